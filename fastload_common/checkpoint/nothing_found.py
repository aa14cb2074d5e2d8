"""Say why a folder has no weights that can be loaded, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fastload_common.checkpoint.wording import enumerate_some
from fastload_common.errors import NoWeightsError

__all__ = ["named_like_a_file", "no_weights"]

_CONVERT = (
    "only safetensors are loaded; convert the model, e.g. with transformers' "
    "save_pretrained(..., safe_serialization=True)"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FILES = (".safetensors", ".json", ".gguf", *_PICKLES)
_OTHER_FORMATS = (".onnx", ".h5", ".msgpack", ".npz", ".tflite")


def no_weights(
    root: str,
    keys: Sequence[str],
    *,
    prefer: str = "hf",
    patterns: Sequence[str] | None = None,
) -> NoWeightsError:
    """Describe what stands there instead of weights.

    Args:
        root: the source's root.
        keys: all that was listed.
        prefer: the set that was asked for.
        patterns: the globs that were asked for.
    """
    found, hint = _instead(root, keys, prefer, patterns)
    return NoWeightsError(f"no safetensors weights to load in {root}: {found}", hint=hint)


def named_like_a_file(root: str) -> str:
    """What to give instead of a root that is one of a model's files; empty if it is none."""
    folder, _, name = root.rpartition("/")
    if not name.endswith(_FILES):
        return ""
    return f"{name} is named like a file; give the folder in which it stands, {folder}"


def _instead(
    root: str, keys: Sequence[str], prefer: str, patterns: Sequence[str] | None
) -> tuple[str, str]:
    if not keys:
        return (
            "nothing stands there",
            named_like_a_file(root)
            or "check bucket and prefix; weights are looked for directly under it, not in folders",
        )
    level = [key for key in keys if "/" not in key]
    safetensors = [key for key in level if key.endswith(".safetensors")]
    if patterns is not None and safetensors:
        return (
            f"no .safetensors file is chosen by the patterns {', '.join(patterns)}; it has "
            f"{enumerate_some(safetensors)}",
            "change the patterns",
        )
    consolidated = [key for key in safetensors if key.startswith("consolidated")]
    adapters = [key for key in level if key.startswith("adapter_")]
    if prefer == "mistral" and len(safetensors) > len(consolidated) and not consolidated:
        return (
            f"the Mistral format was asked for, but there is no consolidated*.safetensors, only "
            f"{enumerate_some(safetensors)}",
            "ask for the Hugging Face format (e.g. --config-format hf)",
        )
    if consolidated and prefer == "hf":
        return (
            f"only Mistral's own format, {enumerate_some(consolidated)}",
            "ask for the Mistral format (e.g. --config-format mistral --tokenizer-mode mistral)",
        )
    for what, files, todo in (
        ("a GGUF model", _ending(level, (".gguf",)), "use the engine's own GGUF loader"),
        ("pickles", _ending(level, _PICKLES, but="adapter_"), _CONVERT),
        ("another format", _ending(level, _OTHER_FORMATS), _CONVERT),
        ("a LoRA adapter", adapters, "serve its base model and pass the adapter as LoRA module"),
        ("files that are excluded", safetensors, "check FASTLOAD_IGNORE_PATTERNS"),
    ):
        if files:
            return f"it holds {what}: {enumerate_some(files)}", todo
    if not level:
        return _only_folders(root, keys)
    return (
        f"it holds {enumerate_some(level)}",
        "give the folder in which the .safetensors files stand",
    )


def _only_folders(root: str, keys: Sequence[str]) -> tuple[str, str]:
    folders = sorted({key.split("/")[0] + "/" for key in keys})
    models = sorted({_folder(key) for key in keys if key.endswith(".safetensors")})
    weights = f"; weights stand in {enumerate_some(models)}" if models else ""
    return (
        f"only folders: {enumerate_some(folders)}{weights}",
        f"give one of them, e.g. {root}/{(models or folders)[0]}",
    )


def _folder(key: str) -> str:
    return key.rpartition("/")[0] + "/"


def _ending(keys: Sequence[str], suffixes: tuple[str, ...], but: str = "\0") -> list[str]:
    return [key for key in keys if key.endswith(suffixes) and not key.startswith(but)]
