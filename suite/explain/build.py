"""Build a workload, or a program of the user's, without data: its module and inputs as fake tensors on cuda:0.

Parameters, buffers and inputs are moved as `module.to("cuda")` moves them; tensors in plain attributes of a module stay
on the CPU, as with real tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from models.instance import instantiate
from models.nests import tensors_of
from models.own_program import Called, Made
from models.parts import CompiledInParts
from models.registry import Size, Workload
from optimizations import torch_internals
from suite.explain.pretended_gpu import named_gpu
from suite.measure.iteration import set_numerics
from suite.measure.known_values import KnownValuesMode

SEED = 1337


@dataclass(frozen=True, slots=True)
class Program:
    """Hold the call to analyse: `module(*args, **kwargs)`, where all tensors are fake ones of `mode`."""

    mode: KnownValuesMode
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    with_gradients: bool = False
    """True if the call trains or differentiates, so that it needs gradients enabled."""
    surroundings: Callable[[], contextlib.AbstractContextManager[Any]] = field(default=contextlib.nullcontext)
    """The context of the call: autocast, if the workload uses it."""
    is_step: bool = False
    """True if the call is a whole training step, with backward and optimizer."""


def build_workload(workload: Workload, *, variant: str | None, size: Size) -> Program:
    """Build the workload's module with its first input set; if it is compiled in parts, a call of that part.

    Raises:
        ValueError: the workload has no such variant.
    """
    mode = KnownValuesMode()
    set_numerics()
    # TorchBench draws inputs while building, and its data loaders read random numbers on the host.
    known = mode.random_values() if workload.builds_on_device else contextlib.nullcontext()
    with mode, replaced_on_move(), named_gpu(), known:
        instance = instantiate(workload, variant=variant, size=size, device="cuda", seed=SEED)
    with mode, mode.random_values():
        inputs = instance.inputs(0)
    module, args, kwargs = instance.module, inputs.args, inputs.kwargs
    if isinstance(module, CompiledInParts):
        with mode:
            module, args, kwargs = module.compiled_part(inputs)
    return Program(
        mode,
        module,
        args,
        kwargs,
        workload.enables_gradients,
        surroundings=instance.autocast,
    )


def build_program(make: Callable[[], Made]) -> Program:
    """Return the call of a user's program, built under fake tensors.

    If nothing in it is on a GPU, module and arguments are moved there; otherwise everything stays where `make` put it.
    """
    mode = KnownValuesMode()
    with mode, replaced_on_move():
        with mode.random_values():
            made = make()
        module = made.call if isinstance(made.call, nn.Module) else Called(made.call)
        args, kwargs = made.sets[0].args, made.sets[0].kwargs
        held = [*module.parameters(), *module.buffers(), *tensors_of((args, kwargs))]
        if not any(tensor.is_cuda for tensor in held):
            module = _on_gpu(module)
            args, kwargs = (
                torch_internals.pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), value)
                for value in (args, kwargs)
            )
    return Program(
        mode, module, args, kwargs, with_gradients=made.is_step or made.loss is not None, is_step=made.is_step
    )


def _on_gpu(module: nn.Module) -> nn.Module:
    """Move a module, and replace the parameters in the optimizers of its function."""
    before = list(module.parameters())
    module = module.to("cuda")
    new = {id(old): parameter for old, parameter in zip(before, module.parameters(), strict=True)}
    for optimizer in module.optimizers if isinstance(module, Called) else ():
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    return module


@contextlib.contextmanager
def replaced_on_move() -> Iterator[None]:
    """Make `nn.Module.to` and similar methods replace parameters by new ones; shared parameters stay shared.

    PyTorch swaps the contents of fake parameters instead, which fails if there is a weak reference to one.
    """
    _, method = torch_internals.holder_of("module_apply")
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    depth = 0

    def apply(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                with torch.no_grad():
                    new = change(tensor)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                # The old tensor is referenced so that no new one gets its id.
                moved[id(tensor)] = (tensor, new)
            return moved[id(tensor)][1]

        depth += 1
        try:
            for child in module.children() if recurse else ():
                getattr(child, method)(change)  # by name, because some modules override it
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, once(parameter))
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                setattr(module, name, once(buffer))
        finally:
            depth -= 1
            if depth == 0:
                moved.clear()
        return module

    with torch_internals.replaced("module_apply", apply):
        yield
