"""What ranks say: it comes as it was said, rubbish is refused, and no foreign text goes out."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.errors import ObjectMissingError, PeerError
from fastload_common.exchange.words import Failure, Told

DIGEST = st.binary(min_size=32, max_size=32)
SIZE = st.integers(0, 2**63)


@given(SIZE, SIZE, st.booleans(), DIGEST, DIGEST, DIGEST, st.binary(max_size=50))
def test_what_was_told_is_heard(
    chunk: int, gap: int, by_object: bool, objects: bytes, headers: bytes, uris: bytes, needs: bytes
) -> None:
    told = Told(chunk, gap, by_object, objects, headers, uris, needs)
    assert Told.decode(told.encode()) == told


@given(st.binary(max_size=112))
def test_rubbish_is_told_apart(data: bytes) -> None:
    if len(data) < 113:
        with pytest.raises(ValueError, match="needs without their head"):
            Told.decode(data)
    with pytest.raises(ValueError):  # noqa: PT011 -- any of JSON's
        Failure.decode(data)


@pytest.mark.parametrize(
    "data", [b"[]", b"{}", b'["a", 1, "b", "c"]', b"[1, 2, 3, 4]", b'[1, true, "a", "b"]']
)
def test_a_failure_that_says_nothing_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a failure that says nothing"):
        Failure.decode(data)


def test_an_error_of_ours_is_told_whole() -> None:
    error = ObjectMissingError("no object s3://m/a", hint="look", attempts=3)
    failure = Failure.of(2, 71, error)
    assert Failure.decode(failure.encode()) == failure
    raised = failure.error()
    assert str(raised) == (
        "rank 2 (pid 71), which loads together with this one, failed: ObjectMissingError: "
        "no object s3://m/a [attempts=3] -> look -> the error is that rank's; its own log says more"
    )


def test_a_foreign_error_is_told_by_its_type() -> None:
    failure = Failure.of(2, 71, ValueError("https://x/?X-Amz-Signature=abc"))
    assert failure == Failure(2, 71, "ValueError", "")


def test_who_passes_on_names_the_first() -> None:
    first = Failure.of(0, 50, ObjectMissingError("gone"))
    second = Failure.of(1, 60, first.error())
    assert second == first


def test_an_error_that_was_sent_between_processes_still_passes_on() -> None:
    error = Failure(3, 80).error()
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, PeerError)
    assert str(again) == str(error)
    assert Failure.of(1, 60, again) == Failure(3, 80)


def test_a_long_text_is_cut() -> None:
    failure = Failure.of(0, 1, ObjectMissingError("x" * 100_000))
    assert len(failure.encode()) < 10_000


def test_words_of_others_cannot_write_to_a_terminal_or_fill_a_log() -> None:
    told = json.dumps([1, 2, "X" * 1_000_000, "\x1b[2J\nERROR fine\u2028" * 10_000])
    failure = Failure.decode(told.encode())
    text = str(failure.error())
    assert text.isprintable()
    assert len(text) < 9_000
    assert "\\x1b[2J\\nERROR fine\\u2028" in text
    assert Failure.decode(failure.encode()) == failure
