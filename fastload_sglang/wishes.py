"""What the operator asked for, from SGLang's arguments while they are being decided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.errors import ConfigError
from fastload_sglang import compat

__all__ = ["Wish", "wish_of"]


@dataclass(frozen=True, slots=True)
class Wish:
    """Models, and how they are to be loaded.

    Attributes:
        model, tokenizer, draft: directories, URIs or hub ids; None where there is none.
        load_format, draft_format: lower case.
        extra_config: ``--model-loader-extra-config``.
        wants_tokenizer: whether the engine will make one.
        checksums: where SGLang is to look for files' checksums, if it is to look.
        served: the model's name for clients, if one is given.
    """

    model: str
    tokenizer: str | None
    draft: str | None
    load_format: str
    draft_format: str
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    wants_tokenizer: bool = True
    checksums: str | None = None
    served: str | None = None

    @property
    def fastload(self) -> bool:
        return self.load_format == LOAD_FORMAT

    @property
    def fastload_draft(self) -> bool:
        return self.draft is not None and self.draft_format == LOAD_FORMAT

    @property
    def models(self) -> dict[str, str | None]:
        """Models by the arguments that name them."""
        return {
            "model_path": self.model,
            "tokenizer_path": self.tokenizer,
            "speculative_draft_model_path": self.draft,
        }


def wish_of(server_args: Any) -> Wish:
    """Read it.

    Raises:
        ConfigError: the extra configuration is no JSON, and is for fastload.
    """
    view = compat.RESOLVING.get()(server_args)
    load_format = str(view.load_format).lower()
    draft_format = str(view.speculative_draft_load_format or load_format).lower()
    return Wish(
        model=str(view.model_path),
        tokenizer=view.tokenizer_path,
        draft=view.speculative_draft_model_path,
        load_format=load_format,
        draft_format=draft_format,
        # Other load formats' options are not ours to complain about.
        extra_config=_extra_config(view) if LOAD_FORMAT in (load_format, draft_format) else {},
        wants_tokenizer=not view.skip_tokenizer_init,
        checksums=view.model_checksum,
        served=view.served_model_name,
    )


def _extra_config(view: Any) -> Mapping[str, Any]:
    text = view.model_loader_extra_config or {}
    try:
        extra = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ConfigError(
            f"--model-loader-extra-config must be a JSON object for load format {LOAD_FORMAT}: "
            f"{error}"
        ) from None
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"--model-loader-extra-config must be a JSON object for load format {LOAD_FORMAT}, "
            f"got {type(extra).__name__}"
        )
    return extra
