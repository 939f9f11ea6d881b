"""Strange programs, compiled whole, while every call may be served another way: what they compute is eager's.

Turns change with each iteration, and verdicts come and go: that no program calls four times in a row by one candidate
hides nothing here.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from compiled_on_cpu import CompiledOnCpu, compiled_on_cpu
from test_strange_programs import PROGRAMS as STRANGE
from test_strange_programs import Net, flat, gradients, values

import optimizations
from optimizations import backend
from optimizations.capture.trees.function import RecordableFunction
from optimizations.selection import budget, group, member, served, timing
from optimizations.selection.decide import Rules
from optimizations.selection.settings import Settings
from optimizations.selection.store import VerdictStore

__all__ = ["compiled_on_cpu"]

Compile = Callable[[Any], Callable[..., Any]]

RESTLESS = Rules(block_calls=1, lead_in_calls=0, lead_in_rounds=0, most_calls=100_000, least_gain_s=0)
HASTY = Rules(block_calls=1, lead_in_calls=0, lead_in_rounds=0, most_calls=5)


def inputs_written(compile_: Compile) -> list[Any]:
    def body(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(x.sum(0))
        x.mul_(2)
        return x + state, x

    run, found = compile_(body), []
    state = torch.zeros(4)
    with torch.no_grad():
        for step in range(30):
            x = values(step)
            result, same = run(x, state)
            found += [result.clone(), x.clone(), state.clone(), torch.tensor(float(same is x))]
    return found


def outputs_share_memory(compile_: Compile) -> list[Any]:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y[1:], y.t(), x, x[0]

    run, found = compile_(body), []
    with torch.no_grad():
        for step in range(30):
            x = values(step)
            results = run(x)
            results[0].add_(1)
            results[3].sub_(1)
            found += [one.clone() for one in (*results, x)]
    return found


def calls_that_raise(compile_: Compile) -> list[Any]:
    net = Net()
    run, found = compile_(net), []
    for step in range(30):
        net.zero_grad()
        try:
            run(values(step) if step % 5 != 3 else torch.ones(2, 3)).square().sum().backward()
        except (RuntimeError, torch._dynamo.exc.TorchRuntimeError):
            found.append(torch.tensor(1.0))
        found += gradients(net)
    return found


def chains_that_are_entered_in_the_middle(compile_: Compile) -> list[Any]:
    first, second = Net(), Net()
    one, other, found = compile_(first), compile_(second), []
    with torch.no_grad():
        for step in range(30):
            found.append(other(one(values(step))))
            if step % 7 == 3:
                found.append(other(values(step)))
    for step in range(20):
        first.zero_grad()
        second.zero_grad()
        other(one(values(step))).square().sum().backward()
        found += gradients(first) + gradients(second)
    return found


def results_that_feed_the_next_call(compile_: Compile) -> list[Any]:
    run, found, x = compile_(Net()), [], values(0, 4)
    for _ in range(60):
        with torch.no_grad():
            x = run(x) * 0.5
        found.append(x)
    return found


OWN = (
    inputs_written,
    outputs_share_memory,
    calls_that_raise,
    chains_that_are_entered_in_the_middle,
    results_that_feed_the_next_call,
)
PROGRAMS = {**STRANGE, **{one.__name__: one for one in OWN}}


class RandomTimer:
    """Times that say nothing."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def begin(self) -> None:
        pass

    def end(self) -> Any:
        seconds = 1e-9 * self.draw.lognormvariate(0, 1)  # no budget ends it
        return type("Known", (), {"seconds": lambda self: seconds})()


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Measuring begins as soon as there is a graph, and looks are taken all the time."""
    draw = random.Random(4)
    standing = RecordableFunction.standing

    def ready(self: RecordableFunction) -> Any:
        found = standing(self)
        return dataclasses.replace(found, waiting=None if found.recordings else found.waiting)

    monkeypatch.setattr(RecordableFunction, "standing", ready)
    monkeypatch.setattr(timing, "timer_for", lambda objective, device_index: RandomTimer(draw))
    monkeypatch.setattr(served, "LOOK_EVERY", 2)
    monkeypatch.setattr(group, "LONGEST_LOOK_EVERY", 2)
    monkeypatch.setattr(budget, "SHARE", 1e9)
    monkeypatch.setattr(member, "circumstances", lambda *arguments: None)

    def with_rules(rules: Rules, seed: int = 4) -> None:
        draw.seed(seed)
        settings = Settings("measure", rules=rules, store=VerdictStore(tmp_path / "verdicts"))
        monkeypatch.setattr(backend, "_selection", lambda options: settings)

    return with_rules


@pytest.mark.parametrize("rules", [RESTLESS, HASTY], ids=["measured", "decided"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_computes_is_eagers_whoever_serves_its_calls(
    compiled_on_cpu: CompiledOnCpu, turning: Any, name: str, rules: Rules
) -> None:
    turning(rules)
    torch.manual_seed(0)
    expected = flat(PROGRAMS[name](lambda module: module))
    torch.manual_seed(0)
    with functorch_config.patch(donated_buffer=False):
        found = flat(PROGRAMS[name](lambda module: torch.compile(module, backend="encore")))
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"value {n}: {text}")
    reports = [one for graph in optimizations.report() for one in graph.selection]
    assert not [one.reason for one in reports if "failed" in (one.reason or "")]
    if name == "results_that_feed_the_next_call":
        assert sum(one.calls for one in reports) >= (30 if rules is RESTLESS else 5), "nobody took turns"
