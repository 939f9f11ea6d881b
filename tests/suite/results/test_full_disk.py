"""On a full disk written rows are kept, and a workload without space is not started."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from fixtures.synthetic_results import cell, environment

from suite.results import store
from suite.results.run_writer import LEAST_FREE_BYTES, RunWriter
from suite.results.store import CannotWrite
from suite.settings import FULL, RunPlan


@pytest.fixture
def run(tmp_path: Path) -> Path:
    plan = RunPlan.model_validate(
        {**FULL.settings.model_dump(), "workloads": ["EOS", "ST"], "modes": ["compile", "graph"]}
    )
    with RunWriter.create(tmp_path / "run", environment(settings=plan.model_dump())) as writer:
        writer.append(cell("EOS", "compile"))
    return tmp_path / "run"


def test_run_without_disk_space_starts_no_workload(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = RunWriter.reopen(run)
    with writer:
        writer.check_space()
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, LEAST_FREE_BYTES - 1))
        with pytest.raises(CannotWrite, match="make room"):
            writer.check_space()


def test_full_disk_advises_resume_for_runs_only(run: Path, tmp_path: Path) -> None:
    """`encore micro` and `encore report --only` write files, too, and have no --resume."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    in_run = store.write_error(run / store.CELLS, full)
    assert f"make room, then go on with `encore run --resume {run}`." in str(in_run)
    elsewhere = store.write_error(tmp_path / "indirection.json", full)
    assert isinstance(elsewhere, CannotWrite)
    assert str(elsewhere).endswith("What was written before is intact; make room, and give the command again.")
