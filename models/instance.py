"""Build a workload: module and inputs in their published dtypes, on the device they are run on.

What is decided here belongs to the program: weights, inputs, dtypes, train or eval mode, loss and optimizer. What
belongs to the measurement (TF32, `no_grad`, compilation, timing) is left to the caller.

Note [CPU attributes stay where they are]. A module is built on the CPU and moved by plain `module.to(device)`, as its
users would. Tensors and numpy scalars in plain attributes therefore stay on the CPU. They prevent the capture of
several published programs, and this must not change.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn

from models import losses
from models.nests import map_tensors, tensors_of
from models.registry import DtypePolicy, Inputs, Size, Workload

LEARNING_RATE = 0.01

_POLICY_DTYPE: dict[DtypePolicy, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "amp": None,
    "amp-bf16": None,
}
"""What floating weights and inputs are converted to; None leaves them as built."""


def autocast_dtype(policy: DtypePolicy, device_type: str) -> torch.dtype | None:
    """Return the dtype that a policy casts to around forward and loss; None where it does not cast."""
    if policy == "amp":
        return torch.bfloat16 if device_type == "cpu" else torch.float16
    return torch.bfloat16 if policy == "amp-bf16" else None


@dataclass(frozen=True, slots=True)
class Instance:
    """Hold one workload on one device, ready to be called: `instance.module(*inputs.args, **inputs.kwargs)`.

    Attributes:
        module: in its policy's dtype, on `device`, in train or eval mode as the task wants.
        loss_scale: what the loss is multiplied by, a power of two. 1 wherever anything is measured.
    """

    workload: Workload
    variant: str
    size: Size
    device: torch.device
    seed: int
    module: nn.Module
    loss_scale: float = 1.0

    @property
    def parameters(self) -> int:
        """Return the number of parameters, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def inputs(self, index: int) -> Inputs:
        """Return input set number `index`: fresh tensors that depend on (`seed`, `index`, kind of device) alone.

        All sets have the same shapes, strides and dtypes. A tensor that is passed twice is one object in each set.
        """
        if self.workload.inputs_at is not None:
            return self.workload.inputs_at(index)
        generator = torch.Generator(_generator_device(self.device))
        # Folded to 32 bits because the CPU generator uses no more; a plain sum would give (0, 1) and (1, 0) one seed.
        generator.manual_seed(int(numpy.random.SeedSequence([self.seed, index]).generate_state(1)[0]))
        with torch.device(self.device):
            made = self.workload.inputs(self.variant, self.size, generator)
        dtype = _policy_dtype(self.workload, self.device)
        if dtype is None:
            return made
        args, kwargs = map_tensors(
            (made.args, dict(made.kwargs)), lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
        )
        return Inputs(args=args, kwargs=kwargs)

    def input_bytes(self, inputs: Inputs) -> int:
        """Return the bytes of the tensors among `inputs`, each object counted once."""
        distinct = {id(tensor): tensor for tensor in tensors_of((inputs.args, inputs.kwargs))}
        return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context for forward and loss: autocast under an amp policy, else nothing.

        Like `loss` it does not reference the instance. So a captured loop that uses both does not check in each call
        whether the instance, and all workloads that its code can reach, are unchanged.
        """
        dtype = autocast_dtype(self.workload.dtype_policy, self.device.type)
        if dtype is None:
            return contextlib.nullcontext
        return functools.partial(torch.autocast, self.device.type, dtype=dtype)

    @property
    def loss(self) -> Callable[[Any], torch.Tensor]:
        """Return the scalar tensor of a module's output that training differentiates (see `models.losses`)."""
        loss = self.workload.loss or losses.mean_loss
        return loss if self.loss_scale == 1.0 else functools.partial(losses.scaled, loss, self.loss_scale)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer over the module's parameters, as the papers configure it for this workload.

        Raises:
            ValueError: the workload is an inference one.
        """
        parameters = list(self.module.parameters())
        if self.workload.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=LEARNING_RATE, foreach=True)
        if self.workload.optimizer == "adam":
            # `capturable` keeps the step count on the device; PyTorch refuses it for parameters on a CPU.
            capturable = self.device.type != "cpu"
            return torch.optim.Adam(parameters, lr=LEARNING_RATE, foreach=True, capturable=capturable)
        raise ValueError(f"workload {self.workload.acronym} is for inference and has no optimizer")


def instantiate(
    workload: Workload,
    *,
    variant: str | None = None,
    size: Size = "full",
    device: str | torch.device,
    seed: int,
) -> Instance:
    """Build `workload` with random weights drawn from `seed` and move it to `device`.

    `device="meta"` builds shapes only, so that parameters and input bytes of any size are known at once. Works under
    fake tensors too (with `device="cuda"` on a machine that has none). Sets the global seeds of torch, numpy and
    `random`, because that is what the libraries' initialisers draw from.

    Raises:
        ValueError: the workload has no such variant; the message lists those it has.
    """
    chosen = workload.variants[0] if variant is None else variant
    if chosen not in workload.variants:
        raise ValueError(
            f"workload {workload.acronym} has no variant {chosen!r}; it has {', '.join(workload.variants)}"
        )
    target = torch.device(device)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if workload.own is not None:
        record, module = workload.own(target)
        return Instance(replace(record, stochastic=workload.stochastic), chosen, size, target, seed, module)
    if workload.builds_on_device:
        module = workload.build(chosen, size, target)
    else:
        with torch.device(target if target.type == "meta" else "cpu"):
            module = workload.build(chosen, size)
    module = _moved(module, target, _policy_dtype(workload, target))
    module.train(workload.task == "training")
    return Instance(workload, chosen, size, target, seed, module)


def _policy_dtype(workload: Workload, device: torch.device) -> torch.dtype | None:
    """Return the dtype of floating weights and inputs on `device`; None: they stay as built."""
    if workload.own is not None or workload.inputs_at is not None:
        return None
    if workload.float32_on_cpu and device.type == "cpu":
        return torch.float32
    return _POLICY_DTYPE[workload.dtype_policy]


def _tensors_are_fake() -> bool:
    """Return whether a fake-tensor mode is on, so that tensors made here have no data and need no real device."""
    return type(torch.empty(0)) is not torch.Tensor


def _generator_device(device: torch.device) -> torch.device:
    """Return where random numbers are drawn: on the GPU itself if real inputs go there, else on the CPU."""
    return device if device.type == "cuda" and not _tensors_are_fake() else torch.device("cpu")


def _moved(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Return `module` on `device`, floating weights and buffers converted to `dtype` unless that is None."""
    if not _tensors_are_fake():
        if dtype is not None:
            module = module.to(dtype)
        return module.to(device)  # Note [CPU attributes stay where they are]

    # `module.to` swaps tensors in place, which PyTorch refuses for fake parameters; the same ones are bound again.
    rebound: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the old ones, so that no id is used twice
    for owner in module.modules():
        parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        for name, old in [*parameters, *owner.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(old) not in rebound:
                new = old.detach().to(device, dtype if old.is_floating_point() else None)
                is_parameter = isinstance(old, nn.Parameter)
                rebound[id(old)] = old, nn.Parameter(new, old.requires_grad) if is_parameter else new
            setattr(owner, name, rebound[id(old)][1])
    return module
