"""Where small files go, whatever the container lacks."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.load.cache_root import cache_roots, private_directory

UID = os.geteuid()


def no_passwd_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def getpwuid(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/home/me"}, ["/x/fastload", f"/tmp/fastload-{UID}"]),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, ["/h/.cache/fastload"]),
        ({"HOME": "/h", "TMPDIR": "/scratch"}, ["/h/.cache/fastload", f"/scratch/fastload-{UID}"]),
        ({"HOME": "/"}, [f"/tmp/fastload-{UID}"]),
        ({"HOME": "//"}, [f"/tmp/fastload-{UID}"]),
        ({"HOME": "relative"}, [f"/tmp/fastload-{UID}"]),
        ({"HOME": "/h", "TMPDIR": "relative"}, ["/h/.cache/fastload", f"/tmp/fastload-{UID}"]),
    ],
)
def test_the_order_of_places(environ: dict[str, str], wanted: list[str]) -> None:
    roots = [str(root) for root in cache_roots(Settings(), environ)]
    assert roots[: len(wanted)] == wanted


def test_e01_no_user_and_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    no_passwd_entry(monkeypatch)
    assert list(cache_roots(Settings(), {"TMPDIR": "/t"})) == [Path(f"/t/fastload-{UID}")]


def test_e01_a_home_without_a_user_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_passwd_entry(monkeypatch)
    first = next(cache_roots(Settings(), {"HOME": "/app"}))
    assert first == Path("/app/.cache/fastload")


def test_the_setting_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache_dir=Path("/cache"))
    assert next(cache_roots(settings, {"XDG_CACHE_HOME": "/x"})) == Path("/cache")
    no_passwd_entry(monkeypatch)
    home = Settings(cache_dir=Path("~/c"))
    assert next(cache_roots(home, {"HOME": "/home/me"})) == Path("/home/me/c")


def test_a_private_directory_is_made_and_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "private"
    private_directory(path)
    private_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError):
        private_directory(shared)
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        private_directory(linked)
