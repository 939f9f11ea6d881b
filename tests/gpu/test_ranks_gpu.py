"""Several GPUs under torchrun: correct replays, equal decisions of ranks, training, and exits.

Skipped where there are fewer than two GPUs. What the programs found goes to the folder ENCORE_RESULTS too, if that is
set.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks_on_cpu import Logged

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "rank_programs.py"
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
LONGEST_END_S = 10.0


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(280)]


@pytest.fixture(autouse=True)
def several_gpus() -> None:
    if gpus() < 2:
        pytest.skip("needs two GPUs")


class Launched(Logged):
    """A program under torchrun."""

    def workers(self) -> list[psutil.Process]:
        return [
            one
            for one in psutil.Process(self.process.pid).children(recursive=True)
            if "rank_programs" in " ".join(one.cmdline())
        ]

    def kill(self) -> None:
        for one in self.workers() if self.process.poll() is None else []:
            one.kill()
        super().kill()

    def found(self, within_s: float = 240.0) -> list[dict[str, Any]]:
        """Return each rank's findings; the program must exit successfully."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs:\n{self.text()[-4000:]}") from None
        finally:
            self.kill()
        assert code == 0, self.text()[-6000:]
        lines = [line.partition("FOUND ")[2] for line in self.text().splitlines() if "FOUND " in line]
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return sorted(found, key=lambda one: one["rank"])


def launch(folder: Path, ranks: int, program: str, mode: str, **variables: str) -> Launched:
    if ranks > gpus():
        pytest.skip(f"needs {ranks} GPUs")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    variables = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "2", **variables}
    return Launched([*command, str(PROGRAM), program, mode], folder / "log", variables, cwd=folder)


def note(name: str, found: Any) -> None:
    if folder := os.environ.get("ENCORE_RESULTS"):
        path = Path(folder) / f"ranks-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_thousand_replays_with_different_data_on_each_rank(tmp_path: Path, ranks: int) -> None:
    found = launch(tmp_path, ranks, "replays", "encore").found()
    note(f"replays-{ranks}", found)
    assert len(found) == ranks
    for one in found:
        assert (one["calls"], one["wrong"]) == (1000, 0), one
        assert one["recordings"] >= 1
        assert one["replayed"] >= 900, "the graphs ran, collectives inside"


@pytest.mark.parametrize("ranks", [2, 4])
def test_decoder_split_by_pytorch_is_correct_and_replayed(tmp_path: Path, ranks: int) -> None:
    found = launch(tmp_path, ranks, "split", "encore").found()
    note(f"split-{ranks}", found)
    for one in found:
        assert one["worst"] < 1e-4, one
        assert one["replayed"] >= 30, one


def test_rank_that_fails_to_record_ends_with_its_error(tmp_path: Path) -> None:
    launched = launch(tmp_path, 2, "fails_on_one", "encore", CALLS="300")
    assert launched.process.wait(120) != 0
    assert "fails as planned" in launched.text()


@pytest.mark.parametrize("program", ["ddp", "fsdp"])
def test_training_on_two_gpus_is_correct_and_as_fast_as_stock(tmp_path: Path, program: str) -> None:
    modes = ("eager", "compile", "graph", "encore")
    found = launch(tmp_path, 2, program, ",".join(modes), WIDTH="512", STEPS="6", UNTIMED="200").found()
    note(program, found)
    for rank in found:
        assert rank["encore"]["losses"] == pytest.approx(rank["eager"]["losses"], rel=5e-3)
    slowest = {mode: max(rank[mode]["step_us"] for rank in found) for mode in modes}
    assert slowest["encore"] <= 1.15 * slowest["graph"], slowest


@pytest.mark.parametrize(
    ("ending", "mode"),
    [
        *((ending, "encore") for ending in ("destroys", "never destroys", "raises on one", "is interrupted")),
        ("destroys", "compile"),  # how long it takes without graphs
    ],
)
def test_all_processes_end_within_ten_seconds(tmp_path: Path, ending: str, mode: str) -> None:
    launched = launch(tmp_path, 2, "ends", mode, ENDING=ending)
    try:
        launched.said("READY", 2)
        workers = launched.workers()
        if ending == "is interrupted":
            time.sleep(1.0)
            for one in [*workers, psutil.Process(launched.process.pid)]:  # as Ctrl-C does
                one.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, alive = psutil.wait_procs(workers, timeout=40)
        seconds = time.monotonic() - began
        said = [line for line in launched.text().splitlines() if line.startswith("encore:")]
        name = f"ends-{ending.replace(' ', '-')}" + ("" if mode == "encore" else f"-{mode}")
        note(name, {"seconds": seconds, "alive": len(alive), "said": said})
        assert not alive, launched.text()[-4000:]
        assert seconds < LONGEST_END_S, launched.text()[-4000:]
        assert (launched.process.wait(20) == 0) == ("destroys" in ending), launched.text()[-4000:]
    finally:
        launched.kill()


def test_killed_rank_ends_the_others(tmp_path: Path) -> None:
    launched = launch(tmp_path, 2, "ends", "encore", ENDING="is interrupted")
    try:
        launched.said("READY", 2)
        time.sleep(1.0)
        workers = launched.workers()
        workers[-1].kill()
        began = time.monotonic()
        _, alive = psutil.wait_procs(workers, timeout=40)
        note("ends-killed", {"seconds": time.monotonic() - began, "alive": len(alive)})
        assert not alive
        assert time.monotonic() - began < LONGEST_END_S
        assert launched.process.wait(20) != 0
    finally:
        launched.kill()
