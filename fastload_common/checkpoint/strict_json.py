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

__all__ = ["MAX_DEPTH", "Pairs", "depth_of", "parse_json"]

Pairs = list[tuple[str, Any]]
"""The members of one JSON object, in order, repeated keys included."""

MAX_DEPTH = 127
"""Containers that may stand inside each other, the outermost included."""

# Only these need the slow integer hook. A name may match as well: slower, never wrong.
_ODD_INTEGER = re.compile(r"-0|[0-9]{300}")
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
    if _ODD_INTEGER.search(text):
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


def depth_of(value: Any) -> int:
    """How many containers stand inside each other in a value from `parse_json`; 0 for a scalar."""
    deepest = 0
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if not isinstance(item, tuple | list):
            continue
        deepest = max(deepest, depth)
        # A pair is no container of its own.
        children = item if isinstance(item, list) else (pair[1] for pair in item)
        stack.extend((child, depth + 1) for child in children)
    return deepest


def _integer(text: str) -> int | float:
    if text == "-0":
        return -0.0
    # Shorter than 300 digits always fits a double.
    return int(text) if len(text) < 300 else _finite_float(text)


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
