"""run_all.sh, run_tests.sh and .ci/run with a Python that only writes down how it was called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from suite.cli.main import app
from suite.results.store import REPOSITORY

SCRIPTS = (
    "run_all.sh",
    "run_tests.sh",
    "suite/set_up.sh",
    "tests/gpu/pytest.sh",
    ".ci/run",
)

STUB = r"""#!/bin/bash
# Stands for every python: answers what the scripts ask, and writes down the rest, a line per call, arguments in <>.
case "$*" in
"-c import ensurepip"*) exit ${STUB_UNUSABLE:-0} ;;
--version) echo "Python 3.12.0"; exit ;;
"-m venv --clear "*) mkdir -p "${4}/bin"; cp "$0" "${4}/bin/python" ;;
esac
# In one write: calls at the same time must not end up in one line.
printf -v call '<%s>' "$@"
echo "$call" >>"$STUB_LOG"
echo "${PYTHONPATH:-}" >>"$STUB_LOG.paths"
case "$*" in
"-m pip install"*) exit ${STUB_PIP:-0} ;;
*"suite env --require-gpu")
    [ -n "${STUB_GPU:-}" ] && echo "$STUB_GPU" && exit
    echo "encore: no NVIDIA GPU: no driver. Without one: do something else." >&2
    exit ${STUB_ENV:-2} ;;
*"--set torchbench"*) exit ${STUB_TORCHBENCH:-0} ;;
*"suite run"*) echo "rows are written" >&2; exit ${STUB_RUN:-0} ;;
*"suite explain"*) exit ${STUB_EXPLAIN:-0} ;;
"-m ruff check"*) echo "a line too long"; exit ${STUB_RUFF:-0} ;;
"-m mypy") echo "a wrong type"; exit ${STUB_MYPY:-0} ;;
"-m tests.gpu.toolchain "*) [ -n "${STUB_TOOLCHAIN:-}" ] && exit 1; mkdir -p "${@: -1}"; touch "${@: -1}/made" ;;
"-m pytest -m gpu and alone"*) exit ${STUB_ALONE:-0} ;;
"-m pytest"*) echo "=== 3 passed in 0.01s ==="; exit ${STUB_PYTEST:-0} ;;
esac
"""


class Checkout:
    """A copy of the scripts in a folder with a space, and the stub to run them with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "my clones" / "encore"
        self.log = folder / "calls"
        self.stub = folder / "stub python"
        self.stub.write_text(STUB)
        self.stub.chmod(0o755)
        for name in (*SCRIPTS, "requirements.lock", "pyproject.toml"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            [str(self.root / script), *arguments],
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def environment(self, **variables: str) -> dict[str, str]:
        return {**os.environ, "PYTHON": str(self.stub), "STUB_LOG": str(self.log), **variables}

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def called(self, words: str) -> str:
        (call,) = [call for call in self.calls() if words in call]
        return call


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_first_start_makes_the_environment_from_the_lock(checkout: Checkout) -> None:
    done = checkout.run("run_all.sh", STUB_GPU="NVIDIA H200")
    assert done.returncode == 0, done.stderr
    venv, lock, bytecode, package = checkout.calls()[:4]
    assert venv == f"<-m><venv><--clear><{checkout.root}/.venv>"
    assert f"<--requirement><{checkout.root}/requirements.lock>" in lock
    assert "<--no-compile>" in lock
    assert bytecode.startswith("<-m><compileall>") and bytecode.endswith(f"<{checkout.root}/.venv/lib>")
    assert f"<--editable><{checkout.root}>" in package
    assert "--no-deps" in package
    assert "index-url" not in done.stderr + lock + package


def test_changed_lock_and_a_moved_folder_are_installed_again(checkout: Checkout) -> None:
    checkout.run("run_all.sh")
    with (checkout.root / "requirements.lock").open("a") as file:
        file.write("another==1.0\n")
    checkout.run("run_all.sh")
    assert sum("<install>" in call for call in checkout.calls()) == 2
    assert not any("<venv>" in call for call in checkout.calls())
    checkout.root = checkout.root.rename(checkout.folder / "moved here")
    checkout.run("run_all.sh")
    assert f"<--editable><{checkout.root}>" in checkout.called("--editable")


def test_failed_install_ends_the_script_and_is_tried_again(checkout: Checkout) -> None:
    done = checkout.run("run_all.sh", STUB_PIP="7")
    assert done.returncode == 7
    assert not any("suite" in call for call in checkout.calls())
    checkout.run("run_all.sh")
    assert sum("<install>" in call for call in checkout.calls()) == 2


@pytest.mark.parametrize("script", ["run_all.sh", "run_tests.sh"])
def test_no_python_to_use_is_a_clear_error(checkout: Checkout, script: str) -> None:
    tools = checkout.folder / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "cat", "cmp", "rm"):
        (tools / name).symlink_to(shutil.which(name) or "")
    (tools / "python3").symlink_to(checkout.stub)
    done = checkout.run(script, PATH=str(tools), PYTHON="", STUB_UNUSABLE="1")
    assert done.returncode == 2
    assert "3.11 or newer" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (checkout.root / ".venv").exists()


H200 = {"STUB_GPU": "NVIDIA H200"}
TORCHBENCH = "--with-torchbench=FOLDER"
"""Stands for the option and a checkout of TorchBench."""


def run_all(checkout: Checkout, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(checkout, "run_all.sh", *arguments, **variables)


def run(checkout: Checkout, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    folder = checkout.folder / "torch bench"
    if TORCHBENCH in arguments and not folder.exists():
        (folder / "torchbenchmark").mkdir(parents=True)
        (folder / "torchbenchmark" / "__init__.py").write_text("")
    words = {TORCHBENCH: ("--with-torchbench", str(folder))}
    return checkout.run(script, *(one for word in arguments for one in words.get(word, (word,))), **variables)


RUN, SECOND = "<suite><run><--resume><newest>", "<--set><torchbench>"


@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        ("", f"{RUN}<--report>", None),
        ("--all --quick", "<--report><--set><all><--quick>", None),
        # With TorchBench there is a second run, of all its models; of an option that is given twice, the last counts.
        (f"{TORCHBENCH} --samples 9", f"{RUN}<--report><--samples><9>", SECOND),
        (f"{TORCHBENCH} --set all", "<--report><--set><all>", f"<--set><all>{SECOND}"),
        # Workloads that are named are all that is measured. The value of an option is no workload.
        (f"{TORCHBENCH} torchbench:alexnet --quick", "<--report><torchbench:alexnet><--quick>", None),
        (f"{TORCHBENCH} --quick --out=here --tag mine EOS", "<--quick><--out=here><--tag><mine><EOS>", None),
        (f"{TORCHBENCH} --quick --tag EOS", "<--quick><--tag><EOS>", SECOND),
    ],
)
def test_run_all_starts_these_runs(checkout: Checkout, arguments: str, first: str, second: str | None) -> None:
    done = run_all(checkout, *arguments.split(), **H200)
    assert done.returncode == 0, done.stderr
    assert "measuring on NVIDIA H200" in done.stderr
    runs = [call for call in checkout.calls() if "<suite><run>" in call]
    assert all(call.startswith(f"<-P><{checkout.root}/encore/own_packages.py>{RUN}") for call in runs)
    ends = [first] if second is None else [first, second]
    assert [call.endswith(end) for call, end in zip(runs, ends, strict=True)] == [True] * len(ends)
    if TORCHBENCH in arguments.split():
        paths = (checkout.folder / "calls.paths").read_text().splitlines()
        assert paths[-1].split(os.pathsep)[0] == str(checkout.folder / "torch bench")


def test_script_knows_which_options_of_a_run_take_no_value() -> None:
    """Otherwise it would take the word after an option for its value, or a value for a workload."""
    (text,) = re.findall(r'^flags=" (.*) "$', (REPOSITORY / "run_all.sh").read_text(), re.MULTILINE)
    command: Any = typer.main.get_command(app)
    options = [each for each in command.commands["run"].params if each.param_type_name == "option"]
    assert {*text.split()} == {"--help", *(name for each in options if each.is_flag for name in each.opts)}
    assert all(name.startswith("--") for each in options for name in each.opts), "a value may stand in the word of -o"


LATE = "before all options and workloads"
NOWHERE = "no checkout of https://github.com/pytorch/benchmark"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        *((f"run_all.sh {TORCHBENCH} --quick {option}{value}", 2, f"two runs, and {option} fits one only")
          for option in ("--out", "--budget") for value in (" 2", "=2")),
        (f"run_all.sh --quick {TORCHBENCH}", 2, LATE),
        ("run_all.sh --with-torchbench", 2, NOWHERE),
        *((f"{script} --help", 0, f"Usage: ./{script}") for script in ("run_all.sh", "run_tests.sh")),
    ],
)  # fmt: skip
def test_help_and_refusals_start_nothing(checkout: Checkout, command: str, code: int, words: str) -> None:
    script, *arguments = command.split()
    done = run(checkout, script, *arguments, **H200)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert not checkout.calls()


@pytest.mark.parametrize(
    ("variables", "arguments", "code"),
    [
        *((H200 | {"STUB_RUN": status}, "", int(status)) for status in ("1", "2", "130")),
        *((H200 | {"STUB_RUN": first, "STUB_TORCHBENCH": second}, TORCHBENCH, whole)
          for first, second, whole in (("0", "1", 1), ("1", "0", 1), ("1", "130", 130), ("2", "0", 2))),
        ({"STUB_EXPLAIN": "1"}, "--all", 1),
        ({"STUB_ENV": "1"}, "", 1),  # a broken installation, and not a missing GPU
    ],
)  # fmt: skip
def test_run_all_combines_exit_codes(checkout: Checkout, variables: dict[str, str], arguments: str, code: int) -> None:
    assert run_all(checkout, *arguments.split(), **variables).returncode == code
    calls = checkout.calls()
    second = "STUB_TORCHBENCH" in variables and code != 2
    assert any("<--set><torchbench>" in call for call in calls) == second
    assert "STUB_EXPLAIN" not in variables or "<--set><grace>" in calls[-1]
    assert "STUB_ENV" not in variables or not any("<explain>" in call for call in calls)


def test_run_all_without_gpu_reports_then_explains_four(checkout: Checkout) -> None:
    for arguments, named in (("--quick", "--quick"), (f"{TORCHBENCH} --quick", "--with-torchbench --quick")):
        done = run_all(checkout, *arguments.split())
        assert done.returncode == 0
        assert (
            "encore: no NVIDIA GPU: no driver: showing the recorded runs, analysing workloads"
            f" (options have no effect: {named})"
        ) in done.stderr.splitlines()
        report, explain = checkout.calls()[-2:]
        assert report.endswith(f"<suite><report><--recorded><--out><{checkout.root}/results/report>")
        assert explain.endswith("<suite><explain><EOS><MMC><XLNET-I><ST>")
        assert not any("<run>" in call for call in checkout.calls())


def test_all_checks_run_and_pytest_is_last(checkout: Checkout) -> None:
    done = checkout.run("run_tests.sh")
    assert done.returncode == 0
    checks = checkout.calls()[4:]
    checks.remove("<-m><mypy>")  # it runs at the same time as linters and the first tests, so its place is not fixed
    for call, words in zip(
        checks,
        ("<ruff><check>", "<ruff><format>", "importlinter", "compileall", "<pytest>", "<pytest>", "<pytest>"),
        strict=True,
    ):
        assert words in call
    compiled = set(checks[3].strip("<>").split("><"))
    assert {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} <= compiled, "all packages of Encore's own"
    assert all("<-m><not gpu>" in call for call in checks[-3:])
    apart = re.findall(r"<(tests/[\w/]+\.py)>", checks[-3] + checks[-2])
    assert apart, "files that come first, in their own processes"
    assert re.findall(r"<--ignore=(tests/[\w/]+\.py)>", checks[-1]) == apart, "no file is run twice, or left out"
    assert done.stdout.splitlines()[-1] == "=== 3 passed in 0.01s ==="


@pytest.mark.parametrize(("check", "variable"), [("ruff check", "STUB_RUFF"), ("mypy", "STUB_MYPY")])
def test_failed_check_fails_the_whole_although_the_tests_pass(checkout: Checkout, check: str, variable: str) -> None:
    done = checkout.run("run_tests.sh", **{variable: "1"})
    assert done.returncode == 1
    assert f"failed so far: {check}" in done.stderr
    assert "a wrong type" in done.stderr
    assert done.stdout.splitlines()[-1] == "=== 3 passed in 0.01s ==="


def test_arguments_are_passed_to_pytest_only(checkout: Checkout) -> None:
    checkout.run("run_tests.sh", "tests/suite/results/test_store.py", "-k", "cut line")
    assert checkout.calls()[-1] == "<-m><pytest><tests/suite/results/test_store.py><-k><cut line>"
    assert not any("ruff" in call for call in checkout.calls())


def test_gpu_tests_need_a_gpu(checkout: Checkout) -> None:
    done = checkout.run("run_tests.sh", "--gpu")
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr
    assert not any("<pytest>" in call for call in checkout.calls())


TOGETHER = "<-m><pytest><-m><gpu and not alone>"
ALONE = "<-m><pytest><-m><gpu and alone>"


def test_gpu_tests_run_together_then_alone(checkout: Checkout) -> None:
    for name in ("found", "other"):
        (checkout.root / "tests" / f"test_{name}.py").write_text("@pytest.mark.gpu\n" if name == "found" else "")
    together = f"{TOGETHER}<--numprocesses><6><--dist><load><--maxschedchunk><1><-x>"
    for given in ((), ("tests/test_other.py",), ("tests/test_other.py::test_it",)):
        assert checkout.run("run_tests.sh", "--gpu", "-x", *given, STUB_GPU="NVIDIA H200").returncode == 0
        files = "".join(f"<{name}>" for name in given or ("tests/test_found.py",))
        assert checkout.calls()[-2:] == [f"{together}{files}", f"{ALONE}<-x>{files}"]


@pytest.mark.parametrize(
    ("together", "alone", "verdict"),
    [
        (0, 0, 0),
        (3, 1, 3),
        (5, 0, 0),  # no test matched in one part,
        (5, 1, 1),
        (5, 5, 5),  # or in any
    ],
)
def test_both_parts_of_the_gpu_tests_have_one_verdict(
    checkout: Checkout, together: int, alone: int, verdict: int
) -> None:
    done = checkout.run(
        "run_tests.sh", "--gpu", STUB_GPU="NVIDIA H200", STUB_PYTEST=str(together), STUB_ALONE=str(alone)
    )
    assert done.returncode == verdict
    assert f"together: exit code {together}, alone: exit code {alone}" in done.stdout


@pytest.mark.parametrize(("locked", "newest", "code"), [(5, 0, 5), (0, 3, 3), (5, 3, 5), (0, 0, 0)])
def test_ci_runs_both_rows(checkout: Checkout, locked: int, newest: int, code: int) -> None:
    row = checkout.root / "tests" / "versions.sh"
    row.write_text(f"#!/usr/bin/env bash\necho row $1\nexit {newest}\n")
    row.chmod(0o755)
    done = checkout.run(".ci/run", STUB_PYTEST=str(locked))
    assert done.returncode == code
    assert "row newest" in done.stderr and "row" not in done.stdout
    assert "<not gpu>" in checkout.calls()[-1]
