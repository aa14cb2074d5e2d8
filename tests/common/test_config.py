"""Settings: precedence, parsing, and errors that name the nearest valid key."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.config import OPTIONS, Settings, environment, load_settings
from fastload_common.errors import ConfigError
from fastload_common.units import GIB, MIB


def test_defaults_are_those_of_the_registry() -> None:
    settings = load_settings({}, {})
    assert settings == Settings()
    assert settings.changed() == {}
    for option in OPTIONS:
        assert getattr(settings, option.name) == option.default


def test_t26_extra_config_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"FASTLOAD_CONCURRENCY": "8", "FASTLOAD_MAX_ATTEMPTS": "2", "OTHER": "x"}
    settings = load_settings({"concurrency": 16}, environ)
    assert (settings.concurrency, settings.max_attempts) == (16, 2)
    assert settings.changed() == {"concurrency": 16, "max_attempts": 2}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("concurrency", "64", 64),
        ("concurrency", 64, 64),
        ("chunk_bytes", "16MiB", 16 * MIB),
        ("chunk_bytes", 16 * MIB, 16 * MIB),
        ("max_bytes_per_s", "500MB", 500_000_000),
        ("max_bytes_per_s", "1.5 GiB", 1536 * MIB),
        ("max_bytes_per_s", 10**9, 10**9),
        ("memory_bytes", "2Gi", 2 * GIB),
        ("connect_timeout_s", "0.5", 0.5),
        ("connect_timeout_s", 3, 3.0),
        ("deadline_s", "60", 60.0),
        ("trace", "eager", "eager"),
        ("anonymous", "true", True),
        ("anonymous", " Yes ", True),
        ("anonymous", "0", False),
        ("anonymous", True, True),
        ("cache_dir", "/cache", Path("/cache")),
        ("ignore_patterns", "a/**, b/*.bin,,", ("a/**", "b/*.bin")),
        ("ignore_patterns", ["a", "b"], ("a", "b")),
        ("report", "r.jsonl", Path("r.jsonl")),
        ("progress", "off", "off"),
    ],
)
def test_values_are_parsed(name: str, text: Any, value: Any) -> None:
    assert getattr(load_settings({name: text}, {}), name) == value
    if isinstance(text, str):
        environ = {f"FASTLOAD_{name.upper()}": text}
        assert getattr(load_settings({}, environ), name) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("concurrency", "many", "expected a whole number, got 'many'"),
        ("concurrency", 1.5, "expected a whole number, got 1.5"),
        ("concurrency", True, "expected a whole number"),
        ("concurrency", 0, "below the minimum of 1"),
        ("concurrency", -3, "below the minimum of 1"),
        ("concurrency", 10**30, "above the maximum of 4096"),
        ("concurrency", "9" * 5000, "expected a whole number, got '999"),
        ("max_attempts", 10**30, "above the maximum of 1000"),
        ("chunk_bytes", "5GiB", "above the maximum of 4.0 GiB"),
        ("chunk_bytes", "9" * 400 + ".5", "expected a size in bytes, got '999"),
        ("memory_bytes", 10**30, "above the maximum of 16.0 TiB"),
        ("merge_gap_bytes", 10**30, "above the maximum"),
        ("cache_max_bytes", 10**30, "above the maximum"),
        ("connect_timeout_s", 1e10, "above the maximum of 86400 s"),
        ("read_timeout_s", 1e10, "above the maximum of 86400 s"),
        ("read_timeout_s", 10**400, "expected a number of seconds, got 1000"),
        ("deadline_s", 1e300, "above the maximum"),
        ("trace", ["lazy"], "expected one of the choices"),
        ("cache_dir", "a\0b", "expected a path"),
        ("chunk_bytes", "big", "expected a size in bytes"),
        ("chunk_bytes", "1KiB", "below the minimum"),
        ("max_bytes_per_s", "10", "max_bytes_per_s': 10 is below the minimum of 64.0 KiB/s"),
        ("max_bytes_per_s", 2.5, "expected bytes per second such as 500MB, got 2.5"),
        ("max_bytes_per_s", "fast", "expected a size in bytes, got 'fast'"),
        ("chunk_bytes", 1.5, "expected a size such as 16MiB"),
        ("chunk_bytes", -1, "expected a size in bytes"),
        ("read_timeout_s", "nan", "expected a number of seconds"),
        ("read_timeout_s", "inf", "expected a number of seconds"),
        ("read_timeout_s", 0, "below the minimum"),
        ("read_timeout_s", True, "expected a number of seconds"),
        ("trace", "fast", "expected one of lazy, eager, got 'fast'"),
        ("anonymous", "maybe", "expected true or false"),
        ("anonymous", 1, "expected true or false"),
        ("cache_dir", 3, "expected a path"),
        ("cache_dir", "", "expected a path"),
        ("ignore_patterns", [1], "expected comma-separated globs"),
    ],
)
def test_ill_typed_values_name_the_setting(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({name: value}, {})
    assert message in str(caught.value)
    assert f"model-loader-extra-config '{name}'" in str(caught.value)
    assert len(caught.value.what) < 250


def test_a_number_that_python_does_not_write_is_refused_as_well() -> None:
    with pytest.raises(ConfigError, match="a number of too many digits is above the maximum"):
        load_settings({"memory_bytes": 10**5000}, {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"concurrency": -1}, "concurrency: -1 is below the minimum of 1"),
        ({"concurrency": 2.5}, "concurrency: expected a whole number"),
        ({"concurrency": True}, "concurrency: expected a whole number"),
        ({"chunk_bytes": 1}, "chunk_bytes: 1 is below the minimum of 64.0 KiB"),
        ({"read_timeout_s": float("nan")}, "read_timeout_s: nan is below"),
        ({"read_timeout_s": None}, "read_timeout_s: expected a number of seconds"),
        ({"deadline_s": 1e300}, "deadline_s: 1e+300 is above"),
        ({"trace": "bogus"}, "trace: expected one of lazy, eager, got 'bogus'"),
        ({"anonymous": 1}, "anonymous: expected true or false"),
        ({"cache_dir": "text"}, "cache_dir: expected a path"),
        ({"ignore_patterns": "a,b"}, "ignore_patterns: expected comma-separated globs"),
    ],
)
def test_settings_made_directly_are_checked_too(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    assert message in caught.value.what


def test_an_ill_typed_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^FASTLOAD_CONCURRENCY: expected a whole number"):
        load_settings({}, {"FASTLOAD_CONCURRENCY": "x"})


@pytest.mark.parametrize(
    ("extra", "environ", "nearest"),
    [
        ({"concurency": 1}, {}, "did you mean concurrency?"),
        ({"chunk_size": 1}, {}, "did you mean chunk_bytes?"),
        ({}, {"FASTLOAD_CONCURENCY": "1"}, "did you mean FASTLOAD_CONCURRENCY?"),
        ({}, {"FASTLOAD_ANONYMUS": "1"}, "did you mean FASTLOAD_ANONYMOUS?"),
    ],
)
def test_t26_an_unknown_key_names_the_nearest_and_all(
    extra: dict[str, Any], environ: dict[str, str], nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(extra, environ)
    assert nearest in str(caught.value)
    prefix = "FASTLOAD_MAX_ATTEMPTS" if environ else "max_attempts"
    assert prefix in caught.value.hint


def test_a_key_that_is_near_to_nothing_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"zzzzqqqq": 1}, {})
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match="unknown setting model-loader-extra-config key 1"):
        load_settings({1: 2}, {})  # type: ignore[dict-item]
    assert "valid: concurrency," in str(caught.value)


def test_messages_say_what_the_caller_calls_it() -> None:
    with pytest.raises(ConfigError, match="unknown setting --set key 'x'"):
        load_settings({"x": 1}, {}, extra_name="--set")


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_not_settings() -> None:
    links = (
        "FASTLOAD_SERVICE_HOST",
        "FASTLOAD_SERVICE_PORT",
        "FASTLOAD_SERVICE_PORT_HTTP",
        "FASTLOAD_PORT",
        "FASTLOAD_PORT_8000_TCP",
        "FASTLOAD_PORT_8000_TCP_ADDR",
        "FASTLOAD_CACHE_SERVICE_HOST",
    )
    assert load_settings({}, dict.fromkeys(links, "tcp://10.0.0.1:8000")) == load_settings({}, {})
    with pytest.raises(ConfigError, match="FASTLOAD_REPORTS"):
        load_settings({}, {"FASTLOAD_REPORTS": "x"})


def test_an_empty_variable_is_unset() -> None:
    assert load_settings({}, {"FASTLOAD_CONCURRENCY": " "}) == Settings()


def test_null_in_the_extra_config_is_the_default() -> None:
    assert load_settings({"concurrency": None}, {}).concurrency == Settings().concurrency


def test_settings_that_contradict_name_both() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"memory_bytes": "1MiB", "chunk_bytes": "2MiB"}, {})
    assert "memory_bytes" in str(caught.value)
    assert "chunk_bytes" in str(caught.value)
    assert load_settings({"memory_bytes": "8MiB"}, {}).memory_bytes == 8 * MIB


def test_settings_are_frozen_and_travel_between_processes() -> None:
    settings = load_settings({"concurrency": 3, "report": "/r"}, {})
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.concurrency = 4  # type: ignore[misc]


def test_the_environment_is_read_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLOAD_CONCURRENCY", "5")
    before = dict(os.environ)
    assert load_settings({"max_attempts": 3}).concurrency == 5
    assert dict(os.environ) == before
    assert environment()["FASTLOAD_CONCURRENCY"] == "5"


def test_every_option_is_fully_described() -> None:
    units = {"bytes", "bytes/s", "s", "count", "path", "flag", "choice", "patterns", "places"}
    units |= {"registries", "text"}
    for option in OPTIONS:
        assert option.unit in units
        assert option.meaning.endswith(".")
        assert bool(option.choices) == (option.unit == "choice")
        assert option.variable == "FASTLOAD_" + option.name.upper()
        if option.name == "concurrent_download_chunk_size":
            continue  # named by SOCI
        if option.unit in ("bytes", "bytes/s", "s"):
            assert option.name.endswith("_" + option.unit.replace("/", "_per_"))
        numbers = ("bytes", "bytes/s", "s", "count")
        assert (option.maximum > option.minimum) == (option.unit in numbers)


@given(
    st.dictionaries(
        st.sampled_from([option.name for option in OPTIONS] + ["unknown"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text("0123456789.-+ eMiB_/*,", max_size=8),
        ),
        max_size=4,
    )
)
def test_anything_is_settings_or_a_config_error_with_a_remedy(extra: dict[str, Any]) -> None:
    failure: ConfigError | None = None
    try:
        settings = load_settings(extra, {})
    except ConfigError as error:
        failure = error
    if failure is None:
        assert "unknown" not in extra
        assert settings.concurrency is None or settings.concurrency >= 1
        if settings.memory_bytes is not None and settings.chunk_bytes is not None:
            assert settings.memory_bytes >= settings.chunk_bytes
    else:
        assert failure.hint
