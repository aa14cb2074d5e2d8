"""`handle_model_source_paths`: look at the models before any other process is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastload_common.config import Settings, load_settings
from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.engine.object_model import fetch_model, fetch_tokenizer, pin_model
from fastload_common.engine.patch import Patch
from fastload_common.errors import ConfigError
from fastload_common.load.local_check import check_local_model
from fastload_sglang import compat
from fastload_sglang.metadata_link import Fetched, fetched, link
from fastload_sglang.wishes import Wish, wish_of

__all__ = ["PATCH"]


def _prepare(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    wish = wish_of(server_args)
    token = fetched.set(Fetched(frozenset(_prepared(server_args, wish)), wish.load_format))
    try:
        return original(server_args, *args, **kwargs)
    finally:
        fetched.reset(token)


def _prepared(server_args: Any, wish: Wish) -> Iterator[str]:
    """Check what fastload is to load; link and name what of that is in an object store."""
    if not (wish.fastload or wish.fastload_draft):
        return
    _check(wish)
    settings = load_settings(wish.extra_config)
    wish = _pinned(server_args, wish, settings)
    own_tokenizer = wish.tokenizer in (None, wish.model)
    if wish.fastload:
        yield from _model(wish.model, settings, tokenizer=own_tokenizer and wish.wants_tokenizer)
        if not own_tokenizer and _is_object(str(wish.tokenizer)):
            uri = str(wish.tokenizer)
            _link(uri, fetch_tokenizer(uri, settings, required=wish.wants_tokenizer))
            yield uri
    if wish.fastload_draft and not (wish.fastload and wish.draft == wish.model):
        yield from _model(str(wish.draft), settings, tokenizer=False)


def _pinned(server_args: Any, wish: Wish, settings: Settings) -> Wish:
    """Registries' tags for their digests, in the arguments too: all processes read one state."""
    asked = [wish.model, wish.tokenizer] if wish.fastload else []
    asked += [wish.draft] if wish.fastload_draft else []
    found = {uri: pin_model(uri, settings) for uri in dict.fromkeys(asked) if uri is not None}
    if all(uri == pinned for uri, pinned in found.items()):
        return wish
    names = {name: found.get(str(uri), uri) for name, uri in wish.models.items()}
    # Clients name the model as the operator did, not by a digest that changes.
    served = {} if wish.served is not None else {"served_model_name": wish.model}
    compat.DECLARE.get()(server_args, "fastload", **names, **served)
    return wish_of(server_args)


def _check(wish: Wish) -> None:
    if wish.checksums is not None:
        raise ConfigError(
            f"--model-checksum reads whole files from a disk, load format {LOAD_FORMAT} does not",
            hint="set FASTLOAD_VERIFY to compare with the checksums of the store",
        )


def _model(model: str, settings: Settings, *, tokenizer: bool) -> Iterator[str]:
    if _is_object(model):
        _link(model, fetch_model(model, settings, configuration=True, tokenizer=tokenizer))
        yield model
    else:
        # An error here is one line; in a scheduler it is three stacks of the engine.
        check_local_model(model, settings)


def _is_object(model: str) -> bool:
    return bool(compat.IS_OBJECT_URI.get()(model))


def _link(uri: str, directory: Path) -> None:
    link(Path(compat.METADATA_PATH.get()(uri)), directory)


PATCH = Patch(
    name="object-store-models",
    target=compat.MODEL_SOURCES,
    reason="Here, once and before all other processes, SGLang prepares models of object stores; "
    "only here it is known which of its arguments a URI came from, and the load format.",
    ends="A loader can provide the metadata of its models.",
    wrapper=_prepare,
)
