"""Tests of other projects that compile, from a checkout: kornia, tensordict, diffusers; and TorchBench's models.

    python -m tests.judges.projects kornia OUT --checkout DIR    plain compile, stock's graphs and Encore, side by side
    python -m tests.judges.projects kornia --list                what the checkout and the machine must have
    python -m tests.judges.projects kornia --cut DIR --to TAR    pack what the tests need of a checkout

Rows go to OUT/rows.jsonl, one for each test and compiler; tests that have a row are not run again. Nothing is
downloaded: what needs the network fails, under each compiler alike. With pytest-xdist a test that ends its process is
a row, and the others go on. TorchBench's models are run by `encore run` (`tests/judges/torchbench.py`).

Exit codes: 0 fine; 1 a test passes under plain compile and fails under Encore; 2 wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import rows as rows_of
from . import torchbench
from .trial import COMPILERS
from .wheel import count, facts, keep_end

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
    files: str | None = None
    calls: int = 1
    note: str = ""


PROJECTS = {
    "kornia": Project(
        tests=("tests", "-k", "dynamo or compile", "--ignore=tests/io", "--continue-on-collection-errors"),
        needed=("kornia", "tests", "testing", "conftest.py", "pyproject.toml"),
        packages=("pytest", "kornia_rs", "packaging"),
        environment=(("KORNIA_TEST_OPTIMIZER", "inductor"), ("KORNIA_TEST_DEVICE", "{device}")),
        files=r"def test\w*(dynamo|compile)",
        calls=4,
    ),
    "tensordict": Project(
        tests=("test/compile/test_compile.py",),
        needed=("tensordict", "test/compile", "test/conftest.py", "test/_utils_internal.py", "pyproject.toml"),
        packages=("pytest", "pyvers", "cloudpickle", "importlib_metadata", "orjson", "packaging"),
        paths=(".", "test"),
        calls=4,
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
        environment=(("RUN_COMPILE", "yes"), ("HF_HUB_OFFLINE", "1"), ("DIFFUSERS_TEST_DEVICE", "{device}")),
        files="TorchCompileTesterMixin",
        calls=4,
    ),
    "torchbench": Project(
        tests=(),
        needed=("torchbenchmark", "utils", "userbenchmark/dynamo/dynamobench"),
        packages=("psutil", "pyyaml", "transformers", "torchvision", "timm"),
        note="Models that need other packages, or the network, are recorded with their reason.",
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    project = PROJECTS[given.project]
    if given.list:
        print(f"of the checkout: {' '.join(project.needed)}")
        print(f"installed: {' '.join(project.packages)}")
        if project.note:
            print(project.note)
        return 0
    if given.cut:
        if given.to is None:
            parser.error("--cut needs --to TAR")
        return cut(project, given.cut, given.to)
    if given.out is None or given.checkout is None:
        parser.error("OUT and --checkout are needed")
    missing = [path for path in project.needed if not (given.checkout / path).exists()]
    if missing:
        parser.error(f"--checkout {given.checkout} has no {', '.join(missing)}")
    given.out.mkdir(parents=True, exist_ok=True)
    return _run(given, project) if project.tests else _measured(given)


def cut(project: Project, checkout: Path, to: Path) -> int:
    """Pack what the tests need, without compiled Python and pictures of more than a MiB."""

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        unwanted = "__pycache__" in member.name or (member.size > 2**20 and not member.name.endswith((".py", ".so")))
        return None if unwanted else member

    with tarfile.open(to, "w:gz") as archive:
        for path in project.needed:
            if not (checkout / path).exists():
                print(f"projects: {checkout} has no {path}", file=sys.stderr)
                return 2
            archive.add(checkout / path, path, filter=chosen)
    print(f"{to}: {to.stat().st_size / 1e6:.1f} MB")
    return 0


def _measured(given: argparse.Namespace) -> int:
    """Judge the models of TorchBench as workloads of the suite. Return the exit code."""
    names = given.only.split(",") if given.only else torchbench.MODELS
    timed = given.timed_seconds if given.timed_seconds is not None else given.seconds // 3
    return torchbench.measure(
        given.out, given.checkout, names, given.compilers.split(","), given.device, given.jobs, given.seconds, timed
    )


def _run(given: argparse.Namespace, project: Project) -> int:
    deadline = time.monotonic() + given.seconds
    path = given.out.resolve() / "rows.jsonl"
    rows = rows_of.read(path) if path.exists() else []
    compilers = given.compilers.split(",")
    if not rows:
        with path.open("w", encoding="utf-8") as out:
            out.write(json.dumps({"run": facts(given.device, compilers)}) + "\n")
    tests = [*(given.only.split(",") if given.only else chosen_files(project, given.checkout)), *project.tests[1:]]
    each = max(1, given.jobs // len(compilers))
    with tempfile.TemporaryDirectory(prefix="encore-judge-") as cache:
        started = []
        for compiler in compilers:
            done = [key.split("|", 1)[1] for key, row in rows_of.by_task(rows).items() if {compiler, "eager"} & {*row}]
            command = [sys.executable, "-m", "pytest", "-q", "-p", "judges.plugin", "-p", "no:cacheprovider"]
            command += ["--rootdir=.", *(["-n", str(each)] if importlib.util.find_spec("xdist") else [])]
            command += ["--timeout=150"] if importlib.util.find_spec("pytest_timeout") else []
            command += [*tests, *(f"--deselect={node}" for node in done)]
            with (given.out / f"{compiler}.log").open("a", encoding="utf-8") as log:
                started.append(
                    subprocess.Popen(
                        command, cwd=given.checkout, env=_environment(given, project, compiler, path, cache),
                        stdout=log, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip
        for compiler, process in zip(compilers, started, strict=True):
            _end(compiler, process, deadline)
    for compiler in compilers:
        keep_end(given.out / f"{compiler}.log")
    rows = rows_of.read(path)
    text = rows_of.summary(rows)
    (given.out / "summary.txt").write_text(text + "\n", "utf-8")
    print(text)
    if not any("passed" in row for row in rows):
        print("projects: no test was run; see the logs", file=sys.stderr)
        return 1
    return 1 if rows_of.findings(rows) else 0


def chosen_files(project: Project, checkout: Path) -> list[str]:
    """Return the project's tests as paths within the checkout: its folder, or the files of it that have `files`."""
    where = project.tests[0]
    if project.files is None:
        return [where]
    found = sorted((checkout / where).rglob("test_*.py"))
    return [str(path.relative_to(checkout)) for path in found if re.search(project.files, path.read_text("utf-8"))]


def _environment(given: argparse.Namespace, project: Project, compiler: str, rows: Path, cache: str) -> dict[str, str]:
    paths = [str((given.checkout / part).resolve()) for part in project.paths]
    return {
        **os.environ,
        **{name: value.format(device=given.device) for name, value in project.environment},
        # As `tests.judges` the plugin would not be found: `tests` is the project's.
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "ENCORE_JUDGE_COMPILER": compiler,
        "ENCORE_JUDGE_ROWS": str(rows),
        "ENCORE_JUDGE_NAME": given.project,
        "ENCORE_JUDGE_REPEATS": str(project.calls),
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _end(compiler: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait for a pytest until the deadline, then end it with the processes that it has started."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"{compiler}: the time is over; start again with the same OUT to go on", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="projects", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", choices=tuple(PROJECTS))
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder for rows, summary and log")
    parser.add_argument("--checkout", type=Path, metavar="DIR")
    parser.add_argument("--list", action="store_true", help="say what is needed and end")
    parser.add_argument("--cut", type=Path, metavar="DIR", help="pack what the tests need of this checkout and end")
    parser.add_argument("--to", type=Path, metavar="TAR")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without graphs, to try the tests"
    )
    parser.add_argument("--jobs", type=count, default=max(1, len(os.sched_getaffinity(0)) - 3), metavar="N")
    parser.add_argument("--compilers", default=",".join(COMPILERS), metavar="NAMES")
    parser.add_argument("--seconds", type=count, default=540, metavar="LIMIT", help="for all of it (540)")
    parser.add_argument("--timed-seconds", type=int, metavar="OF", help="TorchBench: of these, for times (a third)")
    parser.add_argument("--only", metavar="PATHS", help="tests or models of the checkout, separated by commas")
    return parser


if __name__ == "__main__":
    sys.exit(main())
