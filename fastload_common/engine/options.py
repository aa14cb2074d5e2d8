"""What an operator sets through an engine's own options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fastload_common.config import Settings, load_settings
from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.errors import ConfigError

__all__ = ["settings_of"]


def settings_of(extra_config: Any, ignore_patterns: Iterable[str] | str | None) -> Settings:
    """Settings from ``--model-loader-extra-config`` and the environment.

    Args:
        extra_config: what the engine made of that option.
        ignore_patterns: the engine's own patterns of files to leave out; added to ours.

    Raises:
        ConfigError: it is no mapping, or a setting is wrong.
    """
    if not isinstance(extra_config, dict):
        raise ConfigError(
            f"--model-loader-extra-config must be a JSON object for load format {LOAD_FORMAT}, "
            f"got {type(extra_config).__name__}"
        )
    settings = load_settings(extra_config)
    more = [ignore_patterns] if isinstance(ignore_patterns, str) else ignore_patterns or ()
    patterns = dict.fromkeys((*settings.ignore_patterns, *more))
    return replace(settings, ignore_patterns=tuple(patterns))
