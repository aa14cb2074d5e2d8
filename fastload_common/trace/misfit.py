"""When a loaded tensor does not fit what the engine does with it: an error that names it."""

from __future__ import annotations

from typing import Any

from fastload_common.checkpoint.records import TensorEntry
from fastload_common.errors import TensorMismatchError, TraceError
from fastload_common.trace.nodes import FileNode, Node

__all__ = ["MISFIT_HINT", "ComputedGeometryError", "GeometryError", "entry_fields", "misfit"]

MISFIT_HINT = (
    "check that config.json and the weights belong to the same model; if they do, try "
    "FASTLOAD_TRACE=eager"
)


class GeometryError(TensorMismatchError, RuntimeError, IndexError):
    """What torch would raise for a real tensor of this shape: a RuntimeError or an IndexError.

    It is both, since the engine's code may catch either.
    """


class ComputedGeometryError(TraceError, RuntimeError, IndexError):
    """The same for a computed value, whose layout was only foretold: real ones may do better."""


def misfit(node: Node, what: str) -> GeometryError | ComputedGeometryError:
    """The error for an operation that this tensor's shape does not allow.

    Args:
        node: the tensor that it is a view of.
        what: what was tried, and why it cannot be.
    """
    if not isinstance(node, FileNode):
        return ComputedGeometryError(f"a value computed from the checkpoint: {what}")
    return GeometryError(
        f"tensor {node.entry.name!r}: {what}", hint=MISFIT_HINT, **entry_fields(node.entry)
    )


def entry_fields(entry: TensorEntry) -> dict[str, Any]:
    """Where a tensor is and what it is, for an error's fields."""
    return {
        "object": entry.object_id.uri,
        "range": str(entry.byte_range),
        "dtype": entry.dtype,
        "shape": list(entry.shape),
    }
