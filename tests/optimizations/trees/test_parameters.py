"""Parameters that a forward saves for its backward belong to their call and are not kept alive."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import CompiledOnCpu
from torch import nn

import optimizations
from optimizations.trees import moved_inputs
from optimizations.trees.containers import managers


class Net(nn.Module):
    """Saves its parameters as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.second = nn.Parameter(torch.linspace(0, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first.t()).sin() * self.second


class Halves(Net):
    """Saves a view of a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first.chunk(2)[0].t()).tanh() @ self.first.chunk(2)[1]


def values(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def gradients(call: object, net: Net, step: int) -> list[torch.Tensor]:
    x = values(step).requires_grad_()
    call(x).square().sum().backward()  # type: ignore[operator]
    found = [tensor.grad for tensor in (x, *net.parameters()) if tensor.grad is not None]
    net.zero_grad()
    return found


def over_the_same_memory(net: Net) -> list[nn.Parameter]:
    """Replace the parameters by others over the same memory, and return the old ones."""
    before = [net.first, net.second]
    net.first, net.second = nn.Parameter(net.first.data), nn.Parameter(net.second.data)
    return before


def saved_in_place() -> list[bool]:
    (manager,) = managers()
    return [one.is_input for node in manager.nodes() for one in node.results.returned.found]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("kind", [Net, Halves])
def test_recorded_parameters_may_be_changed_or_freed(
    compiled_on_cpu: CompiledOnCpu, kind: type[Net], lean: bool
) -> None:
    net = kind()
    call = torch.compile(net, backend="encore", options={"lean": lean})
    for step in range(8):
        gradients(call, net, step)
    captures = compiled_on_cpu.captures
    for parameter in over_the_same_memory(net):
        parameter.data = torch.full_like(parameter, 1e3)
    for step in range(8):
        torch.testing.assert_close(gradients(call, net, step), gradients(net, net, step))
    assert compiled_on_cpu.captures == captures
    assert all(saved_in_place()) is (kind is Net)
    steady = [one.steady_replays for report in optimizations.report() for one in report.recordings]
    assert any(steady) is lean


LAYERS = 24


class Block(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(memory(place))
        self.shift = nn.Parameter(memory(place + 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight).exp() @ self.shift


def memory(seed: int) -> torch.Tensor:
    drawn = 0.5 * torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    return aligned(16).view(4, 4).copy_(drawn)


def passes(layers: list[Block], count: int, start: int = 0) -> None:
    """Run a model of these layers in inference, and compare it with eager PyTorch."""
    with torch.no_grad():
        for step in range(start, start + count):
            x = expected = torch.full((3, 4), 0.01 * step)
            for layer in layers:
                x = layer(x)
                expected = layer.forward(expected)
            assert torch.equal(x, expected), step


def compiled_layers() -> list[Block]:
    layers = [Block(place) for place in range(LAYERS)]
    for layer in layers:
        layer.compile(backend="encore")
    return layers


def recorded() -> list[int]:
    """Return the bytes that each recording copies in a call."""
    return [node.copied_per_replay for one in managers() for node in one.nodes()]


def test_each_layer_is_recorded_with_its_weights(compiled_on_cpu: CompiledOnCpu) -> None:
    layers = compiled_layers()
    passes(layers, 4)
    copied = recorded()
    assert len(copied) == LAYERS
    assert max(copied) <= 3 * 4 * 4, "the weights are read where they are, as with stock"
    replays = compiled_on_cpu.cuda.replays
    passes(layers, 3, start=4)
    assert compiled_on_cpu.cuda.replays == replays + 3 * LAYERS, "no call runs without a graph"
    assert len(recorded()) == LAYERS


def test_layers_of_a_second_model_are_recorded_too(compiled_on_cpu: CompiledOnCpu) -> None:
    """Recordings of the first one have been replayed by then."""
    first, second = compiled_layers(), compiled_layers()
    passes(first, 4)
    passes(second, 4)
    assert len(recorded()) == 2 * LAYERS
    assert max(recorded()) <= 3 * 4 * 4
    passes(first, 2)
    assert len(recorded()) == 2 * LAYERS


def test_freed_layers_count_as_moved(compiled_on_cpu: CompiledOnCpu) -> None:
    """Weights are loaded for each call, so there are two recordings and one that copies."""
    layer, held = Block(0), []
    layer.compile(backend="encore")
    for step in range(12):
        held.append(bytearray(4096))  # for other addresses
        for parameter in layer.parameters():
            parameter.data = memory(step)
        passes([layer], 1, start=step)
    assert len(recorded()) <= 3
    assert recorded()[-1] != 3 * 4 * 4, "its weights are copied, or read in place by now"


def test_weights_that_never_recur_are_copied(compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_inputs, "MOST_LAYERS", 5)
    layer, held = Block(0), []
    layer.compile(backend="encore")
    for step in range(16):
        held += [parameter.data for parameter in layer.parameters()]
        for parameter in layer.parameters():
            parameter.data = memory(step)
        passes([layer], 1, start=step)
    assert len(recorded()) == 6
    assert recorded()[-1] != 3 * 4 * 4, "its weights are copied, or read in place by now"


# Recordings of whole compiled programs that train as users do.


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def test_two_forwards_in_each_step_are_two_recordings(compiled_on_cpu: CompiledOnCpu) -> None:
    net = Linears()
    run = torch.compile(net, backend="encore")
    for step in range(12):
        net.zero_grad()
        if step == 8:
            before = compiled_on_cpu.captures, compiled_on_cpu.cuda.replays
        (run(values(step)) * run(values(step + 30))).sum().backward()
    assert compiled_on_cpu.captures == before[0]
    assert compiled_on_cpu.cuda.replays == before[1] + 4 * 4


def test_backwards_with_copied_saved_tensors_stop_recording(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward between a forward and its own ends an iteration, so that saved tensors are found live."""
    monkeypatch.setattr(moved_inputs, "MOST_USELESS_BACKWARDS", 4)
    first, second = (torch.compile(Linears(), backend="encore") for _ in range(2))
    recordings = []
    for step in range(20):
        made = first(values(step))
        second(values(step + 5)).mean().backward()
        second(made).square().mean().backward()
        recordings.append(sum(len(report.recordings) for report in optimizations.report()))
    assert recordings[-1] == recordings[12], recordings
    reasons = {one.reason for report in optimizations.report() for one in report.uncaptured}
    assert any("none was replayed" in reason for reason in reasons), reasons


def test_forwards_with_a_live_last_result_stop_recording(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_inputs, "MOST_USELESS_RECORDINGS", 6)
    net = Linears()
    run = torch.compile(net, backend="encore")
    for step in range(20):
        held = run(values(step))
    torch.testing.assert_close(held, net(values(19)))
    assert compiled_on_cpu.captures == [6]
    assert next(iter(optimizations.report()[0].uncaptured)).calls >= 12
