"""Credentials in the files and helpers of container tools."""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload_common.errors import AccessDeniedError, ConfigError, FastloadError
from fastload_common.source.oci_credentials import Credential, find_credential

Config = Callable[..., dict[str, str]]


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Writes a config.json; the variables that lead to it."""

    def write(content: Any, name: str = "config.json") -> dict[str, str]:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
        return {"DOCKER_CONFIG": str(tmp_path), "HOME": "/nonexistent"}

    return write


def no_helper(program: str, server: str) -> tuple[int, bytes]:
    raise AssertionError(f"{program} was called for {server}")


def find(
    environ: dict[str, str],
    registry: str = "r.example",
    repository: str = "a/b",
    run: Callable[[str, str], tuple[int, bytes]] = no_helper,
) -> Credential | None:
    return find_credential(registry, repository, environ, run)


@pytest.mark.parametrize(
    "key",
    ["r.example", "https://r.example", "https://r.example/v2/", "r.example/a", "r.example/a/b"],
)
def test_the_ways_in_which_a_registry_is_written(config: Config, key: str) -> None:
    found = find(config({"auths": {key: auth("me", "it:has:colons")}}))
    assert found is not None
    assert (found.user, found.password) == ("me", "it:has:colons")
    assert found.basic == "Basic " + base64.b64encode(b"me:it:has:colons").decode()


def test_the_longest_path_counts(config: Config) -> None:
    environ = config(
        {"auths": {"r.example": auth("all", "1"), "r.example/a": auth("some", "2"), "x": {}}}
    )
    some, everything = find(environ), find(environ, repository="c")
    assert some is not None
    assert some.user == "some"
    assert everything is not None
    assert everything.user == "all"


def test_docker_hub_is_filed_under_its_old_address(config: Config) -> None:
    environ = config({"auths": {"https://index.docker.io/v1/": auth("me", "pw")}})
    found = find(environ, registry="docker.io")
    assert found is not None
    assert found.user == "me"
    assert find(environ) is None


def test_tokens(config: Config) -> None:
    found = find(config({"auths": {"r.example": {"identitytoken": "idt", "auth": ""}}}))
    assert found is not None
    assert (found.identity_token, found.basic) == ("idt", None)
    found = find(config({"auths": {"r.example": {"registrytoken": "rt"}}}))
    assert found is not None
    assert found.registry_token == "rt"


def test_a_mounted_pull_secret(config: Config) -> None:
    found = find(config({"auths": {"r.example": auth("pod", "pw")}}, name=".dockerconfigjson"))
    assert found is not None
    assert found.user == "pod"


def test_the_files_are_asked_in_their_order(tmp_path: Path) -> None:
    for name in ("one", "two/containers", "three/.docker"):
        (tmp_path / name).mkdir(parents=True)
    auths = {"r.example": auth("podman", "1")}
    (tmp_path / "one" / "auth.json").write_text(json.dumps({"auths": auths}))
    auths = {"r.example": auth("runtime", "1"), "s.example": auth("runtime", "1")}
    (tmp_path / "two/containers/auth.json").write_text(json.dumps({"auths": auths}))
    auths = {"t.example": auth("home", "1")}
    (tmp_path / "three/.docker/config.json").write_text(json.dumps({"auths": auths}))
    environ = {
        "REGISTRY_AUTH_FILE": str(tmp_path / "one" / "auth.json"),
        "XDG_RUNTIME_DIR": str(tmp_path / "two"),
        "HOME": str(tmp_path / "three"),
    }
    users = [
        found.user if found else None
        for found in (find(environ, name) for name in ("r.example", "s.example", "t.example", "u"))
    ]
    assert users == ["podman", "runtime", "home", None]


def test_helpers(config: Config) -> None:
    environ = config(
        {
            "credHelpers": {"r.example": "ecr-login"},
            "credsStore": "desktop",
            "auths": {"s.example": auth("file", "pw"), "r.example": {}},
        }
    )
    asked: list[tuple[str, str]] = []

    def run(program: str, server: str) -> tuple[int, bytes]:
        asked.append((program, server))
        if server == "gone.example":
            return 1, b"credentials not found in native keychain"
        user = "<token>" if server == "t.example" else "AWS"
        return 0, json.dumps({"Username": user, "Secret": "sec", "ServerURL": server}).encode()

    by_helper, by_file = find(environ, run=run), find(environ, "s.example", run=run)
    by_store, none = find(environ, "t.example", run=run), find(environ, "gone.example", run=run)
    assert by_helper is not None
    assert (by_helper.user, by_helper.password) == ("AWS", "sec")
    assert by_helper.origin == "docker-credential-ecr-login"
    assert by_file is not None
    assert by_file.user == "file"
    assert by_store is not None
    assert by_store.identity_token == "sec"
    assert none is None
    assert asked == [
        ("docker-credential-ecr-login", "r.example"),
        ("docker-credential-desktop", "t.example"),
        ("docker-credential-desktop", "gone.example"),
    ]


def test_a_helper_is_a_program_that_is_told_the_server(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "docker-credential-own"
    program.write_text(
        '#!/bin/sh\nread server\n[ "$1" = get ] || exit 1\n'
        'echo "{\\"Username\\":\\"u-$server\\",\\"Secret\\":\\"s\\"}"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = find_credential("r.example", "m", config({"credsStore": "own"}))
    assert found is not None
    assert found.user == "u-r.example"


@pytest.mark.parametrize(
    ("content", "printed", "code", "kind", "says"),
    [
        ("{not json SECRET", b"", 0, ConfigError, "no JSON object"),
        ("[]", b"", 0, ConfigError, "no JSON object"),
        ({"auths": {"r.example": {"auth": "!!SECRET"}}}, b"", 0, ConfigError, "no base64"),
        ({"credsStore": "../SECRET/x"}, b"", 0, ConfigError, "no name"),
        ({"credsStore": "own"}, b"SECRET", 0, AccessDeniedError, "printed no credentials"),
        ({"credsStore": "own"}, b"[]", 0, AccessDeniedError, "printed no credentials"),
        ({"credsStore": "own"}, b"SECRET", 3, AccessDeniedError, "exit code 3"),
    ],
)
def test_what_is_damaged_is_told_without_its_content(
    config: Config,
    content: Any,
    printed: bytes,
    code: int,
    kind: type[FastloadError],
    says: str,
) -> None:
    with pytest.raises(kind, match=says) as caught:
        find(config(content), run=lambda program, server: (code, printed))
    assert says in str(caught.value)
    assert "SECRET" not in str(caught.value).replace("../SECRET", "")


def test_a_helper_that_is_missing_is_named(config: Config) -> None:
    with pytest.raises(ConfigError, match="docker-credential-nowhere"):
        find_credential("r.example", "m", config({"credsStore": "nowhere"}))


def test_no_secret_is_shown(config: Config) -> None:
    found = find(config({"auths": {"r.example": auth("me", "hunter2")}}))
    assert "hunter2" not in repr(found)
