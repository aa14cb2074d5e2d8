"""Manifests and indexes from anybody: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.errors import SourceError
from fastload_common.source.oci_layers import LayerKind, compression_of, layers_of
from fastload_common.source.oci_manifest import (
    Descriptor,
    Index,
    Manifest,
    choose_manifest,
    own_platform,
    parse_document,
)
from fastload_common.source.oci_reference import digest_of

URI = "oci://r/m:v"
BLOB = digest_of(b"blob")
LAYER = {"mediaType": "application/octet-stream", "digest": BLOB, "size": 4}
GOOD: dict[str, Any] = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.manifest.v1+json",
    "config": LAYER,
    "layers": [LAYER],
}
INDEX: dict[str, Any] = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.index.v1+json",
    "manifests": [LAYER],
}


def parse(content: Any) -> Manifest | Index:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_document(data, digest_of(data), URI)


def refusal(data: bytes, otherwise: str) -> str:
    """What a refusal says; no other error comes through."""
    try:
        parse(data)
    except SourceError as error:
        return str(error)
    return otherwise


def test_a_manifest() -> None:
    annotated = LAYER | {"annotations": {"k": "v"}, "platform": None, "urls": ["x"]}
    found = parse(GOOD | {"layers": [annotated], "artifactType": "a/b", "annotations": {"x": "y"}})
    assert isinstance(found, Manifest)
    assert found.layers == (Descriptor("application/octet-stream", BLOB, 4, {"k": "v"}),)
    assert found.config == Descriptor("application/octet-stream", BLOB, 4)
    assert (found.artifact_type, found.annotations) == ("a/b", {"x": "y"})


def test_the_other_forms_of_manifests() -> None:
    artifact = {
        "mediaType": "application/vnd.oci.artifact.manifest.v1+json",
        "blobs": [LAYER],
        "artifactType": "a/b",
    }
    found = parse(artifact)
    assert isinstance(found, Manifest)
    assert len(found.layers) == 1
    assert found.config is None
    docker = "application/vnd.docker.distribution.manifest.v2+json"
    assert isinstance(parse(GOOD | {"mediaType": docker}), Manifest)
    # The type need not be there.
    assert isinstance(parse({k: v for k, v in GOOD.items() if k != "mediaType"}), Manifest)


HOSTILE: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"<html>login</html>",
    "cut short": json.dumps(GOOD).encode()[:-1],
    "not UTF-8": b'{"schemaVersion": 2, "x": "\xff\xfe"}',
    "NaN alone": b"NaN",
    "an array": [],
    "a number": 7,
    "null": None,
    "a text": "manifest",
    "deep": b'{"a":' * 100_000,
    "deep arrays": b"[" * 100_000,
    "a key twice": b'{"schemaVersion": 2, "layers": [], "layers": []}',
    "a key twice, below": json.dumps(GOOD).encode().replace(b'"size": 4', b'"size": 4, "size": 5'),
    "schema 1": {"schemaVersion": 1, "fsLayers": []},
    "schema 3": GOOD | {"schemaVersion": 3},
    "schema as text": GOOD | {"schemaVersion": "2"},
    "schema true": GOOD | {"schemaVersion": True},
    "no schema": {k: v for k, v in GOOD.items() if k != "schemaVersion"},
    "neither": {"schemaVersion": 2},
    "both": GOOD | {"manifests": []},
    "an index that calls itself manifest": INDEX | {"mediaType": GOOD["mediaType"]},
    "a manifest that calls itself index": GOOD | {"mediaType": INDEX["mediaType"]},
    "of a foreign type": GOOD | {"mediaType": "text/html"},
    "type a number": GOOD | {"mediaType": 5},
    "type with a line break": GOOD | {"mediaType": "a\nb"},
    "type endless": GOOD | {"mediaType": "a" * 10_000},
    "layers an object": GOOD | {"layers": {}},
    "layers a text": GOOD | {"layers": "x"},
    "layer null": GOOD | {"layers": [None]},
    "layer a text": GOOD | {"layers": [BLOB]},
    "no digest": GOOD | {"layers": [{"size": 4}]},
    "digest a number": GOOD | {"layers": [LAYER | {"digest": 5}]},
    "digest empty": GOOD | {"layers": [LAYER | {"digest": ""}]},
    "digest short": GOOD | {"layers": [LAYER | {"digest": "sha256:00"}]},
    "digest of another algorithm": GOOD | {"layers": [LAYER | {"digest": "md5:" + "0" * 32}]},
    "digest in capitals": GOOD | {"layers": [LAYER | {"digest": BLOB.upper()}]},
    "digest with a path": GOOD | {"layers": [LAYER | {"digest": "../" + BLOB}]},
    "digest with a query": GOOD | {"layers": [LAYER | {"digest": BLOB + "?x"}]},
    "digest with a line break": GOOD | {"layers": [LAYER | {"digest": BLOB + "\n"}]},
    "no size": GOOD | {"layers": [{"digest": BLOB}]},
    "size negative": GOOD | {"layers": [LAYER | {"size": -1}]},
    "size a fraction": GOOD | {"layers": [LAYER | {"size": 4.5}]},
    "size a text": GOOD | {"layers": [LAYER | {"size": "4"}]},
    "size true": GOOD | {"layers": [LAYER | {"size": True}]},
    "size beyond all": GOOD | {"layers": [LAYER | {"size": 1 << 80}]},
    "size of many digits": b'{"schemaVersion":2,"layers":[{"size":' + b"9" * 10_000 + b"}]}",
    "annotations an array": GOOD | {"layers": [LAYER | {"annotations": []}]},
    "annotation a number": GOOD | {"layers": [LAYER | {"annotations": {"a": 1}}]},
    "config a text": GOOD | {"config": "x"},
    "config null": GOOD | {"config": None},
    "config without digest": GOOD | {"config": {"size": 2}},
    "manifests a text": INDEX | {"manifests": "x"},
    "manifests null in it": INDEX | {"manifests": [None]},
    "platform a text": INDEX | {"manifests": [LAYER | {"platform": "linux/amd64"}]},
    "platform of numbers": INDEX | {"manifests": [LAYER | {"platform": {"os": 1}}]},
    "too many layers": GOOD | {"layers": [LAYER] * 10_001},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_refused_by_name(name: str) -> None:
    """A typed error that names the artifact, whatever the document is."""
    with pytest.raises(SourceError) as caught:
        parse(HOSTILE[name])
    assert URI in str(caught.value)
    assert not caught.value.retryable
    assert len(str(caught.value)) < 1000


def test_there_are_fifty_of_them() -> None:
    assert len(HOSTILE) >= 50


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    assert URI in refusal(data, "taken: " + URI)


@given(st.data())
def test_any_change_of_a_document_is_taken_or_refused(data: st.DataObject) -> None:
    text = bytearray(json.dumps(GOOD | {"annotations": {"a": "b"}}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    assert URI in refusal(bytes(text), "taken: " + URI)


# Platforms


def index(*platforms: str) -> Index:
    found = [
        Descriptor("m", digest_of(str(i).encode()), 1, {}, platform)
        for i, platform in enumerate(platforms)
    ]
    return Index("sha256:i", tuple(found), {})


@pytest.mark.parametrize(
    ("platforms", "wanted", "chosen"),
    [
        (["linux/amd64", "linux/arm64"], "linux/arm64", 1),
        (["linux/arm64/v8", "linux/amd64"], "linux/arm64", 0),
        (["linux/arm64"], "linux/arm64/v8", 0),
        (["linux/arm/v6", "linux/arm/v7"], "linux/arm/v7", 1),
        (["linux/arm64", "linux/arm64/v8"], "linux/arm64/v8", 1),
        ([""], "linux/amd64", 0),
        (["", "linux/arm64"], "linux/amd64", 0),
        (["unknown/unknown", "linux/amd64"], "linux/amd64", 1),
        (["unknown/unknown", ""], "linux/amd64", 1),
    ],
)
def test_platforms(platforms: list[str], wanted: str, chosen: int) -> None:
    made = index(*platforms)
    assert choose_manifest(made, wanted, URI) == made.manifests[chosen]


@pytest.mark.parametrize(
    "platforms", [[], ["linux/arm64"], ["", ""], ["unknown/unknown"], ["linux/amd64x"]]
)
def test_no_platform_is_guessed(platforms: list[str]) -> None:
    with pytest.raises(SourceError, match="FASTLOAD_OCI_PLATFORM"):
        choose_manifest(index(*platforms), "linux/amd64", URI)


def test_attestations_are_no_images() -> None:
    about = Descriptor("m", BLOB, 1, {"vnd.docker.reference.type": "attestation-manifest"}, "")
    image = Descriptor("m", BLOB, 1, {}, "")
    assert choose_manifest(Index("d", (about, image), {}), "linux/amd64", URI) is image


def test_this_machines_platform() -> None:
    assert own_platform().startswith("linux/")
    assert "x86" not in own_platform()


# Layers

TITLE = "org.opencontainers.image.title"
FILEPATH = "org.cncf.model.filepath"
FILE, TAR, COMPRESSED, ASIDE = LayerKind.FILE, LayerKind.TAR, LayerKind.COMPRESSED, LayerKind.ASIDE


def manifest(*layers: tuple[str, dict[str, str]]) -> Manifest:
    found = tuple(
        Descriptor(media_type, digest_of(str(i).encode()), 1, annotations)
        for i, (media_type, annotations) in enumerate(layers)
    )
    return Manifest("sha256:m", "", "", None, found, {})


@pytest.mark.parametrize(
    ("media_type", "annotations", "kind", "name"),
    [
        # CNCF ModelPack
        ("application/vnd.cncf.model.weight.v1.raw", {FILEPATH: "a/m.st"}, FILE, "a/m.st"),
        ("application/vnd.cncf.model.weight.config.v1.raw", {FILEPATH: "c.json"}, FILE, "c.json"),
        ("application/vnd.cncf.model.weight.v1.tar", {FILEPATH: "m.st"}, TAR, ""),
        ("application/vnd.cncf.model.weight.v1.tar+gzip", {FILEPATH: "m.st"}, COMPRESSED, ""),
        ("application/vnd.cncf.model.weight.v1.tar+zstd", {}, COMPRESSED, ""),
        ("application/vnd.cncf.model.doc.v1.tar+gzip", {FILEPATH: "R.md"}, ASIDE, ""),
        ("application/vnd.cncf.model.dataset.v1.tar", {FILEPATH: "d"}, ASIDE, ""),
        # Docker's models
        ("application/vnd.docker.ai.safetensors", {FILEPATH: "m.st"}, FILE, "m.st"),
        ("application/vnd.docker.ai.safetensors", {}, FILE, "model.safetensors"),
        ("application/vnd.docker.ai.vllm.config.tar", {}, TAR, ""),
        ("application/vnd.docker.ai.license", {}, FILE, "LICENSE"),
        ("application/vnd.docker.ai.model.file", {FILEPATH: "a/c.json"}, FILE, "a/c.json"),
        # ORAS
        ("application/vnd.oci.image.layer.v1.tar", {TITLE: "m.safetensors"}, FILE, "m.safetensors"),
        ("text/plain", {TITLE: "./a/./b"}, FILE, "a/b"),
        ("application/octet-stream", {}, ASIDE, ""),
        ("application/vnd.oci.empty.v1+json", {}, ASIDE, ""),
        (
            "application/vnd.oci.image.layer.v1.tar+gzip",
            {TITLE: "d", "io.deis.oras.content.unpack": "true"},
            COMPRESSED,
            "",
        ),
        (
            "application/vnd.oci.image.layer.v1.tar",
            {TITLE: "d", "io.deis.oras.content.unpack": "true"},
            TAR,
            "",
        ),
        ("application/vnd.oci.image.layer.v1.tar", {TITLE: "model.tar"}, TAR, ""),
        # KitOps
        ("application/vnd.kitops.modelkit.model.v1.tar", {}, TAR, ""),
        ("application/vnd.kitops.modelkit.modelpart.v1.tar", {TITLE: "part-0"}, TAR, ""),
        ("application/vnd.kitops.modelkit.model.v1.tar+gzip", {}, COMPRESSED, ""),
        ("application/vnd.kitops.modelkit.docs.v1.tar+gzip", {}, ASIDE, ""),
        # Images
        ("application/vnd.oci.image.layer.v1.tar", {}, TAR, ""),
        ("application/vnd.oci.image.layer.v1.tar+zstd", {}, COMPRESSED, ""),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", {}, COMPRESSED, ""),
        ("application/vnd.docker.image.rootfs.diff.tar", {}, TAR, ""),
        ("application/x-tar", {}, TAR, ""),
    ],
)
def test_what_a_layer_is(
    media_type: str, annotations: dict[str, str], kind: LayerKind, name: str
) -> None:
    (found,) = layers_of(manifest((media_type, annotations)), URI)
    assert (found.kind, found.name) == (kind, name)


def test_unnamed_shards_are_numbered_by_their_order() -> None:
    shard = "application/vnd.docker.ai.safetensors"
    found = layers_of(
        manifest((shard, {}), ("application/vnd.docker.ai.license", {}), (shard, {})), URI
    )
    assert [layer.name for layer in found] == [
        "model-00001-of-00002.safetensors",
        "LICENSE",
        "model-00002-of-00002.safetensors",
    ]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../b", ".", "a\nb", "x" * 5000])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(SourceError, match="name no file can have"):
        layers_of(manifest(("text/plain", {TITLE: name})), URI)


def test_two_files_of_one_name_are_refused_unless_they_are_one() -> None:
    twice = manifest(("text/plain", {TITLE: "a"}), ("text/plain", {TITLE: "./a"}))
    with pytest.raises(SourceError, match="both called a"):
        layers_of(twice, URI)
    same = Manifest("sha256:m", "", "", None, (twice.layers[0],) * 2, {})
    assert len(layers_of(same, URI)) == 2


def test_compressions() -> None:
    assert compression_of("application/vnd.oci.image.layer.v1.tar+gzip") == "gzip"
    assert compression_of("application/vnd.docker.image.rootfs.diff.tar.gzip") == "gzip"
    assert compression_of("application/vnd.oci.image.layer.v1.tar+zstd") == "zstd"
    assert compression_of("application/vnd.oci.image.layer.v1.tar") == ""
