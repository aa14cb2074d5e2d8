"""An engine that `fastload plan` finds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fastload_common.cli import adapters


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs an engine under the name ``test``."""

    def install(planner: object, name: str = "test") -> None:
        point = SimpleNamespace(name=name, load=lambda: planner)
        found = SimpleNamespace(entry_points=lambda group: [point])
        monkeypatch.setattr(adapters, "metadata", found)

    return install
