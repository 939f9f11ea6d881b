"""The plugin of tests/gpu, with a torch that stands for a CUDA context: it breaks once and stays broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "gpu" / "conftest.py"

TORCH = """
class cuda:
    broken = False
    is_initialized = staticmethod(lambda: True)

    @classmethod
    def synchronize(cls):
        if cls.broken:
            raise RuntimeError("an illegal memory access was encountered")
"""

TESTS = """
import pytest
import torch

@pytest.fixture(autouse=True)
def undrawn():  # that one wants PyTorch itself, and these want Encore
    pass

@pytest.fixture(autouse=True)
def unselected():
    pass

@pytest.fixture(autouse=True)
def clean():
    pass

def test_breaks():
    torch.cuda.broken = True

def test_after():
    torch.cuda.synchronize()
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest on the two tests, next to the plugin."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "torch.py").write_text(TORCH)
    (folder / "test_context.py").write_text(TESTS)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--rootdir",
            str(folder),
            "-p",
            "no:cacheprovider",
            "--color=no",
            *options,
            "test_context.py",
        ],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_worker_with_a_broken_context_leaves(tmp_path: Path) -> None:
    done = run(tmp_path, "--numprocesses", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    said = "BROKEN CONTEXT after test_context.py::test_breaks: an illegal memory access was encountered"
    assert said in done.stdout + done.stderr
    assert "crashed while running 'test_context.py::test_breaks'" in done.stdout
    assert "1 failed, 2 passed" in done.stdout, "the crash, and both tests"


@pytest.mark.parametrize("options", [(), ("--numprocesses", "0")])
def test_a_process_that_is_no_worker_stays(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, *options)
    assert "1 failed, 1 passed" in done.stdout
    assert "BROKEN CONTEXT" not in done.stdout + done.stderr
