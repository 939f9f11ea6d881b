"""Runs of tiny workloads as the suite checks them: their results, and the verdict on something in place of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from models.instance import Instance
from suite.measure.correctness import Agreement, compare_with_eager
from suite.measure.iteration import iteration
from suite.measure.results import Results, State, run_checked

SEED = 11


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


class Checked:
    """A program with one of its input sets."""

    def __init__(self, instance: Instance, index: int = 0) -> None:
        self.instance, self.inputs = instance, instance.inputs(index)
        self.state = State(instance.module, self.inputs)

    def run(self, call: Callable[..., object], seed: int = SEED) -> Results:
        """Return the results of `call` in place of the compiled module."""
        return run_checked(
            self.instance, iteration(self.instance, call, marks_steps=False), self.inputs, self.state, seed
        )

    @cached_property
    def eager(self) -> Results:
        return self.run(self.instance.module)

    def verdict(self, found: Results | Callable[..., object]) -> Agreement:
        """Return the verdict on results, or on those of a call."""
        eager = self.eager
        results = found if isinstance(found, Results) else self.run(found)
        return compare_with_eager(results, eager, self.instance, self.inputs, self.state, SEED)


def verdict_on(instance: Instance, call: Callable[..., object]) -> Agreement:
    """Verdict on `call` in place of the compiled module, on input set 0."""
    return Checked(instance).verdict(call)
