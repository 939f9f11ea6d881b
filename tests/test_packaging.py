"""The backend installs and works without what only the suite needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from optimizations.torch_internals import SUPPORTED

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import sys

BLOCKED = {blocked!r}

class Blocking:  # a finder that does not find what is blocked
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else self._finder.find_spec(name, path, target)

sys.meta_path[:] = map(Blocking, sys.meta_path)
import torch
from optimizations.backend import encore

compiled = torch.compile(lambda x: x.view(2, 4).t(), backend=encore)
x = torch.arange(-4.0, 4.0)
assert torch.equal(compiled(x), x.view(2, 4).t())  # nothing to compile in C++
import optimizations
assert len(optimizations.report()) == 1
print("served")
"""


def declared() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: list(map(_name, wanted)) for name, wanted in project["optional-dependencies"].items()}
    return {"": list(map(_name, project["dependencies"])), **extras}


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0]


@pytest.mark.timeout(600)
def test_the_backend_serves_without_the_suites_dependencies() -> None:
    modules = {"nvidia-ml-py": "pynvml"}
    # PyTorch itself looks for some of them; it has to do without.
    blocked = sorted(modules.get(name, name) for name in declared()["suite"])
    command = [sys.executable, "-c", PROGRAM.format(blocked=blocked)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout.strip().endswith("served"), ran.stderr[-2000:]


def test_torch_is_capped_where_its_internals_are_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [wanted for wanted in project["dependencies"] if _name(wanted) == "torch"]
    assert torch == f"torch>={SUPPORTED[0]},<{SUPPORTED[1]}"


def test_there_is_a_license() -> None:
    assert "MIT License" in (ROOT / "LICENSE").read_text()
