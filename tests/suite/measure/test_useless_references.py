"""Programs of which eager computes noise in a short dtype: Note [Useless references] of `suite.measure.correctness`."""

from __future__ import annotations

import math

import pytest
import torch
from checked_runs import Checked
from tiny_workloads import instance_of

from suite.measure.correctness import MOST_ERROR, TOLERANCE, compare_widened
from suite.measure.results import Results, State


class Losing(torch.nn.Module):
    """A sum of large terms that cancel: in bfloat16 nothing of the result is left, as in EOS."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + 4096.0) - 4096.0) * 1.5 + x * 1e-3


def in_float32(x: torch.Tensor) -> torch.Tensor:
    return Losing()(x.float())


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


PASSES, OPEN, FAILS = (True, False), (True, True), (False, False)
"""(passed, undecided)."""


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (in_float32, PASSES),
        # No verdict on far results: right programs may compute noise in that dtype. See the next tests.
        (lambda x: -Losing()(x), OPEN),
        (drawn, OPEN),
        (lambda x: 1.6 * in_float32(x), OPEN),
        (lambda x: 1.2 * Losing()(x), OPEN),
        # Constants and more noise are still refused.
        (lambda x: torch.zeros_like(x), FAILS),
        (lambda x: torch.full_like(x, 7.0), FAILS),
        (lambda x: -in_float32(x), FAILS),
        (lambda x: 1e4 * drawn(x), FAILS),
        (lambda x: torch.full_like(x, math.nan), FAILS),
    ],
)
def test_useless_eager_decides_near_and_very_far_results_only(wrong, expected):
    checked = Checked(instance_of(Losing, dtype_policy="bf16"))
    verdict = checked.verdict(Results({"output": wrong(checked.inputs.args[0]).to(torch.bfloat16)}))
    assert (verdict.passed, verdict.undecided) == expected
    if wrong is in_float32:
        assert verdict.reference_error is not None and verdict.reference_error > MOST_ERROR
        assert verdict.max_relative_error > TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("wrong", "passed"),
    [
        (lambda y: y, True),
        (lambda y: -y, False),
        (lambda y: torch.zeros_like(y), False),
        (lambda y: torch.randn_like(y), False),
        (lambda y: 1.2 * y, False),
    ],
)
def test_program_compiled_in_float32_decides_then(wrong, passed):
    instance = instance_of(Losing, dtype_policy="bf16")
    inputs = instance.inputs(0)
    calls = []

    def compiled(module):
        assert inputs.args[0].dtype is torch.bfloat16
        return lambda x: (calls.append(x.dtype), wrong(module(x)))[1]

    verdict = compare_widened(compiled, instance, inputs, State(instance.module, inputs), 1, marks_steps=False, calls=3)
    assert verdict.passed is passed
    assert calls == [torch.float32] * 3 + ([] if passed else [torch.float64] * 3)


class Choosing(torch.nn.Module):
    """Rounding decides which of two values is chosen, as in max pooling."""

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return torch.where(x + shift > x, -x, x)


class RefusesFloat64(Choosing):
    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise TypeError("not in float64")
        return super().forward(x, shift)


@pytest.mark.parametrize(
    ("build", "wrong", "passed"),
    [
        (Choosing, lambda module, x: module(x, torch.finfo(x.dtype).eps if x.dtype == torch.float32 else 0.0), True),
        (Choosing, lambda module, x: 1.2 * module(x), False),
        (RefusesFloat64, lambda module, x: 1.2 * module(x), False),
    ],
)
def test_float64_decides_what_float32_refuses(build, wrong, passed, capfd):
    instance = instance_of(build, dtype_policy="bf16")
    inputs, forgotten = instance.inputs(0), []

    def compiled(module):
        return lambda x: wrong(module, x)

    options = {"marks_steps": False, "calls": 1, "forget": lambda: forgotten.append(True)}
    verdict = compare_widened(compiled, instance, inputs, State(instance.module, inputs), 1, **options)
    assert verdict.passed is passed and forgotten == [True]
    said = capfd.readouterr()
    assert "in float64, too" in said.out
    assert ("not in float64" in said.err) is (build is RefusesFloat64)
