"""The example of docs/testing.md does what it says."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.house.tree import ROOT


def test_the_example_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert "'Error'" in said
    assert "'complete'" in said
    assert "8.0 MiB" in done.stdout
