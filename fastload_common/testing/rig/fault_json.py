"""Faults as JSON, for files, for other processes and for a failed test to print.

    {"effect": "Stall", "after_bytes": 1000, "name": "models/*", "attempts": [1], "share": 0.01}

One flat object: the effect's kind, its fields, and the conditions of `Fault`. What has its default
is left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from fastload_common.errors import ConfigError
from fastload_common.ranges import ByteRange
from fastload_common.testing.rig.effects import Choice, Effect, Lognormal
from fastload_common.testing.rig.faults import Fault

__all__ = ["dump_faults", "fault_from_json", "fault_to_json", "load_faults"]

_EFFECTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Effect)}
_DELAYS: dict[str, type[Any]] = {"lognormal": Lognormal, "choice": Choice}
_TUPLES = {"methods", "attempts", "seconds", "weights"}


def fault_to_json(fault: Fault) -> dict[str, Any]:
    """One fault.

    Raises:
        TypeError: its attempts are a function.
    """
    if callable(fault.attempts):
        raise TypeError("attempts that are a function have no JSON")
    row = {"effect": type(fault.effect).__name__}
    return row | _changed_fields(fault.effect) | _changed_fields(fault, without="effect")


def fault_from_json(row: Mapping[str, Any]) -> Fault:
    """One fault.

    Raises:
        ConfigError: an unknown effect or field, or a value that does not fit.
    """
    fields = dict(row)
    kind = _EFFECTS.get(str(fields.pop("effect", None)))
    if kind is None:
        raise ConfigError(
            f"a fault has the effect {row.get('effect')!r}", hint=f"known: {', '.join(_EFFECTS)}"
        )
    own = {field.name for field in dataclasses.fields(kind)}
    conditions = {field.name for field in dataclasses.fields(Fault)} - {"effect"}
    unknown = set(fields) - own - conditions
    if unknown:
        raise ConfigError(f"a fault of the effect {kind.__name__} has no {sorted(unknown)}")
    try:
        values = {name: _value(name, value) for name, value in fields.items()}
        effect = kind(**{name: value for name, value in values.items() if name in own})
        return Fault(effect, **{k: v for k, v in values.items() if k in conditions})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"a fault of the effect {kind.__name__}: {error}") from error


def dump_faults(faults: Iterable[Fault]) -> str:
    """A list of faults, for `load_faults`."""
    return json.dumps([fault_to_json(fault) for fault in faults])


def load_faults(text: str) -> list[Fault]:
    """A list of faults.

    Raises:
        ConfigError: it is not JSON, no list, or has what `fault_from_json` refuses.
    """
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the faults are no JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("the faults are no list of objects")
    return [fault_from_json(row) for row in rows]


def _changed_fields(record: Any, without: str = "") -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name != without and value != default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    match value:
        case ByteRange():
            return [value.start, value.end]
        case Lognormal() | Choice():
            return {type(value).__name__.lower(): _changed_fields(value)}
        case bytes():
            return value.decode("latin-1")
        case tuple():
            return list(value)
        case Mapping():
            return dict(value)
        case _:
            return value


def _value(name: str, value: Any) -> Any:
    if name == "byte_range" and value is not None:
        return ByteRange(*value)
    if name == "data":
        return value.encode("latin-1")
    if name in _TUPLES and isinstance(value, list):
        return tuple(value)
    if name == "seconds" and isinstance(value, dict):
        ((kind, fields),) = value.items()
        return _DELAYS[kind](**{field: _value(field, inner) for field, inner in fields.items()})
    return value
