"""The page of ``fastload plan`` and the numbers behind it."""

from __future__ import annotations

import html.parser
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fastload_common.cli.main import main
from fastload_common.cli.plan_html import plan_page
from fastload_common.cli.plan_numbers import numbers_of
from fastload_common.load.plan_job import PlanJob, RankTrace
from fastload_common.plan.geometry import View
from fastload_common.plan.needs import Needs
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ObjectId
from tests.common.cli.plan_engine import Engine, Prepared, write_model


class Links(html.parser.HTMLParser):
    """Collects what a page would fetch or run, and checks that its elements are closed."""

    VOID = frozenset({"meta", "rect", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object"):
            self.outside.append(tag)
        self.outside += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Links:
    links = Links()
    links.feed(page)
    links.close()
    assert links.open == []
    assert links.outside == []
    assert "url(" not in page
    assert "@import" not in page
    return links


def test_the_page_stands_alone(
    engine: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model")
    engine(Engine())
    file = tmp_path / "plan.html"
    assert main(["plan", str(model), "--engine", "test", "--tp", "2", "--html", str(file)]) == 0
    page = parsed(file.read_text())
    assert "model-00001-of-00002.safetensors" in page.text
    assert "rank 1: needs 1.0 MiB" in page.text


def test_a_page_that_cannot_be_written_is_refused_before_the_engine_starts(
    engine: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class NeverStarted(Engine):
        def prepare(self, job: PlanJob) -> Prepared:
            raise RuntimeError("it was started")

    engine(NeverStarted())
    for file, reason in (
        (tmp_path, "it is a directory"),
        (tmp_path / "no" / "page.html", f"there is no directory {tmp_path / 'no'}"),
    ):
        assert main(["plan", str(tmp_path), "--engine", "test", "--html", str(file)]) == 2
        assert f"{file} cannot be written: {reason}" in capsys.readouterr().err


def test_a_place_whose_name_is_no_text_gets_a_page(
    engine: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_model(Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff")))
    engine(Engine())
    file = tmp_path / "plan.html"
    assert main(["plan", str(model), "--engine", "test", "--html", str(file)]) == 0
    assert "m\\udcff on test" in parsed(file.read_text(encoding="utf-8")).text
    assert "m\\udcff on test" in capfd.readouterr().out


def made_trace(rank: int, ranks: int, shards: int, name: str) -> RankTrace:
    """A rank that needs every ``ranks``-th MiB of every shard."""
    size = 1 << 30
    objects = tuple(
        ObjectId(f"s3://b/m/{name}-{k:03}.safetensors", '"e"', size) for k in range(shards)
    )
    mib = 1 << 20
    reads = [
        TensorRead(each, rank * mib, 1, View((size // mib // ranks, mib), (ranks * mib, 1), 0))
        for each in objects
    ]
    needs = Needs.of(reads, objects, gap_bytes=0)
    return RankTrace(
        rank=rank,
        objects=objects,
        data_starts=(0,) * shards,
        needs=needs.encode(),
        exact=needs.encode(),
        shared=True,
        model_bytes=shards * size,
        needed_bytes=needs.needed_bytes,
        chunk_bytes=16 << 20,
        merge_gap_bytes=0,
        alone_fetched_bytes=needs.needed_bytes,
        alone_requests=1,
        early_needed_bytes=0,
        early_fetched_bytes=0,
        early_requests=0,
        tensors=1,
        transfers=1,
        notes=("a note with <b>tags</b>",),
    )


def test_the_page_of_100_shards_and_8_ranks_is_small_and_safe() -> None:
    name = "<script>alert(1)</script>&\"'"
    traces = [made_trace(rank, 8, 100, name) for rank in range(8)]
    page = plan_page(f"s3://b/{name}", numbers_of(traces, gbps=100), traces)
    assert len(page) < 12_000_000
    assert parsed(page).text.count("rank 7: needs") == 100


def test_numbers_of_an_eager_rank_beside_others() -> None:
    traces = [made_trace(rank, 2, 1, "x") for rank in range(2)]
    eager = replace(traces[1], shared=False, alone_fetched_bytes=1 << 30, needed_bytes=1 << 30)
    node = numbers_of([traces[0], eager], gbps=1)
    assert [rank.eager for rank in node.ranks] == [False, True]
    assert node.ranks[0].fetched_bytes == 1 << 29
    assert node.ranks[1].fetched_bytes == 1 << 30
    assert node.shared_bytes == 0
    assert [rank.over_read_bytes for rank in node.ranks] == [0, 0]


def test_the_least_merge_gap_counts_as_it_does_between_ranks() -> None:
    mib = 1 << 20
    traces = [made_trace(rank, 4, 1, "x") for rank in range(2)]
    # Two of four MiB are needed; whoever reads over the gap reads them all.
    wide = [replace(trace, merge_gap_bytes=4 * mib) for trace in traces]
    assert numbers_of(wide, gbps=1).fetched_bytes > 800 * mib
    for mixed in ([wide[0], traces[1]], [traces[0], wide[1]]):
        node = numbers_of(mixed, gbps=1)
        assert node.merge_gap_bytes == 0
        assert node.fetched_bytes == 512 * mib


def test_more_ranges_than_can_be_listed_are_counted_without_their_gaps() -> None:
    size = 1 << 26
    objects = (ObjectId("s3://b/m/x.safetensors", '"e"', size),)
    step = 64
    # Every other run of 32 bytes: too many to be listed one by one.
    read = TensorRead(objects[0], 0, 1, View((size // step, step // 2), (step, 1), 0))
    needs = Needs.of([read], objects, gap_bytes=0)
    assert len(needs.spans[0]) < size // step
    assert needs.needed_bytes == size // 2
    trace = replace(
        made_trace(0, 1, 1, "x"),
        objects=objects,
        needs=needs.encode(),
        exact=needs.encode(),
        needed_bytes=size // 2,
        model_bytes=size,
    )
    node = numbers_of([trace], gbps=1)
    assert node.needed_bytes == node.ranks[0].needed_bytes == size // 2
    assert node.over_read_bytes == node.fetched_bytes - size // 2
    # The same rank twice needs no more than what is there.
    both = numbers_of([trace, replace(trace, rank=1)], gbps=1)
    assert size // 2 <= both.needed_bytes <= size
    assert both.over_read_bytes + both.needed_bytes >= both.fetched_bytes
