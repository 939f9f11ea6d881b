"""`tests/gpu/concurrency_proof.py`: control and comparison of chain and branches, rows and processes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizations.concurrency.branches import Branches
from optimizations.graph.read import read_graph
from tests.optimizations.concurrency.test_branches import INDEPENDENT, chain_of, edges_of, log_of

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU_TESTS))

import concurrency_proof as proof  # noqa: E402
import steered  # noqa: E402


class Event:
    """An event at a time in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Program:
    """A program of one graph. `launch_ms` says how long a launch takes with its edges; `bits_of` what it computes."""

    def __init__(self) -> None:
        self.steering = steered.Steering()
        self.graph = chain_of(2)
        self.branches = Branches(log_of(INDEPENDENT), self.graph, self.graph.driver, self.steering.race, self.mark)
        self.branches.prepare(read_graph(self.graph.driver, self.graph.graph), ())
        self.steering.races[0].branches = self.branches
        self.now = 0.0
        self.calls = 0
        self.launch_ms: Callable[[bool], float] = lambda branched: 0.5 if branched else 1.0
        self.bits_of: Callable[[bool], Mapping[str, str]] = lambda branched: {"loss": "1", "output": "2"}
        self.results_of: Callable[[bool], Mapping[str, torch.Tensor]] = lambda branched: {}

    @property
    def is_branched(self) -> bool:
        return not edges_of(self.graph)

    def mark(self) -> Event:
        return Event(self.now)

    def iterate(self, number: int) -> None:
        self.calls += 1

        def launch() -> None:
            self.now += self.launch_ms(self.is_branched)

        self.branches.run(lambda: self.branches.launch(launch))

    def bits(self) -> Mapping[str, str]:
        self.iterate(0)
        return self.bits_of(self.is_branched)

    def results(self) -> Mapping[str, torch.Tensor]:
        self.iterate(0)
        return self.results_of(self.is_branched)

    def synchronize(self) -> None:
        pass


def test_equal_and_different_bits_are_distinguished() -> None:
    program = Program()
    assert steered.compare_bits(program, program.steering)["equal"]
    program.bits_of = lambda branched: {"loss": "1", "output": "3" if branched else "2"}
    found = steered.compare_bits(program, program.steering)
    assert not found["equal"]
    assert found["branches_differ"] == ["output"]


@pytest.mark.parametrize(("scale", "equal"), [(1.0, True), (100.0, False)])
def test_varying_tensor_is_judged_by_the_spread_of_the_chain(scale: float, equal: bool) -> None:
    program = Program()
    program.bits_of = lambda branched: {"loss": str(program.calls), "output": "2"}

    def results(branched: bool) -> Mapping[str, torch.Tensor]:
        error = 1e-6 * (program.calls % 2) * (scale if branched else 1.0)
        return {"loss": torch.tensor([1.0 + error], dtype=torch.float64)}

    program.results_of = results
    found = steered.compare_bits(program, program.steering)
    assert found["chain_differs_from_itself"] == ["loss"]
    assert found["equal"] is equal


def test_delays_that_change_bits_are_named_by_seed() -> None:
    program = Program()
    under_way: list[int] = []

    @contextlib.contextmanager
    def delayed(graph: Any, seed: int) -> Iterator[None]:
        assert graph is program.graph and program.is_branched
        under_way.append(seed)
        yield
        under_way.pop()

    program.bits_of = lambda branched: {"loss": "1", "output": "3" if under_way == [4] else "2"}
    found = steered.replay_delayed(program, program.steering, delayed, steered.Limit(60.0), replays=6)
    assert found == {"replays": 6, "differing_seeds": [4], "tensors": 2}
    assert steered.replay_delayed(program, program.steering, delayed, steered.Limit(0.0))["replays"] == 0


SCRIPTS = {
    "fine": "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"recordings\": []}')",
    "fails": "print('torch.OutOfMemoryError: CUDA out of memory. Tried'); print('more'); raise SystemExit(1)",
    "hangs": "import time; time.sleep(600)",
}


def started(scripts: Mapping[str, str], folder: Path) -> Callable[[str, proof.Chosen, Path], proof.Running]:
    def start(phase: str, chosen: proof.Chosen, cache: Path) -> proof.Running:
        row, log = folder / f"{chosen.name}.{phase}.json", folder / f"{chosen.name}.{phase}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPTS[scripts[chosen.name]], str(row)], stdout=file, start_new_session=True
            )
        return proof.Running(phase, chosen, process, row, log, time.monotonic())

    return start


def test_existing_rows_are_not_run_again(tmp_path: Path) -> None:
    wanted = [proof.Chosen("A", "published"), proof.Chosen("B", "current")]
    out = tmp_path / "rows.jsonl"
    one = proof.Proof(out, tmp_path, 2, time.monotonic() + 60, started({"A": "fine", "B": "fails"}, tmp_path))
    assert one.run(wanted)
    found = {(row["phase"], row["workload"]): row["status"] for row in one.rows}
    assert found == {**{(phase, "A"): "ok" for phase in proof.PHASES}, ("prepare", "B/current"): "failed"}
    again = proof.Proof(out, tmp_path, 2, time.monotonic() + 60)
    assert again.missing("measure", wanted) == again.missing("prepare", wanted) == wanted[1:]
    (failed,) = [row for row in again.rows if row["status"] == "failed"]
    assert failed["error"].startswith("torch.OutOfMemoryError")
    assert "B/current          failed: torch.OutOfMemoryError" in proof.table([failed])


def measured(**more: Any) -> dict[str, Any]:
    bits = {"equal": True, "chain_differs_from_itself": [], "branches_differ": [], "tensors": 3}
    times = {"graphs_us": {"chain": 100.0, "branches": 80.0}, "gain": 1.25}
    row = {
        "phase": "measure",
        "workload": "A",
        "status": "ok",
        "recordings": [{"direction": "inference", "launches": 7, "width": 3, "longest_path": 4, "reason": ""}],
        "bits": bits,
        "times": times,
        "self": {"races": 10, "branches_won": 1},
        "delays": {"replays": 100, "differing_seeds": []},
    }
    return {**row, **more}


def test_table_has_gain_memory_bits_and_mean() -> None:
    tuned = {"phase": "prepare", "workload": "A", "status": "ok", "reserved_bytes": 150}
    chain = {"phase": "chain", "workload": "A", "status": "ok", "reserved_bytes": 100}
    slower = measured(workload="B", times={"graphs_us": {"chain": 80.0, "branches": 100.0}, "gain": 0.8})
    lines = proof.table(
        [tuned, chain, {**chain, "phase": "branches", "reserved_bytes": 102}, measured(), slower]
    ).splitlines()
    assert lines[1].split() == ["A", "7", "4", "3", "100.0", "80.0", "1.250", "1/10", "0/100", "1.020", "equal"]
    assert "geometric mean of 2, the chain where it is faster: 1.118" in lines[-1]


@pytest.mark.parametrize("script", ["concurrency_proof.py", "steered.py", "delayed_graphs.py"])
def test_names_that_are_imported_late_exist(script: str) -> None:
    for node in ast.walk(ast.parse((GPU_TESTS / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            for one in node.names:
                assert hasattr(module, one.name) or importlib.import_module(f"{node.module}.{one.name}")
