"""The collector is as it was after a plan, however it ended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fastload_common.load.garbage import old_objects_at_rest


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


def test_old_garbage_waits_and_new_garbage_does_not() -> None:
    gc.collect()  # so that none comes by itself
    old = weakref.ref(Ring())
    with old_objects_at_rest():
        new = weakref.ref(Ring())
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


def test_what_was_frozen_before_stays_so() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with old_objects_at_rest():
        pass
    assert gc.get_freeze_count() >= count - 1 > 0


def test_an_error_ends_it_as_well() -> None:
    with pytest.raises(ZeroDivisionError), old_objects_at_rest():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
