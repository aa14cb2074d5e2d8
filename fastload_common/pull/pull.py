"""`fastload pull`: joins the parts. Nothing appears at the destination before all is verified.

    plan -> stage (what a former run left) -> download | unpack, compare -> merge -> rename

The download runs in the caller's thread, unpacking in threads of its own; either one's error ends
the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastload_common.clock import Clock, SystemClock
from fastload_common.config import Settings
from fastload_common.errors import ChecksumMismatchError, PullError
from fastload_common.pull.digesting import Crc, Sha, Summing
from fastload_common.pull.doubts import ask_elsewhere
from fastload_common.pull.download import Download
from fastload_common.pull.layer import Unpacked
from fastload_common.pull.merge import merge_layers
from fastload_common.pull.node_slots import NodeSlots
from fastload_common.pull.placing import check_names, place_files
from fastload_common.pull.plans import PullSource, open_plan
from fastload_common.pull.policy import Allowance, Ownership, Special
from fastload_common.pull.records import FileItem, Item, LayerItem, PullPlan, PullReport
from fastload_common.pull.sizes import WINDOWS_BYTES, PullSizes, choose_pull_sizes
from fastload_common.pull.spool import Spool
from fastload_common.pull.stage import FinishedTree, Stage, UnpackedLayer
from fastload_common.pull.workers import Comparing, Job, Unpacking, Windows, Workers
from fastload_common.ranges import ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.uri import is_file_uri
from fastload_common.transfer.stats import TransferStats
from fastload_common.units import format_size

__all__ = ["pull"]

logger = logging.getLogger(__name__)


def pull(
    uri: str,
    destination: Path,
    settings: Settings,
    *,
    special: Special = "refuse",
    slots_directory: Path | None = None,
    clock: Clock | None = None,
    advance: Callable[[int], None] = lambda size_bytes: None,
    begin: Callable[[PullPlan], None] = lambda plan: None,
) -> PullReport:
    """Pull everything under a URI into a directory.

    Args:
        uri: ``s3://``, ``oci://``, ``file://``, or a path.
        destination: must not be there, or be empty; its parent must. Beside it a stage directory is
            made, which stays after a failure, so that the next pull goes on from there.
        special: see `policy.Special`.
        slots_directory: where pulls of this node count theirs, for the bounds of the node.
        advance: told how many bytes have come.
        begin: told what will be pulled, before the first byte of it.

    Raises:
        ConfigError: the destination, or a setting.
        SourceError: something could not be read; ChecksumMismatchError: or is not what it should.
        PullError: an archive is damaged or unsafe, or the disk is full.
    """
    clock = clock or SystemClock()
    with _explained(destination), contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage(destination))
        try:
            source, plan = open_plan(uri, settings, clock)
        except BaseException:
            stage.remove_if_empty()
            raise
        stack.callback(source.close)
        begin(plan)
        while True:
            run = _Pull(source, plan, stage, settings, special, clock, advance, slots_directory)
            try:
                return run.run()
            except ChecksumMismatchError as error:
                # What an earlier run has left may be what is wrong, or what a mirror sends.
                resumed, object_ids = run.discard_unverified()
                if resumed:
                    logger.warning("what an earlier pull had left is damaged: it is fetched again")
                elif not ask_elsewhere(source, object_ids, error):
                    raise


@dataclass(slots=True)
class _Work:
    """The blobs with their items, and what is there of each."""

    spools: dict[str, Spool] = field(default_factory=dict)
    items: dict[str, list[Item]] = field(default_factory=dict)
    layers: dict[int, UnpackedLayer] = field(default_factory=dict)
    ready: dict[int, Unpacked] = field(default_factory=dict)


class _Pull:
    """One attempt at a plan."""

    def __init__(
        self,
        source: PullSource,
        plan: PullPlan,
        stage: Stage,
        settings: Settings,
        special: Special,
        clock: Clock,
        advance: Callable[[int], None],
        slots_directory: Path | None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._stage = stage
        self._settings = settings
        self._special: Special = special
        self._clock = clock
        self._advance = advance
        self._slots_directory = slots_directory
        self._started_s = clock.monotonic_s()
        self._stats = TransferStats()
        self._work = _Work()
        self._verified: set[str] = set()
        self._report = PullReport(plan.uri, str(stage.destination))

    def run(self) -> PullReport:
        tree = FinishedTree(self._stage, self._identity())
        facts = tree.facts()
        if facts is not None:
            self._take_over(facts)
            self._stage.commit()
            return self._finish()
        self._prepare()
        jobs = self._jobs()
        with self._slots("download", self._settings.max_concurrent_downloads) as connections:
            sizes = self._sizes(connections)
            logger.debug("pull: %s", sizes)
            self._transfer(jobs, sizes)
        self._stage.check_free()
        self._assemble()
        try:
            self._stage.commit()
        except PullError:
            ready = [dataclasses.asdict(one) for one in self._work.ready.values()]
            counts = {"not_owned": self._report.not_owned, "compared": self._report.compared}
            tree.keep({"layers": ready, "counts": counts})
            raise
        return self._finish()

    def _identity(self) -> str:
        plan = self._plan
        files = [(one.name, one.key) for one in plan.files]
        layers = [(one.key, one.diff_id) for one in plan.layers]
        return repr((files, layers, plan.is_image, self._special, self._settings.verify))

    def _take_over(self, facts: dict[str, Any]) -> None:
        """Report what the pull that made the tree has done."""
        layers = enumerate(facts["layers"])
        self._work.ready = {number: Unpacked(**one) for number, one in layers}
        self._report.not_owned = facts["counts"]["not_owned"]
        self._report.compared = facts["counts"]["compared"]
        self._report.resumed_bytes = self._plan.size_bytes
        self._advance(self._plan.size_bytes)

    def discard_unverified(self) -> tuple[bool, list[ObjectId]]:
        """Delete blobs that were not verified; whether one came from an earlier run, and all."""
        spools = {k: s for k, s in self._work.spools.items() if k not in self._verified}
        resumed = any(spool.resumed_bytes > 0 for spool in spools.values())
        for spool in spools.values():
            spool.discard()
        return resumed, [self._work.items[key][0].object_id for key in spools]

    def _prepare(self) -> None:
        """Take over what a former run left."""
        plan, work = self._plan, self._work
        check_names([one.name for one in plan.files], os.pathconf(self._stage.path, "PC_NAME_MAX"))
        self._stage.check_sizes(plan.items)
        for item in plan.items:
            if isinstance(item, LayerItem):
                layer = UnpackedLayer(self._stage, item, self._special, plan.is_image)
                work.layers[item.number] = layer
                facts = layer.facts()
                if facts is not None:
                    work.ready[item.number] = Unpacked(**facts)
                    self._report.resumed_bytes += item.object_id.size_bytes
                    self._report.compared += item.digest is not None or item.diff_id is not None
                    continue
            work.items.setdefault(item.key, []).append(item)
        self._stage.keep_only(work.items, work.layers.values())
        for key, items in work.items.items():
            spool = Spool(self._stage.blobs / key, items[0].object_id.size_bytes)
            spool.prepare()
            work.spools[key] = spool
            self._report.resumed_bytes += spool.resumed_bytes
        self._check_room()
        if self._report.resumed_bytes:
            self._advance(self._report.resumed_bytes)

    def _check_room(self) -> None:
        """Ends at once what cannot end well: unpacked, it will be more still."""
        missing_bytes = sum(one.size_bytes - one.present_bytes for one in self._spools)
        status = os.statvfs(self._stage.path)
        free_bytes = status.f_bavail * status.f_frsize
        if missing_bytes > free_bytes:
            raise PullError(
                f"{format_size(missing_bytes)} are to be fetched, and the disk of "
                f"{self._stage.destination} has {format_size(free_bytes)} free",
                hint="make room, or name a directory on another disk",
            )

    def _jobs(self) -> list[Job]:
        """The largest first: they take longest, and the others fill the gaps."""
        windows = Windows(WINDOWS_BYTES)
        allowance = Allowance(self._plan.size_bytes, self._settings.max_unpacked_bytes)
        for number, unpacked in self._work.ready.items():
            allowance.resume(
                number, unpacked.archive_bytes, unpacked.entries, unpacked.on_disk_bytes
            )
        jobs: list[Job] = []
        for key, items in self._work.items.items():
            for item in items:
                spool = self._work.spools[key]
                if isinstance(item, LayerItem):
                    layer = self._work.layers[item.number]
                    done = self._unpacked(item)
                    jobs.append(
                        Unpacking(
                            item,
                            spool,
                            layer,
                            self._special,
                            self._plan.is_image,
                            allowance,
                            windows,
                            done,
                        )
                    )
                elif (summing := self._summing(item)) is not None:
                    jobs.append(Comparing(item, spool, summing, self._compared(item)))
        return sorted(jobs, key=lambda job: -job.spool.size_bytes)

    def _summing(self, item: FileItem) -> Summing | None:
        if item.digest is not None:
            return Sha(item.digest)
        if self._settings.verify == "off" or not isinstance(self._source, ObjectSource):
            return None
        stored = self._source.stored_checksum(item.object_id)
        return None if stored is None else Crc(stored)

    def _compared(self, item: FileItem) -> Callable[[], None]:
        def done() -> None:
            self._verified.add(item.key)
            self._report.compared += 1

        return done

    def _unpacked(self, item: LayerItem) -> Callable[[Unpacked], None]:
        def done(unpacked: Unpacked) -> None:
            self._work.ready[item.number] = unpacked
            self._report.compared += item.digest is not None or item.diff_id is not None
            others = [
                one
                for one in self._work.items[item.key]
                if isinstance(one, FileItem) or one.number not in self._work.ready
            ]
            if others:
                return
            self._verified.add(item.key)
            if self._settings.discard_unpacked_layers:
                self._work.spools[item.key].discard()

        return done

    @contextlib.contextmanager
    def _slots(self, kind: str, count: int | None) -> Iterator[int | None]:
        wanted = self._settings.max_concurrent_downloads_per_image or 48
        with self._node_slots(kind, count).taken(wanted, threading.Event()) as held:
            yield held

    def _node_slots(self, kind: str, count: int | None) -> NodeSlots:
        directory = self._slots_directory
        return NodeSlots(
            directory or self._stage.path, kind, None if directory is None else count, self._clock
        )

    def _sizes(self, node_connections: int | None) -> PullSizes:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = 1 << 20 if soft == resource.RLIM_INFINITY else soft
        missing = sum(spool.size_bytes - spool.present_bytes for spool in self._spools)
        return choose_pull_sizes(
            self._settings,
            missing,
            cpu_count=len(os.sched_getaffinity(0)),
            descriptor_limit=descriptors,
            remote=not is_file_uri(self._plan.uri),
            node_connections=node_connections,
        )

    @property
    def _spools(self) -> list[Spool]:
        return list(self._work.spools.values())

    def _transfer(self, jobs: list[Job], sizes: PullSizes) -> None:
        order = {id(job.spool): number for number, job in enumerate(jobs)}
        wanted = [
            (items[0].object_id, self._work.spools[key]) for key, items in self._work.items.items()
        ]
        wanted.sort(key=lambda one: order.get(id(one[1]), len(jobs)))
        download = Download(
            self._source,
            [(object_id, spool) for object_id, spool in wanted if not spool.is_complete],
            sizes,
            self._settings,
            self._clock,
            self._stats,
            width=sizes.unpacks if jobs else 1,
            started_s=self._started_s,
            advance=self._advance,
        )
        unpacks = self._node_slots("unpack", self._settings.max_concurrent_unpacks)
        workers = Workers(jobs, sizes, unpacks, download.stop)
        try:
            workers.start()
            download.run()
            workers.join()
        except BaseException:
            workers.stop()
            download.stop()
            workers.join()
            raise
        finally:
            for spool in self._spools:
                spool.close()
            self._report.fetched_bytes += download.fetched_bytes
            self._report.streamed_layers = download.streamed
        if workers.error is not None:
            raise workers.error
        for job in jobs:
            # A stream that began anew wrote over what had been compared already.
            if isinstance(job, Comparing) and job.spool.is_rewritten:
                self._verified.discard(job.item.key)
                job.compare(sizes)
                self._verified.add(job.item.key)

    def _assemble(self) -> None:
        plan, tree = self._plan, self._stage.tree
        tree.mkdir(mode=0o700)
        ownership = Ownership()
        layers = [self._work.layers[item.number] for item in plan.layers]
        merge_layers(
            [(layer.directory, layer.log) for layer in layers],
            tree,
            ownership,
            is_image=plan.is_image,
        )
        place_files([(item.name, self._work.spools[item.key]) for item in plan.files], tree)
        self._report.not_owned += ownership.refused

    def _finish(self) -> PullReport:
        report, ready = self._report, self._work.ready.values()
        report.files, report.layers = len(self._plan.files), len(self._plan.layers)
        report.size_bytes = self._plan.size_bytes
        report.entries = sum(one.entries for one in ready)
        report.unpacked_bytes = sum(one.archive_bytes for one in ready)
        report.left_out = sum(one.left_out for one in ready)
        report.not_owned += sum(one.not_owned for one in ready)
        report.transfer = self._stats.snapshot()
        report.wall_s = self._clock.monotonic_s() - self._started_s
        return report


@contextlib.contextmanager
def _explained(destination: Path) -> Iterator[None]:
    """Turn what the file system says into errors of ours."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: "make room, and pull again: what has come is kept",
            errno.EDQUOT: "the quota is used up",
            errno.EACCES: "its parent must be writable: a stage is made beside it",
            errno.EMFILE: "raise ulimit -n",
            errno.ENAMETOOLONG: "a name is too long for this file system",
        }.get(error.errno or 0, "see the file system that the destination is on")
        raise PullError(
            f"could not pull to {destination}: {error.strerror or error}", hint=hint
        ) from error
