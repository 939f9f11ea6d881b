"""A result nearer to eager's of other inputs is refused, even within the tolerance of its own."""

from __future__ import annotations

import pytest
import torch
from checked_runs import Checked
from tiny_workloads import instance_of

from suite.measure import compare
from suite.measure.correctness import (
    TOLERANCE,
    Agreement,
    combine,
    compute_dtype,
    refused_of_other_inputs,
)
from suite.measure.results import Results


class Indifferent(torch.nn.Module):
    """Nearly the same for all inputs, as an AlexNet with random weights."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 100)
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.share)


@pytest.mark.parametrize(("policy", "share"), [("bf16", 0.01), ("fp16", 0.002), ("amp", 0.01)])
def test_result_of_other_inputs_fails_within_the_tolerance(policy, share):
    instance = instance_of(lambda: Indifferent(share), dtype_policy=policy)
    checked = [Checked(instance, index) for index in (0, 1)]
    eager = [one.eager for one in checked]
    linear, dtype = instance.module.linear, eager[0].tensors["output"].dtype

    def rounded_once(x: torch.Tensor) -> torch.Tensor:
        exact = torch.nn.functional.linear(x.double() * share, linear.weight.double(), linear.bias.double())
        return exact.to(dtype)

    right = [one.run(rounded_once) for one in checked]

    def verdict(results: list[Results]) -> Agreement:
        each = [one.verdict(found) for one, found in zip(checked, results, strict=True)]
        assert all(one.passed for one in each), "the first comparison must not be the one that refuses"
        return refused_of_other_inputs(combine(each), results, eager, device=torch.device("cpu"))

    assert verdict(eager).passed and verdict(right).passed
    for stale in ([right[0], right[0]], [right[1], right[0]], [eager[1], eager[1]]):
        refused = verdict(stale)
        assert not refused.passed and refused.worst.startswith("output, which is nearer")
        assert 0 < refused.max_relative_error < TOLERANCE[compute_dtype(instance, instance.inputs(0))]


def test_rounding_towards_other_inputs_is_not_refused():
    """Where inputs hardly matter, rounding may be larger than what they do; it does not point at the other result."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(1000, generator=generator)
    second = first + 1e-3 * torch.randn(1000, generator=generator)
    for size in (1e-4, 1e-3, 1e-2, 1e-1):
        rounded = [Results({"output": one + size * torch.randn(1000, generator=generator)}) for one in (first, second)]
        verdict = Agreement(True, 1, size, "output", None)
        eager = [Results({"output": first}), Results({"output": second})]
        assert refused_of_other_inputs(verdict, rounded, eager, device=torch.device("cpu")) == verdict


def test_few_numbers_do_not_identify_the_inputs():
    eager = [Results({"output": torch.full((3,), value)}) for value in (1.0, 1.1)]
    verdict = Agreement(True, 1, 0.1, "output", None)
    assert refused_of_other_inputs(verdict, eager[::-1], eager, device=torch.device("cpu")) == verdict


@pytest.mark.parametrize("most", [16, 64, 999, 1000])
def test_part_of_a_large_tensor_identifies_its_inputs(monkeypatch, most):
    monkeypatch.setattr(compare, "MOST_ELEMENTS", most)
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(25, 40, generator=generator)
    eager = [{"output": base + 0.02 * torch.randn(25, 40, generator=generator)} for _ in range(2)]
    right = [{"output": each["output"] * (1 + 1e-3)} for each in eager]
    device = torch.device("cpu")
    assert compare.result_of_other_inputs(right, eager, device=device) is None
    found = compare.result_of_other_inputs([right[0], right[0]], eager, device=device)
    assert found is not None
    assert found[0] == "output"
