"""Right results pass, wrong ones do not, and a run in higher precision decides where precision is what differs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tiny_workloads import instance_of, normal_inputs

from models.instance import Instance
from models.registry import Inputs
from suite.iteration import iteration
from suite.measure.correctness import (
    Verdict,
    combine,
    compare_with_eager,
    compute_dtype,
    higher_precision,
    judge,
)
from suite.measure.results import State, run_checked

SEED = 11


def verdict_on(instance: Instance, call: Callable[..., object]) -> Verdict:
    """Verdict on `call` in place of the compiled module, on input set 0."""
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    eager, compiled = (
        run_checked(instance, iteration(instance, either, uses_cuda_graphs=False), inputs, state, SEED)
        for either in (instance.module, call)
    )
    return compare_with_eager(compiled, eager, instance, inputs, state, SEED)


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def test_the_module_itself_passes_with_no_error():
    instance = instance_of(mlp, task="training")
    verdict = verdict_on(instance, instance.module)
    assert verdict.passed and verdict.max_relative_error == 0.0
    assert verdict.compared_tensors == 6  # output, loss, four gradients


@pytest.mark.parametrize(
    ("wrong", "worst"),
    [
        (lambda output: output * 1.01, "output"),
        (lambda output: torch.where(output == output.max(), math.nan, output), "output"),
        (lambda output: output[:-1], "output"),
        (lambda output: output.double(), "output"),
        (lambda output: (output, output), "output[0]"),
    ],
)
def test_a_wrong_output_fails(wrong, worst):
    instance = instance_of(mlp)
    verdict = verdict_on(instance, lambda x: wrong(instance.module(x)))
    assert not verdict.passed
    if worst == "output":
        assert verdict.worst == worst


def test_a_wrong_gradient_fails_though_output_and_loss_are_right():
    class ReversedGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    instance = instance_of(mlp, task="training")
    verdict = verdict_on(instance, lambda x: ReversedGradient.apply(instance.module(x)))
    assert not verdict.passed
    assert verdict.worst.startswith("gradient ")


def test_a_gradient_that_is_missing_fails():
    instance = instance_of(mlp, task="training")

    def frozen_first_layer(x):
        first = instance.module[0]
        hidden = torch.nn.functional.linear(x, first.weight.detach(), first.bias.detach())
        return instance.module[2](instance.module[1](hidden))

    verdict = verdict_on(instance, frozen_first_layer)
    assert not verdict.passed and verdict.worst.startswith("gradient 0.") and verdict.max_relative_error == math.inf


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0).sum(0)


def test_a_mutation_of_an_input_that_is_lost_fails():
    instance = instance_of(InPlace)
    assert verdict_on(instance, instance.module).passed
    verdict = verdict_on(instance, lambda x: (x + 1.0).sum(0))
    assert not verdict.passed and verdict.worst == "input [0]"


def test_a_mutation_of_an_input_that_eager_does_not_make_fails():
    instance = instance_of(mlp)

    def overwrites(x):
        output = instance.module(x)
        x.zero_()
        return output

    verdict = verdict_on(instance, overwrites)
    assert not verdict.passed and verdict.worst == "input [0]"


def test_running_statistics_that_are_not_updated_fail():
    instance = instance_of(lambda: torch.nn.BatchNorm1d(8), task="training", loss=lambda output: output.square().sum())

    def without_update(x):
        module = instance.module
        return torch.nn.functional.batch_norm(x, None, None, module.weight, module.bias, training=True)

    assert verdict_on(instance, instance.module).passed
    verdict = verdict_on(instance, without_update)
    assert not verdict.passed and verdict.worst.startswith("buffer ")


class Cancelling(torch.nn.Module):
    """(x + 1000) - 1000 in the module's dtype: of a bfloat16 x next to nothing is left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1000) - 1000


def test_more_precise_than_eager_passes_by_the_run_in_higher_precision():
    instance = instance_of(Cancelling, dtype_policy="bf16")
    verdict = verdict_on(instance, lambda x: ((x.float() + 1000) - 1000).bfloat16())
    assert verdict.max_relative_error > 0.08
    assert verdict.passed
    assert verdict.reference_error is not None and verdict.reference_error > 0.5


def test_less_precise_than_twice_eager_does_not():
    instance = instance_of(mlp, dtype_policy="bf16")
    verdict = verdict_on(instance, lambda x: instance.module(x) * 1.2)
    assert not verdict.passed
    assert verdict.reference_error is not None and verdict.reference_error < 0.1


def test_stochastic_workloads_have_no_higher_precision_to_appeal_to():
    instance = instance_of(Cancelling, dtype_policy="bf16", stochastic=True)
    assert not verdict_on(instance, lambda x: ((x.float() + 1000) - 1000).bfloat16()).passed


@pytest.mark.parametrize(
    ("policy", "expected"), [("bf16", torch.float32), ("amp", torch.float32), ("fp32", torch.float64)]
)
def test_higher_precision_runs_all_of_the_module_in_it(policy, expected):
    instance = instance_of(mlp, dtype_policy=policy, task="training")
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    precise = higher_precision(instance, inputs, state, SEED, compute_dtype(instance, inputs))
    assert precise is not None
    assert {tensor.dtype for tensor in precise.tensors.values()} == {expected}
    assert next(instance.module.parameters()).dtype == (torch.bfloat16 if policy == "bf16" else torch.float32)


def test_a_program_that_fixes_a_dtype_has_no_higher_precision(capfd):
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(8, 2, dtype=torch.bfloat16)

    instance = instance_of(Fixed, dtype_policy="bf16")
    inputs = instance.inputs(0)
    assert higher_precision(instance, inputs, State(instance.module, inputs), SEED, "bfloat16") is None
    assert "RuntimeError" in capfd.readouterr().err


def test_the_compute_dtype_is_the_shortest_type_in_use():
    def float64_inputs(variant, size, generator):
        return Inputs(args=(torch.rand(3, generator=generator, dtype=torch.float64),))

    expected = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "amp": "bfloat16"}
    for policy, name in expected.items():
        instance = instance_of(mlp, dtype_policy=policy)
        assert compute_dtype(instance, instance.inputs(0)) == name
    in_float64 = instance_of(torch.nn.Identity, float64_inputs, dtype_policy="amp")
    assert compute_dtype(in_float64, in_float64.inputs(0)) == "float64"


def refuse() -> None:
    raise AssertionError("the reference must not be asked")


def test_within_the_tolerance_the_reference_is_not_run():
    verdict = judge({"output": 0.01, "loss": 0.002}, 0.02, 1e-3, refuse)
    assert verdict == Verdict(True, 2, 0.01, "output", None)


@pytest.mark.parametrize(
    ("compiled", "eager", "passed"),
    [(0.20, 0.10, True), (0.202, 0.10, False), (0.0009, 0.0, True), (math.inf, math.inf, False), (0.5, math.inf, True)],
)
def test_the_reference_allows_twice_eagers_error_and_one_rounding(compiled, eager, passed):
    verdict = judge({"output": 0.3}, 0.02, 1e-3, lambda: ({"output": compiled}, {"output": eager}))
    assert verdict.passed is passed
    assert verdict.reference_error == eager


def test_the_tensor_that_failed_is_named_though_another_is_farther_off():
    verdict = judge({"a": 0.9, "b": 0.3}, 0.02, 1e-3, lambda: ({"a": 0.1, "b": 0.3}, {"a": 0.8, "b": 0.01}))
    assert (verdict.passed, verdict.worst, verdict.reference_error) == (False, "b", 0.01)


def test_where_nothing_can_be_compared_nothing_passes():
    assert not judge({}, 0.02, 1e-3, refuse).passed


def test_one_failed_input_fails_them_all():
    good, bad = Verdict(True, 3, 0.5, "output", 0.4), Verdict(False, 3, 0.2, "loss", None)
    assert combine([good, bad]) == bad
    assert combine([good, Verdict(True, 3, 0.1, "loss", None)]) == good


def test_two_inputs_give_different_results():
    """Or comparing on a second input would show nothing."""
    instance = instance_of(mlp, normal_inputs(4, 8))
    first, second = (
        run_checked(
            instance,
            iteration(instance, instance.module, uses_cuda_graphs=False),
            inputs,
            State(instance.module, inputs),
            SEED,
        ).digest()
        for inputs in (instance.inputs(0), instance.inputs(1))
    )
    assert first != second
