"""vLLM adapter of fastload: the entry point of ``vllm.general_plugins`` and nothing else.

vLLM loads this module in each of its processes, also where no model is ever loaded, so it
imports neither torch nor the engine nor an SDK: `register` does, when it is called.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Teach this process of vLLM the load format ``fastload``. May be called many times.

    Raises:
        Nothing for an unsupported vLLM: vLLM would log and swallow it. The error comes when
        somebody asks for the load format.
    """
    from fastload_vllm.plugin import activate

    activate()
