"""The command line: help, wrong use, exit codes, and reports of runs."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.fake_command import CPU, Fake, made_run, run_command, workloads_of
from fixtures.synthetic_results import environment, write_run
from typer.testing import CliRunner

from optimizations import torch_internals
from suite.cli.main import app
from suite.measure.environment import collect
from suite.measure.modes import MODES
from suite.results import store
from suite.results.errors import WrongUse
from suite.settings import parse_duration

COMMANDS = ("list", "run", "report", "compare", "record", "history", "explain", "env")


def encore(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(arguments, {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"})


def test_help_is_fast_and_imports_no_torch() -> None:
    code = """if True:
        import sys
        from suite.cli.main import main
        try:
            main(["--help"])
        finally:
            heavy = {"torch", "pandas", "matplotlib", "transformers"} & sys.modules.keys()
            assert not heavy, heavy
    """
    spent = [(processor_s(code), processor_s("import numpy")) for _ in range(3)]
    # 2 to 3 times as long on several machines, idle and busy; 0.4 s on one where PyTorch's import takes 2 s.
    assert min(ours for ours, _ in spent) < 6 * min(unit for _, unit in spent), spent


def processor_s(code: str) -> float:
    """Return the time of a process that runs it. Other work on the machine slows it down but does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_dry_run_shows_modes_and_times_of_a_pattern(tmp_path: Path) -> None:
    done = encore("run", "--filter", "xlnet*", "--dry-run", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    _, *planned, total = (line.split() for line in done.stdout.splitlines())
    assert [words[0] for words in planned] == ["XLNET-I", "XLNET-T"] and total[0] == "all"
    assert all("encore" in words for words in planned)
    whole = parse_duration(total[-1], "all")
    assert sum(parse_duration(words[-1], words[0]) for words in planned) == pytest.approx(whole, abs=2)
    assert not (tmp_path / "run").exists()


def test_dry_run_of_a_program_does_not_import_it() -> None:
    done = encore("run", "no_such_module:make", "--quick", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "eager, compile, graph, encore" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = encore(command, "--help")
    assert done.returncode == 0
    assert f"Example: encore {command}" in done.stdout


def test_version_equals_the_distributions() -> None:
    from importlib.metadata import version

    command = [sys.executable, "-m", "suite", "--version"]  # not from the server: the module starts as it is
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"encore {version('encore')}\n"


def test_list_has_all_that_is_registered() -> None:
    from models import registry

    listed = encore("list").stdout
    first = {line.split()[0] for line in listed.splitlines() if line.strip()}
    assert {*registry.workloads(), *MODES} <= first
    assert "DALLE2 (batch 2), DECODER (batch 4), ST (batch 1), VM (batch 1), XLNET-I (batch 128)" in listed
    assert "XLNET-T" not in encore("list", "--modes").stdout
    assert "unpartitioned" not in encore("list", "--workloads").stdout


def test_env_shows_the_record_of_a_run() -> None:
    record = collect("none", (), {})
    shown = json.loads(encore("env").stdout)
    assert (shown["torch"], shown["code"]) == (record.torch, record.code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "XLNT-I"), ("'XLNT-I'", "XLNET-I")),
        (("run", "--modes", "eager,grpah"), ("'grpah'", "graph")),
        (("run", "--sampels", "3"), ("--sampels", "--samples")),
        (("rnu",), ("rnu", "run")),
        (("run", "--samples", "0"), ("--samples", "1")),
        (("run", "--samples", "many"), ("--samples", "integer")),
        (("run", "--processes", "0"), ("--processes", "1")),
        (("run", "--device", "cpu", "--measure-s", "nan"), ("--measure-s", "greater than or equal to 0")),
        (("run", "--device", "gpu"), ("--device", "cuda")),
        (("run", "--budget", "soon"), ("--budget 'soon'", "9m")),
        (("run", "--timeout", "0"), ("--timeout '0'", "1h30m")),
        (("run", "EOS", "--device", "cpu", "--budget", ""), ("--budget ''", "names nothing")),
        (("run", "--device", "cpu", "--set", ""), ("--set ''", "names nothing")),
        (("run", "--device", "cpu", "--modes", "graph"), ("graph", "--device cuda")),
        (("run", "--variant", "curent"), ("'curent'", "published")),
        (("run", "--set", "graze"), ("'graze'", "grace", "pygraph", "all")),
        (("run", "EOS", "--set", "all"), ("--set all", "EOS")),
        (("explain", "--set", "graze"), ("'graze'", "grace")),
        (("explain", "EOS", "--set", "grace"), ("name what to explain", "--set")),
        (("run", "--resume", "no-such-run"), ("'no-such-run'", "results/runs")),
        (("run", "--resume", "x", "--out", "y"), ("--resume", "--out")),
        (("run", "--retry-failed"), ("--retry-failed", "--resume")),
        (("report", "no-such-run"), ("'no-such-run'", "results/recorded")),
        (("report", "--recorded", "a", "b"), ("--recorded", "'a', 'b'")),
        (("explain", "NO-SUCH"), ("NO-SUCH",)),
        (("run", "--filter", "zz*"), ("'zz*'", "XLNET-I", "'XLNET*'")),
        (("run", "a-b:make"), ("'a-b:make'", "package.module:make")),
        (("run", "models.mine:make"), ("'models'", "another name")),
        (("run", "mine:make", "--size", "tiny"), ("mine:make", "leave them out")),
        (("record", "nowhere"), ("unknown run",)),
        (("history", "--figure", "/"), ("it is a folder",)),
        (("history", "--figure", "", "x"), ("--figure ''", "names nothing; give it a value")),
        *(
            (("run", "EOS", *out), ("--out ''", "names nothing; give it a value"))
            for out in (("--out", ""), ("--out=",))
        ),
        (("run", "--device", "cpu", "--modes", ","), ("--modes names no mode",)),
        (("run", "--device", "cpu", "--seed", "-1"), ("--seed -1",)),
        (("run", "MMC", "EOS", "--variant", "current"), ("EOS has published",)),
        (("run", "EOS", "--variant", "published,current"), ("unknown variant 'current': EOS has published",)),
        (("run", "--set", "torchbench"), ("not installed", "git clone", "--with-torchbench PATH")),
        (("run", "--set", "torchbenchh"), ("unknown set", " torchbench")),
        (("run", "torchbench:alexnet"), ("needs TorchBench",)),
        *((("run", "EOS", name), (f"choose it by --set {name}",)) for name in ("grace", "Generation", "torchbench")),
        *((("run", "XLNET-I", "--tp", tp), (f"--tp '{tp}'",)) for tp in ("", "0", "two", "1,-2", "65", "²")),
        (("run", "EOS", "--tp", "2"), ("EOS cannot be split", "XLNET-I")),
        (("run", "XLNET-I@tp2", "--tp", "2"), ("leave that or --tp out",)),
        (("run", "--set", "grace", "--tp", "2"), ("leave --set out",)),
        (("explain", "xlnet-i@tp2"), ("XLNET-I@tp2 is split over 2 GPUs", "XLNET-I@tp1")),
        (("explain", "MMX"), ("unknown workload 'MMX'", "MMC")),
        (("explain", "MMC", "--variant", "newest"), ("unknown variant 'newest'", "published, current")),
        *(
            ((command, name), ("with its function: my_model:make\n",))
            for command in ("run", "explain")
            for name in ("my_model", "my_model.py")
        ),
        *(((command, "x:"), ("'x:' is not a module:callable",)) for command in ("run", "explain")),
        (("explain", "mine:make", "--variant", "published"), ("mine:make", "leave them out")),
        (("explain", "MMC", "mine:make", "--size", "tiny"), ("mine:make", "leave them out")),
    ],
)
def test_wrong_use_names_the_error_and_the_allowed_values(arguments: Sequence[str], words: Sequence[str]) -> None:
    done = encore(*arguments)
    assert done.returncode == 2, done
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_run_defaults_equal_the_settings() -> None:
    """Return what --help shows, and a run's default settings."""
    from typer.main import get_command

    from suite.cli.main import app
    from suite.settings import FULL, RunSettings

    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    shown = {option.name: option.default for option in command.params if option.name in RunSettings.model_fields}
    assert len(shown) >= 8
    assert shown == {name: getattr(FULL.settings, name) for name in shown}


def test_gpu_command_without_a_gpu_is_one_clear_line(tmp_path: Path) -> None:
    done = encore("run", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no NVIDIA GPU" in done.stderr
    assert "encore explain --set all" in done.stderr
    assert not (tmp_path / "run").exists()
    assert encore("env", "--require-gpu").returncode == 2


LONG = "n" * 300


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("report", LONG), "nnn.*: File name too long; give a shorter name"),
        (("report", ""), "'' names nothing"),
        (("report", "a file"), "unknown run 'a file'; this is a file, give the folder"),
        (("report", "folders"), "folders/cells.jsonl: Is a directory; give a file"),
        (("compare", LONG, "named"), "nnn.*File name too long"),
        (("compare", "folders", "named"), "folders/cells.jsonl: Is a directory; give a file"),
        (("run", "EOS", *CPU, "--out", LONG), "nnn.*File name too long"),
        (("run", "--resume", LONG), "nnn.*File name too long"),
        (
            ("report", "--check-fresh", "--readme", "none.md"),
            "none.md: No such file or directory; give one",
        ),
        (("run", "--resume", "newest", *CPU, "--out", LONG), "nnn.*File name too long"),
    ],
)
def test_unreadable_file_is_wrong_use(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], words: str
) -> None:
    monkeypatch.chdir(fake.folder)
    Path("a file").write_text("{}")
    named, folders = made_run(Path("named"), 1, "EOS"), made_run(Path("folders"), 2, "EOS")
    (folders / store.CELLS).unlink()
    (folders / store.CELLS).mkdir()
    done = fake(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(words, " ".join(done.stderr.split())), done.stderr
    assert not (named / "report").exists()


def test_unwritable_folder_is_an_error_without_a_traceback(fake: Fake) -> None:
    (fake.folder / "file").write_text("")
    run = made_run(fake.runs / "one", 1, "EOS")
    below = str(fake.folder / "file" / "run")
    for command in (
        ("run", "EOS", *CPU, "--out", below),
        ("report", "one", "--out", below),
        ("report", "one", "--out", str(fake.folder / "file")),
        ("explain", "any:make", "--out", below),
    ):
        done = fake(*command)
        assert done.returncode == 2, (command, done.stderr)
        assert "/file" in done.stderr and "; a file is in the way; give a folder" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (run / "report").exists()


def test_tables_are_as_wide_as_they_are_in_a_pipe() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    code = "from suite.cli.main import main; main(['list'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["graph-unpartitioned"]]
    assert MODES["graph-unpartitioned"].summary in row
    assert "…" not in done.stdout
    assert all(len(line) < 1000 for line in done.stdout.splitlines()), "and not filled up with blanks"


def test_run_is_reported_into_its_own_folder(fake: Fake) -> None:
    figures = fake.folder / "figures"
    done = fake("run", "EOS", *CPU)
    run = fake.only_run()
    done = fake("report", run.name, "--figures", str(figures))
    assert done.returncode == 0, done.stderr
    assert (run / "report" / "report.html").is_file() and f"{run / 'report' / 'report.html'}: " in done.stdout
    assert "SMOKE RUN on the CPU" in done.stderr


def test_report_of_a_run_without_rows_is_no_success(fake: Fake) -> None:
    settings = {"workloads": ["EOS"], "modes": ["compile", "graph"]}
    empty = write_run(fake.runs / "empty", [], environment(run_id="empty", settings=settings))
    done = fake("report", "empty")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "run empty has no row" in done.stderr and f"`encore run --resume {empty}`" in done.stderr
    assert "not run" in (empty / "report" / "tables" / "failed.csv").read_text(), "what is missing is shown"
    alone = fake("report", "empty", "--only", "fig4", "--out", str(fake.folder / "out"))
    assert alone.returncode == 2 and "run empty has no row" in alone.stderr
    assert not (fake.folder / "out").exists()
    made_run(fake.runs / "named", 2, "EOS")
    both = fake("report", "empty", "named", "--out", str(fake.folder / "out"))
    assert both.returncode == 0 and "run empty has no row" in both.stderr, both.stderr
    assert fake("run", "EOS", *CPU, "--budget", "1s", "--report").returncode == 0, "the run is as it was to be"


def test_recorded_means_all_recorded_runs(fake: Fake) -> None:
    made_run(fake.runs / "newest", 3, "MMC")
    command = ("report", "--recorded", "--out", str(fake.folder / "out"))
    nothing = fake(*command)
    assert (nothing.returncode, nothing.stdout) == (0, "") and "nothing is recorded" in nothing.stderr
    for day, workload in ((1, "EOS"), (2, "ST")):
        made_run(fake.runs / "recorded" / workload.lower(), day, workload)
    done = fake(*command)
    assert workloads_of(fake.folder / "out") == {("EOS", "run eos"), ("ST", "run st")}, done.stderr


def test_run_refuses_an_unknown_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "SUPPORTED", ("1.0", "2.0"))
    refused = CliRunner().invoke(app, ["run", "EOS"]).exception
    assert isinstance(refused, WrongUse)
    assert "Encore knows PyTorch 1.0 up to but not including 2.0" in str(refused)
