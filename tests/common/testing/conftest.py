"""The rig that its own tests ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import Rig
from tests.common.testing.rig_client import DATA, KEY


@pytest.fixture
def rig() -> Iterator[Rig]:
    """One object; unsigned requests are answered."""
    with Rig(keys=[KEY]) as rig:
        rig.allow_unsigned = True
        rig.put("bucket", "m/key", DATA)
        yield rig


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> PrivateAuthority:
    return PrivateAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def timed() -> Iterator[Rig]:
    """Its clock jumps over every wait, so that times in its log are what was waited for."""
    with Rig(FakeClock(auto=True)) as rig:
        rig.allow_unsigned = True
        rig.put("bucket", "m/key", DATA)
        yield rig
