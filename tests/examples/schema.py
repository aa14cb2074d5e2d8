"""Compares objects with Kubernetes' own API, strictly. Not a test itself.

The API's types are those of lightkube-models, which are made from Kubernetes' OpenAPI document of
the release that its version names. An unknown field, a missing one or one of another type is an
error, as it is for an API server with strict field validation.
"""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from lightkube.models import apps_v1, batch_v1, core_v1, storage_v1

__all__ = ["NATIVE", "problems"]

NATIVE: dict[tuple[str, str], Any] = {
    ("apps/v1", "Deployment"): apps_v1.Deployment,
    ("apps/v1", "DaemonSet"): apps_v1.DaemonSet,
    ("apps/v1", "StatefulSet"): apps_v1.StatefulSet,
    ("batch/v1", "Job"): batch_v1.Job,
    ("v1", "ConfigMap"): core_v1.ConfigMap,
    ("v1", "Namespace"): core_v1.Namespace,
    ("v1", "Secret"): core_v1.Secret,
    ("v1", "Service"): core_v1.Service,
    ("v1", "ServiceAccount"): core_v1.ServiceAccount,
    ("storage.k8s.io/v1", "StorageClass"): storage_v1.StorageClass,
}


def problems(value: Any, expected: Any, where: str = "") -> list[str]:
    """What of a value is not of the API's type; one line each."""
    if expected is Any:
        return []
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _of_any(value, typing.get_args(expected), where)
    if isinstance(expected, type) and issubclass(expected, msgspec.Struct):
        return _of_fields(value, expected, where)
    if origin is list:
        return _of_list(value, typing.get_args(expected), where)
    if origin is dict or expected is dict or expected is typing.Dict:  # noqa: UP006
        return _of_mapping(value, typing.get_args(expected), where)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return []
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        return [f"{where}: expected {expected.__name__}, got {str(value)[:40]!r}"]
    return []


def _of_any(value: Any, choices: tuple[Any, ...], where: str) -> list[str]:
    if value is None and type(None) in choices:
        # YAML's null is what an empty line of a list or a forgotten value becomes.
        return [f"{where}: is empty"]
    found = [problems(value, choice, where) for choice in choices if choice is not type(None)]
    return min(found, key=len)


def _of_fields(value: Any, expected: Any, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: expected {expected.__name__}, got {str(value)[:40]!r}"]
    hints = typing.get_type_hints(expected)
    # The API calls a field `continue` or `from`; the model cannot.
    fields = {field.encode_name: field for field in msgspec.structs.fields(expected)}
    found = [f"{where}.{key}: no such field" for key in value if key not in fields]
    for name, field in fields.items():
        if name in value:
            found += problems(value[name], hints[field.name], f"{where}.{name}")
        elif field.required:
            found.append(f"{where}.{name}: is missing")
    return found


def _of_list(value: Any, arguments: tuple[Any, ...], where: str) -> list[str]:
    if not isinstance(value, list):
        return [f"{where}: expected a list, got {str(value)[:40]!r}"]
    return [
        line
        for number, item in enumerate(value)
        for line in problems(item, arguments[0], f"{where}[{number}]")
    ]


def _of_mapping(value: Any, arguments: tuple[Any, ...], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: expected a mapping, got {str(value)[:40]!r}"]
    content = arguments[1] if arguments else Any
    return [
        line for key, item in value.items() for line in problems(item, content, f"{where}[{key}]")
    ] + [f"{where}: key {key!r} is no text" for key in value if not isinstance(key, str)]
