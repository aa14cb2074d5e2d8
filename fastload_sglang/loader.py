"""The model loader that SGLang makes for load format ``fastload``.

Translates: SGLang's configuration into sources, settings and a rank's place; the common layer
does the rest. Imported only inside SGLang, when a model is to be loaded.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, device, nn

from fastload_common.clock import SystemClock
from fastload_common.engine.console import debugging
from fastload_common.engine.cpu_group import CpuGroup
from fastload_common.engine.names import LOAD_FORMAT, missing
from fastload_common.engine.object_model import refuse_other_stores
from fastload_common.engine.options import settings_of
from fastload_common.errors import ConfigError, EngineUnsupportedError, FastloadError
from fastload_common.load.session import LoadSession, WeightSource
from fastload_sglang import compat
from fastload_sglang.compile_rank import wait_restored
from fastload_sglang.group import loading_group, rank_place
from fastload_sglang.post_load import postponed

__all__ = ["FastloadModelLoader"]

logger = logging.getLogger(__name__)

_Base: Any = compat.DEFAULT_LOADER.get()
_Weights = Iterable[tuple[str, Tensor]]

_TRACED_ONLINE = ("fp8",)
"""Quantizations of unquantized checkpoints that begin when all weights are there."""

_INDEX = "model.safetensors.index.json"

_FIRST_RANK_SPEAKS_S = 2.0
"""How long the others of a host wait to be ended before they say the same."""


class FastloadModelLoader(_Base):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Loads weights from ``s3://`` and ``oci://`` URIs, directories and hub ids.

    Raises:
        EngineUnsupportedError: this SGLang lacks something that the loader needs.
        ConfigError: a setting in ``--model-loader-extra-config`` or the environment is wrong.
    """

    def __init__(self, load_config: Any) -> None:
        if faults := missing(compat.LOADER_NAMES):
            raise compat.ENGINE.unsupported(faults)
        self.settings = settings_of(
            load_config.model_loader_extra_config, load_config.ignore_patterns
        )
        # The base class knows its own formats and options only.
        own = copy.copy(load_config)
        own.load_format = compat.LOAD_FORMATS.get().SAFETENSORS
        own.model_loader_extra_config = {}
        super().__init__(own)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Build the model, fill it, and let quantization methods do their part.

        Raises:
            FastloadError: with one log line that says what to do.
        """
        try:
            self._refuse_conversions(model_config)
            model: nn.Module = super().load_model(
                model_config=model_config, device_config=device_config
            )
        except FastloadError as error:
            _say(error)
            if debugging(compat.ENGINE):
                raise
            # The message says it all; the engine prints the stack that is below us anyhow.
            raise error.with_traceback(None) from None
        return model

    def download_model(self, model_config: Any) -> None:
        """Nothing for URIs and directories, which are streamed; a hub id is downloaded."""
        self._locate(weights_root(model_config), model_config.revision, None)

    def _get_all_weights(self, model_config: Any, model: nn.Module) -> PendingWeights:
        sources = [compat.SOURCE.get().init_new(model_config, model)]
        sources += getattr(model, "secondary_weights", ())
        root = weights_root(model_config)
        sources[0].model_or_path = root
        own, *others = [self._source(source) for source in sources]
        return PendingWeights(
            self,
            [own, *_forgotten(own, model_config), *others],
            model_config,
            loading_group(self.load_config),
        )

    def _get_weights_iterator(self, source: Any, **unused: Any) -> PendingWeights:
        """New weights for a running model. Ranks do not wait for each other here: one of them may
        fail, and put back the old ones, by itself."""
        own, model_config = self._source(source), source.model_config
        pending = PendingWeights(self, [own, *_forgotten(own, model_config)], model_config, None)
        pending.find()  # what is wrong is said before the old weights are touched
        return pending

    def load_weights_and_postprocess(
        self, model: nn.Module, weights: Any, target_device: device
    ) -> None:
        if not isinstance(weights, PendingWeights):
            super().load_weights_and_postprocess(model, weights, target_device)
            return
        with postponed(model) as calls, weights.session() as session:

            def load(given: _Weights) -> None:
                calls.clear()
                _Base.load_weights_only(model, weights.as_asked(given), target_device)

            session.load(model, load, eager_reason=_eager_reason(model, weights.model_config))
        wait_restored()  # what follows may compile
        for call in calls:
            call()
        _Base.postprocess_weights(model, target_device)

    def _source(self, source: Any) -> WeightSource:
        patterns = source.allow_patterns_overrides
        return WeightSource(
            self._locate(source.model_or_path, source.revision, patterns),
            prefix=source.prefix,
            patterns=None if patterns is None else tuple(patterns),
        )

    def _locate(self, model: str, revision: str | None, patterns: list[str] | None) -> str:
        """The URI or directory with the weights. Downloads a hub id, as the default loader does."""
        if compat.IS_OBJECT_URI.get()(model):
            refuse_other_stores(model)
            return model
        if os.path.isdir(model):
            return model
        if "://" in model or model.startswith(("/", "./", "~")):
            raise ConfigError(
                f"no such directory: {model}", hint="name a directory, or an s3:// or oci:// URI"
            )
        folder, _, _ = self._prepare_weights(model, revision, False, patterns)
        return str(folder)

    def _refuse_conversions(self, model_config: Any) -> None:
        """What the default loader's siblings do with whole files on a disk.

        Raises:
            EngineUnsupportedError: the model would be converted while it is loaded.
        """
        chosen = compat.CHOOSE_LOADER.get()(self.load_config, model_config)
        if getattr(model_config, "modelopt_quant", None) or (
            type(chosen) is not _Base and not model_config._is_already_quantized()
        ):
            raise EngineUnsupportedError(
                f"load format {LOAD_FORMAT} does not convert checkpoints, and SGLang's "
                f"{type(chosen).__name__} would convert this one",
                hint="load a converted checkpoint, or this one with --load-format auto",
            )


class PendingWeights:
    """Weights that are to be loaded. Iterated they are real tensors, one after the other.

    Args:
        loader: whose settings count.
        sources: in the order of loading.
        model_config: SGLang's, of the model that they are for.
        group: those that load them together.
    """

    def __init__(
        self,
        loader: FastloadModelLoader,
        sources: list[WeightSource],
        model_config: Any,
        group: CpuGroup | None,
    ) -> None:
        place = rank_place()
        self.model_config = model_config
        self._stack = ExitStack()
        self._found: LoadSession | None = None
        self._layer = loader.load_config.draft_model_idx
        self._session = LoadSession(
            sources, loader.settings, place, progress=place.rank == 0, group=group
        )

    def find(self) -> None:
        """Find the weights now, not when they are loaded."""
        self._found = self._stack.enter_context(self._session)

    @contextmanager
    def session(self) -> Iterator[LoadSession]:
        """The session in which they are loaded, once."""
        with self._stack:
            if self._found is None:
                self.find()
            assert self._found is not None
            yield self._found

    def as_asked(self, given: _Weights) -> _Weights:
        """Names as the model expects them, and tensors that it takes in this thread."""
        if self._layer is not None:
            given = _Base._filter_mtp_weights(given, "", self._layer)
        mark = compat.SYNCHRONOUS.get()
        for name, tensor in given:
            if type(tensor) is not Tensor:
                # Only the thread that loads is traced. The engine knows such tensors from a
                # loader that uses its buffers again.
                setattr(tensor, mark, True)
            yield name, tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with self.session() as session:
            yield from self.as_asked(session.tensors())


def _say(error: FastloadError) -> None:
    """Log it, once a host: ranks fail alike, and SGLang ends all of them when one has."""
    if rank_place().local_rank > 0:
        SystemClock().wait(threading.Event(), _FIRST_RANK_SPEAKS_S)
    logger.error("fastload: %s: %s", type(error).__name__, error)
    error.is_said = True


def weights_root(model_config: Any) -> str:
    """Where the weights are: the URI of an object-store model, else directory or hub id."""
    uri = getattr(model_config, "model_weights", None)
    if uri and compat.METADATA_PATH.get()(uri) == model_config.model_path:
        return str(uri)
    return str(model_config.model_path)


def _forgotten(source: WeightSource, model_config: Any) -> list[WeightSource]:
    """Files that are not in the index but belong to the model, as the engine knows it."""
    folder = str(model_config.model_path)
    index = os.path.join(folder, _INDEX)
    if not os.path.isfile(index):
        return []
    with open(index, encoding="utf-8") as stream:
        known = sorted(set(json.load(stream).get("weight_map", {}).values()))
    files = [os.path.join(folder, name) for name in known]
    more = compat.ADD_FORGOTTEN.get()(files, folder, _INDEX, model_config.hf_config)
    names = tuple(os.path.basename(path) for path in more if path not in files)
    return [replace(source, patterns=names)] if names else []


def _eager_reason(model: nn.Module, model_config: Any) -> str | None:
    """Why this model's loading cannot be traced, if so."""
    quantization = model_config.quantization
    if (
        quantization is not None
        and quantization not in _TRACED_ONLINE
        and not model_config._is_already_quantized()
    ):
        return "SGLang quantizes this model while it loads"
    return None
