"""Reads the examples as `kubectl apply -k` would: bases, JSON patches. Not a test itself.

Only what the examples use of kustomize is known; anything else is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.house.tree import ROOT

__all__ = ["EXAMPLES", "Manifest", "build", "containers_of", "find", "pod_of"]

EXAMPLES = ROOT / "examples" / "kubernetes"
OVERLAYS = ("karpenter-bottlerocket", "karpenter-al2023", "auto-mode")
BUILDS = (*OVERLAYS, "pvc", "publish")

Manifest = dict[str, Any]


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands twice: the last one would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"twice in one mapping: {sorted(twice)}", node.start_mark
            )
        return super().construct_mapping(node, deep=deep)


def read(file: Path) -> list[Manifest]:
    """The documents of one file; the caller's own."""
    return copy.deepcopy(_read(file))


@cache
def _read(file: Path) -> list[Manifest]:
    # A subclass of SafeLoader, so nothing is constructed but plain values.
    found = yaml.load_all(file.read_text("utf-8"), Loader=_Strict)
    return [document for document in found if document is not None]


def build(directory: str) -> list[Manifest]:
    """All objects that one directory of the examples applies."""
    return list(_build(EXAMPLES / directory))


def _build(directory: Path) -> Iterator[Manifest]:
    (kustomization,) = read(directory / "kustomization.yaml")
    assert kustomization.pop("apiVersion") == "kustomize.config.k8s.io/v1beta1"
    assert kustomization.pop("kind") == "Kustomization"
    found: list[Manifest] = []
    for name in kustomization.pop("resources"):
        place = (directory / name).resolve()
        if place.is_dir():
            found += _build(place)
        else:
            # kustomize reads no file of another directory, only directories as a whole.
            assert place.is_relative_to(directory), f"{directory}: {name} is outside of it"
            found += read(place)
    for entry in kustomization.pop("patches", []):
        _patch(found, **entry)
    assert kustomization == {}, f"{directory}: not known here: {sorted(kustomization)}"
    yield from found


def _patch(found: list[Manifest], *, target: dict[str, str], patch: str) -> None:
    chosen = [
        manifest
        for manifest in found
        if manifest["kind"] == target["kind"]
        and target.get("name", manifest["metadata"]["name"]) == manifest["metadata"]["name"]
    ]
    assert chosen, f"a patch for nothing: {target}"
    for manifest in chosen:
        for operation in yaml.safe_load(patch):
            _replace(manifest, **operation)


def _replace(manifest: Manifest, *, op: str, path: str, value: Any) -> None:
    assert op == "replace"
    *parents, last = path.removeprefix("/").split("/")
    place: Any = manifest
    for step in parents:
        place = place[int(step) if isinstance(place, list) else step]
    assert last in place, f"{path} is not there"
    place[last] = copy.deepcopy(value)


def find(found: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only object of that kind, and name if one is given."""
    (chosen,) = [
        manifest
        for manifest in found
        if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    ]
    return chosen


def pod_of(manifest: Manifest) -> dict[str, Any] | None:
    """The pod's specification, of what makes pods."""
    template = manifest.get("spec", {}).get("template", {})
    spec: dict[str, Any] = template.get("spec", {})
    return spec if "containers" in spec else None


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod, those that run first too."""
    return [*pod.get("initContainers", []), *pod["containers"]]
