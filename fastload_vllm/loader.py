"""The model loader that vLLM calls for load format ``fastload``.

Translates: vLLM's configuration into sources, settings and a rank's place; the common layer
does the rest. Imported only inside vLLM, when its model loaders are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fastload_common.engine.console import debugging
from fastload_common.engine.cpu_group import CpuGroup
from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.engine.options import settings_of
from fastload_common.errors import (
    ConfigError,
    EngineUnsupportedError,
    FastloadError,
    TensorMissingError,
)
from fastload_common.load.session import LoadSession, WeightSource
from fastload_vllm import compat
from fastload_vllm.group import loading_group
from fastload_vllm.port import is_object_uri, rank_place, weights_root

__all__ = ["FastloadModelLoader", "eager_reason"]

logger = logging.getLogger(__name__)

_Base: Any = compat.BASE_LOADER.get()
_NAMES_SHOWN = 8
_MISTRAL_FILES = "consolidated*.safetensors"


class FastloadModelLoader(_Base):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Loads weights from ``s3://`` and ``oci://`` URIs, directories and hub ids.

    Raises:
        EngineUnsupportedError: this vLLM lacks something that the loader needs.
        ConfigError: a setting in ``--model-loader-extra-config`` or the environment is wrong.
    """

    def __init__(self, load_config: Any, *, may_download: bool = True) -> None:
        faults = compat.missing(compat.LOADER_NAMES)
        if faults:
            raise compat.unsupported(faults)
        super().__init__(load_config)
        self.settings = settings_of(
            load_config.model_loader_extra_config, load_config.ignore_patterns
        )
        self._may_download = may_download

    def download_model(self, model_config: Any) -> None:
        """Nothing for URIs and directories, which are streamed; a hub id is downloaded."""
        self._locate(weights_root(model_config), model_config.revision, None, None, "hf")

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill the model's parameters, and check like the default loader that all were filled.

        Raises:
            FastloadError: with one log line that says what to do.
        """
        try:
            # Reloads (`get_all_weights`) may be of one replica only: nobody is waited for there.
            group = loading_group(model_config)
            with self._session(model, model_config, group) as session:
                loaded = session.load(
                    model, model.load_weights, eager_reason=eager_reason(model, model_config)
                )
                _check_all_loaded(self, model, model_config, loaded)
        except FastloadError as error:
            logger.error("fastload: %s: %s", type(error).__name__, error)
            error.is_said = True
            if debugging(compat.ENGINE):
                raise
            # The message says it all; the engine prints the stack that is below us anyhow.
            raise error.with_traceback(None) from None

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole, in the order of the files. For reloading in place."""
        with self._session(model, model_config) as session:
            yield from session.tensors()

    def _session(
        self, model: nn.Module, model_config: Any, group: CpuGroup | None = None
    ) -> LoadSession:
        place = rank_place()
        return LoadSession(
            self.sources(model, model_config),
            self.settings,
            place,
            progress=self.load_config.use_tqdm_on_load and place.rank == 0,
            group=group,
        )

    def main_source(self, model_config: Any, patterns: Iterable[str] | None = None) -> WeightSource:
        """Where the model's own weights are."""
        root = weights_root(model_config)
        _check_place(root)
        prefer = _preferred_set(model_config)
        return WeightSource(
            self._locate(root, model_config.revision, None, patterns, prefer),
            prefix="",
            prefer=prefer,
            patterns=_patterns(patterns),
        )

    def sources(self, model: nn.Module, model_config: Any) -> list[WeightSource]:
        """Where a model's weights are, in the order of loading."""
        root = weights_root(model_config)
        own_patterns = getattr(model, "allow_patterns_overrides", None)
        sources = [self.main_source(model_config, own_patterns)]
        for more in getattr(model, "secondary_weights", ()):
            where = root if more.model_or_path == model_config.model else more.model_or_path
            own = more.allow_patterns_overrides
            sources.append(
                WeightSource(
                    self._locate(where, more.revision, more.subfolder, own, "hf"),
                    prefix=more.prefix,
                    prefer="hf",
                    patterns=_patterns(own),
                )
            )
        return sources

    def _locate(
        self,
        model: str,
        revision: str | None,
        subfolder: str | None,
        patterns: Iterable[str] | None,
        prefer: str,
    ) -> str:
        """The URI or directory with the weights. Downloads a hub id, as the default loader does."""
        _check_place(model)
        if not is_object_uri(model) and not os.path.isdir(model):
            model = self._download(model, revision, subfolder, patterns, prefer)
        return f"{model.rstrip('/')}/{subfolder.strip('/')}" if subfolder else model

    def _download(
        self,
        model: str,
        revision: str | None,
        subfolder: str | None,
        patterns: Iterable[str] | None,
        prefer: str,
    ) -> str:
        if not self._may_download:
            raise ConfigError(
                f"{model} is neither a directory nor an s3:// or oci:// URI",
                hint="nothing is downloaded for a plan: name where the model lies",
            )
        local = compat.FROM_MODELSCOPE.get()(model, revision)
        if local:
            return str(local)
        mistral = prefer == "mistral"
        directory = self.load_config.download_dir
        folder = compat.DOWNLOAD_WEIGHTS.get()(
            model,
            directory,
            list(patterns)
            if patterns is not None
            else [_MISTRAL_FILES if mistral else "*.safetensors"],
            revision,
            subfolder=subfolder,
            ignore_patterns=self.load_config.ignore_patterns,
        )
        index = f"{'consolidated' if mistral else 'model'}.safetensors.index.json"
        compat.DOWNLOAD_INDEX.get()(
            model, index, cache_dir=directory, subfolder=subfolder, revision=revision
        )
        return str(folder)


def _check_place(model: str) -> None:
    """Refuse what is no directory, no object URI and no hub id, before a hub is asked for it."""
    if is_object_uri(model) or os.path.isdir(model):
        return
    if "://" in model or model.startswith(("/", "./", "~")):
        hint = "name a directory, an s3:// or an oci:// URI"
        raise ConfigError(f"no such directory: {model}", hint=hint)


def _patterns(patterns: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if patterns is None else tuple(patterns)


def _preferred_set(model_config: Any) -> str:
    """Which set of weights where a model has two: what the default loader would take."""
    if str(model_config.config_format) == "hf":
        return "hf"
    model = str(model_config.model)
    # A reload may put a URI here; the engine would ask a hub for its files.
    if is_object_uri(model):
        return "auto"
    if os.path.isdir(model):
        # The engine's own look also finds such files in folders, which hold other models.
        mistral = any(Path(model).glob(_MISTRAL_FILES))
    else:
        mistral = compat.IS_MISTRAL_REPO.get()(model, model_config.revision)
    return "mistral" if mistral else "hf"


def eager_reason(model: nn.Module, model_config: Any) -> str | None:
    """Why this model's loading cannot be traced, if so.

    Raises:
        EngineUnsupportedError: the checkpoint's form needs another loader.
    """
    if compat.HAS_ONLINE_QUANT.get()(model):
        return "vLLM quantizes this model while it loads"
    if model_config.quantization == "torchao":
        raise EngineUnsupportedError(
            f"load format {LOAD_FORMAT} does not read torchao-serialized checkpoints",
            hint="load this model from a directory with --load-format auto",
        )
    return None


def _check_all_loaded(
    loader: FastloadModelLoader, model: nn.Module, model_config: Any, loaded: set[str] | None
) -> None:
    """The default loader's own check, with its conditions: unquantized and the model tells.

    Raises:
        TensorMissingError: parameters that no tensor of the checkpoint initialized.
    """
    if model_config.quantization is not None or loaded is None:
        return
    try:
        # It needs no state of the loader; its exemptions are added to `loaded`.
        compat.TRACK_WEIGHTS.get()(loader, model, loaded, quantized=False)
    except ValueError:
        names = sorted({name for name, _ in model.named_parameters()} - loaded)
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        raise TensorMissingError(
            f"{len(names)} parameters of the model are in no file of {weights_root(model_config)}: "
            f"{shown}",
            hint="the checkpoint is incomplete, or config.json belongs to another model",
        ) from None
