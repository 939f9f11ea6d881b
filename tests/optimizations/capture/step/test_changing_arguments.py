"""A number among the arguments that is another in each call keeps a step from being replayed: it is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice

from optimizations.capture.step.changing_arguments import ChangingArguments
from optimizations.capture.step.changing_values import MOST_VALUES
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.progress import MOST_SIGNATURES


@dataclass
class Sample:
    x: torch.Tensor
    weight: float


def by_number(x: torch.Tensor, batch_idx: int, stage: str = "train") -> torch.Tensor:
    return x * (1 + batch_idx % 2)


def by_entry(batch: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = batch["x"] * batch["n"][0]
    return found


def by_field(sample: Sample) -> torch.Tensor:
    return sample.x * sample.weight


class Trainer:
    def step(self, x: torch.Tensor, epoch: int, *, batch_idx: int) -> torch.Tensor:
        return x * (epoch + batch_idx)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor, int], tuple[Any, dict[str, Any]]], str]] = {
    "a parameter": (by_number, lambda x, i: ((x, i), {}), "is given batch_idx in each call, which is another value"),
    "an entry": (by_entry, lambda x, i: (({"x": x, "n": [i]},), {}), "batch['n'][0]"),
    "a field": (by_field, lambda x, i: ((Sample(x, i / 8),), {}), "sample.weight"),
    "two of a method": (
        Trainer().step,
        lambda x, i: ((x, i), {"batch_idx": i}),
        "batch_idx, epoch in each call, each of which is another value",
    ),
}


def run(
    step: Any, call: Callable[[torch.Tensor, int], tuple[Any, dict[str, Any]]], calls: int
) -> tuple[Any, list[str]]:
    graphed = GraphedStep(step, device=CpuDevice())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(calls):
            args, kwargs = call(torch.ones(2), index)
            assert torch.equal(graphed(*args, **kwargs), step(*args, **kwargs))
    return graphed.report(), [str(one.message) for one in caught if "CUDA graph" in str(one.message)]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_number_that_is_another_in_each_call_is_named(name: str) -> None:
    step, call, words = PROGRAMS[name]
    report, messages = run(step, call, MOST_VALUES + 4)
    (refusal,) = report.refusals
    assert words in refusal.reason and len(messages) == 1 and refusal.reason in messages[0]
    assert not report.replays


def test_it_is_what_is_said_once_no_call_is_looked_at_any_more() -> None:
    step, call, words = PROGRAMS["a parameter"]
    report, messages = run(step, call, MOST_SIGNATURES + 10)
    (refusal,) = report.refusals
    assert words in refusal.reason and len(messages) == 1


def test_numbers_that_come_again_are_no_reason() -> None:
    report, messages = run(by_number, lambda x, i: ((x, i % 7), {}), MOST_SIGNATURES)
    assert report.refusals == () and not messages and report.replays


def test_numbers_that_nothing_reads_are_no_reason() -> None:
    report, messages = run(lambda x, batch_idx: x * 2, lambda x, i: ((x, i), {}), MOST_VALUES + 4)
    assert report.refusals == () and not messages and report.replays > MOST_VALUES - 4


def test_a_replay_in_between_begins_anew() -> None:
    changing = ChangingArguments()
    for number in range(MOST_VALUES - 1):
        assert changing.note({"n": number, "m": 1}, 0) is None
    for number in range(MOST_VALUES - 1):
        assert changing.note({"n": number, "m": 1}, 1) is None
    refusal = changing.note({"n": -1, "m": 1}, 1)
    assert refusal is not None and "is given n in each call" in refusal.reason
    assert changing.note({"n": -2, "m": 1}, 1) is None, "it is said once"
