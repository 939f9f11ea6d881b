"""Backwards read random state on the host or the GPU, next to forwards with and without graphs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import KNOWN, Compiled, Model, nodes, values

from optimizations import torch_internals
from optimizations.in_place.generated import GeneratedCode
from optimizations.trees import readable_seeds, reasons
from optimizations.trees.containers import managers
from optimizations.trees.manager import EncoreManager

W = values(0.5)


class HostMemory:
    """Knows which tensors lie on the host: all memory is host memory here."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = torch_internals.cudagraph_trees.StorageWeakRef(storage)
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()


class Forward(Model):
    """Its result is saved as a seed: on the host where it runs without a graph."""

    host: HostMemory

    def __call__(self, inputs: list[Any]) -> list[Any]:
        (saved,) = super().__call__(inputs)
        return [saved if self.cuda.capturing else self.host.add(saved)]


class Backward(Model):
    """Takes a tangent, a seed and W. Notes where the seed lies in each run."""

    host: HostMemory

    def __call__(self, inputs: list[Any]) -> list[Any]:
        on_host = inputs[1] in self.host
        assert on_host == (self.cuda.capturing is None), "an operator of PyTorch would end the process here"
        return super().__call__(inputs)


class Training:
    """A forward and a backward that reads the forward's seed.

    `copied_out`: the seed is a copy outside of graph memory, and an ordinary input of the backward.
    """

    def __init__(self, cuda: CudaOnCpu, host: HostMemory, *, copied_out: bool = False, lean: bool = True) -> None:
        self.host, self.copied_out = host, copied_out
        forward, backward = Forward(cuda), Backward(cuda, code=GeneratedCode(None, seeds=(1,)))
        forward.host = backward.host = host
        static = (2,) if copied_out else (1, 2)
        self.models = forward, backward
        self.forward = Compiled(forward, is_inference=False, lean=lean)
        self.backward = Compiled(backward, is_inference=False, is_backward=True, static_inputs=static, lean=lean)

    def run_forward(self, start: float) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = values(start), values(start + 1)
        (saved,) = self.forward.checked(x, y, W)
        return saved, 2 * x + y * W

    def run_backward(self, start: float, saved: torch.Tensor, expected: torch.Tensor) -> None:
        tangent = values(start + 2)
        (grad,) = self.backward.function([tangent, saved, W])
        assert torch.equal(grad, 2 * tangent + expected * W)

    def step(self, start: float, *, on_host: bool = False) -> None:
        """`on_host`: the seed is copied to the host after the forward."""
        saved, expected = self.run_forward(start)
        seed = saved.clone() if on_host or self.copied_out else saved
        if on_host or saved in self.host:
            self.host.add(seed)
        self.run_backward(start, seed, expected)

    def without_graph(self, which: str, reason: str | None) -> None:
        getattr(self, which).functions[0].without_graph = reason


@pytest.fixture
def host(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    memory = HostMemory()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda_on_cpu.capturing is not None)
    monkeypatch.setattr(readable_seeds, "is_on_host", lambda seed: seed in memory)
    monkeypatch.setattr(readable_seeds, "to_host", lambda seed: memory.add(seed.clone()))
    return memory


def recorded(cuda: CudaOnCpu, host: HostMemory, *, lean: bool) -> Training:
    """A training whose graphs are recorded and replayed."""
    made = Training(cuda, host, lean=lean)
    for step in range(12):
        made.step(step)
    assert made.models[1].runs[-1] == "captured"
    return made


@pytest.mark.parametrize("lean_on", [True, False])
def test_backward_without_graph_reads_seeds_on_the_host(
    cuda_on_cpu: CudaOnCpu, host: HostMemory, lean_on: bool
) -> None:
    training = recorded(cuda_on_cpu, host, lean=lean_on)
    training.without_graph("backward", "for this test")
    runs = len(training.models[1].runs)
    for step in range(3):
        training.step(step)
    assert training.models[1].runs[runs:] == ["plain"] * 3
    training.without_graph("backward", None)
    training.step(5)
    assert training.models[1].runs[runs + 3 :] == [], "the next one replays its graph"


@pytest.mark.parametrize("lean_on", [True, False])
def test_backward_of_uncaptured_forward_runs_without_graph(
    cuda_on_cpu: CudaOnCpu, host: HostMemory, lean_on: bool
) -> None:
    training = recorded(cuda_on_cpu, host, lean=lean_on)
    recordings = len(nodes())
    training.without_graph("forward", "for this test")
    for step in range(3):
        training.step(step)
    assert training.backward.uncaptured()[reasons.FORWARD_UNCAPTURED] == 3
    training.without_graph("forward", None)
    calls = sum(training.backward.uncaptured().values())
    for step in range(3):
        training.step(step)
    assert sum(training.backward.uncaptured().values()) == calls, "graphs serve them again"
    assert len(nodes()) == recordings


@pytest.mark.parametrize("copied_out", [True, False])
def test_seeds_on_the_host_are_never_captured(cuda_on_cpu: CudaOnCpu, host: HostMemory, copied_out: bool) -> None:
    """This holds also if no forward of this manager put them there, so that nothing is marked."""
    training = Training(cuda_on_cpu, host, copied_out=copied_out)
    for step in range(12):
        training.step(step, on_host=True)
    assert "captured" not in training.models[1].runs
    assert training.backward.uncaptured()[reasons.FORWARD_UNCAPTURED] == 11
    for step in range(12):
        training.step(step)
    runs = list(training.models[1].runs)
    assert "captured" in runs
    recordings = len(nodes())
    for step in range(3):
        training.step(step, on_host=True)
    assert training.models[1].runs == [*runs, *["plain"] * 3]
    assert len(nodes()) == recordings
    said = {one.reason for one in training.backward.functions[0].slow_calls()}
    assert (reasons.FORWARD_UNCAPTURED in said) == copied_out


def test_backward_depends_on_its_own_forward_only(cuda_on_cpu: CudaOnCpu) -> None:
    """A forward without a graph that takes another's result does not let that one's backward run without its graph."""
    first, first_back = Compiled(Model(cuda_on_cpu), is_inference=False), Model(cuda_on_cpu)
    second, second_back = Model(cuda_on_cpu, returns_x=True), Model(cuda_on_cpu)
    settings = {"is_inference": False, "is_backward": True, "static_inputs": (1, 2)}
    back, later_back = Compiled(first_back, **settings), Compiled(second_back, **settings)
    later = Compiled(second, is_inference=False, outputs=2)

    def step(start: float) -> None:
        x, y = values(start), values(start + 1)
        (hidden,) = first.checked(x, y, W)
        out, saved = later.checked(hidden, y, W, mark=False)
        later_back.checked(values(start), out, W, mark=False)
        del out, saved
        back.checked(values(start), hidden, W, mark=False)

    for number in range(8):
        step(number)
    later.functions[0].without_graph = "for this test"
    before = back.uncaptured()
    for number in range(4):
        step(number)
    assert later_back.uncaptured()[reasons.FORWARD_UNCAPTURED] == 4
    assert back.uncaptured() == before


def test_forward_that_saves_only_its_input_is_recognized(cuda_on_cpu: CudaOnCpu) -> None:
    forward = Compiled(Model(cuda_on_cpu, returns_x=True), is_inference=False, outputs=2)
    backward = Compiled(Model(cuda_on_cpu), is_inference=False, is_backward=True, static_inputs=(1, 2))

    def step(start: float) -> None:
        x = values(start)
        _, saved = forward.checked(x, values(1), W)
        assert torch.equal(saved, x)
        backward.checked(values(2), saved, W, mark=False)

    for number in range(6):
        step(number)
    recordings = len(nodes())
    forward.functions[0].without_graph = "for this test"
    for number in range(6):
        step(number)
    assert len(nodes()) == recordings, "recordings for inputs that lie elsewhere in each call would never be replayed"


def test_input_that_a_graph_returns_again_keeps_no_mark(cuda_on_cpu: CudaOnCpu) -> None:
    """A batch stays in its memory. A forward without a graph returned it once, and forwards with one do so later."""
    code = dataclasses.replace(KNOWN, is_partition=True)
    forward = Compiled(Model(cuda_on_cpu, returns_x=True, code=code), is_inference=False, outputs=2, lean=False)
    settings = {"is_inference": False, "is_backward": True, "static_inputs": (1, 2)}
    backward = Compiled(Model(cuda_on_cpu), lean=False, **settings)
    x = values(3)

    def step() -> None:
        saved = forward.checked(x, values(1), W)[1]
        assert saved is x
        backward.checked(values(2), saved, W, mark=False)

    for without_graph in (None, "for this test", None):
        for function in forward.functions:
            function.without_graph = without_graph
        for _ in range(1 if without_graph else 6):
            step()
    assert backward.uncaptured() == {reasons.FORWARD_UNCAPTURED: 1}


def test_live_uncaptured_forward_keeps_others_fast(cuda_on_cpu: CudaOnCpu, host: HostMemory) -> None:
    """An uncaptured forward whose backward never runs does not affect later calls."""
    training = Training(cuda_on_cpu, host)
    for step in range(12):
        training.step(step)
    training.without_graph("forward", "for this test")
    kept = training.run_forward(1)
    training.without_graph("forward", None)
    (one,) = managers()
    assert one.has_uncaptured_forward(kept[:1])
    training.step(2)
    full = sum(one.calls for one in training.backward.functions[0].slow_calls())
    for step in range(4):
        training.step(step)
    assert sum(one.calls for one in training.backward.functions[0].slow_calls()) == full


def test_parameters_and_dead_results_are_not_marked(cuda_on_cpu: CudaOnCpu) -> None:
    """A parameter is saved by every forward, with a graph or without."""
    one = EncoreManager(0)
    parameter, result, in_graph_memory = values(1), values(2), values(3)
    live = torch_internals.cudagraph_trees.StorageWeakRefWrapper(in_graph_memory)
    one.current_node = SimpleNamespace(path_live_weakrefs=lambda: [live])
    one.mark_uncaptured([parameter, result, None, in_graph_memory], [parameter])
    assert not one.has_uncaptured_forward([parameter, in_graph_memory, 3])
    assert one.has_uncaptured_forward([parameter, result[2:]])
    del result
    assert not any(one.has_uncaptured_forward([values(number)]) for number in range(50)), (
        "in the memory of the dead one"
    )
