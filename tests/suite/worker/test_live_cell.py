"""A cell from build to metrics, in this process, on the CPU."""

from __future__ import annotations

import fcntl

import pytest
import torch
from tiny_cells import Mlp, cell, replaced_call

import suite.worker.cell_program
import suite.worker.compilation
import suite.worker.gpu_turns
import suite.worker.judge
import suite.worker.live_cell
import suite.worker.measured_once
from models import registry
from suite.results.schema import CompileConditions
from suite.worker.gpu_turns import TURNS, GpuTurns
from suite.worker.live_cell import start
from suite.worker.protocol import Measure

__all__ = ["cell"]


def test_eager_cell_passes_all_phases(cell):
    live = cell(Mlp)
    prepared = live.prepare()
    assert live.phases == ["build", "check", "compile", "warm-up", "wait", "compare"]
    assert prepared.parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert prepared.input_bytes == 4 * 8 * 4
    correctness = prepared.correctness
    assert correctness.passed and correctness.deterministic and not correctness.fallback_random
    assert (correctness.input_count, correctness.compared_tensors, correctness.compute_dtype) == (2, 2, "float32")
    assert len(set(correctness.digests)) == 2
    assert 0 < prepared.compile.first_call_s <= prepared.compile.warm_up_s

    block = live.measure(Measure(index=1, turn=4, samples=5))
    assert (block.index, block.turn, block.input_sets) == (1, 4, [2, 0, 1, 2, 0])
    assert len(block.host_us) == 5 and min(block.host_us) > 0 and block.device_us is None
    metrics = live.once.take("metrics")
    assert (metrics.coverage, metrics.graphs, metrics.copies, metrics.memory) == (None, None, None, None)


def test_all_processes_free_memory_of_checks(cell, monkeypatch, tmp_path):
    """Eight that keep what eager's comparison took do not fit where eight that are measured do."""
    turns = GpuTurns(tmp_path / TURNS)
    events = []

    def judged(*arguments, **named):
        monkeypatch.setattr(suite.worker.gpu_turns, "MOST_WAIT_S", 0.01)
        with turns.calling():
            events.append("judged")
        return compare(*arguments, **named)

    compare = suite.worker.judge.compare_with_eager
    for module in (suite.worker.compilation, suite.worker.judge):
        monkeypatch.setattr(module, "release", lambda device: events.append("release"))
    monkeypatch.setattr(suite.worker.judge, "compare_with_eager", judged)
    replaced_call(monkeypatch, lambda module, x: (events.append("call"), module(x))[1])
    live = cell(lambda: Mlp(0.5), "encore", task="training", stochastic=True, spec={"cache_dir": str(tmp_path)})
    live.build()
    assert events[0] == "release", "eager's, before the trial"
    judging = events.index("judged")
    assert events[judging - 1] == "release", "the trial's, before others wait for this one"
    assert events[judging:] == ["judged", "judged", "release"], "the judge's"


def test_cell_judges_alone_on_the_gpu(cell, monkeypatch, tmp_path):
    others = GpuTurns(tmp_path / TURNS)
    monkeypatch.setattr(suite.worker.gpu_turns, "MOST_WAIT_S", 0.01)
    seen = []

    def free():
        """Return whether another process could call now, and whether it could lock the GPU exclusively."""
        found = []
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            others._take(kind)
            found.append(others._held == kind)
            others._take(fcntl.LOCK_UN)
        return tuple(found)

    compare = suite.worker.judge.compare_with_eager
    monkeypatch.setattr(
        suite.worker.judge,
        "compare_with_eager",
        lambda *rest, **named: (seen.append(("judge", free())), compare(*rest, **named))[1],
    )
    replaced_call(monkeypatch, lambda module, x: (seen.append(("call", free())), module(x))[1])
    live = cell(Mlp, spec={"cache_dir": str(tmp_path), "warm_up": 3, "input_sets": 2})
    live.build()
    live.compile(CompileConditions.COLD_ALONE)
    warm_up = [("call", (True, True))] + [("call", (True, False))] * 3
    assert seen == warm_up, "compiling is no load on the GPU"
    live.settle()
    assert ("judge", (False, False)) in seen
    assert free() == (True, True)


def test_cell_restarts_peaks_before_each_phase(cell, monkeypatch):
    events = []
    for module in (suite.worker.compilation, suite.worker.live_cell, suite.worker.measured_once):
        monkeypatch.setattr(module, "restart_peak", lambda device: events.append("restart"))
    monkeypatch.setattr(suite.worker.compilation, "release_workspaces", lambda device: events.append("workspaces"))
    for module in (suite.worker.compilation, suite.worker.measured_once):
        monkeypatch.setattr(module, "peak", lambda device: events.append("peak"))
    replaced_call(monkeypatch, lambda module, x: (events.append("call"), module(x))[1])
    live = cell(Mlp)
    live.build()
    events.clear()
    live.compile(CompileConditions.COLD_ALONE)
    live.settle()
    live.once.take("metrics")
    without_calls = [event for event in events if event != "call"]
    assert without_calls == ["workspaces", "restart", "peak", "restart", "restart", "peak"]
    first, second = (index for index, event in enumerate(events) if event == "peak")
    assert events[:2] == ["workspaces", "restart"] and events[2:first].count("call") >= 4
    assert events[second - 4 : second] == ["restart", "call", "call", "call"], "each input set once"


@pytest.mark.parametrize(("mode", "started"), [("eager", []), ("graph", ["cpu"])])
def test_started_process_imports_its_model_and_its_compilers(cell, monkeypatch, mode, started):
    built, toolchains = [], []
    spec = cell(lambda: built.append("tiny") or Mlp(), mode, spec={"size": "full"})._spec
    monkeypatch.setattr(
        suite.worker.live_cell, "start_toolchain", lambda device, *rest: toolchains.append(device.type) or True
    )
    assert start(spec.model_copy(update={"device": "cuda"})).vec_isa_ok is (True if started else None)
    assert built == ["tiny"]
    assert toolchains == started, "the GPU is not touched"


def test_input_sets_that_share_memory_are_refused(cell):
    shared = torch.ones(4, 8)
    live = cell(Mlp, inputs=lambda variant, size, generator: registry.Inputs(args=(shared,)))
    with pytest.raises(ValueError, match="same address"):
        live.prepare()


def test_temporary_memory_of_an_input_set_is_freed_at_once(cell, monkeypatch):
    """Eight processes make their inputs at the same time, and each draws them in float32."""
    events = []

    def inputs(variant, size, generator):
        events.append("made")
        return registry.Inputs(args=(torch.randn(4, 8, generator=generator),))

    monkeypatch.setattr(suite.worker.cell_program, "release", lambda device: events.append("given back"))
    live = cell(Mlp, inputs=inputs, spec={"input_sets": 3})
    live.build()
    assert events == ["made", "given back"] * 3
