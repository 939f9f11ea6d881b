"""Tests of other projects that compile, from a checkout: kornia, tensordict, diffusers; and TorchBench's models.

    python -m tests.judges.projects kornia OUT --checkout DIR    three times: plain compile, stock's graphs, Encore
    python -m tests.judges.projects kornia --list                what the checkout and the machine must have
    python -m tests.judges.projects kornia --cut DIR --to TAR    pack what the tests need of a checkout

Rows go to OUT/rows.jsonl, one for each test and compiler; tests that have a row are not run again. Nothing is
downloaded: what needs the network fails, under each compiler alike. With several jobs, which takes pytest-xdist, a test
that ends its process is a row, and the others go on. TorchBench's models are run by `encore run` into OUT/run.

Exit codes: 0 fine; 1 a test passes under plain compile and fails under Encore; 2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import rows as rows_of
from .trial import COMPILERS
from .wheel import count, keep_end

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    """Where its tests are. `needed`: paths of the checkout; `packages`: what must be installed next to PyTorch."""

    tests: tuple[str, ...]
    needed: tuple[str, ...]
    packages: tuple[str, ...]
    paths: tuple[str, ...] = (".",)
    environment: tuple[tuple[str, str], ...] = ()
    note: str = ""


PROJECTS = {
    "kornia": Project(
        tests=("tests", "-k", "dynamo or compile", "--ignore=tests/io", "--continue-on-collection-errors"),
        needed=("kornia", "tests", "testing", "conftest.py", "pyproject.toml"),
        packages=("pytest", "kornia_rs", "packaging"),
        environment=(("KORNIA_TEST_OPTIMIZER", "inductor"), ("KORNIA_TEST_DEVICE", "{device}")),
    ),
    "tensordict": Project(
        tests=("test/compile/test_compile.py",),
        needed=("tensordict", "test/compile", "test/conftest.py", "test/_utils_internal.py", "pyproject.toml"),
        packages=("pytest", "pyvers", "cloudpickle", "importlib_metadata", "orjson", "packaging"),
        paths=(".", "test"),
        note="Its extension tensordict._C must be built, or taken from the wheel of the same version.",
    ),
    "diffusers": Project(
        tests=("tests/models", "-m", "compile", "--continue-on-collection-errors"),
        needed=("src/diffusers", "tests/__init__.py", "tests/testing_utils.py", "tests/models", "tests/conftest.py",
                "pyproject.toml", "setup.py"),
        packages=("pytest", "accelerate", "huggingface_hub", "safetensors", "transformers", "requests", "Pillow"),
        paths=("src", "."),
        environment=(("RUN_COMPILE", "yes"), ("HF_HUB_OFFLINE", "1"), ("DIFFUSERS_TEST_DEVICE", "{device}")),
    ),
    "torchbench": Project(
        tests=(),
        needed=("torchbenchmark", "utils"),
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
    """Measure the models of TorchBench as workloads, or go on with a run that ended early. Return the exit code."""
    run = given.out / "run"
    where = ["--resume", str(run)] if (run / "environment.json").exists() else ["--out", str(run)]
    names = [f"torchbench:{name}" for name in given.only.split(",")] if given.only else ["--set", "torchbench"]
    modes = ",".join(SUITE_MODES[name] for name in given.compilers.split(","))
    chosen = [*names, "--modes", modes] if where[0] == "--out" else []
    path = os.pathsep.join([str(given.checkout.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-P", "-m", "suite", "run", *chosen, *where, "--budget", f"{given.seconds}s"],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    ).returncode


SUITE_MODES = {"compile": "compile", "stock": "graph", "encore": "encore"}


def _run(given: argparse.Namespace, project: Project) -> int:
    deadline = time.monotonic() + given.seconds
    tests = [*(given.only.split(",") if given.only else project.tests[:1]), *project.tests[1:]]
    path = given.out.resolve() / "rows.jsonl"
    for compiler in given.compilers.split(","):
        rows = rows_of.read(path) if path.exists() else []
        done = [key.split("|", 1)[1] for key, row in rows_of.by_task(rows).items() if {compiler, "eager"} & row.keys()]
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        skip = [f"--deselect={node}" for node in done]
        paths = [str((given.checkout / part).resolve()) for part in project.paths]
        environment = {
            **os.environ,
            **{name: value.format(device=given.device) for name, value in project.environment},
            # As `tests.judges` the plugin would not be found: `tests` is the project's.
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
            "ENCORE_JUDGE_COMPILER": compiler,
            "ENCORE_JUDGE_ROWS": str(path),
            "ENCORE_JUDGE_NAME": given.project,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "judges.plugin", "-p", "no:cacheprovider", "--rootdir=."]
        command += ["-n", str(given.jobs)] if given.jobs > 1 else []
        with (given.out / "pytest.log").open("a", encoding="utf-8") as log:
            try:
                subprocess.run(
                    [*command, *tests, *skip],
                    cwd=given.checkout, env=environment, stdout=log, stderr=log, timeout=seconds, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                print(f"{compiler}: the time is over; start again with the same OUT to go on", file=sys.stderr)
    keep_end(given.out / "pytest.log")
    rows = rows_of.read(path) if path.exists() else []
    text = rows_of.summary(rows)
    (given.out / "summary.txt").write_text(text + "\n", "utf-8")
    print(text)
    if not any("passed" in row for row in rows):
        print("projects: no test was run; see pytest.log", file=sys.stderr)
        return 1
    return 1 if rows_of.findings(rows) else 0


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
    parser.add_argument("--only", metavar="PATHS", help="tests or models of the checkout, separated by commas")
    return parser


if __name__ == "__main__":
    sys.exit(main())
