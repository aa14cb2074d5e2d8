"""The command ``fastload advise``: settings for a model, an image and a machine, and why."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, parse_assignments, settings_from
from fastload_common.errors import ConfigError
from fastload_common.units import format_size, parse_size

if TYPE_CHECKING:
    from fastload_common.advise.advice import Advice
    from fastload_common.advise.image import Image
    from fastload_common.advise.machine import Machine
    from fastload_common.advise.own import Places
    from fastload_common.advise.records import Setting

__all__ = ["advise"]


class Form(StrEnum):
    """What is printed."""

    text = "text"
    toml = "toml"
    mime = "mime"
    env = "env"
    yaml = "yaml"


class Loader(StrEnum):
    """Whose variables ``env`` and ``yaml`` print."""

    fastload = "fastload"
    runai = "runai"


ModelUri = Annotated[
    str | None, typer.Argument(help="The model. Only its headers are read, for its size.")
]
Type = Annotated[str | None, typer.Option(help="EC2 instance type, such as p5.48xlarge.")]
Ranks = Annotated[int, typer.Option(help="Tensor-parallel ranks on the node.")]
ModelSize = Annotated[
    str | None, typer.Option(help="All weight files, e.g. 67GiB; then nothing is read.")
]
ImageName = Annotated[
    str | None,
    typer.Option(help="The container image; of oci://... its registry is asked for the layers."),
]
ImageSize = Annotated[str | None, typer.Option(help="All its layers, compressed.")]
Layers = Annotated[
    list[str] | None, typer.Option(help="One layer, compressed; once for each large one.")
]
Manifest = Annotated[
    str | None, typer.Option(help="Its manifest (docker manifest inspect), a file or -.")
]
Vcpus = Annotated[int | None, typer.Option(help="Of a machine that is not in the table.")]
Memory = Annotated[str | None, typer.Option(help="Of the host, e.g. 256GiB.")]
Gbps = Annotated[float | None, typer.Option(help="Gbit/s of all network cards.")]
Cards = Annotated[int | None, typer.Option(help="Network cards; a pod uses the first.")]
Nvme = Annotated[str | None, typer.Option(help="Local disks, e.g. 3.8TB; 0 for none.")]
Gpus = Annotated[int | None, typer.Option(help="How many.")]
CompilePrefix = Annotated[str | None, typer.Option(help="s3://bucket/prefix of the compile cache.")]
NodeDirectory = Annotated[
    str, typer.Option(help="On a local disk of the node, as the container sees it.")
]
Assume = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Replace an assumption.")
]
Print = Annotated[
    Form,
    typer.Option(
        "--format", help="toml: Bottlerocket. mime: Amazon Linux 2023. env, yaml: variables."
    ),
]
For = Annotated[Loader, typer.Option("--for", help="Whose variables env and yaml print.")]


def advise(
    uri: ModelUri = None,
    instance_type: Type = None,
    tp: Ranks = 1,
    model_size: ModelSize = None,
    image: ImageName = None,
    image_size: ImageSize = None,
    layer: Layers = None,
    manifest: Manifest = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    gbps: Gbps = None,
    network_cards: Cards = None,
    nvme: Nvme = None,
    gpus: Gpus = None,
    compile_prefix: CompilePrefix = None,
    node_directory: NodeDirectory = "/var/cache/fastload",
    assume: Assume = None,
    form: Print = Form.text,
    loader: For = Loader.fastload,
    assignments: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Print settings for a model, an image and a machine, why, and the seconds to expect."""
    from fastload_common.advise import advice as advices
    from fastload_common.advise.rates import rates_with
    from fastload_common.advise.records import Store
    from fastload_common.source.oci_reference import is_oci_uri

    machine = _machine(instance_type, vcpus, memory, gbps, network_cards, nvme, gpus)
    rates = rates_with(parse_assignments(assume))
    found_image = _image(image, image_size, layer or [], manifest, assignments)
    model_bytes = _model_bytes(uri, model_size, assignments)
    advice = advices.advise(
        machine,
        model_bytes=model_bytes,
        image=found_image,
        tensor_parallel=tp,
        places=_places(node_directory, compile_prefix),
        rates=rates,
        store=Store.REGISTRY if is_oci_uri(uri or "") else Store.S3,
    )
    facts = _facts(uri, model_bytes, found_image, machine, asdict(rates))
    if as_json:
        print_json(facts | _as_dict(advice))
    elif form is Form.text:
        _print(facts, advice, machine)
    else:
        sys.stdout.write(_formatted(advice, form, loader))


def _machine(
    name: str | None,
    vcpus: int | None,
    memory: str | None,
    gbps: float | None,
    network_cards: int | None,
    nvme: str | None,
    gpus: int | None,
) -> Machine:
    from fastload_common.advise.machine import machine_of

    numbers = {
        "vcpus": vcpus,
        "memory_bytes": _size(memory, "--memory"),
        "gbps": gbps,
        "network_cards": network_cards,
        "nvme_bytes": _size(nvme, "--nvme"),
        "gpus": gpus,
    }
    return machine_of(name, numbers)


def _places(node_directory: str, compile_prefix: str | None) -> Places:
    from fastload_common.advise.own import Places

    if not node_directory.startswith("/"):
        raise ConfigError(f"--node-directory: expected an absolute path, got {node_directory!r}")
    if compile_prefix is not None and not compile_prefix.startswith("s3://"):
        raise ConfigError(f"--compile-prefix: expected s3://bucket/prefix, got {compile_prefix!r}")
    return Places(node_directory.rstrip("/"), compile_prefix)


def _model_bytes(uri: str | None, size: str | None, assignments: list[str] | None) -> int | None:
    """The size of all weight files, as given or as the checkpoint's shards have it."""
    if size is not None:
        return _size(size, "--model-size")
    if uri is None:
        return None
    from fastload_common.load.model_root import open_readable_root
    from fastload_common.load.open_model import open_checkpoint

    settings = settings_from(assignments)
    with contextlib.closing(open_readable_root(uri, settings)) as source:
        checkpoint = open_checkpoint(source, settings, prefer="auto")
    return sum(shard.object_id.size_bytes for shard in checkpoint.shards)


def _image(
    name: str | None,
    size: str | None,
    layers: list[str],
    manifest: str | None,
    assignments: list[str] | None,
) -> Image | None:
    from fastload_common.advise.image import Image, image_of_manifest, image_of_sizes

    if manifest is not None:
        if size is not None or layers:
            raise ConfigError("--manifest has the sizes: leave --image-size and --layer out")
        return image_of_manifest(name or "", _json_of(manifest))
    if name is not None and name.startswith("oci://") and size is None and not layers:
        sizes = _layers_in_registry(name, assignments)
        return Image(name, sum(sizes), sizes)
    given = [_size(layer, "--layer") or 0 for layer in layers]
    return image_of_sizes(name or "", _size(size, "--image-size"), given)


def _layers_in_registry(name: str, assignments: list[str] | None) -> tuple[int, ...]:
    from fastload_common.source.oci_image import OciImage
    from fastload_common.source.oci_reference import parse_reference

    with contextlib.closing(OciImage(parse_reference(name), settings_from(assignments))) as image:
        return tuple(layer.size_bytes for layer in image.manifest.layers)


def _json_of(file: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        decoded = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--manifest {file}: {error}") from error
    if not isinstance(decoded, dict):
        raise ConfigError(f"--manifest {file}: expected a JSON object")
    return decoded


def _size(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error.what}", hint=error.hint) from error


def _facts(
    uri: str | None,
    model_bytes: int | None,
    image: Image | None,
    machine: Machine,
    rates: dict[str, float],
) -> dict[str, Any]:
    return {
        "model": {"uri": uri, "bytes": model_bytes},
        "image": None
        if image is None
        else {
            "reference": image.reference,
            "bytes": image.total_bytes,
            "layers": None if image.layer_bytes is None else len(image.layer_bytes),
            "layers_above_1_gb": image.large_layers,
        },
        "machine": asdict(machine),
        "assumed": rates,
    }


def _as_dict(advice: Advice) -> dict[str, Any]:
    from fastload_common.advise.formats import al2023_user_data, bottlerocket_toml

    found = asdict(advice)
    found["bottlerocket_toml"] = bottlerocket_toml(advice.soci)
    found["al2023_user_data"] = al2023_user_data(advice.soci)
    return found


def _formatted(advice: Advice, form: Form, loader: Loader) -> str:
    from fastload_common.advise.formats import (
        al2023_user_data,
        bottlerocket_toml,
        kubernetes_env,
        shell_env,
    )

    if form is Form.toml:
        return bottlerocket_toml(advice.soci)
    if form is Form.mime:
        return al2023_user_data(advice.soci)
    settings = advice.fastload if loader is Loader.fastload else advice.runai
    if not settings:
        raise ConfigError(
            f"--format {form} prints variables for a model, and none was given",
            hint="give its URI or --model-size",
        )
    return shell_env(settings) if form is Form.env else kubernetes_env(settings)


def _print(facts: dict[str, Any], advice: Advice, machine: Machine) -> None:
    from fastload_common.advise.machine import table_origin

    show(*_heading(facts, machine), "")
    for title, settings in (
        ("fastload", advice.fastload),
        ("Run:ai (--load-format runai_streamer), if you use that instead", advice.runai),
        ("SOCI, on the node (--format toml: Bottlerocket; mime: Amazon Linux 2023)", advice.soci),
    ):
        if settings:
            show(title, _settings_table(settings), "")
    if advice.phases:
        phases = table("phase", "seconds", "bound by", "reckoned", right=("seconds",))
        for phase in advice.phases:
            phases.add_row(phase.name, f"{phase.seconds:.1f}", phase.bound, phase.formula)
        for total in advice.totals:
            phases.add_row(total.name, f"{total.seconds:.1f}", "", "the phases together")
        show(phases, "")
    for note in advice.notes:
        show(f"note: {note}")
    show(
        "Seconds follow from assumed rates (--json lists them, --assume changes them). Not "
        "counted: until the node is there, imports, memory profiling, graph capture, warm-up.",
        f"Machine: {table_origin()}",
    )


def _heading(facts: dict[str, Any], machine: Machine) -> list[str]:
    gpus = f", {machine.gpus} x {machine.gpu}" if machine.gpu else ""
    lines = [
        f"machine {machine.name}: {machine.vcpus} vCPUs, {format_size(machine.memory_bytes)}, "
        f"{machine.gbps / machine.network_cards:g} Gbit/s for a pod, "
        f"{format_size(machine.nvme_bytes)} of local disk{gpus}"
    ]
    model_bytes = facts["model"]["bytes"]
    if model_bytes is not None:
        lines.append(
            f"model {facts['model']['uri'] or ''}: {format_size(model_bytes)} "
            f"({model_bytes / 1000**3:.1f} GB)"
        )
    image = facts["image"]
    if image is not None:
        layers = "layers not known" if image["layers"] is None else f"{image['layers']} layers"
        lines.append(f"image {image['reference']}: {format_size(image['bytes'])}, {layers}")
    return lines


def _settings_table(settings: tuple[Setting, ...]) -> Any:
    rows = table("setting", "value", "why")
    for setting in settings:
        value = "leave unset" if setting.value is None else str(setting.value)
        rows.add_row(setting.name, value, setting.why)
    return rows
