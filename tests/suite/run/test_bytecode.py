"""Processes of the suite share compiled Python of PyTorch if the installation has none."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from suite.run.supervise import BYTECODE, Supervised, await_exit, bytecode_environment, end


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package "torch" that is found instead of the real one; the path of its compiled file, which is not there."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text("answer = 42\n")
    spec = importlib.machinery.PathFinder.find_spec("torch", [str(package.parent)])
    assert spec is not None and spec.cached is not None
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else find(name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return Path(spec.cached)


def test_compiled_torch_changes_nothing(installed: Path) -> None:
    installed.parent.mkdir(exist_ok=True)
    installed.touch()
    assert bytecode_environment() == {}


def test_users_cache_folder_is_kept(installed: Path) -> None:
    assert bytecode_environment({"PYTHONPYCACHEPREFIX": "/somewhere"}) == {}


def test_next_process_finds_compiled_code(installed: Path, tmp_path: Path) -> None:
    compiled = tmp_path / "cache" / "encore" / BYTECODE
    program = f"import sys; sys.path.insert(0, {str(installed.parents[2])!r}); import torch"
    command = [sys.executable, "-v", "-c", program]
    for turn in (1, 2):
        process = Supervised(command, tmp_path / f"{turn}.log")
        await_exit([process], 60)
        end([process])
    logs = [(tmp_path / f"{turn}.log").read_text() for turn in (1, 2)]
    assert [f"# {compiled}" in log and "torch/__init__" in log for log in logs] == [False, True]
    (found,) = compiled.rglob("torch/__init__*.pyc")
    assert not installed.exists(), "nothing is written to where packages are installed"
    assert f"# {found} matches" in logs[1]


def test_environment_of_this_process_is_unchanged(installed: Path) -> None:
    added = bytecode_environment()
    assert added["PYTHONDONTWRITEBYTECODE"] == "" and Path(added["PYTHONPYCACHEPREFIX"]).name == BYTECODE
    flag = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    ran = subprocess.run([sys.executable, "-c", flag], env=added, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", added["PYTHONPYCACHEPREFIX"]]
