"""JSON as the reference safetensors reader takes it, which is stricter than Python's.

Differences that are closed here: ``NaN`` and ``Infinity`` are no JSON; a number that overflows a
double, a lone surrogate in an escape and nesting deeper than the reference's limit are refused;
``-0`` is no integer. Objects come back as tuples of pairs, so that a repeated key can be seen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["MAX_DEPTH", "Pairs", "check_limits", "parse_json"]

Pairs = list[tuple[str, Any]]
"""The members of one JSON object, in order, repeated keys included."""

MAX_DEPTH = 127
"""Containers that may stand inside each other, the outermost included."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str, build: Callable[[Pairs], tuple[Any, ...]] = tuple) -> Any:
    """Parse JSON; arrays become lists, objects what ``build`` makes of their pairs.

    Args:
        text: the whole document.
        build: called for each object, inner ones first. It must keep every string that may hold
            a surrogate: they are looked for in what it returns.

    Raises:
        ValueError: the text is not JSON in the reference's sense; the message says why.
    """
    options: dict[str, Any] = {}
    if "-0" in text:  # in a name as well: slower, never wrong
        options["parse_int"] = _integer
    try:
        value = json.loads(
            text,
            object_pairs_hook=build,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            **options,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value)
    return value


def check_limits(value: Any, outer_depth: int) -> None:
    """Check a part of a parsed document that nobody else looks at.

    Args:
        value: from `parse_json` without ``build``.
        outer_depth: how many containers it stands in.

    Raises:
        ValueError: it is nested too deeply, or a number overflows a double.
    """
    stack = [(value, outer_depth)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, tuple | list):
            if depth >= MAX_DEPTH:
                raise ValueError("nested too deeply")
            # A pair is no container of its own.
            children = item if isinstance(item, list) else (pair[1] for pair in item)
            stack.extend((child, depth + 1) for child in children)
        elif isinstance(item, int):
            try:
                float(item)
            except OverflowError:
                raise ValueError("number out of range") from None


def _integer(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number out of range: {text[:20]}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _check_surrogates(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise ValueError("lone surrogate in an escape") from None
        elif isinstance(item, tuple | list):
            stack.extend(item)
