"""Workloads with random numbers: eager's rounding is measured on a copy without dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from checked_runs import SEED, Checked, mlp, verdict_on
from tiny_workloads import instance_of, normal_inputs

from models import registry
from models.instance import Instance, instantiate
from suite.measure import correctness
from suite.measure.compare import relative_error
from suite.measure.correctness import (
    TOLERANCE,
    compute_dtype,
    draws_float32_noise,
    error_without_dropout,
    higher_precision,
    without_dropout,
)


def underflowing() -> torch.nn.Module:
    """In float16 the gradient between the two linear layers is some 1e-7, of which little is left."""
    module = torch.nn.Sequential(
        torch.nn.Dropout(0.5), torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False)
    )
    torch.nn.init.normal_(module[1].weight, std=0.02)
    torch.nn.init.normal_(module[2].weight, std=0.0005)
    return module


def stochastic_instance(build: Callable[[], torch.nn.Module] = underflowing, task: str = "training") -> Instance:
    return instance_of(
        build,
        normal_inputs(2048, 8),
        task=task,
        dtype_policy="fp16",
        stochastic=True,
        loss=lambda output: output.float().mean(),
    )


def without_underflow(module: torch.nn.Module, gradient_scale: float = 1.0) -> Callable[..., object]:
    """`underflowing` with the same dropout masks but float32 between the layers; the scale is that of layer 1."""

    def call(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.linear(module[0](x).float(), module[1].weight.float())
        hidden = gradient_scale * hidden - (gradient_scale - 1) * hidden.detach()
        return torch.nn.functional.linear(hidden, module[2].weight.float()).half()

    return call


def test_stochastic_workload_may_differ_by_eagers_rounding():
    instance = stochastic_instance()
    verdict = verdict_on(instance, without_underflow(instance.module))
    assert verdict.worst == "gradient 1.weight"
    assert verdict.max_relative_error > 2 * TOLERANCE["float16"], "the tolerance alone would refuse it"
    assert verdict.passed
    assert verdict.reference_error is not None and 0.05 < verdict.reference_error < 0.2


@pytest.mark.parametrize("gradient_scale", [1.6, -1.0])
def test_wrong_gradient_of_a_stochastic_workload_fails(gradient_scale):
    instance = stochastic_instance()
    verdict = verdict_on(instance, without_underflow(instance.module, gradient_scale))
    assert not verdict.passed and verdict.worst == "gradient 1.weight"
    assert verdict.reference_error is not None and verdict.reference_error > 0.05


def test_eager_noise_of_one_tensor_excuses_no_other():
    instance = stochastic_instance()
    precise = without_underflow(instance.module)
    verdict = verdict_on(instance, lambda x: 1.05 * precise(x))
    assert not verdict.passed and verdict.worst != "gradient 1.weight"


class NoiseOfItsOwn(torch.nn.Module):
    """`Cancelling` with noise that no dropout module makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand_like(x) + 1000) - 1000


def test_randomness_without_dropout_is_judged_by_tolerance(capfd):
    instance = stochastic_instance(NoiseOfItsOwn, task="inference")

    def more_precise(x):
        return ((x + torch.rand_like(x)).float() + 1000 - 1000).half()

    verdict = verdict_on(instance, more_precise)
    assert not verdict.passed and verdict.reference_error is None
    assert "from seed to seed with dropout off" in capfd.readouterr().out


def test_too_little_memory_for_a_reference_is_no_verdict(monkeypatch):
    def refuses(module):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(correctness, "copy", SimpleNamespace(deepcopy=refuses))
    for instance in (stochastic_instance(), instance_of(mlp, dtype_policy="fp16")):
        with pytest.raises(torch.OutOfMemoryError):
            verdict_on(instance, lambda x, module=instance.module: module(x) * 1.2)


class Overflowing(torch.nn.Module):
    """One element in float16 is infinite, and finite in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones_like(x)
        scale[0, 0] = 6e4
        return x.abs().clamp(1.0) * scale * scale


def test_overflow_in_eager_excuses_no_finite_error():
    instance = stochastic_instance(Overflowing, task="inference")
    checked = Checked(instance)
    own = error_without_dropout(instance, checked.inputs, checked.state, SEED, "float16")
    assert own is not None and math.isnan(own["output"])
    verdict = verdict_on(instance, lambda x: instance.module(x) * 1.2)
    assert not verdict.passed and math.isfinite(verdict.max_relative_error)


def test_dropout_is_off_in_a_copy_that_still_trains():
    kinds = [kind(0.5) for kind in correctness.DROPOUT]
    module = torch.nn.Sequential(*kinds, torch.nn.Linear(4, 4)).train()
    calm = without_dropout(module)
    x = torch.randn(3, 4)
    assert torch.equal(calm[0](x), x)
    assert calm.training and [member.p for member in calm[:-1]] == [0.0] * len(kinds)
    assert [member.p for member in module[:-1]] == [0.5] * len(kinds)


def test_dropout_rates_in_attributes_are_disabled_too():
    class Functional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.drop_prob, self.scale = 0.5, 0.25, 0.5
            self.activation_dropout = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, self.dropout + self.drop_prob, self.training) * self.scale

    module = Functional().train()
    calm = without_dropout(module)
    x = torch.randn(3, 4)
    assert torch.equal(calm(x), x * 0.5)
    assert isinstance(calm.activation_dropout, torch.nn.Linear)
    assert (module.dropout, module.drop_prob) == (0.5, 0.25)


STOCHASTIC = [row for row in registry.workloads().values() if row.stochastic and row.task == "training"]


NOISY = [row for row in registry.workloads().values() if row.stochastic and row.task == "inference"]


@pytest.mark.parametrize("workload", STOCHASTIC, ids=lambda workload: workload.acronym)
def test_registered_workloads_are_random_by_dropout_only(workload):
    instance = instantiate(workload, size="tiny", device="cpu", seed=3)
    checked = Checked(instance)
    dtype = compute_dtype(instance, checked.inputs)
    own = error_without_dropout(instance, checked.inputs, checked.state, SEED, dtype)
    assert own is not None and any(name.startswith("gradient ") for name in own)
    # Gradients and statistics may be zero in truth, and then all that is left of them is rounding.
    assert 0 < max(error for name, error in own.items() if name.startswith(("output", "loss"))) < 0.5


@pytest.mark.parametrize("workload", NOISY, ids=lambda workload: workload.acronym)
def test_noise_in_inference_is_the_same_in_higher_precision(workload):
    instance = instantiate(workload, size="tiny", device="cpu", seed=3)
    assert draws_float32_noise(instance)
    checked = Checked(instance)
    eager, other = checked.eager, checked.run(instance.module, SEED + 1)
    precise = higher_precision(instance, checked.inputs, checked.state, SEED, compute_dtype(instance, checked.inputs))
    assert precise is not None
    device = instance.device
    near, far = (
        relative_error(*(it.tensors["output"] for it in (one, precise)), device=device) for one in (eager, other)
    )
    assert 0 < near < 0.1 < far


def test_dropout_is_not_taken_for_noise():
    assert not draws_float32_noise(instance_of(mlp, dtype_policy="amp", task="training", stochastic=True))
    assert not draws_float32_noise(instance_of(mlp, dtype_policy="bf16", stochastic=True))
