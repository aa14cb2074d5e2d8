"""From factors to a key, and from two sets of factors to the words for what differs. Pure.

The key is the SHA-256 of the factors' canonical JSON: sorted names, no spaces, ASCII. Equal factors
give equal keys in every process, on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fastload_common.compile_cache.factors import Factors, check_factors

__all__ = ["Difference", "canonical", "diff", "differences", "is_key", "key_of", "nearest"]

KEY_FORM = 1
"""Grows when a factor changes its meaning: then no old entry is found any more."""

_SHOWN_CHARACTERS = 80


class Difference(NamedTuple):
    """One factor (or one row of a table in it) that two sets do not have in common."""

    name: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"{self.name}: {self.here} here, {self.there} there"


def canonical(value: Any) -> bytes:
    """The one way to write a plain JSON value."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def key_of(factors: Mapping[str, Any]) -> str:
    """64 hexadecimal digits.

    Raises:
        FactorsInvalidError: see `check_factors`.
    """
    checked = check_factors(factors)
    return hashlib.sha256(canonical({"form": KEY_FORM, "factors": checked})).hexdigest()


def is_key(text: str) -> bool:
    """Whether it has the form of a key or a digest, so that it may name a file."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def differences(here: Factors, there: Factors) -> list[Difference]:
    """What differs, by name; tables are compared row by row."""
    return list(_differences("", here, there))


def diff(here: Factors, there: Factors) -> list[str]:
    """The same in words."""
    return [str(difference) for difference in differences(here, there)]


def nearest(
    entries: Iterable[tuple[str, Factors]], factors: Factors
) -> tuple[str, list[Difference]] | None:
    """The entry with the fewest differences, and these; None if there is no entry.

    Args:
        entries: key and factors. Those of another engine or model count only if all are.
    """
    best: tuple[tuple[int, int, str], str, list[Difference]] | None = None
    for key, other in entries:
        found = differences(factors, other)
        foreign = sum(d.name.startswith(("engine.name", "model.content")) for d in found)
        rank = (int(foreign > 0), len(found), key)
        if best is None or rank < best[0]:
            best = (rank, key, found)
    return None if best is None else (best[1], best[2])


def _differences(prefix: str, here: Any, there: Any) -> Iterator[Difference]:
    for name in sorted(here.keys() | there.keys()):
        full = f"{prefix}{name}"
        if name not in here or name not in there:
            yield Difference(
                full,
                _words(here[name]) if name in here else "not given",
                _words(there[name]) if name in there else "not given",
            )
        elif isinstance(here[name], dict) and isinstance(there[name], dict):
            yield from _differences(f"{full}.", here[name], there[name])
        elif canonical(here[name]) != canonical(there[name]):
            yield Difference(full, *_list_words(here[name], there[name]))


def _list_words(here: Any, there: Any) -> tuple[str, str]:
    """Of two lists of names only what the other one lacks: nobody compares 60 CPU flags by eye."""
    lists = isinstance(here, list) and isinstance(there, list)
    if not lists or not all(isinstance(item, str) for item in [*here, *there]):
        return _words(here), _words(there)
    more = [item for item in here if item not in there]
    less = [item for item in there if item not in here]
    if not more and not less:
        return _words(here), _words(there)
    return (
        _cut("has " + " ".join(more) if more else "lacks " + " ".join(less)),
        _cut("has " + " ".join(less) if less else "lacks " + " ".join(more)),
    )


def _words(value: Any) -> str:
    text = value if isinstance(value, str) else canonical(value).decode()
    return _cut(text if text else "''")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
