"""What the tests of S3 faults share: the scripted server, and a source in front of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.source.s3 import S3Source
from fastload_common.source.uri import s3_location
from fastload_common.testing.certificates import PrivateAuthority
from tests.common.source.oci_bench import (  # noqa: F401  (fixtures)
    make_registry,
    oci_clock,
    oci_stack,
    open_oci,
    storage,
    without_ranges,
)

QUICK = Settings(max_attempts=3)
# For servers that stall on purpose. Others may be slow on a busy machine, and are given time.
IMPATIENT = Settings(max_attempts=3, read_timeout_s=0.5)


class RecordingClock(SystemClock):
    """Real time, but waits are only written down."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        return event.is_set()


@pytest.fixture
def clock() -> RecordingClock:
    return RecordingClock()


OpenS3 = Callable[..., S3Source]


@pytest.fixture
def open_s3(clock: RecordingClock) -> Iterator[OpenS3]:
    """Opens S3 sources with quick settings, and closes them."""
    opened: list[S3Source] = []

    def open_(uri: str, settings: Settings = QUICK) -> S3Source:
        source = S3Source(s3_location(uri), settings, clock)
        opened.append(source)
        return source

    yield open_
    for source in opened:
        source.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> PrivateAuthority:
    return PrivateAuthority(tmp_path_factory.mktemp("authority"))
