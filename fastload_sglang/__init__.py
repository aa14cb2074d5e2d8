"""SGLang adapter of fastload: the entry point of ``sglang.srt.plugins`` and nothing else.

SGLang calls it in each of its processes, also where no model is ever loaded, so this module
imports neither torch nor the engine nor an SDK: `register` does, when it is called.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Teach this process of SGLang the load format ``fastload``. May be called many times.

    Raises:
        Nothing for an unsupported SGLang: SGLang would log and swallow it. The error comes when
        somebody asks for the load format.
    """
    from fastload_sglang.plugin import activate

    activate()
