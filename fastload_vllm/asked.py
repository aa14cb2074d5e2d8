"""Which load format the operator asked for, while vLLM builds its configuration.

`ModelConfig` pulls an s3:// model's metadata but is not told the load format; `EngineArgs`
knows it. The patches of `EngineArgs` open this scope, the one of `ModelConfig` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastload_common.engine.names import LOAD_FORMAT

__all__ = ["Asked", "asked", "asking"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The operator's wish.

    Attributes:
        load_format: lower case, as vLLM normalizes it.
        extra_config: ``--model-loader-extra-config``; settings of fastload where that is asked.
    """

    load_format: str
    extra_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fastload(self) -> bool:
        return self.load_format == LOAD_FORMAT


_asked: ContextVar[Asked | None] = ContextVar("fastload_vllm_asked", default=None)


def asked() -> Asked | None:
    """The innermost scope's wish, or None outside of any."""
    return _asked.get()


@contextmanager
def asking(load_format: Any, extra_config: Any) -> Iterator[None]:
    """Open a scope; takes what `EngineArgs` holds, whatever its type."""
    extra = extra_config if isinstance(extra_config, Mapping) else {}
    token = _asked.set(Asked(str(load_format).lower(), extra))
    try:
        yield
    finally:
        _asked.reset(token)
