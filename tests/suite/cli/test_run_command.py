"""`encore run` from start through Ctrl-C to resume, with fake workers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.fake_command import CPU, Fake, wait_for
from fixtures.fake_runs import living, recorded_pids, wait_until

from suite.measure.environment import code_id
from suite.results import store
from suite.results.run_writer import RunWriter
from suite.results.schema import Status
from suite.results.store import read_run


def test_run_leaves_rows_logs_and_a_summary(fake: Fake) -> None:
    done = fake("run", "eos", "ST", *CPU)
    assert done.returncode == 0, done.stderr
    run = fake.only_run()
    assert re.fullmatch(r"\d{8}-\d{6}-cpu", run.name)
    recorded = read_run(run)
    found = [(c.workload, c.mode, c.device) for c in recorded.cells]
    assert found == [(workload, mode, "cpu") for workload in ("EOS", "ST") for mode in ("eager", "compile")]
    assert recorded.environment.settings["samples"] == 10
    assert recorded.environment.command_line[:3] == ["encore", "run", "eos"]
    assert recorded.missing() == []
    assert "4 of 4 cells passed" in done.stderr and "ST compile: warm-up" in done.stderr


def test_run_without_names_takes_the_default_set(fake: Fake) -> None:
    from models import registry

    members = registry.find_set("grace")
    done = fake("run", *CPU, "--modes", "compile", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:-1]] == [workload.acronym for workload in members]


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            (named, "the run's own workloads and modes")
            for named in (["ST"], ["--modes", "eager"], ["--set", "grace"], ["--tp", "2"])
        ),
        (["--samples", "20"], "--samples: 10 there, 20 here; start a new run"),
        (["--seed", "5"], "--seed: 1337 there, 5 here; start a new run"),
    ],
)
def test_resumed_run_keeps_what_it_measures_and_its_settings(fake: Fake, options: Sequence[str], words: str) -> None:
    fake("run", "EOS", *CPU)
    done = fake("run", "--resume", fake.only_run().name, *options)
    assert done.returncode == 2
    assert all(each in done.stderr for each in words.split("; "))
    assert fake("run", "--resume", fake.only_run().name, "--samples", "10").returncode == 0


def test_run_is_resumed_only_at_the_same_code_and_environment(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    path = fake.only_run() / store.ENVIRONMENT
    fields = json.loads(path.read_text())
    assert fields["code"] == code_id(store.REPOSITORY)
    other = {"git_commit": "0" * 40}
    rows = [
        (other | {"git_dirty": not fields["git_dirty"]}, 0, ("nothing to run",)),
        (other | {"code": "0" * 64}, 2, ("code: 000000000000 there",)),
        (other | {"torch": "2.99", "code": None}, 2, ("torch: 2.99 there", "git_commit: 000")),
    ]
    for changes, code, words in rows if fields["code"] else rows[2:]:  # None outside of a git checkout
        path.write_text(json.dumps(fields | changes))
        done = fake("run", "--resume", path.parent.name)
        assert done.returncode == code, done.stderr
        assert all(each in done.stderr for each in words)
    assert len(read_run(path.parent).cells) == 2


def test_newest_reuses_matching_rows_and_reports_it(fake: Fake) -> None:
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


def test_out_folder_is_resumed_and_not_overwritten(fake: Fake) -> None:
    out = fake.folder / "with space" / "run"
    for words in ("2 cells to measure", "nothing to run"):
        done = fake("run", "EOS", *CPU, "--out", str(out), "--resume", "newest")
        assert done.returncode == 0
        assert words in done.stderr
    assert len(read_run(out).cells) == 2
    done = fake("run", "EOS", *CPU, "--out", str(out))
    assert done.returncode == 2
    assert "--resume" in done.stderr and str(out) in done.stderr


def test_budget_leaves_a_resumable_run_and_exits_0(fake: Fake) -> None:
    done = fake("run", "EOS", "ST", *CPU, "--budget", "1s")
    assert done.returncode == 0
    assert "not started for lack of time: EOS, ST" in done.stderr
    run = fake.only_run()
    assert f"go on with: encore run --resume {run}" in done.stderr
    assert fake("run", "--resume", run.name, "--budget", "1h").returncode == 0
    assert len(read_run(run).cells) == 4


def test_run_in_use_is_refused(fake: Fake) -> None:
    fake("run", "EOS", *CPU)
    run = fake.only_run()
    writer, _ = RunWriter.reopen(run)
    with writer:
        done = fake("run", "--resume", run.name)
        assert len(read_run(run).cells) == 2, "it can be read"
    assert done.returncode == 2
    assert "another `encore run`" in done.stderr


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


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGINT, "measure"),
        (signal.SIGTERM, "metrics"),
    ],
)
def test_interrupted_run_leaves_no_process_and_resumes(fake: Fake, number: signal.Signals, phase: str) -> None:
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
    """Python waits for PyTorch's compile workers when it exits."""
    code = (
        "import atexit, pathlib, subprocess, sys, time\n"
        "from suite.cli import main as cli\n"
        "def command(*arguments, **keywords):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "    atexit.register(child.wait, 300)\n"
        "    pathlib.Path(sys.argv[1]).write_text(f'started {child.pid}')\n"
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
    assert living([int(told.read_text().split()[1])]) == []


def test_killed_run_resumes_with_written_rows(fake: Fake) -> None:
    running = fake.start("run", "EOS", "ST", *CPU, behave={"ST/compile": "slow:30"})
    wait_until(lambda: list(fake.runs.glob("*/logs/ST.compile.log")))
    running.kill()
    running.communicate()
    run = fake.only_run()
    done = fake("run", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert len(read_run(run).cells) == 4
