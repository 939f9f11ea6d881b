"""`encore run own_programs:NAME` on a GPU: every mode passes, and the six lines hold numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from suite.results.store import REPOSITORY

pytestmark = pytest.mark.gpu

LIMIT_S = 240
"""Two minutes are the aim of --quick; a busy host takes longer."""


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", ["inference", "training", "training_with_dropout", "trainer"])
def test_quick_run_of_a_program_concludes_with_numbers(name: str, tmp_path: Path) -> None:
    command = (sys.executable, "-P", str(REPOSITORY / "encore" / "own_packages.py"), "suite")
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "run", f"own_programs:{name}", "--quick", "--json", "--out", str(tmp_path / "run")],
        cwd=REPOSITORY / "tests" / "support",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S - 10,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stderr[-2000:], f"{time.monotonic() - begun:.0f} s")
    made = json.loads(done.stdout)
    assert (made["cells"], made["failed"]) == (4, [])
    lines = dict(line.split(": ", 1) for line in made["conclusions"][f"own_programs:{name}"])
    for subject in ("over compile", "over stock's graphs"):
        assert lines[subject].startswith("Encore is "), lines
    assert "at most while replaying" in lines["memory"]
    assert "settled after" in lines["start"]
    assert "not measured" not in lines["not captured"]
    assert time.monotonic() - begun < LIMIT_S
