"""Runs of tiny workloads as the suite checks them: their results, and the verdict on something in place of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.instance import Instance
from suite.measure.correctness import (
    Agreement,
    compare_with_eager,
)
from suite.measure.iteration import iteration
from suite.measure.results import Results, State, run_checked

SEED = 11


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def results_of(instance: Instance, call: Callable[..., object], index: int = 0) -> Results:
    inputs = instance.inputs(index)
    state = State(instance.module, inputs)
    return run_checked(instance, iteration(instance, call, marks_steps=False), inputs, state, SEED)


def verdict_on(instance: Instance, call: Callable[..., object]) -> Agreement:
    """Verdict on `call` in place of the compiled module, on input set 0."""
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    eager, compiled = (
        run_checked(instance, iteration(instance, either, marks_steps=False), inputs, state, SEED)
        for either in (instance.module, call)
    )
    return compare_with_eager(compiled, eager, instance, inputs, state, SEED)
