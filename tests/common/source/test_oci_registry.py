"""Artifacts in a registry: what is read, and what a registry may do wrong."""

from __future__ import annotations

import json

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    ChecksumMismatchError,
    ObjectChangedError,
    ObjectMissingError,
    RangeMismatchError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange
from fastload_common.source.oci import OciSource
from fastload_common.source.oci_reference import digest_of
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.scripted_registry import (
    MANIFEST,
    Answer,
    ScriptedRegistry,
)
from tests.common.source.oci_bench import (
    DATA,
    NAMED,
    RAW,
    Make,
    Open,
    assert_no_secret,
    read,
)

INDEX = "application/vnd.oci.image.index.v1+json"

# Reading


def test_files_are_read_by_range(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    source = open_oci(registry)
    (row,) = source.list()
    assert row.key == "model.safetensors"
    assert row.object_id.size_bytes == len(DATA)
    assert row.object_id.etag == digest_of(DATA)
    assert source.stat("model.safetensors") == row.object_id
    assert read(source) == DATA[1000:2000]
    assert source.read(row.object_id) == DATA
    assert source.read(row.object_id, ByteRange(5, 5)) == b""
    assert registry.log[-1].headers["range"] == f"bytes=0-{len(DATA) - 1}"
    assert registry.count("/manifests/") == 1
    with pytest.raises(ObjectMissingError, match="no such file"):
        source.stat("other")
    with pytest.raises(SourceError, match="nothing is written"):
        source.put_if_absent("x", b"")
    assert source.stored_checksum(row.object_id) is None


def test_the_digest_pins_what_a_tag_meant(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    source = open_oci(registry)
    first = source.pinned_uri()
    registry.artifact("v", [registry.put(b"other", RAW, NAMED)])
    assert read(source) == DATA[1000:2000]
    assert source.pinned_uri() == first
    assert first.startswith(f"oci://{registry.host}/m:v@sha256:")
    pinned = open_oci(registry, first.removeprefix(f"oci://{registry.host}/"))
    assert read(pinned) == DATA[1000:2000]
    assert open_oci(registry).stat("model.safetensors").size_bytes == 5


def test_a_whole_layer_is_compared_with_its_digest(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    source = open_oci(registry)
    object_id = source.stat("model.safetensors")
    good, damaged = DATA, DATA[:-1] + b"!"
    answers = [damaged, good]
    registry.script = lambda asked: (
        Answer(200, answers.pop(0)) if "/blobs/" in asked.path and answers else None
    )
    assert source.read(object_id) == good  # one damaged reply is no damaged layer
    answers += [damaged, damaged]
    with pytest.raises(ChecksumMismatchError, match="digest"):
        source.read(object_id)


def test_an_index_leads_to_this_platforms_manifest(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    entries = []
    for platform in ("linux/amd64", "linux/arm64"):
        content = platform.encode()
        digest = registry.artifact(platform, [registry.put(content, RAW, NAMED)])
        system, machine = platform.split("/")
        size = len(registry.documents[digest][0])
        entries.append(
            {
                "mediaType": MANIFEST,
                "digest": digest,
                "size": size,
                "platform": {"os": system, "architecture": machine},
            }
        )
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    digest = registry.document("i", document, INDEX)
    source = open_oci(registry, "m:i", oci_platform="linux/arm64")
    assert source.read(source.stat("model.safetensors")) == b"linux/arm64"
    assert digest in source.pinned_uri()
    with pytest.raises(SourceError, match=r"no manifest for windows/amd64.*linux/amd64"):
        open_oci(registry, "m:i", oci_platform="windows/amd64").list()


# What a registry may do wrong with a manifest


def nested(registry: ScriptedRegistry, depth: int) -> None:
    digest = registry.artifact("n0", [registry.put(DATA, RAW, NAMED)])
    for level in range(depth):
        size = len(registry.documents[digest][0])
        entry = {"mediaType": INDEX, "digest": digest, "size": size}
        content = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
        digest = registry.document(f"n{level + 1}", content, INDEX)


def test_indexes_in_indexes_end(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    nested(registry, 6)
    assert read(open_oci(registry, "m:n3")) == DATA[1000:2000]
    with pytest.raises(SourceError, match="from index to index"):
        open_oci(registry, "m:n6").list()


def test_an_index_that_names_itself_is_caught_by_its_digest(
    make_registry: Make, open_oci: Open
) -> None:
    """No document can hold its own digest, so a loop needs a registry that lies about one."""
    registry = make_registry()
    wanted = digest_of(b"chosen")
    entry = {"mediaType": INDEX, "digest": wanted, "size": 10}
    content = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
    registry.document("loop", content, INDEX)
    registry.documents[wanted] = registry.documents["loop"]
    registry.script = lambda asked: (
        Answer(200, registry.documents["loop"][0]) if wanted in asked.path else None
    )
    with pytest.raises(ChecksumMismatchError, match="not what its digest says"):
        open_oci(registry, "m:loop").list()


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (Answer(200, b"<html>"), SourceError, "no JSON"),
        (Answer(200, b""), SourceError, "no JSON"),
        (Answer(200, b"{" + b" " * (5 << 20)), SourceError, "too large"),
        (Answer(200, b"", {"Content-Length": "99999999999"}, 0), SourceError, "too large"),
        (Answer(200, b"{}", {"Docker-Content-Digest": digest_of(b"x")}), SourceError, "digest"),
        (Answer(404), ObjectMissingError, "not there"),
        (Answer(403), AccessDeniedError, "not allowed"),
        (Answer(418), SourceError, "refused to"),
        (Answer(500), SourceUnavailableError, "not serve this now"),
        (Answer(307), SourceError, "without saying where"),
        (Answer(307, headers={"Location": "/v2/m/manifests/v"}), SourceError, "too many redirects"),
        (Answer(307, headers={"Location": "ftp://x/secret"}), SourceError, "no HTTP URL"),
    ],
)
def test_what_is_no_manifest_is_a_typed_error(
    make_registry: Make,
    open_oci: Open,
    caplog: pytest.LogCaptureFixture,
    answer: Answer,
    kind: type[SourceError],
    says: str,
) -> None:
    registry = make_registry()
    registry.script = lambda asked: answer
    with pytest.raises(kind, match=says) as caught:
        open_oci(registry).list()
    assert_no_secret(caught.value, caplog)


def test_an_index_that_is_wrong_about_a_size(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    digest = registry.artifact("a", [])
    entry = {"mediaType": MANIFEST, "digest": digest, "size": 3}
    content = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
    registry.document("i", content, INDEX)
    with pytest.raises(SourceError, match="not as large as its index says"):
        open_oci(registry, "m:i").list()


def test_a_manifest_cut_short_is_asked_for_again(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    body, _ = registry.documents["v"]
    answers = [Answer(200, body, cut_bytes=40), Answer(503), Answer(200, body)]
    registry.script = lambda asked: (
        answers.pop(0) if "/manifests/" in asked.path and answers else None
    )
    assert read(open_oci(registry)) == DATA[1000:2000]


def test_a_layer_that_is_missing(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    source = open_oci(registry)
    object_id = source.stat("model.safetensors")
    registry.blobs.clear()
    with pytest.raises(ObjectMissingError, match=r"model\.safetensors"):
        source.read(object_id)


@pytest.mark.parametrize("change", [-100, 100])
def test_a_layer_of_another_size_than_its_manifest_says(
    make_registry: Make, open_oci: Open, change: int
) -> None:
    registry = make_registry()
    layer = registry.put(DATA, RAW, NAMED)
    registry.artifact("wrong", [layer | {"size": len(DATA) + change}])
    with pytest.raises((ObjectChangedError, RangeMismatchError)):
        read(open_oci(registry, "m:wrong"))


def test_compressed_layers_are_told_to_be_pulled(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    layer = registry.put(b"\x1f\x8b", "application/vnd.oci.image.layer.v1.tar+gzip")
    registry.artifact("gz", [layer])
    with pytest.raises(SourceError, match="fastload pull oci://") as caught:
        open_oci(registry, "m:gz").list()
    assert "gzip" in str(caught.value)
    assert registry.count("/blobs/") == 0


def test_a_folder_that_is_not_there(make_registry: Make, open_oci: Open) -> None:
    with pytest.raises(ObjectMissingError, match="no such folder"):
        open_oci(make_registry(), "m:v/models").list()


def test_a_registry_without_ranges_gives_whole_layers_only(
    without_ranges: tuple[ScriptedRegistry, OciSource],
) -> None:
    _, source = without_ranges
    with pytest.raises(RangeMismatchError, match="does not honour Range"):
        read(source)
    assert source.read(source.stat("model.safetensors")) == DATA


# Faults in the middle


def test_a_body_that_ends_early_costs_the_missing_bytes_only(
    make_registry: Make, open_oci: Open
) -> None:
    registry = make_registry()
    source = open_oci(registry)
    object_id = source.stat("model.safetensors")
    head = {"Content-Range": f"bytes 0-9999/{len(DATA)}"}
    answers = [Answer(206, DATA[:10_000], head, cut_bytes=6_000)]
    registry.script = lambda asked: answers.pop() if "/blobs/" in asked.path and answers else None
    assert source.read(object_id, ByteRange(0, 10_000)) == DATA[:10_000]
    assert [asked.headers["range"] for asked in registry.log[-2:]] == [
        "bytes=0-9999",
        "bytes=6000-9999",
    ]


def test_a_registry_that_is_busy_is_asked_again_as_it_says(
    make_registry: Make, open_oci: Open, oci_clock: FakeClock
) -> None:
    registry = make_registry()
    answers = [Answer(429, headers={"Retry-After": "7"})] * 2
    registry.script = lambda asked: answers.pop() if answers else None
    assert read(open_oci(registry)) == DATA[1000:2000]
    assert len([wait_s for wait_s in oci_clock.waits_s if wait_s >= 7]) == 2


def test_what_a_registry_says_is_shown_without_urls(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry()
    said = "denied: see https://r/x?token=secret or ask?sig=secret\nadmin"
    body = json.dumps({"errors": [{"code": "DENIED", "message": said}]}).encode()
    registry.script = lambda asked: Answer(403, body)
    with pytest.raises(AccessDeniedError, match="denied: see") as caught:
        open_oci(registry).list()
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
