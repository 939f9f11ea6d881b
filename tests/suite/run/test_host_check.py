"""`encore run --host-check` warns, and what was found lies with the run."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.fake_runs import fake_worker
from rich.console import Console

from host_tuning import Disturbance, Finding
from suite.results.store import CannotWrite, read_run
from suite.run import host_use
from suite.run.host_use import HOST_CHECK, record_host_check

FAKE_ENCORE = Path(__file__).parents[2] / "support" / "fixtures" / "fake_encore.py"
FINDINGS = (
    Finding("smt", Disturbance.WARN, "on", "A neighbour slows Python down.", "tune --smt-off"),
    Finding("turbo", Disturbance.OK, "off", "Turbo depends on others."),
    Finding("governor", Disturbance.UNKNOWN, "no cpufreq", "A governor lowers the frequency."),
)


def test_disturbances_are_printed_and_everything_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_use, "check", lambda: FINDINGS)
    console = Console(file=io.StringIO(), width=300)
    record_host_check(tmp_path, console)
    record_host_check(tmp_path, console)
    lines = [json.loads(line) for line in (tmp_path / HOST_CHECK).read_text().splitlines()]
    assert [[each["item"] for each in line["findings"]] for line in lines] == [["smt", "turbo", "governor"]] * 2
    assert lines[0]["findings"][0]["verdict"] == "warn"
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "host: smt: on. A neighbour slows Python down." in printed
    assert "turbo" not in printed and "governor" not in printed


def test_a_full_disk_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_use.os, "fsync", full)
    with pytest.raises(CannotWrite, match="make room"):
        record_host_check(tmp_path, Console(file=io.StringIO()))


def test_a_run_has_the_findings_only_if_asked(tmp_path: Path) -> None:
    def run(*more: str) -> Path:
        (folder,) = (tmp_path / str(len(more)),)
        command = [sys.executable, str(FAKE_ENCORE), json.dumps(fake_worker({}, tmp_path)), str(tmp_path / "runs")]
        command += ["run", "eos", "--device", "cpu", "--size", "tiny", "--samples", "10", "--out", str(folder), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return folder

    assert not (run() / HOST_CHECK).exists()
    checked = run("--host-check")
    (line,) = (checked / HOST_CHECK).read_text().splitlines()
    assert {each["item"] for each in json.loads(line)["findings"]} >= {"governor", "c_states", "smt", "load"}
    assert len(read_run(checked).cells) == 2, "the run itself reads as before"
