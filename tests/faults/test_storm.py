"""Some storms in every run, and whether they would tell of a fault; all by ``make storm``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from fastload_common.testing.rig import Rig
from tests.faults import run_storm, storm
from tests.faults.storm import Census, Weather, ride_out
from tests.faults.storm_shapes import SIZES, Shape, blocks, sessions

CURABLE = 2  # a seed whose load gets its bytes, by a consumer that stays


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Iterator[Weather]:
    with Rig() as rig:
        for name, value in rig.environ().items():
            monkeypatch.setenv(name, value)
        yield Weather(rig, tls=False)


def test_every_load_ends_with_its_bytes_or_the_error_of_its_faults(
    capfd: pytest.CaptureFixture[str],
) -> None:
    status = run_storm.main(["--loads", "80", "--workers", "8"])
    said = capfd.readouterr().out
    assert "80 loads in " in said
    assert status == 0, said


def test_wrong_bytes_are_told(weather: Weather) -> None:
    weather.content = {key: b"~" + data[1:] for key, data in weather.content.items()}
    (outcome,) = ride_out(weather, [CURABLE])
    assert outcome.ended == "bytes"
    for key in SIZES:
        assert any(
            "wrong bytes in [0, " in fault and fault.endswith(f"of {key}")
            for fault in outcome.faults
        )


def test_what_ends_otherwise_than_it_may_is_told(
    weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    weather.rig.store.delete("storm", "m/a")
    monkeypatch.setattr(storm, "MARGIN_S", -1000.0)
    (outcome,) = ride_out(weather, [CURABLE])
    assert outcome.ended in ("ObjectChangedError", "ObjectMissingError")
    assert outcome.faults[0].endswith("s after the deadline")
    assert outcome.faults[1:] == ["it must have succeeded"]


def test_what_is_left_is_told(weather: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "_PATIENCE_S", 0.0)
    before = Census.take(weather.rig)
    assert before.compare(weather.rig) == []
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="fastload-left")
    thread.start()
    left = os.open("/dev/null", os.O_RDONLY)
    try:
        threads, descriptors = before.compare(weather.rig)
    finally:
        os.close(left)
        over.set()
        thread.join()
    assert threads == "threads left: ['fastload-left']"
    assert descriptors == f"descriptors left: {{({left}, '/dev/null')}}"


def test_a_load_is_the_same_in_whatever_company() -> None:
    alone = [session for block in blocks([37]) for session in sessions(block)]
    among = [session for block in blocks(range(100)) for session in sessions(block)]
    assert alone[-1].seeds[-1] == 37
    shapes = {seed: shape for s in among for seed, shape in zip(s.seeds, s.shapes, strict=True)}
    for session in alone:
        for seed, shape in zip(session.seeds, session.shapes, strict=True):
            assert shapes[seed] == shape


def test_all_seeds_are_in_the_blocks_once() -> None:
    found = [seed for block in blocks(range(10, 95)) for seed in block]
    assert set(found) >= set(range(10, 95))
    assert len(found) == len(set(found))
    assert all(len({seed % 2 for seed in block}) == 1 for block in blocks(range(100)))


def test_loads_are_of_all_kinds() -> None:
    shapes = [shape for s in sessions(range(0, 2000, 2)) for shape in s.shapes]
    kinds: list[Callable[[Shape], bool]] = [
        lambda shape: shape.hurry_s is not None,
        lambda shape: shape.leaves_after is not None,
        lambda shape: shape.kill_after_s is not None,
        lambda shape: shape.max_bytes_per_s is not None,
        lambda shape: not shape.hedging,
        lambda shape: shape.slots == 1,
        lambda shape: shape.concurrency == 12,
        lambda shape: shape.chunk_bytes < 64 * 1024,
        lambda shape: shape.chunk_bytes > 512 * 1024,
        lambda shape: 0 < shape.holds == shape.slots - 1,
    ]
    assert min(sum(map(kind, shapes)) for kind in kinds) >= 10
