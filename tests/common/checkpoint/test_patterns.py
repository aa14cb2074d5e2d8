"""Globs over keys."""

from __future__ import annotations

import pytest

from fastload_common.checkpoint.patterns import matches, matches_any
from fastload_common.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "pattern", "expected"),
    [
        ("model.safetensors", "*.safetensors", True),
        ("original/model.safetensors", "*.safetensors", False),
        ("original/model.safetensors", "original/**", True),
        ("original/a/b.bin", "original/**", True),
        ("original/b.bin", "original/**/*", True),
        ("original/a/b.bin", "original/**/*", True),
        ("originally.bin", "original/**", False),
        ("a/b/c.safetensors", "**/*.safetensors", True),
        ("c.safetensors", "**/*.safetensors", True),
        ("a/b/c.safetensors", "a/*.safetensors", False),
        ("model-1.safetensors", "model-?.safetensors", True),
        ("model-10.safetensors", "model-?.safetensors", False),
        ("model-1.safetensors", "model-[0-3].safetensors", True),
        ("model-7.safetensors", "model-[!0-3].safetensors", True),
        ("model-1.safetensors", "model-[!0-3].safetensors", False),
        ("model-/x", "model-[!0-3]x", False),
        ("a.b", "a?b", True),
        ("axb", "a.b", False),
        ("a+b(c)", "a+b(c)", True),
        ("a[", "a[", True),
        ("MODEL.safetensors", "model.safetensors", False),
    ],
)
def test_matches(key: str, pattern: str, expected: bool) -> None:
    assert matches(key, pattern) is expected


def test_matches_any() -> None:
    assert matches_any("a.pt", ["*.bin", "*.pt"])
    assert not matches_any("a.pt", [])


def test_wrong_glob_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\[z-a\]"):
        matches("x", "[z-a]")
