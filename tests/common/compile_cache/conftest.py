"""A small cache: factors, trees of artefacts, keys, and stores in temporary directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastload_common.compile_cache.trust import Keys, load_keys
from tests.common.compile_cache.artefacts import write_keys


@pytest.fixture(scope="session")
def key_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private key's file and its public one's."""
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def keys(key_files: tuple[Path, Path]) -> Keys:
    found = load_keys(key_files[0])
    assert found is not None
    return found
