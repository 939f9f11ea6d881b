"""Recordings of whole compiled programs that train as users do."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.trees import nodes
from torch import nn

import optimizations
from optimizations.trees import moved_inputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def values(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def test_two_forwards_in_each_step_are_two_recordings(compiled_on_cpu: CompiledOnCpu) -> None:
    net = Net()
    run = torch.compile(net, backend="encore")
    for step in range(12):
        net.zero_grad()
        if step == 8:
            before = compiled_on_cpu.captures, compiled_on_cpu.cuda.replays
        (run(values(step)) * run(values(step + 30))).sum().backward()
    assert compiled_on_cpu.captures == before[0]
    assert compiled_on_cpu.cuda.replays == before[1] + 4 * 4


def test_forward_stores_indices_of_returned_results(compiled_on_cpu: CompiledOnCpu) -> None:
    """Callers get the first two; saved results are not checked for attachments."""
    net = Net()

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = net(x)
        return y, y.argmax(1)

    run = torch.compile(program, backend="encore")
    for step in range(4):
        run(values(step))[0].sum().backward()
    forward, backward = sorted(nodes(), key=lambda node: node.function.direction, reverse=True)
    assert (forward.function.direction, forward.function.callers_get) == ("forward", {0, 1})
    assert len(forward.outputs_metadata) > 2
    assert (backward.function.direction, backward.function.callers_get) == ("backward", None)


def test_backwards_with_copied_saved_tensors_stop_recording(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward between a forward and its own ends an iteration, so that saved tensors are found live."""
    monkeypatch.setattr(moved_inputs, "MOST_USELESS_BACKWARDS", 4)
    first, second = (torch.compile(Net(), backend="encore") for _ in range(2))
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
    net = Net()
    run = torch.compile(net, backend="encore")
    for step in range(20):
        held = run(values(step))
    torch.testing.assert_close(held, net(values(19)))
    assert compiled_on_cpu.captures == [6]
    assert next(iter(optimizations.report()[0].uncaptured)).calls >= 12
