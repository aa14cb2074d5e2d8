"""The adapter's own parts, without an engine."""

from __future__ import annotations

from fastload_vllm.asked import asked, asking


def test_scopes_nest_and_end() -> None:
    assert asked() is None
    with asking("FastLoad", {"concurrency": 3}):
        outer = asked()
        assert outer is not None
        assert outer.fastload
        assert outer.extra_config == {"concurrency": 3}
        with asking("auto", "not a mapping"):
            inner = asked()
            assert inner is not None
            assert not inner.fastload
            assert inner.extra_config == {}
        assert asked() is outer
    assert asked() is None
