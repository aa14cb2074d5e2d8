"""The pages that come from the code are what the code says, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastload_common import errors
from fastload_common.cli.docs import PAGES
from fastload_common.config import OPTIONS, Settings
from fastload_common.engine.compile_verdict import SCHEMA as COMPILE_SCHEMA
from fastload_common.errors import FastloadError
from fastload_common.load.report import SCHEMA
from tests.house.tree import ROOT, project_files, relative

LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("name", sorted(PAGES))
def test_generated_page_is_committed(name: str) -> None:
    committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), "run `make docs` and commit what it writes"


def test_every_setting_is_a_field_and_documented() -> None:
    page = PAGES["configuration.md"]()
    assert [option.name for option in OPTIONS] == list(Settings.__dataclass_fields__)
    for option in OPTIONS:
        assert f"`{option.variable}`" in page
        assert option.meaning in page


def error_classes() -> set[str]:
    return {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, FastloadError)
    }


def test_every_error_is_exported_drawn_and_documented() -> None:
    page = PAGES["errors.md"]()
    drawing = errors.__doc__ or ""
    assert error_classes() == set(errors.__all__)
    for name in error_classes():
        assert re.search(rf"\b{name}\b", drawing), f"{name} is not in the module's drawing"
        assert f"`{name}`" in page


def test_every_error_is_documented_with_a_meaning() -> None:
    rows = [line for line in PAGES["errors.md"]().splitlines() if line.startswith(("| `", "| &"))]
    assert len(rows) == len(error_classes())
    assert all(len(row.split("|")[2].strip()) > 10 for row in rows)


def test_every_field_of_the_report_is_documented() -> None:
    page = PAGES["report.md"]()
    documented = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert documented == [*SCHEMA, *COMPILE_SCHEMA]


def test_readme_names_every_command() -> None:
    from fastload_common.cli.main import app

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [info.callback.__name__ for info in app.registered_commands if info.callback]
    assert commands
    for command in commands:
        assert f"fastload {command}" in readme


def markdown_files() -> list[Path]:
    return [path for path in project_files() if path.suffix == ".md"]


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for path in markdown_files():
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            place = target.partition("#")[0]
            if place and "://" not in place and not (path.parent / place).exists():
                broken.append(f"{relative(path)} -> {target}")
    assert broken == []


def test_decisions_are_numbered_without_gaps_and_dated() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [int(page.name[:4]) for page in pages]
    assert numbers == list(range(1, len(pages) + 1))
    for page in pages:
        assert re.search(r"^Date: \d{4}-\d{2}-\d{2}$", page.read_text(), flags=re.MULTILINE), page
