"""Correct results pass, wrong ones fail, and a run in higher precision decides where only precision differs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from checked_runs import SEED, Checked, mlp, verdict_on
from tiny_workloads import instance_of

from models import registry
from models.instance import Instance, instantiate
from models.registry import DtypePolicy, Inputs
from suite.measure.correctness import (
    LOSS_SCALES,
    SMALL,
    TOLERANCE,
    UNIT_ROUNDOFF,
    compute_dtype,
    higher_precision,
    loss_scales,
)
from suite.measure.results import Results


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
def test_wrong_output_fails(wrong, worst):
    instance = instance_of(mlp)
    verdict = verdict_on(instance, lambda x: wrong(instance.module(x)))
    assert not verdict.passed
    if worst == "output":
        assert verdict.worst == worst


POLICIES = (*get_args(DtypePolicy), "float64")
"""Every dtype policy, and a program whose tensors are all float64, which autocast leaves alone."""


def wide(task: str, policy: str) -> Instance:
    """A program with outputs of a thousand elements per sample, in a dtype policy."""

    def build() -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1000))
        return module.double() if policy == "float64" else module

    def inputs(variant: str, size: str, generator: torch.Generator) -> Inputs:
        dtype = torch.float64 if policy == "float64" else torch.float32
        return Inputs(args=(torch.randn(4, 8, generator=generator, dtype=dtype),))

    return instance_of(
        build,
        inputs,
        task=task,
        dtype_policy="amp" if policy == "float64" else policy,
        loss=lambda output: output.float().square().sum(),
    )


def scattered(tensor: torch.Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(tensor.numel())


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(tensor.numel(), generator=scattered(tensor))
    return tensor.reshape(-1)[order].reshape(tensor.shape)


def noise(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=scattered(tensor)).to(tensor) * tensor.std()


def one_element_wrong(tensor: torch.Tensor) -> torch.Tensor:
    wrong = tensor.clone().reshape(-1)
    wrong[wrong.numel() // 3] += 3 * tensor.double().square().mean().sqrt().to(tensor)
    return wrong.reshape(tensor.shape)


def first_of_another(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[1:2], tensor[1:]])


WRONG = (torch.zeros_like, torch.neg, noise, permuted, one_element_wrong, first_of_another)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("task", ["inference", "training"])
def test_wrong_values_fail_under_every_dtype_policy(task, wrong, policy):
    checked = Checked(wide(task, policy))
    eager = checked.eager
    names = ["output"] if task == "inference" else ["output", "gradient 0.weight", "gradient 2.weight"]
    assert checked.verdict(eager).passed
    for name in names:
        verdict = checked.verdict(Results({**eager.tensors, name: wrong(eager.tensors[name])}))
        assert (verdict.passed, verdict.undecided, verdict.worst) == (False, False, name)


@pytest.mark.parametrize(("name", "passed"), [("gradient 0.weight", True), ("gradient 2.weight", False)])
def test_small_gradient_may_be_off_by_three_times_eagers_error(monkeypatch, name, passed):
    monkeypatch.setitem(TOLERANCE, "bfloat16", 1e-6)
    monkeypatch.setitem(UNIT_ROUNDOFF, "bfloat16", 1e-6)
    checked = Checked(wide("training", "bf16"))
    eager = {each: tensor.float() for each, tensor in checked.eager.tensors.items()}
    true = higher_precision(checked.instance, checked.inputs, checked.state, SEED, "bfloat16").tensors[name]
    checked.eager = Results(eager)
    assert (eager[name].numel() < SMALL) is passed
    verdict = checked.verdict(Results({**eager, name: true + 2.9 * (eager[name] - true)}))
    assert (verdict.passed, verdict.worst) == (passed, name)


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0).sum(0)


def overwriting(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    x.zero_()
    return output


def without_update(module: torch.nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.batch_norm(x, None, None, module.weight, module.bias, training=True)


@pytest.mark.parametrize(
    ("build", "wrong", "worst"),
    [
        (InPlace, lambda module, x: (x + 1.0).sum(0), "input [0]"),  # the mutation is lost
        (mlp, overwriting, "input [0]"),  # eager makes none
        (lambda: torch.nn.BatchNorm1d(8), without_update, "buffer "),
    ],
)
def test_lost_and_added_mutations_fail(build, wrong, worst):
    task = "training" if wrong is without_update else "inference"
    instance = instance_of(build, task=task, loss=lambda output: output.square().sum())
    assert verdict_on(instance, instance.module).passed
    verdict = verdict_on(instance, lambda x: wrong(instance.module, x))
    assert not verdict.passed and verdict.worst.startswith(worst)


class Cancelling(torch.nn.Module):
    """(x + 1000) - 1000 in the module's dtype: of a bfloat16 x next to nothing is left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1000) - 1000


def test_result_more_precise_than_eager_passes_by_the_reference():
    instance = instance_of(Cancelling, dtype_policy="bf16")
    verdict = verdict_on(instance, lambda x: ((x.float() + 1000) - 1000).bfloat16())
    assert verdict.max_relative_error > 0.08
    assert verdict.passed
    assert verdict.reference_error is not None and verdict.reference_error > 0.5


def test_excluded_outputs_count_for_bits_only():
    class TwoValues(torch.nn.Module):
        shift = 0.0

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scores": x.sum(dim=1), "choice": x + self.shift}

    instance = instance_of(TwoValues, compared=lambda output: output["scores"].sort().values)
    checked = Checked(instance)
    eager = checked.eager
    instance.module.shift = 1.0
    shifted = checked.run(instance.module)
    assert list(eager.tensors) == ["output"]
    assert torch.equal(eager.tensors["output"], checked.inputs.args[0].sum(dim=1).sort().values)
    assert checked.verdict(shifted).max_relative_error == 0.0
    assert shifted.digest() != eager.digest()


def test_mask_rcnn_is_compared_by_its_scores():
    found = Checked(instantiate(registry.find("VM"), size="tiny", device="cpu", seed=3)).eager
    (scores,) = found.tensors.values()
    assert 0 < len(scores) <= 4
    assert torch.equal(scores, scores.sort().values)
    assert {name.rpartition("[")[2] for name in found.uncompared} == {"'boxes']", "'labels']", "'scores']", "'masks']"}


@pytest.mark.parametrize(
    ("policy", "expected"), [("bf16", torch.float32), ("amp", torch.float32), ("fp32", torch.float64)]
)
def test_higher_precision_applies_to_the_whole_module(policy, expected):
    instance = instance_of(mlp, dtype_policy=policy, task="training")
    checked = Checked(instance)
    dtype = compute_dtype(instance, checked.inputs)
    precise = higher_precision(instance, checked.inputs, checked.state, SEED, dtype)
    assert precise is not None
    assert {tensor.dtype for tensor in precise.tensors.values()} == {expected}
    assert next(instance.module.parameters()).dtype == (torch.bfloat16 if policy == "bf16" else torch.float32)


def test_compute_dtype_is_the_shortest_type_in_use():
    def float64_inputs(variant, size, generator):
        return Inputs(args=(torch.rand(3, generator=generator, dtype=torch.float64),))

    expected = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "amp": "bfloat16", "amp-bf16": "bfloat16"}
    for policy, name in expected.items():
        instance = instance_of(mlp, dtype_policy=policy)
        assert compute_dtype(instance, instance.inputs(0)) == name
    on_gpu = {
        policy: replace(instance_of(mlp, dtype_policy=policy), device=torch.device("cuda")) for policy in expected
    }
    found = {policy: compute_dtype(instance, Inputs()) for policy, instance in on_gpu.items()}
    assert found == expected | {"fp32": "tf32", "amp": "float16"}
    assert compute_dtype(instance_of(mlp, dtype_policy="fp16", float32_on_cpu=True), Inputs()) == "float32"
    in_float64 = instance_of(torch.nn.Identity, float64_inputs, dtype_policy="amp")
    assert compute_dtype(in_float64, in_float64.inputs(0)) == "float64"


def test_losses_are_scaled_where_gradients_are_in_float16():
    gpu = torch.device("cuda")
    scaled = {
        (task, policy, device.type)
        for task in ("training", "inference")
        for policy in get_args(DtypePolicy)
        for device in (gpu, torch.device("cpu"))
        if loss_scales(replace(instance_of(mlp, task=task, dtype_policy=policy), device=device)) == LOSS_SCALES
    }
    assert scaled == {("training", "amp", "cuda")}
    assert loss_scales(instance_of(mlp, task="training", dtype_policy="amp")) == (1.0,)
    assert LOSS_SCALES[0] < torch.finfo(torch.float16).max < 2 * LOSS_SCALES[0]
    assert LOSS_SCALES[-1] == 1.0, "where nothing else leaves gradients finite, the program is judged as it is"
