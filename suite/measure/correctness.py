"""Decide whether a mode computes what eager computes, before anything is timed, on real replays.

Eager and the compiled function start from the same seed, buffers and inputs, and their outputs, loss, gradients and
changed state are compared by relative error, in the L2 and the maximum norm. Two correct programs of one precision
differ by their rounding, and how much that is depends on the model. So the tolerance decides where it can, and where it
is exceeded a run in higher precision does: the compiled function may be as far from it as the tolerance, or at most
`REFERENCE_FACTOR` times as far as eager is. Two that are each within the tolerance of it can be farther from each
other.

Note [Stochastic workloads]: random numbers depend on the dtype they are drawn for, so a run of the same program in
higher precision has other dropout masks and is not a reference. What it can tell is how much eager rounds: eager's
error is measured on a copy without dropout. A compiled function that is `REFERENCE_FACTOR` times as far from the truth
as eager is differs from eager by at most `1 + REFERENCE_FACTOR` times this error, so that much is allowed between the
two. This assumes that dropout hardly changes how much is rounded; the rule above needs no such assumption. That the
compiled function has eager's random numbers at all is `suite.measure.eager_random`'s part.

Note [Scaled losses]: in float16 gradients of a mean over thousands of tokens are below what the type can hold, and
eager's are no reference then (XLNET-T, DGPT2). A stochastic program is compiled for the comparison alone, and what is
compiled does not know where the gradients come from. So there the loss is multiplied, on both sides, as users of amp
do, by a power of two that leaves eager's gradients finite.

Note [Useless references]: in a short dtype a program may round so much that eager's result has nothing to do with the
true one. A multiple of eager's error then allows anything, zeros and noise included (EOS in bfloat16: eager is off by
423 times the value). So nothing is ever allowed to be farther off than `MOST_ERROR`, from the run in higher precision
or from eager, and zeros are off by 1. Where eager itself is farther off, nothing is judged in that dtype: a correct
program may compute noise there, as EOS does, eager or compiled. The program is then compiled in higher precision, too,
and that compilation is compared with eager in that precision. An error that the mode makes only in the short dtype is
not found then, unless it gives the same value everywhere. Gradients are computed from one another. So where eager is
useless for one gradient, it is no reference for another one either if the multiple of its error there is above
`MOST_ERROR` (LearningToPaint, where batch normalisation cancels nearly all of the gradient of a mean).

Note [Few elements]: eager's error is measured once for each tensor. Over many elements that says how much eager rounds,
over two it is luck: of two programs that round equally much, one differs from the other by more than three times its
own error in more than a quarter of all gradients that are a single number. EfficientDet has 32 weights of fusion nodes,
whose gradients are one number with either sign: a sum of thousands of terms of which nearly nothing is left. So where
eager is useless for any gradient of a program, gradients of few elements are not judged by it either, even where it
happened to be nearly right.
Nor is it for those with few rows, one for each output of a layer: of one sample, the gradient of the weight that
squeezes channels is that of its bias, times the same numbers in each row.

Of some hundred elements it is still luck in part: their errors come from what is rounded further on, and are alike in
all of them. The bias of a batch normalisation of LearningToPaint has 512, off by 0.009 in eager on a GPU and by 0.011
on a CPU, where what is in front of it is off by 0.1 to 0.25; compiled by 0.006 and 0.014 for two of them on a CPU, and
by more than 0.02 on a GPU. So gradients of fewer than `SMALL` elements may be off by one more time of eager's error.
PyTorch's benchmarks allow three times there, too.

Note [Choices]: max pooling sends a gradient to the largest of its inputs, and rounding decides which one that is where
two are nearly equal. Each such choice moves a whole gradient, so errors of gradients grow with the square root of what
is rounded, and float32 is not much of a reference then: in EfficientDet they are 0.2 in float16 and 0.002 in float32,
though what is pooled differs by 0.02 and 0.00001 only. In float64 no choice is left to rounding. So what is compiled in
float32 and differs there is compiled in float64, too, where the tolerance alone decides.
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
"""Largest relative error of rounding once. tf32, which float32 matmuls use on a GPU, has the fraction of float16."""

TOLERANCE: dict[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "tf32": 2e-2,
    "float16": 2e-2,
    "bfloat16": 8e-2,
}
"""Relative errors that need no explanation: for the short types some 20 to 40 roundings that all go one way, for the
long ones far more, because long sums and other algorithms (Winograd, another order of reduction) dominate there."""

REFERENCE_FACTOR = 2.0
"""Largest ratio of the compiled function's distance from the run in higher precision to eager's."""

MOST_ERROR = 0.5
"""Largest relative error that can be allowed, or that a reference may have. Zeros in place of a result are off by 1."""

FEW_ELEMENTS = 10
"""Most elements, or rows, of a gradient whose error is luck: see Note [Few elements]. PyTorch's benchmarks may allow
tensors of up to so many ten times eager's error."""

SMALL = 1000
"""Elements of a gradient below which its error is luck in part: see Note [Few elements]. As in PyTorch's benchmarks
(`same` of `torch/_dynamo/utils.py`, 2.11)."""

DROPOUT = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)
"""Modules whose rate is the attribute `p`, from which transformers' attention functions take theirs, too."""

RATES = ("dropout", "attention_dropout", "activation_dropout", "drop_prob")
"""Attributes of other modules that are rates where they are floats: transformers pass theirs to functional dropout, and
timm's stochastic depth has one."""


LOSS_SCALES = (2.0**15, 2.0**7, 1.0)
"""Factors of losses where gradients are computed in float16: the first that eager's stay finite with. One more doubling
would already be infinite in float16."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hold the outcome of comparing one or several inputs; names are those of `suite.results.schema.Correctness`."""

    passed: bool
    compared_tensors: int
    max_relative_error: float
    worst: str
    reference_error: float | None
    undecided: bool = False
    """Passed as far as this dtype can tell, which is nothing: eager is not a reference in it."""
    widened_error: float | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Hold what decides where the tolerance is exceeded: errors by tensor name, 0 where a name is missing.

    Attributes:
        compiled: errors of the compiled function.
        eager: eager's own rounding errors; NaN where nothing is known.
        factor: how many times eager's error the compiled function's may be.
        is_eager: the errors of the compiled function are its distances from eager, not from a run in higher precision.
        few: gradients of few elements or rows: see Note [Few elements].
        small: those of fewer than `SMALL` elements, which may be off by one more time of eager's error.
    """

    compiled: Mapping[str, float]
    eager: Mapping[str, float]
    factor: float
    is_eager: bool = False
    few: Collection[str] = ()
    small: Collection[str] = ()

    def allows(self, name: str, tolerance: float, roundoff: float) -> bool:
        """Return whether a tensor's error is explained. One above `MOST_ERROR` never is, however large eager's own."""
        error, own = self.compiled.get(name, 0.0), self.eager.get(name, 0.0)
        if self.is_eager and self.is_useless(name):
            return False
        factor = self.factor + (name in self.small)
        return error <= max(tolerance, min(factor * own, MOST_ERROR) + roundoff)

    def is_useless(self, name: str) -> bool:
        """Return whether eager is too far off to be a reference for this tensor: see Note [Useless references]."""
        own = self.eager.get(name, 0.0)
        return own > MOST_ERROR or (own > MOST_ERROR / self.factor and self._worst(name) > MOST_ERROR)

    def is_open(self, name: str) -> bool:
        """Return whether there is no verdict: eager is useless, and the compiled function no farther off than
        explained."""
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
    """Return the largest relative error that needs no explanation: the program's own, or that of its dtype."""
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
        tolerance: what is accepted at once, from eager or from a run in higher precision.
        roundoff: unit roundoff of the compute dtype, by which errors against the reference may be above eager's.
        reference: called only if something exceeds `tolerance`; None if there is nothing to refer to.
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
    """Return one verdict over several inputs: passed if all are. Numbers are those of the worst, failed ones first."""
    shown = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.max_relative_error))
    return replace(
        shown,
        passed=all(verdict.passed for verdict in verdicts),
        undecided=any(verdict.undecided for verdict in verdicts),
    )


def refused_of_other_inputs(
    verdict: Agreement, compiled: Sequence[Results], eager: Sequence[Results], *, device: torch.device
) -> Agreement:
    """Return the verdict over all input sets, failed if a result is eager's of another input set than its own."""
    own = []
    for results, expected in zip(compiled, eager, strict=True):
        same = same_bits(results, expected)  # nothing is nearer to these than eager's on the same inputs
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
    """Return whether what is random is noise that a run in higher precision draws too, so that it is a reference.

    In inference there is no dropout, and under amp a program's own tensors are float32 as they are in that run.
    """
    casts = autocast_dtype(instance.workload.dtype_policy, instance.device.type) is not None
    return instance.workload.task == "inference" and casts


def error_without_dropout(
    instance: Instance, inputs: Inputs, state: State, seed: int, dtype: str
) -> dict[str, float] | None:
    """Return eager's own rounding error by tensor, with dropout off: see Note [Stochastic workloads].

    None where the copy is random nevertheless, where it or its run in higher precision cannot run; the log says why.
    An infinite error says nothing about how much eager rounds, and is NaN: it would excuse whatever is finite.
    """
    try:
        state.restore()
        calm = replace(instance, module=without_dropout(instance.module))
        run, start = iteration(calm, calm.module, marks_steps=False), State(calm.module, inputs)
        rounded, again = (run_checked(calm, run, inputs, start, either) for either in (seed, seed + 1))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a program does with a rate it was not written for
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

    None for float64, and where the copy cannot run (a program may fix a dtype in its code); the log says why.

    Raises:
        torch.OutOfMemoryError: with other modes alive. This is not a verdict on the numbers, and the runner can help
        it.
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
    except Exception:  # whatever a program does in a dtype it was not written for: then the tolerance decides alone
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
    """Return the verdict on the program compiled in higher precision, against eager there: Note [Useless references].

    Where it fails in float32 it is compiled in float64: see Note [Choices]. Where a program cannot run in that, the log
    says why, and the verdict of float32 stays.

    Args:
        compile_module: the mode's way to compile a module.
        instance: the program in its own dtype.
        inputs: one input set of it.
        state: of the instance, with these inputs.
        seed: of the random numbers of each call.
        marks_steps: as of `iteration`.
        calls: which call's results are compared; the first ones replay nothing.
        forget: called before it is compiled once more.

    Raises:
        torch.OutOfMemoryError: with other modes alive.
        Exception: whatever a program does in a dtype that it was not written for.
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
        except Exception:  # whatever a program does in a dtype it was not written for
            traceback.print_exc()
            return verdict
