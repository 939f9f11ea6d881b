"""What `graph_callables` asks of callables and their samples: parameters, modes, hooks, the GPU they are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations.capture.device import CudaDevice, Device
from optimizations.capture.signature import Same, flatten
from optimizations.capture.step.reach import reach

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def samples_of(sample_args: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """The arguments of each callable; one tuple of tensors stands for all."""
    if sample_args and not any(isinstance(member, tuple) for member in sample_args):
        return [tuple(sample_args)] * count
    if len(sample_args) != count or not all(isinstance(member, tuple) for member in sample_args):
        raise ValueError(
            f"sample_args has {len(sample_args)} entries for {count} callables: give a tuple of arguments for each, or "
            "one tuple of tensors for all"
        )
    return list(sample_args)


def called(function: Callable[..., Any], sample: Sample) -> Any:
    args, kwargs = sample
    return function(*args, **kwargs)


def unknown_object(structure: Any) -> Any:
    """An object in a structure that is neither a number nor a container, or None."""
    if isinstance(structure, Same):
        return structure.value
    if isinstance(structure, tuple):
        return next((found for member in structure if (found := unknown_object(member)) is not None), None)
    return None


def device_of(samples: Sequence[Any]) -> Device:
    tensors: list[torch.Tensor] = []
    flatten(list(samples), tensors)
    found = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    if len(found) != 1:
        raise ValueError(f"the sample arguments are on {len(found)} GPUs; put them, and the modules, on one")
    return CudaDevice(found[0])


def parameters_of(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Leaves that a callable uses and that collect gradients: of a module, or reached by a function."""
    if isinstance(function, torch.nn.Module):
        return [parameter for parameter in function.parameters() if parameter.requires_grad]
    return reach([(getattr(function, "__qualname__", "callable"), function)]).parameters()


def modes_of(function: Callable[..., Any]) -> tuple[bool, ...]:
    """Training or evaluation, of every module in a callable; autocast belongs to it."""
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    return (torch.is_autocast_enabled("cuda"), *[module.training for module in modules])


def has_hooks(module: torch.nn.Module) -> bool:
    held = vars(module)
    return any(
        held.get(name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )
