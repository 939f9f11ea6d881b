"""Right results pass, wrong ones do not, and a run in higher precision decides where precision is what differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from tiny_workloads import instance_of, normal_inputs

from models import registry
from models.instance import Instance, instantiate
from models.registry import DtypePolicy, Inputs
from suite.iteration import iteration
from suite.measure import correctness, mixed_inputs
from suite.measure.compare import relative_error
from suite.measure.correctness import (
    MOST_ERROR,
    REFERENCE_FACTOR,
    TOLERANCE,
    Agreement,
    Reference,
    combine,
    compare_widened,
    compare_with_eager,
    compute_dtype,
    draws_float32_noise,
    error_without_dropout,
    higher_precision,
    judge,
    refused_of_other_inputs,
    without_dropout,
)
from suite.measure.results import Results, State, run_checked

SEED = 11


def verdict_on(instance: Instance, call: Callable[..., object]) -> Agreement:
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


POLICIES = ("bf16", "fp16", "fp32", "amp", "float64")
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


def results_of(instance: Instance, call: Callable[..., object], index: int = 0) -> Results:
    inputs = instance.inputs(index)
    state = State(instance.module, inputs)
    return run_checked(instance, iteration(instance, call, uses_cuda_graphs=False), inputs, state, SEED)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("task", ["inference", "training"])
def test_wrong_values_fail_under_every_dtype_policy(task, wrong, policy):
    instance = wide(task, policy)
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    eager = results_of(instance, instance.module)
    names = ["output"] if task == "inference" else ["output", "gradient 0.weight", "gradient 2.weight"]
    assert compare_with_eager(eager, eager, instance, inputs, state, SEED).passed
    for name in names:
        results = Results({**eager.tensors, name: wrong(eager.tensors[name])})
        verdict = compare_with_eager(results, eager, instance, inputs, state, SEED)
        assert (verdict.passed, verdict.undecided, verdict.worst) == (False, False, name)


def test_every_dtype_policy_is_tried():
    assert set(get_args(DtypePolicy)) <= set(POLICIES)
    computed = {compute_dtype(wide("inference", policy), wide("inference", policy).inputs(0)) for policy in POLICIES}
    assert computed == {"bfloat16", "float16", "float32", "float64"}


class Indifferent(torch.nn.Module):
    """Nearly the same for all inputs, as an AlexNet with random weights."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 100)
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.share)


@pytest.mark.parametrize(("policy", "share"), [("bf16", 0.01), ("fp16", 0.002), ("amp", 0.01)])
def test_the_result_of_other_inputs_fails_though_it_is_within_the_tolerance(policy, share):
    instance = instance_of(lambda: Indifferent(share), dtype_policy=policy)
    eager = [results_of(instance, instance.module, index) for index in (0, 1)]
    linear, dtype = instance.module.linear, eager[0].tensors["output"].dtype

    def rounded_once(x: torch.Tensor) -> torch.Tensor:
        exact = torch.nn.functional.linear(x.double() * share, linear.weight.double(), linear.bias.double())
        return exact.to(dtype)

    right = [results_of(instance, rounded_once, index) for index in (0, 1)]

    def verdict(results: list[Results]) -> Agreement:
        each = []
        for index in (0, 1):
            inputs = instance.inputs(index)
            state = State(instance.module, inputs)
            each.append(compare_with_eager(results[index], eager[index], instance, inputs, state, SEED))
        assert all(one.passed for one in each), "or this is no test of the second comparison"
        return refused_of_other_inputs(combine(each), results, eager, device=torch.device("cpu"))

    assert verdict(eager).passed and verdict(right).passed
    for stale in ([right[0], right[0]], [right[1], right[0]], [eager[1], eager[1]]):
        refused = verdict(stale)
        assert not refused.passed and refused.worst.startswith("output, which is nearer")
        assert 0 < refused.max_relative_error < TOLERANCE[compute_dtype(instance, instance.inputs(0))]


def test_results_that_rounding_brings_near_to_other_inputs_are_not_refused():
    """Where inputs hardly matter, rounding may be larger than what they do; it does not point at the other result."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(1000, generator=generator)
    second = first + 1e-3 * torch.randn(1000, generator=generator)
    for size in (1e-4, 1e-3, 1e-2, 1e-1):
        rounded = [Results({"output": one + size * torch.randn(1000, generator=generator)}) for one in (first, second)]
        verdict = Agreement(True, 1, size, "output", None)
        eager = [Results({"output": first}), Results({"output": second})]
        assert refused_of_other_inputs(verdict, rounded, eager, device=torch.device("cpu")) == verdict


def test_a_few_numbers_are_too_few_to_tell_whose_result_they_are():
    eager = [Results({"output": torch.full((3,), value)}) for value in (1.0, 1.1)]
    verdict = Agreement(True, 1, 0.1, "output", None)
    assert refused_of_other_inputs(verdict, eager[::-1], eager, device=torch.device("cpu")) == verdict


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


def test_a_stochastic_workload_may_differ_by_what_eager_rounds_without_dropout():
    instance = stochastic_instance()
    verdict = verdict_on(instance, without_underflow(instance.module))
    assert verdict.worst == "gradient 1.weight"
    assert verdict.max_relative_error > 2 * TOLERANCE["float16"], "the tolerance alone would refuse it"
    assert verdict.passed
    assert verdict.reference_error is not None and 0.05 < verdict.reference_error < 0.2


@pytest.mark.parametrize("gradient_scale", [1.6, -1.0])
def test_a_wrong_gradient_of_a_stochastic_workload_fails_though_eager_rounds_it_much(gradient_scale):
    instance = stochastic_instance()
    verdict = verdict_on(instance, without_underflow(instance.module, gradient_scale))
    assert not verdict.passed and verdict.worst == "gradient 1.weight"
    assert verdict.reference_error is not None and verdict.reference_error > 0.05


def test_what_eager_rounds_in_one_tensor_excuses_no_other():
    instance = stochastic_instance()
    precise = without_underflow(instance.module)
    verdict = verdict_on(instance, lambda x: 1.05 * precise(x))
    assert not verdict.passed and verdict.worst != "gradient 1.weight"


class NoiseOfItsOwn(torch.nn.Module):
    """`Cancelling` with noise that no dropout module makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand_like(x) + 1000) - 1000


def test_a_module_that_is_random_without_dropout_is_decided_by_the_tolerance_alone(capfd):
    instance = stochastic_instance(NoiseOfItsOwn, task="inference")

    def more_precise(x):
        return ((x + torch.rand_like(x)).float() + 1000 - 1000).half()

    verdict = verdict_on(instance, more_precise)
    assert not verdict.passed and verdict.reference_error is None
    assert "from seed to seed with dropout off" in capfd.readouterr().out


def test_a_copy_that_does_not_run_is_no_reference(monkeypatch, capfd):
    def refuses(module):
        raise TypeError("cannot be copied")

    monkeypatch.setattr(correctness, "without_dropout", refuses)
    instance = stochastic_instance()
    assert not verdict_on(instance, without_underflow(instance.module)).passed
    assert "cannot be copied" in capfd.readouterr().err


def test_too_little_memory_for_a_reference_is_no_verdict(monkeypatch):
    def refuses(module):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(correctness.copy, "deepcopy", refuses)
    for instance in (stochastic_instance(), instance_of(mlp, dtype_policy="fp16")):
        with pytest.raises(torch.OutOfMemoryError):
            verdict_on(instance, lambda x, module=instance.module: module(x) * 1.2)


class Overflowing(torch.nn.Module):
    """One element in float16 is infinite, and finite in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones_like(x)
        scale[0, 0] = 6e4
        return x.abs().clamp(1.0) * scale * scale


def test_an_overflow_in_eager_excuses_no_finite_error():
    instance = stochastic_instance(Overflowing, task="inference")
    inputs = instance.inputs(0)
    own = error_without_dropout(instance, inputs, State(instance.module, inputs), SEED, "float16")
    assert own is not None and math.isnan(own["output"])
    verdict = verdict_on(instance, lambda x: instance.module(x) * 1.2)
    assert not verdict.passed and math.isfinite(verdict.max_relative_error)


def test_dropout_is_switched_off_in_a_copy_that_is_still_training():
    kinds = [kind(0.5) for kind in correctness.DROPOUT]
    module = torch.nn.Sequential(*kinds, torch.nn.Linear(4, 4)).train()
    calm = without_dropout(module)
    x = torch.randn(3, 4)
    assert torch.equal(calm[0](x), x)
    assert calm.training and [member.p for member in calm[:-1]] == [0.0] * len(kinds)
    assert [member.p for member in module[:-1]] == [0.5] * len(kinds)


def test_rates_that_are_plain_attributes_are_switched_off_too():
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
def test_what_is_random_in_a_registered_workload_is_dropout_that_can_be_switched_off(workload):
    instance = instantiate(workload, size="tiny", device="cpu", seed=3)
    inputs = instance.inputs(0)
    dtype = compute_dtype(instance, inputs)
    own = error_without_dropout(instance, inputs, State(instance.module, inputs), SEED, dtype)
    assert own is not None and any(name.startswith("gradient ") for name in own)
    # Gradients and statistics may be zero in truth, and then all that is left of them is rounding.
    assert 0 < max(error for name, error in own.items() if name.startswith(("output", "loss"))) < 0.5


@pytest.mark.parametrize("workload", NOISY, ids=lambda workload: workload.acronym)
def test_noise_in_inference_is_the_same_in_higher_precision(workload):
    instance = instantiate(workload, size="tiny", device="cpu", seed=3)
    assert draws_float32_noise(instance)
    inputs = instance.inputs(0)
    state, dtype = State(instance.module, inputs), compute_dtype(instance, inputs)
    run = iteration(instance, instance.module, uses_cuda_graphs=False)
    eager, other = (run_checked(instance, run, inputs, state, seed) for seed in (SEED, SEED + 1))
    precise = higher_precision(instance, inputs, state, SEED, dtype)
    assert precise is not None
    device = instance.device
    near, far = (
        relative_error(*(it.tensors["output"] for it in (one, precise)), device=device) for one in (eager, other)
    )
    assert 0 < near < 0.1 < far


def test_dropout_is_not_taken_for_noise():
    assert not draws_float32_noise(instance_of(mlp, dtype_policy="amp", task="training", stochastic=True))
    assert not draws_float32_noise(instance_of(mlp, dtype_policy="bf16", stochastic=True))


def test_what_a_workload_leaves_out_of_the_comparison_counts_for_bits_alone():
    class TwoValues(torch.nn.Module):
        shift = 0.0

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scores": x.sum(dim=1), "choice": x + self.shift}

    instance = instance_of(TwoValues, compared=lambda output: output["scores"].sort().values)
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    run = iteration(instance, instance.module, uses_cuda_graphs=False)
    eager = run_checked(instance, run, inputs, state, SEED)
    instance.module.shift = 1.0
    shifted = run_checked(instance, run, inputs, state, SEED)
    assert list(eager.tensors) == ["output"]
    assert torch.equal(eager.tensors["output"], inputs.args[0].sum(dim=1).sort().values)
    assert compare_with_eager(shifted, eager, instance, inputs, state, SEED).max_relative_error == 0.0
    assert shifted.digest() != eager.digest()


def test_mask_rcnn_is_compared_by_how_sure_it_is_of_what_it_finds():
    instance = instantiate(registry.find("VM"), size="tiny", device="cpu", seed=3)
    inputs = instance.inputs(0)
    run = iteration(instance, instance.module, uses_cuda_graphs=False)
    found = run_checked(instance, run, inputs, State(instance.module, inputs), SEED)
    (scores,) = found.tensors.values()
    assert 0 < len(scores) <= 4
    assert torch.equal(scores, scores.sort().values)
    assert {name.rpartition("[")[2] for name in found.uncompared} == {"'boxes']", "'labels']", "'scores']", "'masks']"}


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
    assert compute_dtype(instance_of(mlp, dtype_policy="fp16", float32_on_cpu=True), Inputs()) == "float32"
    in_float64 = instance_of(torch.nn.Identity, float64_inputs, dtype_policy="amp")
    assert compute_dtype(in_float64, in_float64.inputs(0)) == "float64"


def refuse() -> None:
    raise AssertionError("the reference must not be asked")


def test_within_the_tolerance_the_reference_is_not_run():
    verdict = judge({"output": 0.01, "loss": 0.002}, 0.02, 1e-3, refuse)
    assert verdict == Agreement(True, 2, 0.01, "output", None)


@pytest.mark.parametrize(
    ("compiled", "eager", "passed"),
    [(0.20, 0.10, True), (0.202, 0.10, False), (0.0009, 0.0, True), (math.inf, math.inf, False), (0.5, math.inf, True)],
)
def test_the_reference_allows_twice_eagers_error_and_one_rounding(compiled, eager, passed):
    reference = Reference({"output": compiled}, {"output": eager}, REFERENCE_FACTOR)
    verdict = judge({"output": 0.3}, 0.02, 1e-3, lambda: reference)
    assert verdict.passed is passed
    assert verdict.reference_error == eager


@pytest.mark.parametrize(
    ("error", "eager", "passed"),
    [(0.30, 0.10, True), (0.302, 0.10, False), (0.03, 0.0, False), (0.03, math.nan, False), (math.inf, 1.0, False)],
)
def test_against_eager_itself_three_times_its_error_and_one_rounding_are_allowed(error, eager, passed):
    found = {"output": error}
    verdict = judge(found, 0.02, 1e-3, lambda: Reference(found, {"output": eager}, 1 + REFERENCE_FACTOR))
    assert verdict.passed is passed


def test_a_tensor_that_a_reference_does_not_name_has_no_error_there():
    assert judge({"buffer n": 0.3}, 0.02, 1e-3, lambda: Reference({}, {}, REFERENCE_FACTOR)).passed


def test_the_tensor_that_failed_is_named_though_another_is_farther_off():
    verdict = judge(
        {"a": 0.9, "b": 0.3}, 0.02, 1e-3, lambda: Reference({"a": 0.1, "b": 0.3}, {"a": 0.8, "b": 0.01}, 2.0)
    )
    assert (verdict.passed, verdict.worst, verdict.reference_error) == (False, "b", 0.01)


def test_where_nothing_can_be_compared_nothing_passes():
    assert not judge({}, 0.02, 1e-3, refuse).passed


def test_one_failed_input_fails_them_all():
    good, bad = Agreement(True, 3, 0.5, "output", 0.4), Agreement(False, 3, 0.2, "loss", None)
    assert combine([good, bad]) == bad
    assert combine([good, Agreement(True, 3, 0.1, "loss", None)]) == good


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


class Losing(torch.nn.Module):
    """A sum of large terms that cancel: in bfloat16 nothing of the result is left, as in EOS."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + 4096.0) - 4096.0) * 1.5 + x * 1e-3


def losing_verdict(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Agreement:
    """On a function of the inputs next to eager, in bfloat16."""
    instance = instance_of(Losing, dtype_policy="bf16")
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    eager = run_checked(instance, iteration(instance, instance.module, uses_cuda_graphs=False), inputs, state, 1)
    results = Results({"output": wrong(inputs.args[0]).to(torch.bfloat16)})
    return compare_with_eager(results, eager, instance, inputs, state, 1)


def in_float32(x: torch.Tensor) -> torch.Tensor:
    return Losing()(x.float())


def test_where_eager_is_useless_what_is_near_the_truth_passes():
    verdict = losing_verdict(in_float32)
    assert verdict.reference_error is not None and verdict.reference_error > MOST_ERROR
    assert verdict.max_relative_error > TOLERANCE["bfloat16"]
    assert (verdict.passed, verdict.undecided) == (True, False)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: -Losing()(x),
        lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
        lambda x: 1.6 * in_float32(x),
        lambda x: 1.2 * Losing()(x),
    ],
)
def test_where_eager_is_useless_there_is_no_verdict_on_what_is_far_from_the_truth(wrong):
    """Neither a pass nor a failure: right programs may compute noise in that dtype. See the next tests."""
    verdict = losing_verdict(wrong)
    assert verdict.undecided


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.zeros_like(x),
        lambda x: torch.full_like(x, 7.0),
        lambda x: -in_float32(x),
        lambda x: 1e4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
        lambda x: torch.full_like(x, math.nan),
    ],
)
def test_where_eager_is_useless_one_value_everywhere_or_more_noise_than_eagers_fails(wrong):
    verdict = losing_verdict(wrong)
    assert (verdict.passed, verdict.undecided) == (False, False)


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
def test_the_program_compiled_in_float32_decides_then(wrong, passed):
    instance = instance_of(Losing, dtype_policy="bf16")
    inputs = instance.inputs(0)
    calls = []

    def compiled(module):
        assert inputs.args[0].dtype is torch.bfloat16
        return lambda x: (calls.append(x.dtype), wrong(module(x)))[1]

    verdict = compare_widened(
        compiled, instance, inputs, State(instance.module, inputs), 1, uses_cuda_graphs=False, calls=3
    )
    assert verdict.passed is passed
    assert calls == [torch.float32] * 3


@pytest.mark.parametrize(("eager", "error", "passed"), [(0.26, 0.45, True), (0.26, 0.51, False), (0.17, 0.52, False)])
def test_never_is_more_than_half_allowed(eager, error, passed):
    """DistilGPT2's worst gradient may differ by three times what eager rounds, which is 0.26; zeros differ by 1."""
    found = {"gradient": error}
    reference = Reference(found, {"gradient": eager}, 1 + REFERENCE_FACTOR, is_eager=True)
    assert judge(found, 0.02, 1e-3, lambda: reference).passed is passed


def test_a_stochastic_eager_that_is_useless_decides_nothing():
    reference = Reference({"gradient": 0.3}, {"gradient": 0.7}, 1 + REFERENCE_FACTOR, is_eager=True)
    verdict = judge({"gradient": 0.3}, 0.02, 1e-3, lambda: reference)
    assert (verdict.passed, verdict.undecided) == (True, True)
    far = Reference({"gradient": 2.5}, {"gradient": 0.7}, 1 + REFERENCE_FACTOR, is_eager=True)
    assert not judge({"gradient": 2.5}, 0.02, 1e-3, lambda: far).passed


@pytest.mark.parametrize(
    ("own", "error", "passed", "undecided"),
    [
        (0.41, 1.3, True, True),  # another gradient of eager's is useless, and this one nearly
        (0.41, 2.3, False, False),  # farther off than even the useless one explains
        (0.20, 0.45, False, False),  # eager is a reference for this one
        (0.20, 0.39, True, False),
    ],
)
def test_where_eager_is_useless_for_one_gradient_it_is_no_reference_for_those_nearly_as_bad(
    own, error, passed, undecided
):
    compiled = {"gradient a": error, "gradient b": 0.9, "output": 0.01}
    reference = Reference(compiled, {"gradient a": own, "gradient b": 1.1, "output": 0.01}, REFERENCE_FACTOR)
    verdict = judge({"gradient a": error}, 0.08, 1e-3, lambda: reference)
    assert (verdict.passed, verdict.undecided) == (passed, undecided)


def test_a_useless_gradient_excuses_no_output_and_a_useless_output_no_gradient():
    found = {"output": 0.6}
    reference = Reference(found, {"output": 0.4, "gradient b": 1.1}, REFERENCE_FACTOR)
    assert not judge(found, 0.08, 1e-3, lambda: reference).passed
    found = {"gradient a": 0.6}
    reference = Reference(found, {"output": 1.1, "gradient a": 0.4}, REFERENCE_FACTOR)
    assert not judge(found, 0.08, 1e-3, lambda: reference).passed


def test_one_input_without_a_verdict_leaves_all_without_one():
    decided, open_one = Agreement(True, 1, 0.1, "a", None), Agreement(True, 1, 0.05, "b", 0.7, undecided=True)
    assert combine([decided, open_one]).undecided


@pytest.mark.parametrize("most", [16, 64, 999, 1000])
def test_of_a_large_tensor_a_part_tells_which_inputs_it_is_of(monkeypatch, most):
    monkeypatch.setattr(mixed_inputs, "MOST_ELEMENTS", most)
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(25, 40, generator=generator)
    eager = [{"output": base + 0.02 * torch.randn(25, 40, generator=generator)} for _ in range(2)]
    right = [{"output": each["output"] * (1 + 1e-3)} for each in eager]
    device = torch.device("cpu")
    assert mixed_inputs.result_of_other_inputs(right, eager, device=device) is None
    found = mixed_inputs.result_of_other_inputs([right[0], right[0]], eager, device=device)
    assert found is not None
    assert found[0] == "output"
