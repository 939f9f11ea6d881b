"""The command line as a newcomer meets it: help, wrong use, exit codes, and runs from start over Ctrl-C to resume."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from fixtures.command_server import CommandServer
from fixtures.fake_runs import SETTINGS, default_signals, fake_worker, living, recorded_pids
from fixtures.synthetic_results import cell, environment, explanation, write_explanations, write_run
from typer.testing import CliRunner

from optimizations import torch_internals
from suite.cli.choices import PATHS, _functions, path_options, refuse_empty_paths
from suite.cli.main import app
from suite.measure.checkout import code_id, shown_code
from suite.measure.modes import MODES
from suite.results import store
from suite.results.errors import WrongUse
from suite.results.run_writer import RunWriter
from suite.results.schema import Shortage, Status
from suite.results.store import read_run
from suite.run.launch import _earlier_rows
from suite.settings import RunPlan

FAKE_ENCORE = Path(__file__).parents[2] / "support" / "fixtures" / "fake_encore.py"
COMMANDS = ("list", "run", "merge", "report", "compare", "record", "history", "explain", "env")
CPU = ("--device", "cpu", "--size", "tiny", "--blocks", "5", "--samples", "10", "--measure-s", "0")


COMMANDS_STARTED = CommandServer()


@pytest.fixture(scope="module", autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    COMMANDS_STARTED.stop()


def encore(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command, as `python -m suite`."""
    return COMMANDS_STARTED.run("suite", arguments, {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"})


class Fake:
    """`encore` with fake workers in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"

    def command(self, arguments: Sequence[str], behave: Mapping[str, str] | None) -> list[str]:
        worker = json.dumps(fake_worker(behave, self.folder))
        return [str(FAKE_ENCORE), worker, str(self.runs), *arguments]

    def __call__(self, *arguments: str, behave: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        program, *told = self.command(arguments, behave)
        return COMMANDS_STARTED.run(program, told)

    def start(self, *arguments: str, behave: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *self.command(arguments, behave)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=default_signals,
        )

    def only_run(self) -> Path:
        (run,) = store.list_runs(self.runs)
        return run


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_help_imports_no_torch_and_answers_at_once() -> None:
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
    """Of a process that runs it. Other work on the machine does not count, but slows it down."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_dry_run_shows_modes_and_times_of_a_pattern(tmp_path: Path) -> None:
    done = encore("run", "--filter", "xlnet*", "--dry-run", "--json", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert [each["workload"] for each in planned["workloads"]] == ["XLNET-I", "XLNET-T"]
    assert all("encore" in each["modes"] for each in planned["workloads"])
    assert planned["expected_s"] == pytest.approx(sum(each["expected_s"] for each in planned["workloads"]))
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


def test_json_is_offered_by_every_command() -> None:
    for command in COMMANDS:
        assert "--json" in encore(command, "--help").stdout


def test_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    command = [sys.executable, "-m", "suite", "--version"]  # not from the server: the module starts as it is
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"encore {version('encore')}\n"


def test_list_shows_workloads_and_modes() -> None:
    shown = encore("list").stdout
    assert "XLNET-T" in shown
    assert "graph-unpartitioned" in shown
    assert "XLNET-T" not in encore("list", "--modes").stdout
    assert "unpartitioned" not in encore("list", "--workloads").stdout


def test_list_as_json_has_all_that_is_registered() -> None:
    from models import registry

    listed = json.loads(encore("list", "--json").stdout)
    assert [workload["acronym"] for workload in listed["workloads"]] == list(registry.workloads())
    batches = {workload["acronym"]: workload["tp_batch"] for workload in listed["workloads"] if workload["tp_batch"]}
    assert batches == {"DALLE2": 2, "DECODER": 4, "ST": 1, "VM": 1, "XLNET-I": 128}
    assert [mode["name"] for mode in listed["modes"]] == list(MODES)
    assert list(json.loads(encore("list", "--modes", "--json").stdout)) == ["modes"]


def test_env_as_json_is_the_record_of_a_run() -> None:
    from suite.results.schema import Environment

    record = Environment.model_validate_json(encore("env", "--json").stdout)
    assert record.gpu is None
    shown = encore("env").stdout
    assert record.torch in shown and (shown_code(record.code) or "code  ") in shown


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
        (("run", "--budget", "9m", "--budget-used", "0"), ("--budget-used '0'", "9m")),
        (("run", "--budget-used", "9m"), ("--budget-used", "needs --budget")),
        (("run", "--timeout", "0"), ("--timeout '0'", "1h30m")),
        (("run", "--shard", "3/2"), ("--shard '3/2'", "2/3")),
        (("run", "EOS", "--device", "cpu", "--shard", ""), ("--shard ''", "2/3")),
        (("run", "EOS", "--device", "cpu", "--shard", f"1/{'9' * 5000}"), ("--shard", "2/3")),
        (("run", "EOS", "--device", "cpu", "--budget", ""), ("--budget ''", "9m")),
        (("run", "--device", "cpu", "--set", ""), ("unknown set ''", "grace")),
        (("run", "--device", "cpu", "--modes", "graph"), ("graph", "--device cuda")),
        (("run", "--variant", "curent"), ("'curent'", "published")),
        (("run", "--set", "graze"), ("'graze'", "grace", "pygraph", "all")),
        (("run", "EOS", "--set", "all"), ("--set all", "EOS")),
        (("explain", "--set", "graze"), ("'graze'", "grace")),
        (("explain", "EOS", "--set", "grace"), ("--set", "--all")),
        (("run", "--device", "cpu", "--tag", "a/b"), ("--tag 'a/b'", "letters")),
        (("run", "--resume", "no-such-run"), ("'no-such-run'", "results/runs")),
        (("run", "--resume", "x", "--out", "y"), ("--resume", "--out")),
        (("run", "--retry-failed"), ("--retry-failed", "--resume")),
        (("report", "no-such-run"), ("'no-such-run'", "results/recorded")),
        (("report", "--recorded", "a", "b"), ("--recorded", "'a', 'b'")),
        (("merge", "no-such-run", "other", "--out", "x"), ("'no-such-run'",)),
        (("explain", "NO-SUCH"), ("NO-SUCH",)),
        (("run", "--filter", "zz*"), ("'zz*'", "XLNET-I", "'XLNET*'")),
        (("run", "a-b:make"), ("'a-b:make'", "package.module:make")),
        (("run", "models.mine:make"), ("'models'", "another name")),
        (("run", "mine:make", "--size", "tiny"), ("mine:make", "leave them out")),
    ],
)
def test_wrong_use_names_what_is_wrong_and_what_is_right(arguments: Sequence[str], words: Sequence[str]) -> None:
    done = encore(*arguments)
    assert done.returncode == 2, done
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_defaults_of_a_run_are_those_of_the_settings() -> None:
    """What --help shows, and what a run records if nothing is given."""
    from typer.main import get_command

    from suite.cli.main import app
    from suite.settings import FULL, RunSettings

    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    shown = {option.name: option.default for option in command.params if option.name in RunSettings.model_fields}
    assert len(shown) >= 8
    assert shown == {name: getattr(FULL.settings, name) for name in shown}


def test_a_gpu_command_without_a_gpu_is_one_clear_line(tmp_path: Path) -> None:
    done = encore("run", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no NVIDIA GPU" in done.stderr
    assert "encore explain --all" in done.stderr
    assert not (tmp_path / "run").exists()
    assert encore("env", "--require-gpu").returncode == 2


def test_a_run_leaves_rows_logs_and_a_summary(fake: Fake) -> None:
    done = fake("run", "eos", "ST", *CPU, "--tag", "first", "--json")
    assert done.returncode == 0, done.stderr
    run = fake.only_run()
    assert re.fullmatch(r"\d{8}-\d{6}-cpu-first", run.name)
    recorded = read_run(run)
    assert [(c.workload, c.mode) for c in recorded.cells] == [
        ("EOS", "eager"),
        ("EOS", "compile"),
        ("ST", "eager"),
        ("ST", "compile"),
    ]
    assert {c.device for c in recorded.cells} == {"cpu"}
    assert recorded.environment.settings["samples"] == 10
    assert recorded.environment.command_line[:3] == ["encore", "run", "eos"]
    assert recorded.missing() == []
    summary = json.loads(done.stdout)
    assert (summary["cells"], summary["new_cells"], summary["failed"], summary["not_started"]) == (4, 4, [], [])
    assert summary["run"].endswith(run.name)
    assert "ST compile: warm-up" in done.stderr


@pytest.mark.parametrize(("options", "chosen"), [((), "grace"), (("--set", "pygraph"), "pygraph")])
def test_a_run_takes_a_set_and_without_names_the_default_one(fake: Fake, options: Sequence[str], chosen: str) -> None:
    from models import registry

    members = registry.find_set(chosen)
    assert members != list(registry.workloads().values())
    done = fake("run", *options, *CPU, "--modes", "compile", "--shard", f"{len(members)}/{len(members)}")
    assert done.returncode == 0, done.stderr
    assert read_run(fake.only_run()).environment.settings["workloads"] == [
        max(workload.acronym for workload in members if workload.task == "inference")  # training takes longer in tiny
    ]


def test_rows_tell_what_other_programs_did_meanwhile(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    for row in read_run(fake.only_run()).cells:
        assert row.others is not None and row.others.gpus_at_work is None, "a run on the CPU uses none"
        assert row.others.cpu_cores is None or row.others.cpu_cores >= 0


def test_failed_cells_exit_1_and_are_retried_when_asked(fake: Fake) -> None:
    first = fake("run", "EOS", "ST", *CPU, behave={"EOS/compile": "exit:9"})
    assert first.returncode == 1
    assert "EOS compile: crash" in first.stderr
    run = fake.only_run()
    assert f"--resume {run} --retry-failed" in first.stderr
    again = fake("run", "--resume", run.name)
    assert again.returncode == 1, "the run still has a failed cell"
    assert "nothing to run" in again.stderr
    retried = fake("run", "--resume", str(run), "--retry-failed")
    assert retried.returncode == 0, retried.stderr
    cells = {(c.workload, c.mode): c for c in read_run(run).cells}
    assert len(cells) == 4
    assert cells["EOS", "compile"].status is Status.PASS
    assert json.loads((run / store.RETRIED).read_text())["status"] == "crash"


def test_rows_short_of_memory_are_not_retried_with_a_message(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    run = fake.only_run()
    short = Shortage(mode="compile", process=1, phase="prepare", error="out of memory")
    rows = [
        row.model_copy(update={"shortages": [short]} if row.mode == "compile" else {"status": Status.CRASH})
        for row in read_run(run).cells
    ]
    (run / store.CELLS).write_text(store.lines_of(rows))
    plain = fake("run", "--resume", str(run))
    assert "memory was short" not in plain.stderr
    done = fake("run", "--resume", str(run), "--retry-failed")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "memory was short for EOS compile: these rows have passed and stay as they are" in said
    assert f"take their lines out of {run}/{store.CELLS}" in said
    kept = {cell.mode: cell for cell in read_run(run).cells}
    assert kept["compile"].shortages == [short] and kept["eager"].status is Status.PASS


def test_a_resumed_run_can_take_more_modes_and_workloads(fake: Fake) -> None:
    fake("run", "EOS", *CPU, "--modes", "compile")
    run = fake.only_run()
    done = fake("run", "--resume", run.name, "EOS", "ST", "--modes", "eager,compile")
    assert done.returncode == 0, done.stderr
    cells = {(c.workload, c.mode): c for c in read_run(run).cells}
    assert len(cells) == 4
    assert list(cells["EOS", "eager"].baseline_blocks) == ["compile"]


def test_resume_command_names_what_the_run_does_not(fake: Fake) -> None:
    fake("run", "EOS", *CPU, "--modes", "compile")
    run = fake.only_run()
    failing = {"ST/eager": "exit:9"}
    done = fake("run", "--resume", str(run), "EOS", "ST", "--modes", "eager,compile", behave=failing)
    command = f"--resume {run} EOS ST --modes eager,compile --retry-failed"
    assert done.returncode == 1 and command in done.stderr, done.stderr
    again = fake("run", *command.split())
    assert again.returncode == 0, again.stderr
    assert all(cell.status is Status.PASS for cell in read_run(run).cells)


def test_a_folder_may_have_brackets_and_spaces_in_its_name(fake: Fake) -> None:
    out = fake.folder / "a [red] [" / "b] run"
    done = fake("run", "EOS", *CPU, "--modes", "compile", "--out", str(out), behave={"EOS/compile": "exit:9"})
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"{out}: 1 cells to measure" in done.stderr
    assert f"encore run --resume '{out}' --retry-failed" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--samples", "20"), "--samples: 10 there, 20 here"), (("--seed", "5"), "--seed: 1337 there, 5 here")],
)
def test_a_run_is_not_resumed_with_other_settings(fake: Fake, options: Sequence[str], words: str) -> None:
    fake("run", "EOS", *CPU)
    done = fake("run", "--resume", fake.only_run().name, *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert "start a new run" in done.stderr
    assert fake("run", "--resume", fake.only_run().name, "--samples", "10").returncode == 0


def test_a_run_is_not_resumed_in_another_environment(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    path = fake.only_run() / store.ENVIRONMENT
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"torch": "2.99", "git_commit": "0" * 40, "code": None}))
    done = fake("run", "--resume", path.parent.name, "ST")
    assert done.returncode == 2
    assert "torch: 2.99 there" in done.stderr
    assert "git_commit: 000" in done.stderr
    assert len(read_run(path.parent).cells) == 2


def test_run_is_resumed_only_at_the_same_code(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    path = fake.only_run() / store.ENVIRONMENT
    fields = json.loads(path.read_text())
    assert fields["code"] == code_id(store.REPOSITORY)
    if fields["code"] is None:
        pytest.skip("no git checkout")
    path.write_text(json.dumps(fields | {"git_commit": "0" * 40, "git_dirty": not fields["git_dirty"]}))
    done = fake("run", "--resume", path.parent.name, "ST")
    assert done.returncode == 0, done.stderr
    assert len(read_run(path.parent).cells) == 4
    path.write_text(json.dumps(fields | {"code": "0" * 64}))
    done = fake("run", "--resume", path.parent.name, "EOS")
    assert done.returncode == 2
    assert "code: 000000000000 there" in done.stderr


def test_newest_reuses_what_fits_and_says_so(fake: Fake) -> None:
    ask = ("run", "EOS", *CPU, "--resume", "newest")
    first = fake(*ask)
    assert first.returncode == 0
    run = fake.only_run()
    again = fake(*ask)
    assert again.returncode == 0
    assert f"going on with {run}" in again.stderr
    assert "nothing to run" in again.stderr
    fake.only_run()
    time.sleep(1.1)  # run names have seconds
    other = fake("run", "EOS", *CPU, "--samples", "20", "--resume", "newest")
    assert other.returncode == 0
    assert "--samples: 10 there, 20 here" in other.stderr
    assert len(store.list_runs(fake.runs)) == 2
    assert "nothing to run" in fake(*ask).stderr, "an older run that fits is found behind a newer one that does not"


def test_newest_with_out_goes_on_in_that_folder(fake: Fake) -> None:
    out = fake.folder / "with space" / "run"
    for words in ("2 cells to measure", "nothing to run"):
        done = fake("run", "EOS", *CPU, "--out", str(out), "--resume", "newest")
        assert done.returncode == 0
        assert words in done.stderr
    assert len(read_run(out).cells) == 2


def test_out_is_not_written_over(fake: Fake) -> None:
    out = fake.folder / "run"
    assert fake("run", "EOS", *CPU, "--out", str(out)).returncode == 0
    done = fake("run", "EOS", *CPU, "--out", str(out))
    assert done.returncode == 2
    assert f"--resume {out}" in done.stderr


def test_shards_are_merged_into_the_whole(fake: Fake) -> None:
    names = ("EOS", "MMC", "ST")
    for shard in ("1/2", "2/2"):
        out = str(fake.folder / shard.replace("/", "-"))
        assert fake("run", *names, *CPU, "--shard", shard, "--out", out).returncode == 0
    done = fake("merge", *(str(fake.folder / name) for name in ("1-2", "2-2")), "--out", str(fake.folder / "whole"))
    assert done.returncode == 0, done.stderr
    whole = read_run(fake.folder / "whole")
    assert sorted({c.workload for c in whole.cells}) == list(names)
    assert whole.missing() == []
    assert fake("run", "--resume", str(fake.folder / "whole")).returncode == 0
    done = fake("merge", *(str(fake.folder / name) for name in ("1-2", "2-2")), "--out", str(whole.path))
    assert done.returncode == 2
    assert "is a run already; give --out another folder" in done.stderr, "`encore merge` has no --resume"
    again = fake("run", *whole.environment.settings["workloads"], *CPU, "--resume", "newest", "--out", str(whole.path))
    assert "nothing to run" in again.stderr, "of which parts it was joined is none of what is asked for"


def test_a_merge_without_one_of_the_shards_says_so(fake: Fake) -> None:
    for shard in ("1/3", "3/3"):
        out = str(fake.folder / shard.replace("/", "-"))
        assert fake("run", "EOS", "MMC", "ST", *CPU, "--shard", shard, "--out", out).returncode == 0
    runs = [str(fake.folder / name) for name in ("1-3", "3-3")]
    done = fake("merge", *runs, "--out", str(fake.folder / "two"))
    assert done.returncode == 0, done.stderr
    assert "none of these runs is of shard 2/3" in done.stderr
    assert done.stdout.strip().endswith("of 2 runs, without shard 2/3")
    done = fake("merge", *runs, "--out", str(fake.folder / "again"), "--json")
    assert json.loads(done.stdout)["missing_shards"] == ["2/3"]


EMPTY_PATHS = (
    ("run", "EOS", "--out"), ("run", "--resume"), ("merge", "a", "b", "--out"),
    ("report", "--out"), ("report", "--figures"), ("report", "--readme"), ("report", "--micro"),
    ("report", "--explanations"), ("explain", "EOS", "--out"),
    ("micro", "indirection", "--draw"), ("micro", "indirection", "--out"),
    ("record", "--retire"), ("history", "--figure"),
    ("draw", "graph", "--saved"), ("draw", "graph", "--drawing"), ("draw", "graph", "--save"),
)  # fmt: skip


@pytest.mark.parametrize("written", ["--out ''", "--out="])
def test_empty_folder_is_wrong_use(tmp_path: Path, written: str) -> None:
    told = {**os.environ, "PYTHONPATH": str(store.REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "suite", "run", "EOS", *CPU, *written.replace("''", "").split(" ")],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=told,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--out '' names nothing: give a folder" in done.stderr and "or . for the working directory" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", EMPTY_PATHS, ids=" ".join)
def test_no_option_that_takes_a_path_takes_an_empty_one(arguments: Sequence[str]) -> None:
    for written in ((*arguments, ""), (*arguments[:-1], f"{arguments[-1]}=")):
        with pytest.raises(WrongUse, match=f"^{arguments[-1]} '' names nothing: give a "):
            refuse_empty_paths(app, written)
    refuse_empty_paths(app, (*arguments, "there"))
    refuse_empty_paths(app, ("run", "EOS", "--modes", "", "--out", "there"))


def test_every_option_that_is_a_path_says_so() -> None:
    """By its metavar, which is what empty ones are found by."""
    known = {option for option, _ in path_options(app)}
    assert known == {arguments[-1] for arguments in EMPTY_PATHS}
    for command in _functions(app):
        for hint in get_type_hints(command, include_extras=True).values():
            for option in getattr(hint, "__metadata__", ()):
                if isinstance(option, typer.models.OptionInfo) and Path in (
                    hint.__origin__,
                    *get_args(hint.__origin__),
                ):
                    assert option.metavar in PATHS


def test_shards_that_start_in_the_same_second_are_two_runs(fake: Fake) -> None:
    started = [fake.start("run", "EOS", "MMC", *CPU, "--shard", shard) for shard in ("1/2", "2/2")]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    runs = store.list_runs(fake.runs)
    assert sorted(read_run(path).cells[0].workload for path in runs) == ["EOS", "MMC"]
    assert {path.name for path in runs} == {read_run(path).environment.run_id for path in runs}
    done = fake("merge", *map(str, runs), "--out", str(fake.folder / "whole"))
    assert done.returncode == 0, done.stderr


def test_shard_of_another_kind_is_not_resumed(fake: Fake) -> None:
    assert fake("run", "EOS", "MMC", *CPU, "--shard", "1/2").returncode == 0
    path = fake.only_run() / store.ENVIRONMENT
    record = json.loads(path.read_text())
    assert record["settings"]["shard"] == "1/2 by seconds"
    assert fake("run", "--resume", path.parent.name, "--shard", "1/2").returncode == 0
    record["settings"]["shard"] = "1/2"  # every second workload of the alphabet, as parts were before
    path.write_text(json.dumps(record))
    done = fake("run", "--resume", path.parent.name, "--shard", "1/2")
    assert done.returncode == 2
    assert "--shard: 1/2 there, 1/2 by seconds here" in done.stderr
    assert fake("run", "--resume", path.parent.name).returncode == 0, "what it set out for, it may still do"


def test_a_budget_leaves_a_resumable_run_and_exits_0(fake: Fake) -> None:
    done = fake("run", "EOS", "ST", *CPU, "--budget", "1s", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["not_started"] == ["EOS", "ST"]
    run = fake.only_run()
    assert f"go on with: encore run --resume {run}" in done.stderr
    assert fake("run", "--resume", run.name, "--budget", "1h").returncode == 0
    assert len(read_run(run).cells) == 4


def test_what_is_used_of_a_budget_already_is_not_used_again(fake: Fake) -> None:
    for used, left_out in (("59m59s", ["EOS"]), ("2h", ["EOS"]), ("1s", [])):
        out = str(fake.folder / used)
        done = fake("run", "EOS", *CPU, "--budget", "1h", "--budget-used", used, "--json", "--out", out)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["not_started"] == left_out


def test_estimates_for_a_budget_come_from_earlier_runs(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    time.sleep(1.1)
    done = fake("run", "EOS", "ST", *CPU, "--budget", "60s", "--json")
    assert json.loads(done.stdout)["not_started"] == ["ST"], "EOS took seconds before; ST is not known"


def test_estimates_ignore_runs_of_other_sizes_or_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(store, "RECORDED", tmp_path / "recorded")
    plan = RunPlan(**SETTINGS.model_dump(), workloads=["EOS"], modes=["eager"])
    told = {"size": plan.size, "device": plan.device}
    for folder, name, settings in (
        (store.RUNS, "current", told),
        (store.RUNS, "alike", told),
        (store.RUNS, "larger", told | {"size": "full"}),
        (store.RECORDED, "elsewhere", told | {"device": "cuda"}),
        (store.RECORDED, "silent", {}),
    ):
        write_run(folder / name, [cell(parameters=len(name))], environment(settings=settings))
    read: list[str] = []
    read_run = store.read_run
    monkeypatch.setattr(store, "read_run", lambda run: read.append(run.name) or read_run(run))
    found = [cell.parameters for cells in _earlier_rows(store.RUNS / "current", plan) for cell in cells]
    assert read == ["alike", "silent"]
    assert found == list(map(len, read))


def test_a_broken_results_file_is_refused_with_its_line(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    run = fake.only_run()
    text = (run / store.CELLS).read_text().replace('"status":"pass"', '"status":"great"')
    (run / store.CELLS).write_text(text)
    for arguments in (("run", "--resume", run.name), ("report", run.name)):
        done = fake(*arguments)
        assert done.returncode == 2
        assert "cells.jsonl line 1: field 'status'" in done.stderr
        assert "Traceback" not in done.stderr


LONG = "n" * 300


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("report", LONG), "run 'nnn.*\\.\\.\\.': File name too long"),
        (("report", ""), "'' names no run"),
        (("report", "a file"), "unknown run 'a file'; this is a file, give the folder"),
        (("report", "folders"), "folders/cells.jsonl cannot be read: Is a directory"),
        (("report", "named", "--explanations", LONG), "File name too long: nnn"),
        (("report", "named", "--explanations", "a file"), "--explanations a file is a file; give the folder"),
        (("compare", LONG, "named"), "run 'nnn.*File name too long"),
        (("compare", "folders", "named"), "folders/cells.jsonl cannot be read: Is a directory"),
        (("merge", "named", LONG, "--out", "whole"), "run 'nnn.*File name too long"),
        (("run", "EOS", *CPU, "--out", LONG), "File name too long: nnn"),
        (("run", "--resume", LONG), "run 'nnn.*File name too long"),
        (("run", "--resume", "newest", *CPU, "--out", LONG), "File name too long: nnn"),
    ],
)
def test_what_cannot_be_read_is_wrong_use(
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


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 1, "EOS")

    def refused(path: Path) -> bytes:  # root may read everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(WrongUse, match=r"environment\.json cannot be read: Permission denied"):
        read_run(run)


def test_a_run_in_use_is_refused(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    run = fake.only_run()
    writer, _ = RunWriter.reopen(run)
    with writer:
        done = fake("run", "--resume", run.name, "ST")
    assert done.returncode == 2
    assert "another `encore run`" in done.stderr


def test_an_unwritable_folder_is_an_error_without_a_traceback(fake: Fake) -> None:
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
        assert "a file is in the way; give" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (run / "report").exists()


def test_shard_without_a_workload_is_wrong_use(fake: Fake) -> None:
    done = fake("run", "EOS", *CPU, "--shard", "2/2")
    assert done.returncode == 2
    assert "--shard 2/2 is empty: of 1 (EOS), part 2 has none" in done.stderr
    assert store.list_runs(fake.runs) == []


def test_run_without_workloads_is_not_resumed_with_all(fake: Fake) -> None:
    fake("run", "EOS", *CPU, "--modes", "compile")
    run = fake.only_run()
    record = json.loads((run / store.ENVIRONMENT).read_text())
    record["settings"]["workloads"] = []
    (run / store.ENVIRONMENT).write_text(json.dumps(record))
    done = fake("run", "--resume", run.name)
    assert done.returncode == 0, done.stderr
    assert "nothing to run" in done.stderr
    assert len(read_run(run).cells) == 1


def test_tables_are_as_wide_as_they_are_in_a_pipe() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    code = "from suite.cli.main import main; main(['list'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["graph-unpartitioned"]]
    assert MODES["graph-unpartitioned"].summary in row
    assert "…" not in done.stdout
    assert all(len(line) < 1000 for line in done.stdout.splitlines()), "and not filled up with blanks"


def wait_for(path: Path, words: str) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and words in path.read_text()):
        assert time.monotonic() < deadline, f"{words!r} did not appear in {path}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGINT, "prepare"),
        (signal.SIGINT, "measure"),
        (signal.SIGTERM, "metrics"),
        (signal.SIGHUP, "measure"),
    ],
)
def test_an_interrupted_run_leaves_no_process_and_resumes(fake: Fake, number: signal.Signals, phase: str) -> None:
    behave = {"ST/compile": f"deaf,child,stray,hang@{phase}"}
    running = fake.start("run", "EOS", "ST", *CPU, behave=behave)
    try:
        wait_for(fake.folder / "events", "stray")
        run = fake.only_run()
        wait_for(run / "logs" / "ST.compile.log", "about to hang")
        running.send_signal(number)
        time.sleep(0.2)
        running.send_signal(number)  # the impatient user's second Ctrl-C must not cut the clean-up short
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, err
    assert f"go on with: encore run --resume {run}" in err
    assert number.name in err
    assert "Traceback" not in err
    pids = recorded_pids(fake.folder)
    assert len(pids) == 2
    assert living(pids) == []
    marked = subprocess.run(["pgrep", "-f", str(fake.folder)], capture_output=True, text=True)
    assert marked.stdout == "", "no worker is left"
    assert {c.workload for c in read_run(run).cells} == {"EOS"}
    done = fake("run", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert len(read_run(run).cells) == 4


def test_interrupted_command_does_not_wait_for_its_children(tmp_path: Path) -> None:
    """As PyTorch's compile workers: Python waits for them when it ends."""
    code = (
        "import atexit, pathlib, subprocess, sys, time\n"
        "from suite.cli import main as cli\n"
        "from suite.run import guard\n"
        "def command(*arguments, **keywords):\n"
        "    folder = guard.make_folder('encore-test-')\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "    atexit.register(child.wait, 300)\n"
        "    pathlib.Path(sys.argv[1]).write_text(f'started {child.pid} {guard.process_id()} {folder}')\n"
        "    time.sleep(300)\n"
        "cli.app = command\n"
        "cli.main([])\n"
    )
    told = tmp_path / "told"
    running = subprocess.Popen([sys.executable, "-c", code, str(told)], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(told, "started")
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert (running.returncode, err) == (130, "encore: ended by SIGTERM\n")
    _, child, watching, folder = told.read_text().split()
    assert living([int(child)]) == []
    deadline = time.monotonic() + 30  # the guard lived on, and removed what was left
    while living([int(watching)]) or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_run_resumes_with_what_was_written(fake: Fake) -> None:
    running = fake.start("run", "EOS", "ST", *CPU, behave={"ST/compile": "slow:30"})
    deadline = time.monotonic() + 60
    while not list(fake.runs.glob("*/logs/ST.compile.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.kill()
    running.communicate()
    run = fake.only_run()
    with (run / store.CELLS).open("ab") as file:
        file.write(b'{"schema_version": 1, "workl')
    done = fake("run", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert "cut short" in done.stderr
    assert len(read_run(run).cells) == 4


def test_a_run_is_reported_into_its_own_folder(fake: Fake) -> None:
    figures = fake.folder / "figures"
    done = fake("run", "EOS", *CPU)
    run = fake.only_run()
    done = fake("report", run.name, "--figures", str(figures), "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert Path(made["html"]) == run / "report" / "report.html"
    assert Path(made["html"]).is_file()
    assert made["warning"], "a run on a CPU says so"


def made_run(folder: Path, day: int, workload: str, **changes: Any) -> Path:
    """A made-up run of that day, called after its folder."""
    of = environment(run_id=folder.name, created_at=f"2026-01-0{day}T00:00:00+00:00", **changes)
    return write_run(folder, [cell(workload, "compile"), cell(workload, "graph", 50.0)], of)


def workloads_of(report: str) -> set[tuple[str, str]]:
    """(workload, run) of the rows of a report that was made with --json."""
    times = next(Path(table) for table in json.loads(report)["tables"] if table.endswith("/times.csv"))
    return {(row["workload"], row["source"]) for row in csv.DictReader(times.open())}


def test_several_runs_make_one_report(fake: Fake) -> None:
    made_run(fake.runs / "named", 1, "EOS")
    other = made_run(fake.folder / "a folder", 2, "ST")
    done = fake("report", "named", str(other), "--out", str(fake.folder / "out"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["html"] == str(fake.folder / "out" / "report.html")
    assert workloads_of(done.stdout) == {("EOS", "run named"), ("ST", "run a folder")}


def test_runs_that_do_not_go_together_are_wrong_use(fake: Fake) -> None:
    made_run(fake.runs / "one", 1, "EOS")
    made_run(fake.runs / "other", 2, "ST", driver="570.1")
    done = fake("report", "one", "other", "--out", str(fake.folder / "out"))
    assert done.returncode == 2
    assert "driver (580.0 and 570.1)" in done.stderr and "encore report RUN --out DIR" in done.stderr
    assert not (fake.folder / "out").exists()


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
    explained = write_explanations(fake.folder / "explained", [explanation("ST")])
    made_run(fake.runs / "newest", 3, "MMC")
    command = ("report", "--recorded", "--explanations", str(explained), "--out", str(fake.folder / "out"), "--json")
    made = json.loads(fake(*command).stdout)
    assert (made["run_id"], made["explained"]) == (None, 1)
    for day, workload in ((1, "EOS"), (2, "ST")):
        made_run(fake.runs / "recorded" / workload.lower(), day, workload)
    done = fake(*command)
    assert workloads_of(done.stdout) == {("EOS", "run eos"), ("ST", "run st")}
    assert json.loads(done.stdout)["run_id"] == "eos, st"


def test_without_a_run_the_newest_is_reported(fake: Fake) -> None:
    for day, name in ((2, "newer"), (1, "older")):
        made_run(fake.runs / name, day, "EOS")
    done = fake("report", "--figures", str(fake.folder / "figures"), "--json")
    assert json.loads(done.stdout)["html"] == str(fake.runs / "newer" / "report" / "report.html")


def test_run_refuses_an_unknown_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "SUPPORTED", ("1.0", "2.0"))
    refused = CliRunner().invoke(app, ["run", "EOS"]).exception
    assert isinstance(refused, WrongUse)
    assert "Encore knows PyTorch 1.0 up to but not including 2.0" in str(refused)
