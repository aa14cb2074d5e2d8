"""Runs the engine's own `load_weights` over lazy tensors and records what it copies.

The rules (docs/decisions/0004-trace-by-lazy-tensors.md has the reasons):

- a view operation on a lazy tensor changes its geometry;
- ``real.copy_(lazy)`` is recorded as a `Transfer`; nothing moves;
- any other operation on lazy tensors becomes an expression, evaluated when its bytes are there;
  if it cannot be one (it needs a value now, or depends on real tensors that may change), the
  bytes are read now and it is computed;
- an operation that reads just what one pending transfer will fill becomes an expression too;
- any other operation on real tensors that reads or writes memory with pending transfers
  settles those first, and only those that overlap;
- an in-place operation on a lazy tensor reads the tensor and changes what was read; views see
  the new value, and what was recorded before is still taken from the checkpoint.

A dispatch mode sees one thread. In another thread nothing is recorded: copies are done at once.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fastload_common.checkpoint.records import TensorEntry
from fastload_common.errors import TraceError
from fastload_common.trace.dtypes import torch_layout
from fastload_common.trace.expressions import fast_copy, fast_pick, make_expression
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.ledger import Ledger, Resolver, flat_arguments
from fastload_common.trace.misfit import misfit
from fastload_common.trace.modes import DispatchMode, FunctionMode
from fastload_common.trace.nodes import ExprNode, FileNode, Node
from fastload_common.trace.peel import peel
from fastload_common.trace.schema import READS_NO_VALUES, Effect, effect_of, written_arguments
from fastload_common.trace.transfer import Transfer, destination_view
from fastload_common.trace.views import FAST_VIEWS, view_by_meta

__all__ = ["Recorder"]

aten = torch.ops.aten
_COPY = aten.copy_.default


class Recorder:
    """One trace of one `load_weights`.

    Args:
        resolver: brings what is needed while tracing.
        dry: nothing will be loaded: copies into tensors without memory (the meta device) are
            recorded too. Else they do nothing, as in torch.

    Attributes:
        ledger: what is recorded.
        eager_ops: operations that had to read at once, by name.
        changed_by: an operation that changed a real tensor depending on its old value, if there
            was one: `load_weights` must then not run a second time.
    """

    def __init__(self, resolver: Resolver, *, dry: bool = False) -> None:
        self._resolver = resolver
        self._dry = dry
        self.ledger = Ledger(resolver)
        self._lock = threading.RLock()
        self._nodes: list[weakref.ref[Node]] = []
        self._closed = False
        self.changed_by: str | None = None
        self.eager_ops: dict[str, int] = {}

    def lazy(self, entry: TensorEntry) -> LazyTensor:
        """A lazy tensor for a whole tensor of the checkpoint."""
        dtype, sizes = torch_layout(entry)
        node = FileNode(self, entry, dtype, sizes)
        self.track(node)
        return LazyTensor(node, sizes, node.strides)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in this thread while the block runs."""
        collecting = gc.isenabled()
        # Each tensor leaves a few objects that live until the end: the collector would look at
        # all of them again and again (half of the time at 100,000 tensors).
        gc.disable()
        try:
            with FunctionMode(self), DispatchMode(self):
                yield
        finally:
            if collecting:
                gc.enable()

    def track(self, node: Node) -> None:
        """See `Owner.track`."""
        self._nodes.append(weakref.ref(node))

    def leaked(self) -> list[Node]:
        """Tensors of the checkpoint, and values computed from them, that are still held lazily."""
        nodes = [reference() for reference in self._nodes]
        return [node for node in nodes if node is not None and node.real is None]

    def close(self) -> None:
        """From now on a lazy tensor that was kept raises when it is used."""
        self._closed = True

    # -- dispatch ---------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation in the recording thread."""
        first: Any = args[0] if args else None
        effect = effect_of(func)
        if effect is Effect.COMPOSITE:
            with DispatchMode(self):
                return func.decompose(*args, **kwargs)
        if type(first) is not LazyTensor:
            if effect is Effect.VIEW:
                return func(*args, **kwargs)
            if func is _COPY and type(args[1]) is LazyTensor:
                with torch._C.DisableTorchFunction():
                    return self.record_copy(first, args[1])
        elif first.node.real is None:
            fast = FAST_VIEWS.get(func)
            if fast is not None:
                result = fast(*args, **kwargs)
                if result is not None:
                    return result
        lazies = [v for v in flat_arguments(args, kwargs) if type(v) is LazyTensor]
        if effect is Effect.WRITE and type(first) is not LazyTensor and func not in _OVERWRITES:
            self.changed_by = self.changed_by or str(func)
        if not lazies:
            if self.ledger.pending and func not in READS_NO_VALUES:
                with self._lock, torch._C.DisableTorchFunction():
                    if self.ledger.touched_by(args, kwargs):
                        with torch.no_grad():
                            return self._dispatch_touching(func, args, kwargs)
            return func(*args, **kwargs)
        with self._lock, torch._C.DisableTorchFunction(), torch.no_grad():
            return self._dispatch_lazy(func, args, kwargs, lazies)

    def dispatch_foreign(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation on a lazy tensor where no mode is active: nothing is deferred."""
        first = args[0] if args else None
        if effect_of(func) is Effect.VIEW and type(first) is LazyTensor and first.node.real is None:
            view = view_by_meta(func, first, args, kwargs)
            if view is not None:
                return view
        with self._lock:
            return self._run_now(func, args, kwargs)

    def _dispatch_touching(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on real tensors, some of which are still to be filled."""
        if effect_of(func) is Effect.PURE:
            made = self._keep_for_later(func, args, kwargs)
            if made is not None:
                return made
        self.ledger.settle_touched(func, args, kwargs)
        return func(*args, **kwargs)

    def _keep_for_later(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation as an expression; None where it must be computed now."""
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            # Others may have effects that no schema tells; random numbers come in their order.
            return None
        args, kwargs = tree_map_only(torch.Tensor, self._with_pending, (args, kwargs))
        if not any(type(value) is LazyTensor for value in flat_arguments(args, kwargs)):
            return None  # whatever was pending is done now
        made = fast_copy(self, func, args, kwargs)
        if made is None:
            made = fast_pick(self, func, args, kwargs)
        return make_expression(self, func, args, kwargs) if made is None else made

    def _with_pending(self, value: torch.Tensor) -> torch.Tensor:
        """What a real tensor will hold: itself, or the lazy tensor that is to be copied into it.

        Mamba's loaders read a parameter right after copying into it, layer by layer; so that is
        no reason to wait for each.
        """
        if type(value) is LazyTensor:
            return value
        transfers = self.ledger.pending.overlapping(value)
        if len(transfers) == 1:
            [transfer] = transfers
            source = transfer.source
            view = destination_view(value)
            if (
                view == transfer.view
                and view.strides == source.view_in_node.strides
                and transfer.destination.dtype == value.dtype
            ):
                if (source.dtype, source.device) == (value.dtype, value.device):
                    return source
                to_copy = {"dtype": value.dtype, "device": value.device}
                cast = fast_copy(self, aten._to_copy.default, (source,), to_copy)
                if cast is not None:
                    return cast  # type: ignore[no-any-return]
        self.ledger.settle(transfers)
        return value

    def _dispatch_lazy(
        self, func: Any, args: Any, kwargs: dict[str, Any], lazies: list[LazyTensor]
    ) -> Any:
        if torch.Tag.inplace_view in func.tags and type(args[0]) is LazyTensor:
            raise TraceError(f"{func} changes the shape or memory of a loaded tensor in place")
        if any(lazy.node.real is not None for lazy in lazies):
            return self._dispatch_real(func, args, kwargs)
        effect = effect_of(func)
        if func is aten._foreach_copy_.default and not any(
            type(destination) is LazyTensor for destination in args[0]
        ):
            for pair in zip(args[0], args[1], strict=True):
                if type(pair[1]) is LazyTensor:
                    self._record(*pair)
                else:
                    self.ledger.settle_touched(_COPY, pair, {})
                    pair[0].copy_(pair[1])
            return None
        if effect is Effect.VIEW and type(args[0]) is LazyTensor:
            view = view_by_meta(func, args[0], args, kwargs)
            if view is not None:
                return view
        if func in READS_NO_VALUES:
            args, kwargs = tree_map_only(LazyTensor, _stand_in, (args, kwargs))
            return func(*args, **kwargs)
        if effect is not Effect.WRITE:
            made = self._keep_for_later(func, args, kwargs)
            if made is not None:
                return made
        return self._run_now(func, args, kwargs)

    def _dispatch_real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on lazy tensors some of which have become real: on those as such."""
        passed: dict[int, LazyTensor] = {}

        def unwrap(lazy: LazyTensor) -> torch.Tensor:
            if lazy.node.real is None:
                return lazy
            real = lazy.real_view()
            passed[id(real)] = lazy
            return real

        args, kwargs = tree_map_only(LazyTensor, unwrap, (args, kwargs))
        with DispatchMode(self):
            result = func(*args, **kwargs)
        return passed.get(id(result), result)

    def _run_now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Read what the operation needs and compute it."""
        written = {id(v) for v in _written(func, args, kwargs)}
        nodes = [v.node for v in tree_leaves((args, kwargs)) if type(v) is LazyTensor]
        results: dict[int, LazyTensor] = {}

        def to_real(lazy: LazyTensor) -> torch.Tensor:
            if lazy.node.real is None:
                name = str(func)
                self.eager_ops[name] = self.eager_ops.get(name, 0) + 1
            if id(lazy) not in written:
                return self._value(lazy)
            # Its old value is not needed, unless another argument shows it.
            covers = func in _OVERWRITES and nodes.count(lazy.node) == 1
            self._make_writable(lazy, covers=covers)
            real = lazy.real_view()
            results[id(real)] = lazy
            return real

        args, kwargs = tree_map_only(LazyTensor, to_real, (args, kwargs))
        self.ledger.settle_touched(func, args, kwargs)
        result = func(*args, **kwargs)
        # In-place operations return their argument: give back the tensor that was passed.
        return results.get(id(result), result)

    # -- recording --------------------------------------------------------------------------

    def record_copy(self, destination: torch.Tensor, source: LazyTensor) -> torch.Tensor:
        """``destination.copy_(source)`` into a real tensor, recorded."""
        with self._lock:
            return self._record(destination, source)

    def _record(self, destination: torch.Tensor, source: LazyTensor) -> torch.Tensor:
        if source.node.real is not None or destination.is_conj() or destination.is_neg():
            with torch.no_grad():
                self._run_now(_COPY, (destination, source), {})
            return destination
        if destination.shape != source.view_in_node.sizes:
            source = self._broadcast(destination, source)
        if destination.is_meta and not self._dry:
            return destination
        # An alias: the parameter may get other memory later (`param.data = ...`, swap_tensors).
        target = destination.detach()
        if type(source.node) is ExprNode:
            target, source = peel(destination, source)
        transfer = Transfer(target, source)
        if transfer.start == transfer.end:
            return destination
        self.ledger.record(transfer)
        return destination

    def _broadcast(self, destination: torch.Tensor, source: LazyTensor) -> LazyTensor:
        expanded = FAST_VIEWS[aten.expand.default](source, list(destination.shape))
        if expanded is None:
            raise misfit(
                source.node,
                f"shape {list(source.shape)} was to be copied into a parameter of shape "
                f"{list(destination.shape)}",
            )
        return expanded  # type: ignore[no-any-return]

    # -- settling ---------------------------------------------------------------------------

    def expose(self, tensor: torch.Tensor) -> None:
        """The address of a real tensor is being taken; see `Ledger.expose`."""
        with self._lock, torch._C.DisableTorchFunction():
            self.ledger.expose(tensor)

    def materialize(self, node: Node) -> None:
        """Give a node its real value: the address of it is needed, or it will be written to."""
        with self._lock:
            if node.real is None:
                if self._closed:
                    raise TraceError(
                        "a tensor of the checkpoint was used after its load had ended",
                        hint="set FASTLOAD_TRACE=eager, and report which model does this",
                    )
                with torch.inference_mode(False):  # it may be used outside of it later
                    node.real = self._resolver.read(LazyTensor(node, node.sizes, node.strides))

    def _value(self, lazy: LazyTensor) -> torch.Tensor:
        node = lazy.node
        if node.real is not None:
            return lazy.real_view()
        size_bytes = node.dtype.itemsize * math.prod(node.sizes)
        if isinstance(node, ExprNode) or size_bytes <= _READ_WHOLE_BYTES:
            self.materialize(node)
            return lazy.real_view()
        return self._resolver.read(lazy)

    def _make_writable(self, lazy: LazyTensor, *, covers: bool) -> None:
        node = lazy.node
        if node.real is not None:
            return
        view = lazy.view_in_node
        if covers and view.numel == view.span == math.prod(node.sizes):
            node.real = torch.empty_strided(
                node.sizes, node.strides, dtype=node.dtype, device=node.device
            )
        else:
            self.materialize(node)


# A tensor this small is read whole when a part of it is: the next element then costs nothing.
_READ_WHOLE_BYTES = 1024 * 1024

# They give every element a value without reading it.
_OVERWRITES = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, _COPY})


def _stand_in(lazy: LazyTensor) -> torch.Tensor:
    """A real tensor of the same form, for operations that look at nothing else."""
    sizes, strides, _ = lazy.view_in_node
    return torch.empty_strided(sizes, strides, dtype=lazy.dtype, device=lazy.device)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    if effect_of(func) is not Effect.WRITE:
        return []
    values = []
    for position, name in written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        values += tree_leaves(value)
    return values
