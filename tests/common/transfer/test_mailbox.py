"""The mailbox: nothing that is posted is missed, however the threads are interleaved."""

from __future__ import annotations

import os

import pytest

from fastload_common.transfer.lanes import Started
from fastload_common.transfer.mailbox import Mailbox


def test_a_post_during_the_reading_of_the_last_wake_still_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mailbox = Mailbox()
    really_read = os.eventfd_read

    def read(fd: int) -> int:
        # Another thread posts just before and just after the counter is drained.
        mailbox.post(Started(2, 0.0))
        value = really_read(fd)
        mailbox.post(Started(3, 0.0))
        return value

    mailbox.post(Started(1, 0.0))
    monkeypatch.setattr(os, "eventfd_read", read)
    found = mailbox.wait(0)
    monkeypatch.setattr(os, "eventfd_read", really_read)
    assert [event.attempt_id for event in found] == [1, 2, 3]
    mailbox.wait(0)
    mailbox.post(Started(4, 0.0))
    # In the error that this is for, no later post ever woke anybody.
    assert mailbox._selector.select(0)
    assert [event.attempt_id for event in mailbox.wait(0)] == [4]
    mailbox.close()


def test_a_wake_after_the_end_does_nothing() -> None:
    mailbox = Mailbox()
    mailbox.close()
    mailbox.wake()
    mailbox.close()
