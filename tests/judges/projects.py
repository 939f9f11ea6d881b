"""Tests of other projects that compile, from a checkout: kornia, tensordict, diffusers.

Plain compile, stock's graphs and Encore run side by side, each with processes of its own. What needs the network fails,
under each compiler alike. With pytest-xdist a test that ends its process is a row, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from row_files import RowFile, facts

from . import rows as rows_of
from .trial import COMPILERS
from .wheel import device_name

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    """A project and its tests. `needed`: paths of the checkout; `packages`: what must be installed next to PyTorch.

    `tests`: a folder or file, and pytest's options. `files`: what a file of that folder has that is run; importing
    all others takes longer than some tests.
    """

    tests: tuple[str, ...]
    needed: tuple[str, ...]
    packages: tuple[str, ...]
    paths: tuple[str, ...] = (".",)
    environment: tuple[tuple[str, str], ...] = ()
    files: str = ""
    note: str = ""

    def needs(self) -> str:
        """Return what the checkout and the machine must have, as text."""
        return "\n".join(
            [f"of the checkout: {' '.join(self.needed)}", f"installed: {' '.join(self.packages)}", self.note]
        )

    def missing(self, checkout: Path | None) -> list[str]:
        """Return the paths that a checkout lacks."""
        return [path for path in self.needed if checkout is None or not (checkout / path).exists()]

    def chosen_files(self, checkout: Path) -> list[str]:
        """Return the tests as paths within the checkout: its folder, or the files of it that have `files`."""
        where = self.tests[0]
        found = sorted((checkout / where).rglob("test_*.py")) if self.files else []
        found = [path for path in found if re.search(self.files, path.read_text("utf-8"))]
        return [str(path.relative_to(checkout)) for path in found] or [where]


PROJECTS = {
    "kornia": Project(
        tests=("tests", "-k", "dynamo or compile", "--ignore=tests/io", "--continue-on-collection-errors"),
        needed=("kornia", "tests", "testing", "conftest.py", "pyproject.toml"),
        packages=("pytest", "kornia_rs", "packaging"),
        environment=(("KORNIA_TEST_OPTIMIZER", "inductor"), ("KORNIA_TEST_DEVICE", "cuda")),
        files=r"def test\w*(dynamo|compile)",
    ),
    "tensordict": Project(
        tests=("test/compile/test_compile.py",),
        needed=("tensordict", "test/compile", "test/conftest.py", "test/_utils_internal.py", "pyproject.toml"),
        packages=("pytest", "pyvers", "cloudpickle", "importlib_metadata", "orjson", "packaging"),
        paths=(".", "test"),
        note="Its extension tensordict._C must be built, or taken from the wheel of the same version.",
    ),
    "diffusers": Project(
        # Quantized models need packages of their own and the network; what is exported ahead of time is not compiled.
        tests=(
            "tests/models", "-m", "compile", "--continue-on-collection-errors",
            "-k", "not (gguf or torchao or bnb or quanto or modelopt or autoround or sdnq or works_with_aot)",
        ),
        needed=("src/diffusers", "tests/__init__.py", "tests/testing_utils.py", "tests/conftest.py", "tests/models",
                "tests/others", "pyproject.toml", "setup.py"),
        packages=(
            "pytest", "accelerate", "huggingface_hub", "importlib_metadata", "parameterized", "peft", "Pillow",
            "requests", "requests_mock", "safetensors", "transformers",
        ),
        paths=("src", "."),
        environment=(("RUN_COMPILE", "yes"), ("HF_HUB_OFFLINE", "1"), ("DIFFUSERS_TEST_DEVICE", "cuda")),
        files="TorchCompileTesterMixin",
    ),
}  # fmt: skip


def run(given: argparse.Namespace, rows: RowFile, environment: Mapping[str, str]) -> None:
    """Run the tests that have no rows yet under each compiler. The plugin adds the rows to the file."""
    project = PROJECTS[given.name]
    if not rows.rows:
        rows.add({"run": {**facts(device_name(given.device)), "compilers": list(COMPILERS)}})
    tests = given.only.split(",") if given.only else project.chosen_files(given.checkout)
    options = [f"-n={max(1, given.jobs // len(COMPILERS))}"] if importlib.util.find_spec("xdist") else []
    options += ["--timeout=150"] if importlib.util.find_spec("pytest_timeout") else []
    paths = [*(str((given.checkout / part).resolve()) for part in project.paths), str(ROOT), str(ROOT / "tests")]
    started = []
    for compiler in COMPILERS:
        done = [key.split("|", 1)[1] for key, row in rows_of.by_task(rows.rows).items() if {compiler, "eager"} & {*row}]
        # As `tests.judges` the plugin would not be found: `tests` is the project's.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "judges.plugin", "-p", "no:cacheprovider", "--rootdir=."]
        command += [*options, *tests, *project.tests[1:], *(f"--deselect={node}" for node in done)]
        variables = {
            **os.environ,
            **environment,
            **dict(project.environment),
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "ENCORE_JUDGE_COMPILER": compiler,
            "ENCORE_JUDGE_ROWS": str(rows.path),
            "ENCORE_JUDGE_NAME": given.name,
        }
        with (given.out / f"{compiler}.log").open("a", encoding="utf-8") as log:
            options_of = {"cwd": given.checkout, "env": variables, "stdout": log, "stderr": log}
            started.append(subprocess.Popen(command, start_new_session=True, **options_of))
    for compiler, process in zip(COMPILERS, started, strict=True):
        _end(compiler, process, given.deadline)
    rows.read()


def _end(compiler: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait for a pytest until the deadline, then end it with the processes that it has started."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"{compiler}: the time is over; start again with the same OUT to go on", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
