"""Errors: one tree, clear messages, and the journey from a worker's process."""

from __future__ import annotations

import pickle

import pytest

from fastload_common import errors
from fastload_common.errors import (
    CheckpointError,
    FastloadError,
    HeaderInvalidError,
    HeaderTooLargeError,
    ObjectMissingError,
    SourceError,
    SourceUnavailableError,
)

ALL = [getattr(errors, name) for name in errors.__all__]


def test_message_has_what_facts_and_remedy() -> None:
    error = SourceUnavailableError(
        "s3://b/k: no reply", hint="check the network", status=503, attempts=3, region=None
    )
    assert str(error) == "s3://b/k: no reply [status=503, attempts=3] -> check the network"
    assert error.fields == {"status": 503, "attempts": 3}


def test_message_without_facts_or_remedy() -> None:
    assert str(FastloadError("it failed")) == "it failed"
    assert str(FastloadError("it failed", hint="try")) == "it failed -> try"


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_pickling_with_fields_and_notes(kind: type[FastloadError]) -> None:
    error = kind("what", hint="remedy", uri="s3://b/k", size_bytes=3)
    error.add_note("rank 1 failed as well")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.fields == error.fields
    assert again.__notes__ == ["rank 1 failed as well"]


def test_only_what_may_help_is_retryable() -> None:
    assert [kind.__name__ for kind in ALL if kind.retryable] == ["SourceUnavailableError"]


def test_the_tree_is_split_by_whose_fault_it_is() -> None:
    assert issubclass(ObjectMissingError, SourceError)
    assert issubclass(HeaderTooLargeError, HeaderInvalidError)
    assert issubclass(HeaderInvalidError, CheckpointError)
    assert not issubclass(SourceError, CheckpointError)
    assert all(issubclass(kind, FastloadError) for kind in ALL)


def test_good_bytes_before_a_failure_default_to_none() -> None:
    error = SourceUnavailableError("cut")
    assert error.received_bytes == 0
    error.received_bytes = 7
    assert SourceUnavailableError.received_bytes == 0


def test_good_bytes_before_a_failure_survive_pickling() -> None:
    error = SourceUnavailableError("cut")
    error.received_bytes = 7
    assert pickle.loads(pickle.dumps(error)).received_bytes == 7
