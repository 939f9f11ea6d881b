"""Parts of a cell are measured once: the source of each number, and its step."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from fixtures.synthetic_results import metrics
from tiny_cells import Mlp, cell

import suite.worker.measured_once
from suite.measure import launches
from suite.results.schema import Copies

__all__ = ["cell"]


def test_placeholder_copies_are_counted_and_the_rest_profiled(cell, monkeypatch):
    """With a profile and a count as a GPU would give them: each stands in its own field."""
    from suite.measure.profiling import IterationProfile

    copies = Copies(placeholder_bytes=4096, placeholder_tensors=3, pointer_bytes=16)
    coverage = metrics().coverage
    assert coverage is not None
    profile = IterationProfile(coverage, {"k 1 32": 6}, 12.5)
    live = cell(Mlp, "graph")
    live.build()
    live._compilation.iterate = live._compilation.compiled_iteration(live._program.instance.module)
    loaded = []
    monkeypatch.setattr(suite.worker.measured_once, "copies_of", lambda run: copies)
    monkeypatch.setattr(suite.worker.measured_once, "load_profiler", loaded.append)
    monkeypatch.setattr(suite.worker.measured_once, "profile_iterations", lambda iterate, agreed, sources: profile)
    monkeypatch.setattr(suite.worker.measured_once, "recorded_graphs", lambda device: [])
    monkeypatch.setattr(suite.worker.measured_once.MeasuredOnce, "_replay_memory", lambda once: None)
    monkeypatch.setattr(launches, "least_graph", lambda: lambda: None)
    live._program.instance = replace(live._program.instance, device=torch.device("cuda"))
    found = live.once.take("metrics")
    assert (found.copies, found.kernel_time_us, found.kernels) == (copies, 12.5, {"k 1 32": 6})
    assert len(loaded) == 1, "steps that were not asked for before are taken"


def test_measured_cell_is_not_measured_again_with_a_profiler(cell, monkeypatch):
    live = cell(Mlp)
    live.prepare()
    order = []
    monkeypatch.setattr(suite.worker.measured_once, "restart_peak", lambda device: order.append("memory"))
    monkeypatch.setattr(suite.worker.measured_once.MeasuredOnce, "_on_gpu", True)
    monkeypatch.setattr(suite.worker.measured_once, "load_profiler", lambda iterate: order.append("load"))
    monkeypatch.setattr(suite.worker.measured_once, "profile_iterations", lambda *given: order.append("profile"))
    live.once.take("once")
    live.once.take("profiler")
    assert order == ["memory", "load"]
    live.once.take("metrics")
    assert order == ["memory", "load", "profile"]


def test_each_rank_is_timed_on_its_own_core_in_all_modes(cell, monkeypatch):
    """On one core all ranks of a cell took twice as long as in their blocks (ST@tp2: 17.5 ms instead of 7.9)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(8)))
    cores = {}
    for mode in ("eager", "graph"):
        for rank in range(2):
            live = cell(Mlp, mode, spec={"rank": rank})
            live.build()
            live._program.ranks.count = 2
            cores[mode, rank] = live.once.core
    assert cores == {("eager", 0): 0, ("graph", 0): 0, ("eager", 1): 4, ("graph", 1): 4}


def test_counted_and_profiled_iterations_move_their_inputs(cell, monkeypatch):
    """A graph that reads inputs in place writes no pointers for those that are where they were in the last call."""
    took, counted = [], []

    class Profiler(contextlib.nullcontext):
        def __init__(self, **named):
            super().__init__(self)

        def __enter__(self):
            counted.append(len(took))
            return self

        def export_chrome_trace(self, file):
            Path(file).write_text(json.dumps({"traceEvents": []}))

    live = cell(Mlp, "graph")
    live.build()
    live._compilation.iterate = lambda inputs: took.append(
        next(place for place, one in enumerate(live._program.input_sets) if one is inputs)
    )
    monkeypatch.setattr(suite.worker.measured_once, "copies_of", lambda run: (counted.append(len(took)), run()))
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(suite.worker.measured_once, "recorded_graphs", lambda device: [])
    monkeypatch.setattr(suite.worker.measured_once.MeasuredOnce, "_on_gpu", True)
    last = SimpleNamespace(name="last", values=lambda prepared: prepared.iterate(0) or {})
    monkeypatch.setattr(suite.worker.measured_once, "metrics", lambda: (last,))
    for _ in range(2):
        live.once.take("metrics")
        live.once.take("kernels")
        live.once.take("once")
        live.once.take("profiler")
    assert len(counted) >= 10
    assert [place for place in counted if took[place - 1] == took[place]] == []
    assert {took[place] for place in counted} == {0}, "all modes on the same inputs"
