"""The life of a start with a compile cache: what is restored, said, published and reported."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from fastload_common.engine.compile_counters import Counted
from fastload_common.engine.compile_start import CompileStart, compile_cache_is_on
from fastload_common.engine.compile_verdict import SCHEMA
from fastload_common.testing.s3_server import S3Server
from tests.common.compile_cache.artefacts import FACTORS, write_keys
from tests.common.engine.compile_engine import (
    COUNT,
    FILES,
    LAYOUT,
    Server,
    compile_all,
    directory_of,
    warnings,
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch, tmp_path / "node")


def test_without_the_setting_nothing_is_done(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with server.process({"FASTLOAD_COMPILE_CACHE": ""}):
        assert not compile_cache_is_on()
        assert server.begin() is None
        with pytest.raises(KeyError):
            directory_of("graphs")
    with server.process():
        assert compile_cache_is_on()
    assert warnings(caplog) == []


@pytest.mark.s3
def test_cold_then_warm_then_a_new_node_from_s3(
    s3_server: S3Server,
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    uri = f"s3://{s3_bucket}/p"
    server = Server(monkeypatch, tmp_path / "node", uri)
    start, cold = server.start()
    assert (cold.measured, cold.compiled, cold.loaded) == ("miss", COUNT, 0)
    assert start.outcome.published == {str(server.node): "stored", uri: "stored"}
    assert cold.saved_s is None

    start, second = server.start()
    assert (second.measured, second.compiled, second.loaded) == ("hit", 0, COUNT)
    assert (start.outcome.status, start.outcome.store) == ("hit", str(server.node))
    assert start.outcome.published == {}
    assert second.saved_s == 2.0

    shutil.rmtree(server.place)
    server.place.mkdir()
    start, new = server.start()
    assert (new.measured, new.compiled, new.loaded) == ("hit", 0, COUNT)
    assert start.outcome.store == uri
    assert start.outcome.files == COUNT + 1, "the artefacts, and what fastload notes"
    assert server.last_line()["measured"] == "hit"

    start, other = server.start({"layout.tensor": 2})
    assert other.measured == "miss"
    assert start.outcome.differing == ["layout.tensor: 2 here, 1 there"]
    assert warnings(caplog) == []
    names = {row["Key"] for row in s3_server.client().list_objects_v2(Bucket=s3_bucket)["Contents"]}
    assert {name.split("/")[2] for name in names} == {"blobs", "manifests"}


def test_the_reports_line_has_exactly_the_fields_of_its_form(server: Server) -> None:
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "number or null": (int, float, type(None)),
        "object": dict,
        "array": list,
    }
    for _ in range(2):
        start, verdict = server.start()
        line = server.last_line()
        assert list(line) == list(SCHEMA)
        for name, (kind, _) in SCHEMA.items():
            assert isinstance(line[name], kinds[kind]), name
        assert line["kind"] == "compile_cache"
        assert line["measured"] == verdict.measured
        assert line["key"] == start.outcome.key
    assert len(server.report.read_text().splitlines()) == 2


def test_the_log_says_what_was_measured(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fastload_common"):
        server.start()
        server.start()
    told = [r.getMessage() for r in caplog.records if "as measured" in r.getMessage()]
    assert told[0].startswith(
        f"fastload: compile cache: miss, as measured: 0 artefacts found and used, {COUNT} compiled"
    )
    assert told[1].endswith("0.0 s in it, 2.0 s less than without")


def test_what_the_operator_has_set_stays_and_is_packed_from_there(
    server: Server, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    start, _ = server.start(variables={"ENGINE_CACHE": str(mine)})
    assert start.directories.given == {"ENGINE_CACHE": str(mine)}
    assert start.directories.roots["graphs.compiled"] == mine / "compiled"
    assert list(start.directories.variables) == ["TORCHINDUCTOR_CACHE_DIR"]
    shutil.rmtree(mine)
    _, verdict = server.start(variables={"ENGINE_CACHE": str(mine)})
    assert (verdict.measured, verdict.compiled) == ("hit", 0)
    assert (mine / FILES["graphs"][0]).is_file()


@pytest.mark.parametrize("value", ["torchinductor_somebody", "torchinductor_somebody/a/b"])
def test_what_torch_has_set_for_itself_is_nobodys_wish(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    start, _ = server.start(variables={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / value)})
    assert set(start.directories.variables) == {"ENGINE_CACHE", "TORCHINDUCTOR_CACHE_DIR"}
    assert not (tmp_path / value).exists()


def test_what_the_engine_has_set_for_itself_is_nobodys_wish(server: Server, tmp_path: Path) -> None:
    with server.process({"ENGINE_CACHE": str(tmp_path / "default")}):
        start = CompileStart.begin(
            "engine",
            lambda: FACTORS,
            LAYOUT,
            made_up={"ENGINE_CACHE": str(tmp_path / "default")},
        )
        assert start is not None
        start.wait()
        assert "ENGINE_CACHE" in start.directories.variables
        start.directories.close()


def test_a_second_engine_of_a_process_is_not_sent_to_the_first_ones_directories(
    server: Server,
) -> None:
    with server.process():
        one, two = server.begin(), server.begin({"layout.tensor": 2})
        assert one is not None
        assert two is not None
        one.wait(), two.wait()
        assert two.directories.given == {}
        assert directory_of("graphs").parent == two.directories.base
        assert one.directories.base != two.directories.base
        for start in (one, two):
            start.directories.close()


def test_engines_that_a_process_runs_in_turn_share_a_directory(server: Server) -> None:
    with server.process():
        bases = []
        for _ in range(2):
            start = server.begin()
            assert start is not None
            start.wait()
            assert start.complete([compile_all()]) is not None
            assert start.finish(60)
            bases.append(start.directories)
        assert bases[0].base == bases[1].base
        bases[0].close()


# What engines do with what they are given


def test_a_part_of_it_is_partial_and_the_whole_is_published(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        names = FILES["graphs"]
        (directory_of("graphs") / "compiled").mkdir(parents=True)
        (directory_of("graphs") / names[0]).write_bytes(b"[] compiled/a.py" * 50)
        assert start.complete([Counted(1, 0, 0.5)]) is not None
        assert start.finish(60)
        start.directories.close()
    shutil.rmtree(server.cache)
    start, verdict = server.start()
    assert (verdict.measured, verdict.compiled, verdict.loaded) == ("partial", COUNT - 1, 1)
    assert start.outcome.published == {str(server.node): "stored"}
    assert "partial, as measured" in warnings(caplog)[0]
    shutil.rmtree(server.cache)
    assert server.start()[1].measured == "hit"


def test_an_entry_that_the_engine_does_not_use_is_said_and_replaced(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        verdict = start.complete([compile_all(ignore=True)])
        assert start.finish(60)
        start.directories.close()
    assert verdict is not None
    assert (verdict.measured, verdict.loaded) == ("unused", 0)
    assert verdict.why == "the engine found none of them under its own key"
    assert start.outcome.published == {str(server.node): "stored"}
    assert len(warnings(caplog)) == 1


def test_an_entry_that_the_engine_cannot_use_is_not_replaced(server: Server) -> None:
    server.start()
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        verdict = start.complete([compile_all(ignore=True)], "it cannot load what it saves")
        assert start.finish(60)
        start.directories.close()
    assert verdict is not None
    assert verdict.why == "it cannot load what it saves"
    assert start.outcome.published == {}


def test_what_only_the_own_directory_has_is_warm_and_published(server: Server) -> None:
    server.start()
    shutil.rmtree(server.node)
    start, verdict = server.start()
    assert (verdict.measured, verdict.compiled, verdict.loaded) == ("warm", 0, COUNT)
    assert start.outcome.published == {str(server.node): "stored"}
    _, verdict = server.start()
    assert verdict.measured == "hit"
    assert verdict.saved_s == 2.0, "the seconds of the start that compiled it"


def test_a_configuration_that_compiles_nothing_publishes_nothing(server: Server) -> None:
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        verdict = start.complete([Counted()])
        assert start.finish(60)
        start.directories.close()
    assert verdict is not None
    assert verdict.measured == "idle"
    assert verdict.why == "this configuration compiles nothing, or nothing that is counted"
    assert start.outcome.published == {}
    assert not (server.node / "v1").exists()


def test_of_two_cold_starts_at_once_the_first_entry_stays(server: Server) -> None:
    with server.process():
        one = server.begin()
        assert one is not None
        one.wait()
        made = compile_all()
    with server.process():
        two = server.begin()
        assert two is not None
        two.wait()
        assert directory_of("graphs").parent != one.directories.base
        made_too = compile_all()
        assert (made.compiled, made_too.compiled) == (COUNT, COUNT)
        for start in (one, two):
            assert start.complete([made]) is not None
            assert start.finish(60)
            start.directories.close()
    assert one.outcome.published == {str(server.node): "stored"}
    assert two.outcome.published == {str(server.node): "it is there already"}
    assert not (server.node / "v1/quarantine").exists()


def test_what_is_written_after_warm_up_is_not_published(server: Server) -> None:
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        made = compile_all()
        publish = start._cache.publish

        def write_and_publish(*arguments: object, **named: object) -> None:
            (directory_of("graphs") / "compiled/half").write_bytes(b"half a fi")
            publish(*arguments, **named)  # type: ignore[arg-type]

        server.monkeypatch.setattr(start._cache, "publish", write_and_publish)
        assert start.complete([made]) is not None
        assert start.finish(60)
        start.directories.close()
    shutil.rmtree(server.cache)
    start, verdict = server.start()
    assert verdict.measured == "hit"
    assert not (start.directories.roots["graphs.compiled"] / "half").exists()


def test_what_changes_after_warm_up_is_not_published_half(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        made = compile_all()
        publish = start._cache.publish

        def change_and_publish(*arguments: object, **named: object) -> None:
            (directory_of("graphs") / FILES["graphs"][0]).write_bytes(b"half a fi")
            publish(*arguments, **named)  # type: ignore[arg-type]

        server.monkeypatch.setattr(start._cache, "publish", change_and_publish)
        assert start.complete([made]) is not None
        assert start.finish(60)
        start.directories.close()
    assert "has changed since warm-up" in start.outcome.published[str(server.node)]
    assert len(warnings(caplog)) == 1
    _, verdict = server.start()
    assert (verdict.measured, verdict.compiled) == ("miss", 1), "only that one is compiled anew"
    assert server.start()[1].measured == "hit"


def test_a_signed_entry_is_used_with_the_public_key(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private, public = write_keys(tmp_path)
    variable = "FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE"
    server.start(variables={variable: str(private)})
    start, verdict = server.start(variables={variable: str(public)})
    assert verdict.measured == "hit"
    start, verdict = server.start({"layout.tensor": 2}, {variable: str(public)})
    assert start.outcome.published == {str(server.node): "there is only the public key"}
    assert warnings(caplog) == []
