"""Eager's run for reference, and the trial of a stochastic workload."""

from __future__ import annotations

import os

import pytest
import torch
from tiny_cells import Mlp, cell, replaced_call
from torch._dynamo.utils import counters

import suite.worker.compilation
import suite.worker.judge
from optimizations import torch_internals
from suite.measure.correctness import LOSS_SCALES
from suite.results.schema import CompileConditions
from suite.worker.protocol import Inaccurate

__all__ = ["cell"]


def test_compiled_stochastic_training_agrees_with_eager(cell):
    """Half of the hidden values are dropped: with other random numbers, nothing would agree."""
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True)
    prepared = live.prepare()
    correctness = prepared.correctness
    assert correctness.passed and correctness.fallback_random and correctness.deterministic
    assert correctness.compared_tensors == 7  # output, loss, four gradients, the buffer
    assert prepared.compile.parts["entire_frame_compile"] > 0
    graphs = live.once.take("metrics").graphs
    assert graphs is not None
    assert (graphs.fx_graphs, graphs.graph_breaks, graphs.partitions, graphs.cuda_graphs) == (1, 0, None, 0)


def surroundings() -> tuple[bool, ...]:
    """Return whether algorithms are deterministic, and whether each kind of attention may run."""
    cuda = torch.backends.cuda
    kinds = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    return torch.are_deterministic_algorithms_enabled(), *(may_run() for may_run in kinds)


class Asking(torch.nn.Module):
    """Writes down its surroundings, uncompiled and compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(0.5)
        self.found: list[tuple[bool, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.compiler.disable(lambda: self.found.append(surroundings()))()
        return self.mlp(x)


@pytest.mark.parametrize(("task", "deterministic"), [("training", True), ("training", False), ("inference", False)])
def test_eager_and_trial_have_surroundings_of_their_own(cell, task, deterministic):
    """Their algorithms may be deterministic, and dropping attention is computed from single operators."""
    module = Asking()
    live = cell(lambda: module, "compile", task=task, stochastic=True, tried_deterministic=deterministic)
    before = surroundings()
    assert not before[0]
    live.build()
    assert live._judge.trial_verdict.passed
    attention = (False, False, False, True) if task == "training" else before[1:]
    assert set(module.found) == {(deterministic, *attention)}
    tried = len(module.found)
    assert tried >= 4, "eager, and what was compiled for trial, on two inputs each"
    live.compile(CompileConditions.COLD_ALONE)
    assert set(module.found[tried:]) == {before} == {surroundings()}
    assert live.settle().correctness.passed
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_trials_do_not_share_caches_with_what_is_measured(cell, monkeypatch, tmp_path):
    """Each process of a mode whose results are never twice the same runs one, and only the first compiles for it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    found = []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec={"cache_dir": str(tmp_path)})
        live.build()
        found.append(counters["inductor"]["fxgraph_cache_hit"] > 0)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert found == [False, True]
    counters.clear()
    live.compile(CompileConditions.COLD_ALONE)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0 < counters["inductor"]["fxgraph_cache_miss"]


def test_later_trial_finds_what_the_first_compiled(cell, monkeypatch, tmp_path):
    """A later process has marked its graphs with the name of its mode before it knows that it needs a trial."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    spec = {"cache_dir": str(tmp_path)}
    cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec=spec).build()
    spec |= {"known_digests": ["other", "bits"]}
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec=spec)
    live.build()
    live.compile(CompileConditions.WARM)
    mark = torch_internals.inductor_config.aot_inductor.metadata
    counters.clear()
    live._judge.run_reference()
    assert counters["inductor"]["fxgraph_cache_hit"] > 0 == counters["inductor"]["fxgraph_cache_miss"]
    assert torch_internals.inductor_config.aot_inductor.metadata == mark, "what is compiled next is the mode's again"


class Keeping(Mlp):
    """Keeps what it makes in its first call, as Mask R-CNN keeps its anchors. Writes down whether that is compiled."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.kept: torch.Tensor | None = None
        self.made_compiled: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.made_compiled.append(torch.compiler.is_compiling())
            self.kept = x.new_ones(4)
        return super().forward(x) * self.kept


@pytest.mark.parametrize("task", ["inference", "training"])
def test_later_process_begins_with_an_uncompiled_call_too(cell, task):
    first = cell(Keeping, "compile", task=task)
    digests = first.prepare().correctness.digests
    module = Keeping()
    live = cell(lambda: module, "compile", task=task, spec={"known_digests": digests})
    live.build()
    assert module.made_compiled == [False]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.calls == 0, "buffers are as they were built"
    live.compile(CompileConditions.WARM)
    assert live.settle().correctness is None, "it has the bits of the first"


class HalfGradients(Mlp):
    """Its gradients pass through float16, as under autocast on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).half().float()


class Doubled(torch.autograd.Function):
    """Twice the gradient of what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize(("size", "scale"), [(1e-6, 2.0**15), (1e3, 2.0**7), (1e6, 1.0)])
def test_trial_finds_wrong_gradients_too_small_for_float16(cell, monkeypatch, size, scale):
    """And its losses are not scaled so far that eager's gradients are infinite."""
    monkeypatch.setattr(suite.worker.judge, "loss_scales", lambda instance: LOSS_SCALES)
    options = {"task": "training", "stochastic": True, "loss": lambda output: output.mean() * size}
    seen = []
    replaced_call(monkeypatch, lambda module, x: seen.append(live._program.instance.loss_scale) or module(x))
    live = cell(lambda: HalfGradients(0.5), "compile", **options)
    live.build()
    assert set(seen) == {scale} and len(seen) == 2 * 3, "calls of the trial"
    seen.clear()
    live.compile(CompileConditions.COLD_ALONE)
    assert live.settle().correctness.passed
    assert set(seen) == {1.0}, "what is measured is the program as it is"
    replaced_call(monkeypatch, lambda module, x: Doubled.apply(module(x)))
    with pytest.raises(Inaccurate, match="gradient"):
        cell(lambda: HalfGradients(0.5), "compile", **options).build()


def test_trial_leaves_no_pending_work(cell, monkeypatch):
    """A graph that is not called any more never settles, and each cell waited 20 s for it."""
    forgotten = []
    monkeypatch.setattr(suite.worker.compilation.optimizations, "reset", lambda: forgotten.append(len(calls)))
    calls = []
    replaced_call(monkeypatch, lambda module, x: calls.append(x) or module(x))
    live = cell(lambda: Mlp(0.5), "encore", task="training", stochastic=True)
    live.build()
    assert forgotten == [len(calls)], "after the trial's last call"
    assert calls
