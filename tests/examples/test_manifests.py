"""The examples are what Kubernetes, Karpenter and EKS take, and what the docs say of them."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.examples import crds, schema
from tests.examples.manifests import (
    BUILDS,
    EXAMPLES,
    OVERLAYS,
    Manifest,
    build,
    containers_of,
    find,
    pod_of,
    read,
)

QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
CHOICES = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "podManagementPolicy": {"Parallel", "OrderedReady"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "medium": {"", "Memory"},
    "volumeBindingMode": {"WaitForFirstConsumer", "Immediate"},
    "reclaimPolicy": {"Delete", "Retain"},
    "effect": {"NoSchedule", "NoExecute", "PreferNoSchedule"},
    "whenScaled": {"Retain", "Delete"},
    "whenDeleted": {"Retain", "Delete"},
}
TEXT_MAPPINGS = {"labels", "matchLabels", "nodeSelector", "data", "stringData", "parameters"}
ENGINES = {"vllm": 0, "sglang": 1}


def every(name: str | None = None) -> Iterator[tuple[str, Manifest]]:
    for directory in BUILDS if name is None else (name,):
        for manifest in build(directory):
            yield f"{directory}: {manifest['kind']} {manifest['metadata']['name']}", manifest


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Each key with its value, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def pods(directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in build(directory):
        pod = pod_of(manifest)
        if pod is not None:
            yield f"{manifest['kind']} {manifest['metadata']['name']}", pod


@pytest.mark.parametrize("directory", BUILDS)
def test_each_object_is_of_its_schema(directory: str) -> None:
    found = []
    for name, manifest in every(directory):
        kind = (manifest["apiVersion"], manifest["kind"])
        if kind in schema.NATIVE:
            found += [name + line for line in schema.problems(manifest, schema.NATIVE[kind])]
        else:
            spec = manifest["spec"]
            found += [f"{name} {line}" for line in crds.problems(spec, crds.CUSTOM[kind])]
    assert found == []


@pytest.mark.parametrize("directory", BUILDS)
def test_what_the_schema_calls_text_is_of_its_form(directory: str) -> None:
    for name, manifest in every(directory):
        for key, value in walk(manifest):
            if key in TEXT_MAPPINGS:
                assert all(isinstance(item, str) for item in value.values()), f"{name}: {key}"
            if key in CHOICES:
                assert value in CHOICES[key], f"{name}: {key}"
            if key == "sizeLimit":
                assert QUANTITY.fullmatch(value), f"{name}: {key}"
            if key in ("requests", "limits"):
                assert all(QUANTITY.fullmatch(item) for item in value.values()), f"{name}: {key}"


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("replicas",), "1", "expected int"),
        (("replica",), 1, "no such field"),
        (("template", "spec", "containers", 0, "readinessprobe"), {}, "no such field"),
        (("template", "spec", "containers", 0, "env"), [{"nam": "x"}], "name: is missing"),
        (("template", "spec", "volumes"), None, "is empty"),
        (("selector",), {"app": "vllm"}, "no such field"),
    ],
)
def test_the_schema_check_sees(path: tuple[Any, ...], value: Any, told: str) -> None:
    manifest = copy.deepcopy(find(build("auto-mode"), "Deployment", "vllm"))
    place = manifest["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    found = schema.problems(manifest, schema.NATIVE["apps/v1", "Deployment"])
    assert any(told in line for line in found), found


def test_the_custom_check_sees() -> None:
    shape = crds.CUSTOM["karpenter.sh/v1", "NodePool"]
    spec = find(build("auto-mode"), "NodePool")["spec"]
    assert crds.problems(spec, shape) == []
    assert crds.problems(spec | {"limit": {}}, shape) == ["spec.limit: no such field"]
    assert crds.problems(spec | {"limits": {"cpu": 5}}, shape) == [
        "spec.limits.cpu: expected str, got 5"
    ]


@pytest.mark.parametrize("directory", BUILDS)
def test_names_that_are_used_are_there(directory: str) -> None:
    found = build(directory)
    there = found if directory != "publish" else found + build(OVERLAYS[0])
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in there}
    # Made by hand, since its content is secret; public-key.yaml has the command.
    names.add(("Secret", "fastload-signing-key"))
    for what, pod in pods(directory):
        assert ("ServiceAccount", pod["serviceAccountName"]) in names, what
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {
            claim["metadata"]["name"]
            for manifest in found
            for claim in manifest.get("spec", {}).get("volumeClaimTemplates", [])
        }
        mounted = set()
        for volume in pod.get("volumes", []):
            # What is optional need not be there; settings.yaml has the command.
            if "secret" in volume and not volume["secret"].get("optional"):
                assert ("Secret", volume["secret"]["secretName"]) in names, what
        for container in containers_of(pod):
            mounted |= {mount["name"] for mount in container.get("volumeMounts", [])}
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in names, what
        assert mounted == (mounted | {v["name"] for v in pod.get("volumes", [])}), what
        assert mounted <= volumes, what


@pytest.mark.parametrize("directory", BUILDS)
def test_selectors_find_their_pods_and_nodes(directory: str) -> None:
    found = build(directory)
    labels = [
        manifest["spec"]["template"]["metadata"]["labels"] for manifest in found if pod_of(manifest)
    ]
    for manifest in found:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            assert spec["selector"] in labels
        elif manifest["kind"] in ("Deployment", "DaemonSet", "StatefulSet"):
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pools = [manifest for manifest in found if manifest["kind"] == "NodePool"]
    for pool in pools:
        template = pool["spec"]["template"]
        taints = {(taint["key"], taint["effect"]) for taint in template["spec"]["taints"]}
        for what, pod in pods(directory):
            assert pod["nodeSelector"].items() <= template["metadata"]["labels"].items(), what
            assert {(t["key"], t["effect"]) for t in pod["tolerations"]} >= taints, what
        (node_class,) = [m for m in found if m["kind"] == template["spec"]["nodeClassRef"]["kind"]]
        reference = template["spec"]["nodeClassRef"]
        assert node_class["metadata"]["name"] == reference["name"]
        assert node_class["apiVersion"].partition("/")[0] == reference["group"]


def test_probes_wait_longer_than_an_engine_needs_to_answer() -> None:
    """SGLang looks for the token of its health request after 1 s at the earliest."""
    seen = set()
    for directory in BUILDS:
        for what, pod in pods(directory):
            for container in containers_of(pod):
                for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                    if kind in container:
                        seen.add((what, kind))
                        assert container[kind].get("timeoutSeconds", 1) >= 5, (what, kind)
    engines = ("Deployment vllm", "Deployment sglang", "StatefulSet vllm-pvc")
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    assert seen == {(engine, kind) for engine in engines for kind in kinds}


@pytest.mark.parametrize("directory", BUILDS)
def test_containers_may_do_no_more_than_they_must(directory: str) -> None:
    for what, pod in pods(directory):
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, what
        assert pod["automountServiceAccountToken"] is False, what
        # A Service named vllm would set VLLM_PORT to a URI, at which vLLM ends.
        assert pod["enableServiceLinks"] is False, what
        writable = {
            volume["name"]
            for volume in pod.get("volumes", [])
            if "emptyDir" in volume or "hostPath" in volume
        }
        for container in containers_of(pod):
            own = pod["securityContext"] | container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, what
            assert own["readOnlyRootFilesystem"] is True, what
            assert own["capabilities"]["drop"] == ["ALL"], what
            if container["name"] != "directories":
                assert own["runAsNonRoot"] is True, what
                assert own["runAsUser"] == 10001, what
                assert "add" not in own["capabilities"], what
            assert "memory" in container["resources"]["limits"], what
            assert "cpu" not in container["resources"]["limits"], what
            for mount in container.get("volumeMounts", []):
                assert mount["name"] in writable | {"node"} or mount["readOnly"] is True, what


@pytest.mark.parametrize("directory", [*OVERLAYS, "pvc"])
def test_engines_are_watched(directory: str) -> None:
    for what, pod in pods(directory):
        for container in pod["containers"]:
            if container["name"] not in ENGINES:
                continue
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            words = container["command"] + container["args"]
            assert f"--port={ports['http']}" in words, what
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}, what
            start = container["startupProbe"]
            assert start["periodSeconds"] * start["failureThreshold"] >= 1800, what


@pytest.mark.parametrize("directory", [*OVERLAYS, "pvc", "publish"])
def test_engines_load_with_fastload_and_use_the_gpus_they_ask_for(directory: str) -> None:
    seen = 0
    for what, pod in pods(directory):
        for container in pod["containers"]:
            words = container.get("command", []) + container.get("args", [])
            if "--load-format=fastload" not in words:
                continue
            seen += 1
            (ranks,) = [
                word.partition("=")[2]
                for word in words
                if word.startswith(("--tensor-parallel-size=", "--tp-size="))
            ]
            resources = container["resources"]
            assert resources["limits"]["nvidia.com/gpu"] == ranks, what
            assert resources["requests"]["nvidia.com/gpu"] == ranks, what
            assert resources["requests"]["memory"] == resources["limits"]["memory"], what
            assert any("$(MODEL_URI)" in word for word in words), what
    assert seen == (2 if directory in OVERLAYS else 1)


def test_what_is_published_is_what_serves() -> None:
    """Another argument is another key: then the publication is of no use to the Deployment."""
    serving = find(build("karpenter-bottlerocket"), "Deployment", "vllm")
    publishing = find(build("publish"), "Job")
    (server,) = containers_of(pod_of(serving) or {})
    (publisher,) = containers_of(pod_of(publishing) or {})
    assert publisher["args"] == server["command"] + server["args"]
    for same in ("image", "envFrom", "resources"):
        assert publisher[same] == server[same], same
    mounts = {mount["name"]: mount for mount in server["volumeMounts"]}
    for mount in publisher["volumeMounts"]:
        assert mount == mounts.pop(mount["name"])
    assert set(mounts) == {"compile", "ranges"}, "the node's directories have other paths elsewhere"
    for same in ("nodeSelector", "tolerations"):
        assert (pod_of(publishing) or {})[same] == (pod_of(serving) or {})[same], same


@pytest.mark.parametrize("directory", [*OVERLAYS, "pvc", "publish"])
def test_only_the_publisher_has_the_private_key(directory: str) -> None:
    for what, pod in pods(directory):
        secrets = {v["secret"]["secretName"] for v in pod.get("volumes", []) if "secret" in v}
        expected = "fastload-signing-key" if directory == "publish" else "fastload-public-key"
        # That of a registry has no key.
        assert secrets - {"fastload-registry"} == {expected}, what
        assert (pod["serviceAccountName"] == "fastload-publisher") == (directory == "publish")


@pytest.mark.parametrize("directory", OVERLAYS)
def test_engines_wait_for_the_directories_that_the_daemon_set_makes(directory: str) -> None:
    found = build(directory)
    prewarm = pod_of(find(found, "DaemonSet")) or {}
    (node,) = [volume for volume in prewarm["volumes"] if volume["name"] == "node"]
    assert node["hostPath"]["type"] == "DirectoryOrCreate"
    directories, warming = prewarm["initContainers"]
    assert "/node/compile" in directories["args"]
    assert warming["args"][:2] == ["cache", "prewarm"]
    for engine in ENGINES:
        pod = pod_of(find(found, "Deployment", engine)) or {}
        places = {v["name"]: v["hostPath"] for v in pod["volumes"] if "hostPath" in v}
        assert set(places) == {"compile", "ranges"}
        for name, place in places.items():
            assert f"/node/{name}" in directories["args"]
            assert place == {"path": f"{node['hostPath']['path']}/{name}", "type": "Directory"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("directory", BUILDS)
def test_kubectl_builds_the_same(directory: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(EXAMPLES / directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]

    def order(manifest: Manifest) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    assert sorted(built, key=order) == sorted(build(directory), key=order)


def test_every_yaml_file_is_applied_by_something() -> None:
    named = {
        name
        for file in EXAMPLES.rglob("kustomization.yaml")
        for name in ((file.parent / entry).resolve() for entry in read(file)[0]["resources"])
    }
    for file in EXAMPLES.rglob("*.yaml"):
        if file.name != "kustomization.yaml":
            assert file.resolve() in named, file


def test_a_key_that_stands_twice_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("a: 1\nb: {c: 1, c: 2}\n")
    with pytest.raises(Exception, match="twice in one mapping"):
        read(file)


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell")
@pytest.mark.parametrize("ready", [True, False])
def test_the_publishing_script_ends_with_its_server(ready: bool, tmp_path: Any) -> None:
    """The server is told to end once it is ready; one that dies before fails the Job."""
    (container,) = containers_of(pod_of(find(build("publish"), "Job")) or {})
    _, flags, script, name = container["command"]
    programs = {
        "python3": f"#!/bin/sh\ntest -e {tmp_path}/up\n",
        "sleep": "#!/bin/sh\nexit 0\n",
        "fastload": '#!/bin/sh\necho "fastload $*"\n',
        "server": "#!/bin/sh\n"
        + (f"trap 'echo ended; exit 0' TERM\n: > {tmp_path}/up\n" if ready else "exit 3\n")
        + "while :; do :; done\n",
    }
    for program, text in programs.items():
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        ["sh", flags, script, name, str(tmp_path / "server")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "FASTLOAD_COMPILE_CACHE_DEADLINE_S": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ready:
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[:2] == ["ended", "fastload cache list"]
    else:
        assert done.returncode != 0
        assert "fastload" not in done.stdout
