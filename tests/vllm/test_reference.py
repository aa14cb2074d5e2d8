"""The page on patches is what the code says, and each patch is a file of its own."""

from __future__ import annotations

from pathlib import Path

from fastload_vllm import compat
from fastload_vllm.patches import PATCHES
from fastload_vllm.reference import patches_page

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "patches.md").read_text(encoding="utf-8")
    assert committed == patches_page(), "run python -m fastload_vllm.reference docs/patches.md"


def test_one_file_is_one_patch() -> None:
    files = {file.stem for file in (ROOT / "fastload_vllm" / "patches").glob("*.py")}
    # Those of the compile cache are applied together.
    together = {"compile_cache", "compile_key"}
    assert files - {"__init__"} - together == {p.name.replace("-", "_") for p in PATCHES}
    assert together < files


def test_every_patched_name_is_probed() -> None:
    assert {patch.target for patch in PATCHES} <= set(compat.CONFIG_NAMES)


def test_no_other_module_imports_the_engine() -> None:
    for file in (ROOT / "fastload_vllm").rglob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if line.strip().startswith(("import vllm", "from vllm"))]
        assert found == [], f"{file.name}: take it from compat"
