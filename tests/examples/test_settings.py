"""Settings in the examples are settings of fastload, with values that it takes."""

from __future__ import annotations

import base64
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from fastload_common.advise.formats import al2023_user_data, bottlerocket_toml
from fastload_common.advise.image import Image
from fastload_common.advise.machine import machine_of
from fastload_common.advise.own import grace_s, pod_memory_bytes
from fastload_common.advise.soci import soci_settings
from fastload_common.cli.main import app
from fastload_common.config import OPTIONS, load_settings
from fastload_common.source.oci_credentials import find_credential
from fastload_common.units import GIB, parse_size
from tests.examples.manifests import (
    BUILDS,
    EXAMPLES,
    OVERLAYS,
    build,
    containers_of,
    find,
    pod_of,
)

VARIABLES = {option.variable: option for option in OPTIONS}
EXAMPLE_IMAGE = Image("example", 10 * 1000**3, (4 * 1000**3, 3 * 1000**3, 2 * 1000**3, 10**9))
EXAMPLE_TYPE = "g6e.12xlarge"
MODEL_BYTES = 61 * GIB


def environments() -> Iterator[tuple[str, dict[str, str]]]:
    """The environment of each container that runs fastload, as Kubernetes puts it together."""
    for directory in BUILDS:
        found = build(directory)
        maps = {
            manifest["metadata"]["name"]: manifest["data"]
            for manifest in (*found, *build(OVERLAYS[0]))
            if manifest["kind"] == "ConfigMap"
        }
        for manifest in found:
            pod = pod_of(manifest) or {"containers": []}
            for container in containers_of(pod):
                environ: dict[str, str] = {}
                for source in container.get("envFrom", []):
                    environ |= maps[source["configMapRef"]["name"]]
                environ |= {item["name"]: item["value"] for item in container.get("env", [])}
                if environ:
                    yield f"{directory} {manifest['kind']} {container['name']}", environ


def volumes_of(directory: str, engine: str) -> dict[str, dict[str, Any]]:
    """Where each mount of an engine's container comes from."""
    pod = pod_of(find(build(directory), "Deployment", engine)) or {}
    sources = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    return {mount["mountPath"]: sources[mount["name"]] for mount in container["volumeMounts"]}


def test_every_name_is_a_setting_of_fastload() -> None:
    text = "".join(
        file.read_text("utf-8") for file in sorted(EXAMPLES.rglob("*")) if file.is_file()
    )
    named = set(re.findall(r"\bFASTLOAD_[A-Z_]+[A-Z]\b", text))
    assert named
    assert named <= set(VARIABLES), f"not settings: {sorted(named - set(VARIABLES))}"


def test_every_command_is_a_command_of_fastload() -> None:
    commands = {info.callback.__name__ for info in app.registered_commands if info.callback}
    groups = {info.name for info in app.registered_groups}
    for directory in BUILDS:
        for manifest in build(directory):
            for container in containers_of(pod_of(manifest) or {"containers": []}):
                if "fastload-agent" in container["image"] and "command" not in container:
                    assert container["args"][0] in commands | groups


def test_every_value_is_taken() -> None:
    seen = 0
    for what, environ in environments():
        given = {
            VARIABLES[name].name: value
            for name, value in environ.items()
            if name in VARIABLES and value
        }
        settings = load_settings(given, extra_name=what)
        assert settings.compile_cache, what
        seen += 1
    assert seen >= 8


@pytest.mark.parametrize("directory", OVERLAYS)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_path_is_on_a_volume_that_is_meant_for_it(directory: str, engine: str) -> None:
    environ = dict(environments())[f"{directory} Deployment {engine}"]
    mounts = volumes_of(directory, engine)

    def volume(path: str) -> dict[str, Any]:
        inside = [mount for mount in mounts if PurePosixPath(path).is_relative_to(mount)]
        assert inside, f"{path} is on the root file system, which is read-only"
        return mounts[max(inside, key=len)]

    for name in ("FASTLOAD_CACHE_DIR", "FASTLOAD_REPORT", "HOME", "TMPDIR"):
        assert "emptyDir" in volume(environ[name]), name
    compile_cache = environ["FASTLOAD_COMPILE_CACHE"].split(",")
    assert compile_cache[1].startswith("s3://")
    assert "hostPath" in volume(compile_cache[0])
    assert "secret" in volume(environ["FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE"])
    assert "hostPath" in volume(environ["FASTLOAD_NODE_CACHE"])


@pytest.mark.parametrize(
    ("directory", "kind", "name"),
    [
        *((directory, "Deployment", "vllm") for directory in OVERLAYS),
        ("pvc", "StatefulSet", "vllm-pvc"),
        ("publish", "Job", "fastload-publish"),
    ],
)
def test_a_pull_secret_is_where_fastload_looks(
    directory: str, kind: str, name: str, tmp_path: Path
) -> None:
    pod = pod_of(find(build(directory), kind, name)) or {}
    (container,) = pod["containers"]
    (secret,) = [volume for volume in pod["volumes"] if volume["name"] == "registry"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "registry"]
    assert secret["secret"] == {"secretName": "fastload-registry", "optional": True}
    environ = next(
        environ
        for what, environ in environments()
        if what == f"{directory} {kind} {container['name']}"
    )
    assert environ["DOCKER_CONFIG"] == mount["mountPath"]
    # Kubernetes' own type of Secret has this one key. Without the Secret the directory is empty.
    given = {"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path / "home")}
    assert find_credential("registry.example", "models/m", given) is None
    auth = base64.b64encode(b"user:token").decode()
    auths = {"auths": {"registry.example": {"auth": auth}}}
    (tmp_path / ".dockerconfigjson").write_text(json.dumps(auths))
    found = find_credential("registry.example", "models/m", given)
    assert found is not None
    assert (found.user, found.password) == ("user", "token")


def test_what_is_published_goes_where_the_others_look() -> None:
    found = dict(environments())
    publisher = found["publish Job publish"]
    reader = found["karpenter-bottlerocket Deployment vllm"]
    assert reader["FASTLOAD_COMPILE_CACHE"].split(",")[1] == publisher["FASTLOAD_COMPILE_CACHE"]
    # Artefacts may hold the path of the directory in which they were made.
    for environ in found.values():
        assert environ["FASTLOAD_CACHE_DIR"] == publisher["FASTLOAD_CACHE_DIR"]


def test_bounded_directories_fit_their_volumes() -> None:
    environ = dict(environments())["karpenter-bottlerocket Deployment vllm"]
    pod = pod_of(find(build("karpenter-bottlerocket"), "Deployment", "vllm")) or {}
    (cache,) = [volume for volume in pod["volumes"] if volume["name"] == "cache"]
    bound = parse_size(environ["FASTLOAD_CACHE_MAX_BYTES"])
    assert bound <= parse_size(cache["emptyDir"]["sizeLimit"]) // 2


def test_pods_are_given_longer_to_end_than_an_upload_may_take() -> None:
    seen = 0
    for directory in BUILDS:
        for manifest in build(directory):
            pod = pod_of(manifest)
            if pod is None or manifest["kind"] == "DaemonSet":
                continue
            seen += 1
            assert pod["terminationGracePeriodSeconds"] >= grace_s(), manifest["metadata"]["name"]
    assert seen >= 8
    (environ,) = {environ["FASTLOAD_COMPILE_CACHE_DEADLINE_S"] for _, environ in environments()}
    assert float(environ) + 15 <= grace_s()
    for directory in OVERLAYS:
        # A node that goes gives its pods that time, too.
        pool = find(build(directory), "NodePool")
        assert pool["spec"]["template"]["spec"]["terminationGracePeriod"] == "10m"


def test_memory_does_not_bound_the_load() -> None:
    pod = pod_of(find(build("auto-mode"), "Deployment", "vllm")) or {}
    limit = parse_size(pod["containers"][0]["resources"]["limits"]["memory"])
    machine = machine_of(EXAMPLE_TYPE, {})
    assert pod_memory_bytes(MODEL_BYTES, machine, 4) <= limit < machine.memory_bytes


@pytest.mark.parametrize("directory", OVERLAYS)
def test_pods_fit_the_machine_that_the_pool_makes(directory: str) -> None:
    pool = find(build(directory), "NodePool")
    requirements = {
        item["key"]: item["values"] for item in pool["spec"]["template"]["spec"]["requirements"]
    }
    (name,) = requirements["node.kubernetes.io/instance-type"]
    assert name == EXAMPLE_TYPE
    machine = machine_of(name, {})
    (least_nvme_gib,) = (
        int(values[0]) for key, values in requirements.items() if key.endswith("local-nvme")
    )
    assert machine.nvme_bytes > least_nvme_gib * GIB
    for engine in ("vllm", "sglang"):
        pod = pod_of(find(build(directory), "Deployment", engine)) or {}
        requests = pod["containers"][0]["resources"]["requests"]
        assert int(requests["cpu"]) < machine.vcpus
        assert int(requests["nvidia.com/gpu"]) == machine.gpus


def test_bottlerocket_nodes_have_what_advise_says() -> None:
    user_data = find(build("karpenter-bottlerocket"), "EC2NodeClass")["spec"]["userData"]
    settings = tomllib.loads(user_data)["settings"]
    advised = tomllib.loads(
        bottlerocket_toml(soci_settings(EXAMPLE_IMAGE, machine_of(EXAMPLE_TYPE, {})))
    )["settings"]
    (command,) = settings.pop("bootstrap-commands").items()
    assert settings == advised
    # Karpenter's own command, 000-mount-instance-storage, makes the array; this one runs after it.
    assert command[0] > "000-mount-instance-storage"
    assert command[1]["commands"] == [
        ["apiclient", "ephemeral-storage", "bind", "--dirs", "/mnt/fastload"]
    ]


def test_amazon_linux_nodes_have_what_advise_says() -> None:
    user_data = find(build("karpenter-al2023"), "EC2NodeClass")["spec"]["userData"]
    machine = machine_of(EXAMPLE_TYPE, {})
    assert user_data == al2023_user_data(soci_settings(EXAMPLE_IMAGE, machine))
    (gate,) = [
        yaml.safe_load(part.partition("\n\n")[2])
        for part in user_data.split("--BOUNDARY")
        if "application/node.eks.aws" in part
    ]
    assert gate["spec"] == {"featureGates": {"FastImagePull": True}}


def test_auto_mode_formats_the_local_disks() -> None:
    """It does so only where the asked size is below theirs."""
    spec = find(build("auto-mode"), "NodeClass")["spec"]
    size = parse_size(spec["ephemeralStorage"]["size"])
    assert size < machine_of(EXAMPLE_TYPE, {}).nvme_bytes // 2


def test_the_containerfile_installs_what_the_settings_need() -> None:
    text = (EXAMPLES / "Containerfile").read_text("utf-8")
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert len(stages) == 2
    for stage in stages:
        assert "compile-cache" in stage
        assert "USER 10001:10001" in stage
    users = {
        container["securityContext"].get("runAsUser", pod["securityContext"].get("runAsUser"))
        for directory in BUILDS
        for manifest in build(directory)
        if (pod := pod_of(manifest)) is not None
        for container in containers_of(pod)
    }
    assert users == {10001, 0}
