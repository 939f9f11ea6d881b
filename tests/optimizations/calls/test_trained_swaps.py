"""Weights swapped in training are ordinary inputs from the third set on, and every path saves the same tensors."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import CompiledOnCpu
from torch import nn

import optimizations
from optimizations.in_place.examination import Examination
from optimizations.trees import reasons, results
from optimizations.trees.containers import managers
from tests.optimizations.trees.test_parameters import Net, values

SWAPS = 100


class Halves(nn.Module):
    """Saves a view of a parameter, which begins where a kernel may read it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.first.chunk(2)
        return (x @ one.t()).tanh() @ other


class Broken(nn.Module):
    """Two graphs in each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


@pytest.fixture(autouse=True)
def _proven_by_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of matrix products are such inputs."""
    monkeypatch.setattr(Examination, "unproven", lambda *_: [])


def memory(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Values of other weights, in memory of their own."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return aligned(like.numel()).view(like.shape).copy_(drawn)


def through_data(net: nn.Module, seed: int) -> None:
    for place, parameter in enumerate(net.parameters()):
        parameter.data = memory(parameter, seed + place)


def some_through_data(net: nn.Module, seed: int) -> None:
    for place, parameter in list(enumerate(net.parameters()))[seed // 100 % 2 :: 2]:
        parameter.data = memory(parameter, seed + place)


def by_a_state_dict(net: nn.Module, seed: int) -> None:
    state = {name: memory(value, seed + place) for place, (name, value) in enumerate(net.state_dict().items())}
    net.load_state_dict(state, assign=True)


def as_other_parameters(net: nn.Module, seed: int) -> None:
    for place, (name, parameter) in enumerate(list(net.named_parameters())):
        owner, _, attribute = name.rpartition(".")
        setattr(net.get_submodule(owner), attribute, nn.Parameter(memory(parameter, seed + place)))


WAYS = [through_data, some_through_data, by_a_state_dict, as_other_parameters]
KINDS = [Net, Halves, Broken]


class Training:
    """A module and its twin that is not compiled, trained on the same data with the same weights."""

    def __init__(self, kind: Callable[[], nn.Module], **options: object) -> None:
        self.net = kind()
        self.twin = copy.deepcopy(self.net)
        for one in (self.net, self.twin):
            through_data(one, 0)
        self.call = torch.compile(self.net, backend="encore", options=options)
        # Gradients of a parameter's parts are added in another order by eager PyTorch.
        self.expected = torch.compile(self.twin, backend="inductor") if kind is Halves else self.twin
        self.steps = 0

    def weights(self) -> list[torch.Tensor]:
        """A caller that references them gets new addresses for the next ones. Otherwise the allocator may reuse
        those of a recording, which needs no patch then (`test_reused_addresses_replay_their_first_recording`)."""
        return [one.data for net in (self.net, self.twin) for one in net.parameters()]

    def both(self, change: Callable[[nn.Module], object]) -> None:
        for one in (self.net, self.twin):
            change(one)

    def step(self, *, backwards: int = 1) -> None:
        """Forward and backward; gradients are added to those that there are."""
        self.steps += 1
        for _ in range(backwards):
            found = []
            for call, net in ((self.call, self.net), (self.expected, self.twin)):
                x = values(self.steps).requires_grad_()
                result = call(x)
                result.square().sum().backward()
                gradients = [one.grad for one in (x, *net.parameters()) if one.grad is not None]
                found.append([result.detach().clone(), *gradients])
                del result
            self.compare(*found)

    def infer(self) -> None:
        self.steps += 1
        with torch.no_grad():
            self.compare([self.call(values(self.steps)).clone()], [self.expected(values(self.steps))])

    def update(self) -> None:
        """Update in place as an optimizer does, and release the gradients."""
        for net in (self.net, self.twin):
            torch.optim.SGD(net.parameters(), lr=0.125).step()
            net.zero_grad()

    def compare(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), (self.steps, place)


def ordinary() -> int:
    """The most parameters that a recording of a forward copies, or reads in place as other inputs."""
    nodes = [node for one in managers() for node in one.nodes() if node.function.direction == "forward"]
    return max(len(node.function.ordinary_inputs.intersection(node._copied)) for node in nodes)


def recordings() -> int:
    return sum(len(report.recordings) for report in optimizations.report())


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_weights_have_eagers_gradients(
    compiled_on_cpu: CompiledOnCpu, kind: type[nn.Module], way: Callable[[nn.Module, int], None], lean: bool
) -> None:
    training = Training(kind, lean=lean)
    for _ in range(5):
        training.step()
        training.update()
    held: list[torch.Tensor] = []
    for seed in range(SWAPS):
        held += training.weights()
        training.both(lambda net, seed=seed: way(net, 100 * seed))  # type: ignore[misc]
        training.step(backwards=1 + seed % 2)
        training.update()
    assert ordinary()
    graphs = 2 * (2 if kind is Broken else 1)
    assert recordings() <= 4 * graphs, "two of each graph and direction, as stock makes them, and what follows"
    uncaptured = [one for report in optimizations.report() for one in report.uncaptured]
    assert {one.reason for one in uncaptured} <= {reasons.KEPT, reasons.FORWARD_UNCAPTURED}
    assert sum(one.calls for one in uncaptured) <= 2 * graphs, "no call runs without a graph because weights moved"


@pytest.mark.parametrize("back", ["", "first", "second", "first second"])
def test_reused_addresses_replay_their_first_recording(compiled_on_cpu: CompiledOnCpu, back: str) -> None:
    """The allocator may give weights the very addresses that were recorded. Then that recording is replayed, and there
    is one more of all that follow, as with stock."""
    training = Training(Broken)
    recorded = {net: {name: one.data for name, one in net.named_parameters()} for net in (training.net, training.twin)}

    def come_back(net: nn.Module) -> None:
        for name, parameter in net.named_parameters():
            if name.split(".")[0] in back.split():
                parameter.data = recorded[net][name].copy_(parameter)

    for _ in range(5):
        training.step()
        training.update()
    held: list[torch.Tensor] = []
    made = []
    for seed in range(16):
        held += training.weights()
        training.both(lambda net, seed=seed: through_data(net, 100 * seed))  # type: ignore[misc]
        if seed in (1, 12):
            with torch.no_grad():
                training.both(come_back)
        training.step()
        training.update()
        made.append(recordings())
    assert made[8] == made[11] and made[-1] <= made[11] + 4
    assert ordinary()


def test_swapped_weights_are_released(compiled_on_cpu: CompiledOnCpu) -> None:
    """This includes weights of recordings that are never replayed again."""
    training = Training(Net)
    sets = [list(training.net.parameters()), [nn.Parameter(memory(one, 7)) for one in training.net.parameters()]]
    gone: list[weakref.ref[torch.Tensor]] = []
    for step in range(30):
        if step < 16:
            training.net.first, training.net.second = sets[step // 4 % 2]
            training.twin.load_state_dict(training.net.state_dict())
            training.both(lambda net: net.zero_grad())
        else:
            sets.clear()
            training.both(lambda net, step=step: as_other_parameters(net, 10 * step))  # type: ignore[misc]
        training.step()
        gone += map(weakref.ref, training.net.parameters())
        if step > 16:
            gc.collect()
            current = set(map(id, training.net.parameters()))
            assert {id(one()) for one in gone if one() is not None} == current, step
    assert ordinary()


def test_outputs_in_input_memory_are_known() -> None:
    whole = torch.zeros(12)
    first, second, alone = whole[:4], whole[4:], torch.zeros(12)[4:]
    fixed = {0: first, 2: second, 5: alone}
    found = results.found_in([first, alone, None, second[2:]], fixed)
    assert [(one.output, one.input, one.is_input) for one in found] == [(0, 0, True), (1, 5, True), (3, 2, False)]
    moved = torch.arange(20.0)[3:11]
    outputs: list[torch.Tensor] = [alone[2:4], alone]
    results.ReturnedInPlace(results.found_in(outputs, fixed)).return_results(outputs, {5: moved})
    assert outputs[1] is moved
    assert outputs[0].tolist() == [5, 6]
    assert outputs[0].untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()


@pytest.mark.parametrize("seed", range(3))
def test_random_trainings_equal_uncaptured_runs(compiled_on_cpu: CompiledOnCpu, seed: int) -> None:
    draw = random.Random(seed)
    training = Training(KINDS[seed % len(KINDS)], lean=draw.random() < 0.7)
    kept: list[torch.Tensor] = []
    held: list[torch.Tensor] = []
    for step in range(80):
        if step < 40:
            held += training.weights()
        if draw.random() < 0.6:
            way = draw.choice(WAYS)
            training.both(lambda net, step=step, way=way: way(net, 100 * step))  # type: ignore[misc]
        if draw.random() < 0.2:  # written in place, at the address where it is
            with torch.no_grad():
                training.both(lambda net, step=step: next(net.parameters()).copy_(memory(next(net.parameters()), step)))  # type: ignore[misc]
        if draw.random() < 0.3:  # the allocator gives other addresses
            kept = [torch.empty(draw.randrange(1, 400)) for _ in range(draw.randrange(4))]
        if draw.random() < 0.2:
            training.infer()
        if draw.random() < 0.2:
            torch.compiler.cudagraph_mark_step_begin()
        training.step(backwards=draw.choice((1, 1, 2)))
        if draw.random() < 0.7:
            training.update()
    del kept, held
    assert ordinary()


# Saved-tensor hooks get the program's tensors, equally many on every path of a call.


IMPORTS = """
import importlib, pkgutil, torch
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one), lambda one: one):
    import optimizations
    for found in pkgutil.walk_packages(optimizations.__path__, "optimizations."):
        importlib.import_module(found.name)
print("saved", len(saved))
"""


def test_imports_save_no_tensors() -> None:
    """Encore imports most of its modules in the program's first forward, which may be checkpointed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    arguments = [sys.executable, "-c", IMPORTS]
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.strip() == "saved 0", result.stderr


class Adapted(nn.Module):
    """A frozen weight with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(self.base(x) + self.up(self.down(x)))
        return result


@pytest.mark.parametrize("lean", [True, False])
def test_every_path_saves_equally_many_tensors(compiled_on_cpu: CompiledOnCpu, lean: bool) -> None:
    counts = []
    block = Adapted()
    call = torch.compile(block, backend="encore", options={"lean": lean})
    for step in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, saved=saved: saved.append(one) or one, _same):
            result = call(torch.randn(4, 8) + step)
        result.square().sum().backward()
        counts.append(len(saved))
    assert len(set(counts)) == 1
    assert compiled_on_cpu.cuda.replays


def _same(value: Any) -> Any:
    return value
