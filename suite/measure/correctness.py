"""Decide whether a mode computes what eager computes, before anything is timed, on real replays.

Eager and the compiled function start from the same seed, buffers and inputs, and their outputs, loss, gradients and
changed state are compared by relative error, in the L2 and the maximum norm. Two correct programs of one precision
differ by rounding, and the difference depends on the model. An error within the tolerance passes. A larger error is
checked against a run in higher precision: the compiled function's error there may be at most the tolerance, or
`REFERENCE_FACTOR` times eager's error. Two results within the tolerance of that run can differ by more than the
tolerance.

Note [Stochastic workloads]: random numbers depend on their dtype, so a run of the same program in higher precision has
different dropout masks and is not a reference. But it shows eager's rounding error: this is measured on a copy without
dropout. A compiled function whose error is at most `REFERENCE_FACTOR` times eager's differs from eager by at most
`1 + REFERENCE_FACTOR` times eager's error, so this difference is allowed. It assumes that dropout hardly changes
rounding errors; the rule above needs no such assumption. `suite.measure.eager_random` makes the compiled function draw
eager's random numbers.

Note [Scaled losses]: in float16, gradients of a mean over thousands of tokens underflow, and eager's gradients are then
no reference (XLNET-T, DGPT2). A stochastic program is compiled only for the comparison, and the compiled code does not
depend on the loss. So the loss is multiplied on both sides, as in amp, by a power of two that leaves eager's gradients
finite.

Note [Useless references]: in a short dtype rounding errors may exceed the value itself. A multiple of eager's error
then allows any result, zeros and noise included (EOS in bfloat16: eager's error is 423 times the value). So no error
above `MOST_ERROR` is ever allowed, relative to the run in higher precision or to eager; zeros have an error of 1. Where
eager's own error is larger, that dtype decides nothing: a correct program may compute noise there, as EOS does, eager
or compiled. The program is then also compiled in higher precision and compared with eager in that precision. This
misses an error that the mode makes only in the short dtype, unless all elements have the same value. Gradients are
computed from one another. So where eager is useless for one gradient, it is also no reference for another one if the
allowed multiple of its error there is above `MOST_ERROR` (LearningToPaint, where batch normalisation cancels nearly all
of the gradient of a mean).

Note [Few elements]: eager's error is measured once for each tensor. Over many elements it estimates the rounding error,
over two it is chance. Of two programs with equal rounding errors, one differs from the other by more than three times
its own error in more than a quarter of all gradients that are a single number. EfficientDet has 32 weights of fusion
nodes whose gradients are single numbers of either sign: sums of thousands of terms that nearly cancel. So where eager
is useless for any gradient of a program, it is no reference for gradients of few elements either, even where its error
is small by chance. The same holds for gradients with few rows, one for each output of a layer: for one sample, the
gradient of the weight that squeezes channels is that of its bias, times the same numbers in each row.

For a few hundred elements the error is still partly chance: it comes from rounding in later layers and is correlated
over the elements. A batch normalisation bias of LearningToPaint has 512 elements. Its error is 0.009 in eager on a GPU
and 0.011 on a CPU, although the layer's inputs have errors of 0.1 to 0.25. Compiled it is 0.006 and 0.014 for two of
them on a CPU, and more than 0.02 on a GPU. So for gradients of fewer than `SMALL` elements the allowed factor is larger
by one. PyTorch's benchmarks allow three times there, too.

Note [Choices]: max pooling passes a gradient to the largest of its inputs, and rounding decides which one that is where
two are nearly equal. Each such choice moves a whole gradient, so errors of gradients grow with the square root of the
rounding error, and float32 is then a poor reference. In EfficientDet they are 0.2 in float16 and 0.002 in float32,
although the pooled values differ by only 0.02 and 0.00001. In float64 rounding decides no choice. So a program that
differs in float32 is also compiled in float64, where the tolerance alone decides.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from models.instance import Instance, autocast_dtype
from models.nests import map_tensors, tensors_of
from models.registry import Inputs
from suite.measure.compare import errors, misshapen, result_of_other_inputs
from suite.measure.iteration import full_precision, iteration
from suite.measure.results import GRADIENT, Results, State, run_checked, run_unchecked

UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Largest relative error of one rounding. tf32, which float32 matmuls use on a GPU, has the mantissa of float16."""

TOLERANCE: dict[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "tf32": 2e-2,
    "float16": 2e-2,
    "bfloat16": 8e-2,
}
"""Relative errors that always pass: 20 to 40 roundings of equal sign for the short types, far more for the long ones,
where long sums and different algorithms (Winograd, order of reduction) dominate."""

REFERENCE_FACTOR = 2.0
"""Largest allowed ratio of the compiled function's error to eager's, both relative to the run in higher precision."""

MOST_ERROR = 0.5
"""Largest relative error that is ever allowed, or that a reference may have. A result of zeros has an error of 1."""

FEW_ELEMENTS = 10
"""Largest number of elements or rows of a gradient whose error is chance: see Note [Few elements]. PyTorch's benchmarks
allow tensors of this size up to ten times eager's error."""

SMALL = 1000
"""Gradients of fewer elements have an error that is partly chance: see Note [Few elements]. As in PyTorch's benchmarks
(`same` of `torch/_dynamo/utils.py`, 2.11)."""

DROPOUT = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)
"""Modules whose rate is the attribute `p`, which transformers' attention functions read, too."""

RATES = ("dropout", "attention_dropout", "activation_dropout", "drop_prob")
"""Attributes of other modules that are rates where they are floats: transformers pass theirs to functional dropout, and
timm's stochastic depth has one."""


LOSS_SCALES = (2.0**15, 2.0**7, 1.0)
"""Factors of losses for float16 gradients; the first one with which eager's gradients are finite is used. Twice the
largest would be infinite in float16."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hold the outcome of comparing one or several inputs; names are those of `suite.results.schema.Correctness`."""

    passed: bool
    compared_tensors: int
    max_relative_error: float
    worst: str
    reference_error: float | None
    undecided: bool = False
    """Passed only because eager is not a reference in this dtype, so that nothing could be decided."""
    widened_error: float | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Hold the errors that decide where the tolerance is exceeded, by tensor name; 0 where a name is missing.

    Attributes:
        compiled: errors of the compiled function.
        eager: eager's rounding errors; NaN where they are unknown.
        factor: allowed ratio of the compiled function's error to eager's.
        is_eager: errors of the compiled function are relative to eager, not to a run in higher precision.
        few: gradients of few elements or rows: see Note [Few elements].
        small: gradients of fewer than `SMALL` elements, whose allowed factor is larger by one.
    """

    compiled: Mapping[str, float]
    eager: Mapping[str, float]
    factor: float
    is_eager: bool = False
    few: Collection[str] = ()
    small: Collection[str] = ()

    def allows(self, name: str, tolerance: float, roundoff: float) -> bool:
        """Return whether a tensor's error is allowed; an error above `MOST_ERROR` never is."""
        error, own = self.compiled.get(name, 0.0), self.eager.get(name, 0.0)
        if self.is_eager and self.is_useless(name):
            return False
        factor = self.factor + (name in self.small)
        return error <= max(tolerance, min(factor * own, MOST_ERROR) + roundoff)

    def is_useless(self, name: str) -> bool:
        """Return whether eager's error is too large for a reference of this tensor: see Note [Useless references]."""
        own = self.eager.get(name, 0.0)
        return own > MOST_ERROR or (own > MOST_ERROR / self.factor and self._worst(name) > MOST_ERROR)

    def is_open(self, name: str) -> bool:
        """Return whether there is no verdict: eager is useless, and its error explains the compiled function's."""
        error = self.compiled.get(name, 0.0)
        if name in self.few and self._worst(name) > MOST_ERROR:
            return math.isfinite(error) and math.isfinite(self.eager.get(name, 0.0))
        return math.isfinite(error) and self.is_useless(name) and error <= self.factor * self._worst(name)

    def _worst(self, name: str) -> float:
        """Return eager's largest error over what is computed with this tensor: gradients come out of one another."""
        own = self.eager.get(name, 0.0)
        if not name.startswith(GRADIENT):
            return own
        return max((error for each, error in self.eager.items() if each.startswith(GRADIENT)), default=own)


def loss_scales(instance: Instance) -> Sequence[float]:
    """Return the scales to try: see Note [Scaled losses]. Only 1 where nothing is differentiated, or not in float16."""
    policy, task, on_gpu = instance.workload.dtype_policy, instance.workload.task, instance.device.type == "cuda"
    return LOSS_SCALES if task == "training" and policy == "amp" and on_gpu else (1.0,)


def compute_dtype(instance: Instance, inputs: Inputs) -> str:
    """Return the shortest floating type that the workload's arithmetic uses, as a key of `TOLERANCE`."""
    tensors = [*instance.module.parameters(), *tensors_of((inputs.args, inputs.kwargs))]
    floating = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if floating == {torch.float64}:
        return "float64"  # autocast leaves it alone too
    on_gpu = instance.device.type == "cuda"
    match policy := instance.workload.dtype_policy:
        case "bf16":
            return "bfloat16"
        case "fp16":
            return "float16" if on_gpu or not instance.workload.float32_on_cpu else "float32"
        case "fp32":
            return "tf32" if on_gpu else "float32"
        case "amp" | "amp-bf16":
            return str(autocast_dtype(policy, instance.device.type)).removeprefix("torch.")


def tolerance_of(instance: Instance, inputs: Inputs) -> float:
    """Return the relative error that always passes: the workload's tolerance, else that of its compute dtype."""
    own = instance.workload.tolerance
    return TOLERANCE[compute_dtype(instance, inputs)] if own is None else own


def judge(
    compiled: Mapping[str, float],
    tolerance: float,
    roundoff: float,
    reference: Callable[[], Reference | None],
) -> Agreement:
    """Return the verdict on the errors of one input.

    Args:
        compiled: errors of the compiled function against eager, by tensor.
        tolerance: error that always passes, relative to eager or to a run in higher precision.
        roundoff: unit roundoff of the compute dtype, by which errors against the reference may be above eager's.
        reference: called only if an error exceeds `tolerance`; returns None if there is no reference.
    """
    if not compiled:
        return Agreement(False, 0, math.inf, "(nothing to compare)", None)
    worst = max(compiled, key=lambda name: compiled[name])
    suspects = [name for name, error in compiled.items() if not error <= tolerance]
    judged = reference() if suspects else None
    if judged is None:
        return Agreement(not suspects, len(compiled), compiled[worst], worst, None)
    open_ones = [name for name in suspects if not judged.allows(name, tolerance, roundoff)]
    refuted = [name for name in open_ones if not judged.is_open(name)]
    shown = max(refuted or open_ones or [worst], key=lambda name: compiled[name])
    undecided = bool(open_ones) and not refuted
    return Agreement(not refuted, len(compiled), compiled[shown], shown, judged.eager.get(shown, 0.0), undecided)


def combine(verdicts: Sequence[Agreement]) -> Agreement:
    """Return one verdict over several inputs, passed if all passed, with the numbers of the worst input."""
    shown = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.max_relative_error))
    return replace(
        shown,
        passed=all(verdict.passed for verdict in verdicts),
        undecided=any(verdict.undecided for verdict in verdicts),
    )


def refused_of_other_inputs(
    verdict: Agreement, compiled: Sequence[Results], eager: Sequence[Results], *, device: torch.device
) -> Agreement:
    """Return the verdict over all input sets, failed if a result matches eager's result of another input set."""
    own = []
    for results, expected in zip(compiled, eager, strict=True):
        same = same_bits(results, expected)  # no other result can be closer to eager's on the same inputs
        own.append({name: tensor for name, tensor in results.tensors.items() if name not in same})
    found = result_of_other_inputs(own, [results.tensors for results in eager], device=device)
    if found is None or not verdict.passed:
        return verdict
    name, error = found
    return replace(
        verdict,
        passed=False,
        undecided=False,
        max_relative_error=error,
        worst=f"{name}, which is nearer to eager's of other inputs,",
    )


def same_bits(compiled: Results, eager: Results) -> set[str]:
    """Return the names of tensors that have the same bits on both sides, as far as bits were taken."""
    return {name for name, bits in compiled.bits.items() if eager.bits.get(name) == bits}


def compare_with_eager(
    compiled: Results, eager: Results, instance: Instance, inputs: Inputs, state: State, seed: int
) -> Agreement:
    """Return the verdict on one input set."""
    dtype = compute_dtype(instance, inputs)
    tolerance, device = tolerance_of(instance, inputs), instance.device
    same = same_bits(compiled, eager)
    found = errors(compiled.tensors, eager.tensors, state, device=device, tolerance=tolerance, same=same)
    of_gradients = {name: each for name, each in eager.tensors.items() if name.startswith(GRADIENT)}
    few = {name for name, each in of_gradients.items() if has_few(each)}
    small = {name for name, each in of_gradients.items() if each.numel() < SMALL}

    def reference() -> Reference | None:
        if instance.workload.stochastic and not draws_float32_noise(instance):
            own = error_without_dropout(instance, inputs, state, seed, dtype)
            if own is None:
                return None
            return Reference(found, own, 1 + REFERENCE_FACTOR, is_eager=True, few=few, small=small)
        precise = higher_precision(instance, inputs, state, seed, dtype)
        if precise is None:
            return None
        # A buffer or input is missing from the errors of a side that left it alone, as the precise run did: no error.
        first, second = (
            errors(results.tensors, precise.tensors, state, device=device, tolerance=tolerance)
            for results in (compiled, eager)
        )
        return Reference(first, second, REFERENCE_FACTOR, few=few, small=small)

    if wrong := misshapen(compiled.tensors, eager.tensors, state):
        return Agreement(False, len(found), math.inf, wrong[0], None)
    for name, error in found.items():
        if error > tolerance and is_flat(compiled.tensors.get(name)) and not is_flat(eager.tensors.get(name)):
            return Agreement(False, len(found), error, name, None)
    return judge(found, tolerance, UNIT_ROUNDOFF[dtype], reference)


def has_few(gradient: torch.Tensor) -> bool:
    """Return whether a gradient has so few elements that its error is luck: see Note [Few elements]."""
    return gradient.dim() == 0 or len(gradient) <= FEW_ELEMENTS


def is_flat(tensor: torch.Tensor | None) -> bool:
    """Return whether all elements are the same, zeros for example."""
    return tensor is not None and tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())


def draws_float32_noise(instance: Instance) -> bool:
    """Return whether a run in higher precision draws the same random numbers, so that it is a reference.

    Inference has no dropout, and under amp the program draws float32 tensors, as the run in higher precision does.
    """
    casts = autocast_dtype(instance.workload.dtype_policy, instance.device.type) is not None
    return instance.workload.task == "inference" and casts


def error_without_dropout(
    instance: Instance, inputs: Inputs, state: State, seed: int, dtype: str
) -> dict[str, float] | None:
    """Return eager's rounding error by tensor, with dropout off: see Note [Stochastic workloads].

    Return None where the copy is still random, or where it cannot run in this or in higher precision; the log has the
    reason. An infinite error becomes NaN: it does not measure rounding, and would allow any finite error.
    """
    try:
        state.restore()
        calm = replace(instance, module=without_dropout(instance.module))
        run, start = iteration(calm, calm.module, marks_steps=False), State(calm.module, inputs)
        rounded, again = (run_checked(calm, run, inputs, start, either) for either in (seed, seed + 1))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a program may fail in any way with a rate that it was not written for
        traceback.print_exc()
        return None
    if rounded.digest() != again.digest():
        print("no reference: results differ from seed to seed with dropout off, too")
        return None
    precise = higher_precision(calm, inputs, start, seed, dtype)
    if precise is None:
        return None
    found = errors(rounded.tensors, precise.tensors, start, device=instance.device, tolerance=TOLERANCE[dtype])
    return {name: error if math.isfinite(error) else math.nan for name, error in found.items()}


def without_dropout(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the module, in its train or eval mode, in which dropout modules drop nothing."""
    calm = copy.deepcopy(module)
    for member in calm.modules():
        if isinstance(member, DROPOUT):
            member.p = 0.0
        for name in RATES:
            if isinstance(getattr(member, name, None), float):
                setattr(member, name, 0.0)
    return calm


def higher_precision(instance: Instance, inputs: Inputs, state: State, seed: int, dtype: str) -> Results | None:
    """Return results of a copy of the module, uncompiled, in float32 (of float32: float64), without TF32 and autocast.

    Return None for float64, and where the copy cannot run (a program may fix a dtype in its code); the log has the
    reason.

    Raises:
        torch.OutOfMemoryError: other modes use the GPU's memory. This is no verdict on the numbers: the runner
        measures the mode again in a smaller group.
    """
    if dtype == "float64":
        return None
    try:
        state.restore()
        precise, wide_inputs = widened(instance, inputs, wider_than(dtype))
        with full_precision():
            run = iteration(precise, precise.module, marks_steps=False)
            return run_checked(precise, run, wide_inputs, State(precise.module, wide_inputs), seed)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a program may fail in any way in another dtype: then the tolerance alone decides
        traceback.print_exc()
        return None


def wider_than(dtype: str) -> torch.dtype:
    """Return float32; of float32, float64."""
    return torch.float64 if dtype in ("float32", "tf32") else torch.float32


def widened(instance: Instance, inputs: Inputs, wider: torch.dtype) -> tuple[Instance, Inputs]:
    """Return a copy of the program and its inputs in this precision, without autocast."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        narrow = tensor.is_floating_point() and tensor.element_size() < wider.itemsize
        return tensor.to(wider) if narrow else tensor.clone()

    args, kwargs = map_tensors((inputs.args, dict(inputs.kwargs)), widen)
    precise = replace(
        instance,
        module=copy.deepcopy(instance.module).to(wider),
        workload=replace(instance.workload, dtype_policy="fp32"),
    )
    return precise, Inputs(args, kwargs)


def compare_widened(
    compile_module: Callable[[torch.nn.Module], Callable[..., Any]],
    instance: Instance,
    inputs: Inputs,
    state: State,
    seed: int,
    *,
    marks_steps: bool,
    calls: int,
    forget: Callable[[], None] = lambda: None,
) -> Agreement:
    """Compare the program compiled in higher precision with eager in that precision: see Note [Useless references].

    If it differs in float32 it is compiled in float64: see Note [Choices]. Where it cannot run in float64, the log has
    the reason, and the verdict in float32 counts.

    Args:
        compile_module: compiles a module as the mode does.
        instance: the program in its own dtype.
        inputs: one input set of it.
        state: of the instance, with these inputs.
        seed: of the random numbers of each call.
        marks_steps: as of `iteration`.
        calls: which call's results are compared; the first ones replay nothing.
        forget: drops compiled code; called before the program is compiled again.

    Raises:
        torch.OutOfMemoryError: other modes use the GPU's memory.
        Exception: any error of a program in a dtype that it was not written for.
    """

    def verdict_in(wider: torch.dtype) -> Agreement:
        state.restore()
        precise, wide_inputs = widened(instance, inputs, wider)
        start = State(precise.module, wide_inputs)
        eager = run_checked(precise, iteration(precise, precise.module, marks_steps=False), wide_inputs, start, seed)
        run = iteration(precise, compile_module(precise.module), marks_steps=marks_steps)
        for _ in range(calls - 1):
            run_unchecked(precise, run, wide_inputs, start, seed)
        compiled = run_checked(precise, run, wide_inputs, start, seed)
        return compare_with_eager(compiled, eager, precise, wide_inputs, start, seed)

    with full_precision():
        wider = wider_than(compute_dtype(instance, inputs))
        verdict = verdict_in(wider)
        if verdict.passed or wider is torch.float64:
            return verdict
        print(f"in float32 {verdict.worst} differs by {verdict.max_relative_error:.2g}: compiled in float64, too")
        forget()
        try:
            return verdict_in(torch.float64)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a program may fail in any way in another dtype
            traceback.print_exc()
            return verdict
