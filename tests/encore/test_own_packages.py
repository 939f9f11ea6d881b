"""A project that has packages called `models` and `suite`, as many have: Encore finds its own, the program its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from encore import own_packages
from suite.explain import run
from suite.results.store import REPOSITORY
from suite.run.process import WORKER_COMMAND

PROJECT = {
    "models/net.py": """if True:
        import torch

        import suite.sizes
        from models.blocks import Block

        def make():
            import suite.late
            return Block(suite.sizes.WIDTH), (torch.ones(suite.late.BATCH, suite.sizes.WIDTH),)
    """,
    "models/blocks.py": """if True:
        from torch import nn

        class Block(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.linear = nn.Linear(width, width)

            def forward(self, x):
                return self.linear(x).relu()
    """,
    "models/__init__.py": "",
    "suite/__init__.py": "raise_unless_loaded = True",
    "suite/sizes.py": "WIDTH = 8",
    "suite/late.py": "BATCH = 2",
    "optimizations.py": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, source in PROJECT.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "project"


def run_in(project: Path, command: Sequence[str], *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder, with these folders on PYTHONPATH."""
    path = os.pathsep.join(map(str, paths))
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=200)


def encore(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in the project's folder, which is on PYTHONPATH too and comes before Encore's there."""
    return run_in(project, [*own_packages.script("suite"), *arguments], project)


def test_a_program_in_packages_of_encores_names_is_explained(project: Path, tmp_path: Path) -> None:
    done = encore(project, "explain", "models.net:make", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    explanation = json.loads((tmp_path / "out" / "models.net.make.json").read_text())
    assert explanation["error"] is None
    (graph,) = explanation["graphs"]
    assert graph["non_static_inputs"][0]["shape"] == [2, 8]
    assert graph["stock_captures"] is True


def test_commands_and_workers_find_encores_own_packages(project: Path) -> None:
    assert "XLNET-T" in encore(project, "list", "--workloads").stdout
    for command in (WORKER_COMMAND, run.WORKER_COMMAND):
        done = run_in(project, [*command, "--help"], project)
        assert done.returncode == 0, done.stderr
        assert "usage:" in done.stdout


def test_installed_command_puts_encores_packages_first() -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["encore"].partition(":")
    assert getattr(importlib.import_module(module), function) is own_packages.command
    assert sys.modules[module].__name__.partition(".")[0] not in ("suite", "models"), "a name that others have too"


def test_command_without_dependencies_says_how_to_get_them() -> None:
    code = "import sys; sys.modules['typer'] = None; from encore.own_packages import command; command()"
    done = run_in(REPOSITORY, [sys.executable, "-c", code])
    assert done.returncode == 1
    assert done.stderr.startswith("encore: the command needs typer, which is not installed")
    assert "pip install 'encore[suite]'" in done.stderr


def test_only_names_that_the_user_has_give_way(project: Path) -> None:
    code = """if True:
        from encore import own_packages
        own_packages.put_first()
        import host_tuning, models.registry, suite.results.errors
        mine = suite.results.errors
        own_packages.give_way()
        import models.blocks, suite.sizes
        assert suite.sizes.WIDTH == 8 and models.blocks.__file__.endswith("project/models/blocks.py")
        import host_tuning.machine as kept
        assert "project" not in kept.__file__
        assert mine.EXIT_OK == 0
    """
    (project / "machine.py").write_text("")
    done = run_in(project, [sys.executable, "-P", "-c", code], REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_backend_needs_none_of_the_users_names(project: Path) -> None:
    (project / "optimizations.py").unlink()
    for name in ("models", "suite"):
        (project / name / "__init__.py").write_text("raise SystemExit('the package of the user was imported')")
    code = "import optimizations.compiled_graph; optimizations.report(); optimizations.reset()"
    done = run_in(project, [sys.executable, "-c", code], project, REPOSITORY)
    assert done.returncode == 0, done.stderr
