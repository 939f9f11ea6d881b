"""Whole compiled programs that use results, gradients and modules as users do compute eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.trees import nodes
from torch import nn
from user_sessions import check_session

import optimizations
from optimizations.trees import moved_inputs

Compile = Callable[[Any], Callable[..., Any]]
PROGRAMS: dict[str, Callable[[Compile], list[Any]]] = {}


class Net(nn.Module):
    def __init__(self, *, norm: bool = False, drop: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5) if drop else nn.Identity()
        self.register_buffer("offset", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.drop(torch.relu(self.norm(self.first(x))))) + self.offset
        return result


def values(seed: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def program(function: Callable[[Compile], list[Any]]) -> Callable[[Compile], list[Any]]:
    PROGRAMS[function.__name__] = function
    return function


@program
def views_of_results_kept(compile_: Compile) -> list[Any]:
    def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ x.t()
        return y[0], y[1:], y.t()

    run, found = compile_(rows), []
    with torch.no_grad():
        for step in range(14):
            first, others, turned = run(values(step))
            if step % 4 == 1:
                others.add_(1)
            found += [(others,), (first,), (turned[0],), ()][step % 4]
    return found


@program
def two_forwards_in_each_step(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []
    for step in range(8):
        net.zero_grad()
        loss = (run(values(step)) * run(values(step + 30))).sum()
        loss.backward()
        found += [loss.detach(), *gradients(net)]
    return found


@program
def several_forwards_in_some_steps(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []
    for step in range(12):
        net.zero_grad()
        losses = [run(values(20 * step + i)).square().mean() for i in range(1 + (step % 4 == 3) + (step % 5 == 4))]
        for loss in losses:
            loss.backward()
        found += gradients(net)
    return found


@program
def a_backward_that_comes_steps_later(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []
    later: torch.Tensor | None = None
    for step in range(14):
        net.zero_grad()
        loss = run(values(step)).square().mean()
        if step % 5 == 3:
            later = loss
            continue
        loss.backward()
        if step % 5 == 0 and later is not None:
            later.backward()
            later = None
        found += gradients(net)
    return found


@program
def graphs_retained_in_some_steps(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []
    for step in range(14):
        net.zero_grad()
        loss = run(values(step)).square().mean()
        loss.backward(retain_graph=step % 5 == 3)
        if step % 5 == 3:
            loss.backward()
        found += gradients(net)
    return found


@program
def forwards_without_a_backward(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []
    for step in range(16):
        result = run(values(step))
        if step % 3 == 2:
            result.sum().backward()
            found += gradients(net)
        found.append(result.detach())
    return found


@program
def resets_while_a_backward_is_pending(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []
    for reset in (lambda: None, lambda: None, lambda: None, optimizations.reset, torch.compiler.reset, lambda: None):
        net.zero_grad()
        result = run(values(3))
        reset()
        result.sum().backward()
        found += [result, *gradients(net)]
    return found


@program
def hooks_that_change_and_raise(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("not this one")

    for step in range(10):
        result = run(values(step))
        result.register_hook(refuse if step % 4 == 2 else lambda gradient: gradient * 3)
        try:
            result.sum().backward()
        except ValueError:
            found.append(torch.tensor(float(step)))
        found += [result.detach(), *gradients(net)]
    return found


def flat(found: Any) -> list[Any]:
    if isinstance(found, (list, tuple)):
        return [leaf for one in found for leaf in flat(one)]
    return [found.detach() if isinstance(found, torch.Tensor) else found]


FULL_WAYS = ("several_forwards_in_some_steps", "a_backward_that_comes_steps_later", "graphs_retained_in_some_steps")


@pytest.mark.parametrize(
    ("name", "lean"), [*((name, True) for name in PROGRAMS), *((name, False) for name in FULL_WAYS)]
)
def test_program_computes_eagers_results(compiled_on_cpu: CompiledOnCpu, name: str, lean: bool) -> None:
    torch.manual_seed(0)
    expected = flat(PROGRAMS[name](lambda module: module))
    torch.manual_seed(0)
    # Buffers that a backward may write over are PyTorch's reason to refuse retain_graph.
    with functorch_config.patch(donated_buffer=False):
        found = flat(PROGRAMS[name](lambda module: torch.compile(module, backend="encore", options={"lean": lean})))
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"value {n}: {text}")
    assert any(compiled_on_cpu.captures), "nothing was captured"
    assert compiled_on_cpu.cuda.replays


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


ACTIONS = 30


@pytest.mark.parametrize(
    ("seed", "lean", "mark_steps"), [(1, True, False), (2, True, True), (3, False, False), (4, True, False)]
)
def test_session_results_equal_eager(compiled_on_cpu: CompiledOnCpu, seed: int, lean: bool, mark_steps: bool) -> None:
    check_session(seed, ACTIONS, lean=lean, mark_steps=mark_steps)
    assert any(compiled_on_cpu.captures)
    assert compiled_on_cpu.cuda.replays
