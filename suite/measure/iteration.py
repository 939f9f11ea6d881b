"""Run one iteration of a workload in a mode, as its users would write it.

The compiled object is the module itself. The loss is computed outside of it, so that autograd passes the compiled
backward a tangent for every differentiable output, including zeros: stock CUDA graphs copy these bytes, and the
measurement includes them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from models.instance import Instance
from models.parts import CompiledInParts
from models.precision import precision_kept
from models.registry import Inputs
from suite.measure.modes import Mode
from suite.settings import MATMUL_PRECISION


@dataclass(frozen=True, slots=True)
class IterationOutput:
    """Hold the results of an iteration. In training, gradients are in `.grad` of the parameters."""

    output: Any
    loss: torch.Tensor | None


Iterate = Callable[[Inputs], IterationOutput]


def callable_for(mode: Mode, module: torch.nn.Module) -> Callable[..., Any]:
    """Return the module as this mode calls it: compiled with the mode's backend and options, or as it is.

    A program that is compiled in parts defines these itself.
    """
    if mode.backend is None:
        return module
    if isinstance(module, CompiledInParts):
        return module.compiled_with(backend=mode.backend, options=dict(mode.options))
    compiled: Callable[..., Any] = torch.compile(module, backend=mode.backend, options=dict(mode.options))
    return compiled


def iteration(
    instance: Instance,
    call: Callable[..., Any],
    *,
    marks_steps: bool,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterate:
    """Return the function that runs `instance` once through `call` (its module, or the module compiled).

    Inference: forward under `no_grad`, unless the workload enables gradients. Training: gradients set to None, forward
    and loss, backward, and a step of `optimizer` if there is one. Forward and loss run under autocast if the dtype
    policy is amp. A user's training step does all of this itself. `marks_steps`: each iteration begins with
    `cudagraph_mark_step_begin`, as PyTorch requires of programs with its CUDA graphs.
    """
    parameters = list(instance.module.parameters())
    autocast, loss_of = instance.autocast, instance.loss
    gradients = torch.enable_grad if instance.workload.enables_gradients else torch.no_grad
    if marks_steps:
        torch.compiler.cudagraph_mark_step_begin()  # imports Inductor, which is not to be in the first iteration's time

    def infer(inputs: Inputs) -> IterationOutput:
        if marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        with gradients(), autocast():
            return IterationOutput(call(*inputs.args, **inputs.kwargs), None)

    def train(inputs: Inputs) -> IterationOutput:
        for parameter in parameters:
            parameter.grad = None
        if marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast():
            output = call(*inputs.args, **inputs.kwargs)
            loss = loss_of(output)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return IterationOutput(output, loss)

    def step(inputs: Inputs) -> IterationOutput:
        if marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast():
            return IterationOutput(call(*inputs.args, **inputs.kwargs), None)

    if instance.workload.is_step:
        return step
    return train if instance.workload.task == "training" else infer


def set_numerics() -> None:
    """Set the published runner's numerics in all modes: TF32 in float32 matmuls.

    Unlike there, cuDNN never times its algorithms (AlexNet, DenseNet): each process would select its own without a
    cache, and differences between modes would be differences of algorithms.
    """
    torch.set_float32_matmul_precision(MATMUL_PRECISION)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Turn off TF32, in matmuls and convolutions, inside the block, for reference runs."""
    with precision_kept():
        torch.set_float32_matmul_precision("highest")
        cudnn: Any = torch.backends.cudnn
        cudnn.allow_tf32 = False
        for operators in (cudnn.conv, cudnn.rnn):
            if operators.fp32_precision == "tf32":  # `torch.backends.fp32_precision` says so for all that say nothing
                operators.fp32_precision = "ieee"
        yield


def seed_all(seed: int) -> None:
    """Reset the random numbers a workload may draw: PyTorch's on all devices, numpy's and Python's."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
