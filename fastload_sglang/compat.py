"""Every name of SGLang that this adapter touches, in one place, probed before use.

No other module of the adapter imports from SGLang. A test checks the same list against the
source of the newest release, and of the one before. Importing this module imports nothing of
SGLang.
"""

from __future__ import annotations

from functools import partial

from fastload_common.engine.names import Engine
from fastload_common.engine.names import Name as EngineName

__all__ = [
    "COMPILE_NAMES",
    "CONFIG_NAMES",
    "ENGINE",
    "FIELDS",
    "KEY_MAKER_NAMES",
    "LOADER_NAMES",
    "NAMES",
    "Name",
]

ENGINE = Engine(
    title="SGLang",
    package="sglang",
    advice="install SGLang 0.5.22 or 0.5.23, or a newer fastload",
    logger="",
)
Name = partial(EngineName, ENGINE, since="0.5.22")

_CONFIG = "sglang.srt.configs.load_config"
_PATHS = "sglang.srt.arg_groups.model_path_hook"
_OVERRIDES = "sglang.srt.arg_groups.overrides"
_STORES = "sglang.srt.utils.runai_utils"
_LOADER = "sglang.srt.model_loader.loader"
_WEIGHTS = "sglang.srt.model_loader.weight_utils"
_CONTEXT = "sglang.srt.runtime_context"

FORMAT_CHOICES = Name(
    "sglang.srt.arg_groups.choices", "LOAD_FORMAT_CHOICES", "what the command line accepts"
)
LOAD_CONFIG = Name(_CONFIG, "LoadConfig", "patched")
VERIFY_FORMAT = Name(
    _CONFIG,
    "LoadConfig._verify_load_format",
    "patched: a class is a load format, an unknown name is none",
    (),
)
MODEL_SOURCES = Name(
    _PATHS,
    "handle_model_source_paths",
    "patched: which load format is asked while s3:// models are prepared",
    ("server_args",),
)
RESOLVE_FORMAT = Name(
    _PATHS,
    "handle_load_format",
    "patched: it gives s3:// models another load format",
    ("server_args",),
)
DECLARE = Name(
    _OVERRIDES, "declare_resolution", "how an argument is decided", ("server_args", "source")
)
RESOLVING = Name(_OVERRIDES, "resolving_view", "the arguments as decided so far", ("server_args",))
OBJECT_MODEL = Name(_STORES, "ObjectStorageModel", "patched")
PULL_METADATA = Name(
    _STORES,
    "ObjectStorageModel.download_and_get_path",
    "patched: metadata of s3:// models",
    ("model_path",),
)
METADATA_PATH = Name(
    _STORES,
    "ObjectStorageModel.get_path",
    "where all processes look for it",
    ("model_path",),
)
IS_OBJECT_URI = Name(
    _STORES, "is_runai_obj_uri", "which models are object-store URIs", ("model_or_path",)
)
OBJECT_SCHEMES = Name(
    _STORES, "SUPPORTED_SCHEMES", "oci:// is added: such models are object-store URIs, too"
)
DEFAULT_LOADER = Name(_LOADER, "DefaultModelLoader", "base class of the loader", ("load_config",))
LOAD_MODEL = Name(
    _LOADER, "DefaultModelLoader.load_model", "called", ("model_config", "device_config")
)
ALL_WEIGHTS = Name(
    _LOADER,
    "DefaultModelLoader._get_all_weights",
    "overridden: weights at the start",
    ("model_config", "model"),
)
WEIGHTS_ITERATOR = Name(
    _LOADER, "DefaultModelLoader._get_weights_iterator", "overridden: new weights", ("source",)
)
LOAD_AND_POSTPROCESS = Name(
    _LOADER,
    "DefaultModelLoader.load_weights_and_postprocess",
    "overridden: the trace begins and ends here",
    ("model", "weights", "target_device"),
)
LOAD_ONLY = Name(
    _LOADER,
    "DefaultModelLoader.load_weights_only",
    "what is traced",
    ("model", "weights", "target_device"),
)
POSTPROCESS = Name(
    _LOADER, "DefaultModelLoader.postprocess_weights", "called", ("model", "target_device")
)
PREPARE_WEIGHTS = Name(
    _LOADER,
    "DefaultModelLoader._prepare_weights",
    "overridden: models named by a hub id",
    ("model_name_or_path", "revision", "fall_back_to_pt"),
)
FILTER_MTP = Name(
    _LOADER,
    "DefaultModelLoader._filter_mtp_weights",
    "draft models of several layers",
    ("weights_iterator", "prefix", "draft_model_idx"),
)
SOURCE = Name(_LOADER, "DefaultModelLoader.Source", "models' sources of weights")
SOURCE_OF = Name(
    _LOADER,
    "DefaultModelLoader.Source.init_new",
    "the source of a model",
    ("model_config", "model"),
)
IS_QUANTIZED = Name(
    "sglang.srt.configs.model_config",
    "ModelConfig._is_already_quantized",
    "models quantized while they load are read eagerly",
    (),
)
ADD_FORGOTTEN = Name(
    _WEIGHTS,
    "maybe_add_mtp_safetensors",
    "a file that some published indexes forget",
    ("hf_weights_files", "hf_folder", "index_file", "hf_config"),
)
SYNCHRONOUS = Name(
    _WEIGHTS,
    "RUNAI_STREAMER_TENSOR_ATTR",
    "tensors that are not handed to threads, where the trace would not see them",
)
DEFAULT_GROUP = Name(_CONFIG, "_DEFAULT_LOAD_GROUP", "all ranks load together")
PARALLEL = Name(_CONTEXT, "get_parallel", "rank of this process, and how to reach the others", ())
CHOOSE_LOADER = Name(
    _LOADER,
    "get_model_loader",
    "whether the default loader would load this model, or convert it",
    ("load_config", "model_config"),
)
LOAD_FORMATS = Name(_CONFIG, "LoadFormat", "the format that the base class is given")

_ENGINE = "sglang.srt.entrypoints.engine"
_SCHEDULER = "sglang.srt.managers.scheduler"

LAUNCH = Name(
    _ENGINE,
    "Engine._launch_scheduler_processes",
    "patched: all arguments are decided, and no rank has been started",
    ("server_args", "port_args", "run_scheduler_process_func"),
)
SHUTDOWN = Name(_ENGINE, "Engine.shutdown", "patched: an engine without a server ends", ())
ASK_RANKS = Name(_ENGINE, "Engine.freeze_gc", "how such an engine's ranks are reached", ())
MODEL_LOADED = Name(
    "sglang.srt.model_executor.model_runner",
    "ModelRunner.load_model",
    "patched: the weights are there, nothing has been compiled",
    (),
)
CAPTURED = Name(
    _SCHEDULER, "Scheduler.init_model_worker", "patched: graphs are captured, kernels tuned", ()
)
WARM = Name(
    _SCHEDULER,
    "Scheduler.handle_freeze_gc",
    "patched: the server has answered its own warm-up request",
    ("recv_req",),
)
TACTICS = Name(
    "sglang.srt.model_executor.runner.flashinfer_autotune",
    "flashinfer_autotune_cache_path",
    "patched: where FlashInfer's choices are kept",
    ("model_runner",),
)
ARGUMENTS = Name(
    "sglang.srt.arg_groups.arg_utils", "namespace_of", "all arguments, and their groups", ()
)
MODEL_CONFIG = Name(
    "sglang.srt.arg_groups.model_override_base",
    "model_config_of",
    "the model's configuration",
    ("server_args",),
)
DEFAULT_CACHES = Name(
    "sglang.srt.environ",
    "third_party_cache_defaults",
    "which directories of compilers nobody has chosen",
    (),
)

LOAD_PLUGINS = Name("sglang.srt.plugins", "load_plugins", "`fastload cache key`", ())
PREPARE = Name("sglang.srt.server_args", "prepare_server_args", "`fastload cache key`", ("argv",))
SET_VARIABLES = Name(
    _ENGINE, "_set_envs_and_config", "`fastload cache key`: variables count", ("server_args",)
)

KEY_MAKER_NAMES: tuple[EngineName, ...] = (LOAD_PLUGINS, PREPARE, SET_VARIABLES)
"""What ``fastload cache key`` needs; probed by it alone."""

COMPILE_NAMES: dict[str, tuple[EngineName, ...]] = {
    _ENGINE: (
        *(LAUNCH, SHUTDOWN, ASK_RANKS, ARGUMENTS, MODEL_CONFIG, DEFAULT_CACHES, RESOLVING),
        *(METADATA_PATH, IS_OBJECT_URI),
    ),
    MODEL_LOADED.module: (MODEL_LOADED,),
    _SCHEDULER: (CAPTURED, WARM),
    TACTICS.module: (TACTICS,),
}
"""What the compile cache needs, where one is asked for; without one of them it stays off."""

CONFIG_NAMES: dict[str, tuple[EngineName, ...]] = {
    _CONFIG: (LOAD_CONFIG, VERIFY_FORMAT),
    _PATHS: (MODEL_SOURCES, RESOLVE_FORMAT, DECLARE, RESOLVING, METADATA_PATH, IS_OBJECT_URI),
    _STORES: (OBJECT_MODEL, PULL_METADATA, METADATA_PATH, OBJECT_SCHEMES),
}
"""What the patches of a module need; probed when a process has imported that module."""

LOADER_NAMES: tuple[EngineName, ...] = (
    DEFAULT_LOADER,
    LOAD_MODEL,
    ALL_WEIGHTS,
    WEIGHTS_ITERATOR,
    LOAD_AND_POSTPROCESS,
    LOAD_ONLY,
    POSTPROCESS,
    PREPARE_WEIGHTS,
    FILTER_MTP,
    SOURCE,
    SOURCE_OF,
    IS_QUANTIZED,
    ADD_FORGOTTEN,
    SYNCHRONOUS,
    DEFAULT_GROUP,
    PARALLEL,
    CHOOSE_LOADER,
    LOAD_FORMATS,
)
"""What the loader needs; probed when one is made, not in processes that load no model."""

NAMES: tuple[EngineName, ...] = (
    FORMAT_CHOICES,
    *dict.fromkeys(name for names in CONFIG_NAMES.values() for name in names),
    *LOADER_NAMES,
    *dict.fromkeys(
        name
        for names in COMPILE_NAMES.values()
        for name in names
        if name not in (RESOLVING, METADATA_PATH, IS_OBJECT_URI)
    ),
    *KEY_MAKER_NAMES,
)
"""Functions, methods, classes and values."""

FIELDS: tuple[EngineName, ...] = tuple(
    Name(module, f"{owner}.{field}", why)
    for module, owner, why, names in (
        (
            _CONFIG,
            "LoadConfig",
            "the operator's wishes, and who loads together",
            (
                "load_format",
                "model_loader_extra_config",
                "ignore_patterns",
                "draft_model_idx",
                "load_group",
            ),
        ),
        (
            "sglang.srt.arg_groups.fields.model",
            "Model",
            "the operator's wishes",
            ("model_path", "load_format", "model_loader_extra_config", "model_checksum"),
        ),
        (
            "sglang.srt.arg_groups.fields.spec",
            "Spec",
            "the same for drafts",
            ("speculative_draft_model_path", "speculative_draft_load_format"),
        ),
        (
            "sglang.srt.arg_groups.fields.serving",
            "Serving",
            "whether a tokenizer must be there",
            ("tokenizer_path", "skip_tokenizer_init", "served_model_name"),
        ),
        (_CONFIG, "LoadFormat", "the format that the base class is given", ("SAFETENSORS",)),
        (
            "sglang.srt.arg_groups.fields.parallel",
            "Parallel",
            "rank of this process, and how to reach the others",
            (
                "nnodes",
                "dp_size",
                "dp_rank",
                "world_group",
                "launch_world_size",
                "max_world_size",
            ),
        ),
        (
            "sglang.srt.distributed.parallel_state",
            "GroupCoordinator",
            "the same",
            ("world_size", "rank_in_group", "cpu_group"),
        ),
        (
            _LOADER,
            "DefaultModelLoader.Source",
            "models' sources of weights",
            (
                "model_or_path",
                "revision",
                "prefix",
                "fall_back_to_pt",
                "allow_patterns_overrides",
                "model_config",
            ),
        ),
    )
    for field in names
)
"""Fields that are read or set; each stands in the body of its class."""
