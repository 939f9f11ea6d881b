"""Modes compile programs: warm-up, settling, the optimizer, and shared caches."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_cells import Mlp, cell, replaced_call
from torch._dynamo.utils import counters
from torch._inductor.runtime.autotune_cache import AutotuneCache

import suite.worker.compilation
from suite.results.schema import CompileConditions
from suite.worker.compilation import CALLS_OF_START, CALLS_TO_REPLAY
from suite.worker.compile_cache import CompileCache
from suite.worker.protocol import Measure, OomTogether

__all__ = ["cell"]


def test_optimizer_updates_weights_only_after_the_check(cell):
    live = cell(Mlp, task="training", optimizer="sgd", spec={"with_optimizer": True})
    correctness = live.prepare().correctness
    assert correctness.passed and correctness.max_relative_error == 0.0
    weight = live._program.instance.module.first.weight
    before = weight.detach().clone()
    live.measure(Measure(index=0, turn=0, samples=1))
    assert not torch.equal(weight, before)


def test_mode_with_cuda_graphs_on_a_cpu_reports_none(cell):
    live = cell(Mlp, "graph")
    assert live.prepare().correctness.passed
    graphs = live.once.take("metrics").graphs
    assert graphs is not None
    assert (graphs.partitions, graphs.cuda_graphs) == (0, 0)
    assert any("CUDA" in each.reason for each in graphs.not_captured)


def test_warm_up_lasts_until_every_input_set_was_replayed(cell, monkeypatch):
    """However few iterations are asked for: two calls come before the first replay."""
    calls = []
    replaced_call(monkeypatch, lambda module, x: calls.append(x) or module(x))
    live = cell(Mlp, spec={"warm_up": 1, "input_sets": 3})
    live.build()
    live._compilation._compile_and_warm_up(CompileConditions.COLD_ALONE)
    assert len(calls) == CALLS_TO_REPLAY - 1 + 3
    assert {id(x) for x in calls[2:]} == {id(inputs.args[0]) for inputs in live._program.input_sets}


@pytest.mark.parametrize("settles", [True, False])
def test_cell_is_called_until_graphs_have_settled(cell, monkeypatch, settles):
    """One whose graphs never settle is measured, and marked."""
    calls, answers = [], iter([False, False, False])
    replaced_call(monkeypatch, lambda module, x: calls.append(x) or module(x))
    monkeypatch.setattr(suite.worker.compilation.optimizations, "settled", lambda: next(answers, settles))
    if not settles:
        monkeypatch.setattr(suite.worker.compilation, "SETTLE_S", 0.05)
    live = cell(Mlp, spec={"warm_up": 11})
    live.build()
    times = live._compilation._settle(live._compilation._compile_and_warm_up(CompileConditions.COLD_ALONE))
    assert (times.settle_calls == 3, times.settled) == (settles, settles)
    assert len(calls) == 11 + times.settle_calls
    assert len(times.calls_s) == min(len(calls), CALLS_OF_START), "each call of the start is noted"
    assert (times.warm_up_calls, times.calls_s[0]) == (11, times.first_call_s)
    assert 0 < sum(times.calls_s) <= times.warm_up_s + times.settle_s


def test_waiting_cell_keeps_its_time_to_settle(cell, monkeypatch):
    """Another one may judge its results for longer than that, alone on the GPU."""
    answers = iter([False] * 3)
    monkeypatch.setattr(suite.worker.compilation.optimizations, "settled", lambda: next(answers, True))
    monkeypatch.setattr(suite.worker.compilation, "SETTLE_S", 0.05)
    live = cell(Mlp, "encore", spec={"warm_up": 11})
    live._program.build()
    times = live._compilation._compile_and_warm_up(CompileConditions.COLD_ALONE)
    monkeypatch.setattr(live._program, "calling", lambda: contextlib.nullcontext(time.sleep(0.06)))
    assert live._compilation._settle(times).settled


@pytest.mark.parametrize(("second", "found"), [("indirection", 1), ("lean", 0)])
def test_compiled_graphs_are_found_by_their_own_mode_only(cell, monkeypatch, tmp_path, second, found):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for mode in ("indirection", second):
        torch.compiler.reset()
        counters.clear()
        live = cell(lambda: torch.nn.Linear(8, 8), mode)
        live.build()
        live.compile(CompileConditions.COLD_ALONE)
    assert counters["inductor"]["fxgraph_cache_hit"] == found


def test_tuning_results_are_stored_under_one_key(cell):
    """Compile workers do not know what a process has marked its graphs with, and it is they who name what is stored."""
    key = AutotuneCache._prepare_key("kernel.py")
    live = cell(lambda: torch.nn.Linear(8, 8), "compile")
    live.build()
    live.compile(CompileConditions.COLD_ALONE)
    assert AutotuneCache._prepare_key("kernel.py") == key


@pytest.mark.parametrize(("alive", "fits"), [(8, False), (3, False), (2, True), (1, True)])
def test_graphs_waiting_for_memory_of_others_are_not_measured(cell, monkeypatch, alive, fits):
    """A mode and what it is compared with are as few as there can be: then it is measured as it is."""
    waits = SimpleNamespace(waiting="memory: 13 GB are needed", waits_for_memory=True)
    recordings = (SimpleNamespace(waiting="more use", waits_for_memory=False), waits)
    live = cell(Mlp, "encore", spec={"alive_together": alive})
    live.build()
    times = live._compilation._compile_and_warm_up(CompileConditions.COLD_ALONE)
    monkeypatch.setattr(
        suite.worker.compilation.optimizations, "report", lambda: [SimpleNamespace(recordings=recordings)]
    )
    if fits:
        assert live._compilation._settle(times).settled is not None
        return
    with pytest.raises(OomTogether, match="for lack of memory: 13 GB are needed"):
        live._compilation._settle(times)


def test_kept_compile_cache_has_kernels_but_no_graphs_or_results(tmp_path: Path) -> None:
    kept = [tmp_path / "inductor" / "ab" / "kernel.py", tmp_path / "rank1" / "inductor" / "cd" / "kernel.py"]
    gone = [tmp_path / "inductor" / "fxgraph" / "x", tmp_path / "rank1" / "inductor" / "aotautograd" / "y"]
    gone.append(tmp_path / "judged" / "real" / "z.json")
    for file in (*kept, *gone):
        file.parent.mkdir(parents=True)
        file.touch()
    CompileCache(tmp_path)
    assert all(file.exists() for file in (*kept, *gone))
    CompileCache(tmp_path, kept=True)
    assert all(file.exists() for file in kept) and not any(file.exists() for file in gone)
