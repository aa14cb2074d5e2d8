"""The adapter's own parts, without an engine."""

from __future__ import annotations

import pytest

from fastload_common.errors import ConfigError
from fastload_common.load.plan_job import PlanJob
from fastload_vllm import compat
from fastload_vllm.asked import asked, asking
from fastload_vllm.planning import VllmPlanner


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


def test_what_the_engine_refuses_is_shown_by_its_messages_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusal(ValueError):
        """As pydantic's."""

        def __str__(self) -> str:
            return "1 validation error ... For further information visit https://errors.example"

        def errors(self) -> list[dict[str, str]]:
            return [{"msg": "Value error, 4 heads and 3 ranks"}, {"msg": "too many ranks"}]

    def refuse(**arguments: object) -> None:
        raise Refusal

    monkeypatch.setattr(type(compat.ENGINE_ARGUMENTS), "get", lambda name: refuse)
    monkeypatch.setattr(compat, "missing", lambda names: [])
    monkeypatch.setattr("fastload_vllm.register", lambda: None)
    with pytest.raises(ConfigError) as caught:
        VllmPlanner().prepare(PlanJob("model", 3))
    assert str(caught.value) == (
        "vLLM refuses this configuration: 4 heads and 3 ranks; too many ranks"
    )
