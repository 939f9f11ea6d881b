"""Check the callables and samples of `graph_callables`: parameters, modes, hooks and the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimizations.capture.callables.installed import as_it_is, is_graphed
from optimizations.capture.device import Device
from optimizations.capture.signature import copies, flatten, refused_tensor
from optimizations.capture.step.call import is_fully_sharded, refused_function, refused_iterators, refused_sources
from optimizations.capture.step.host_state import MODULE_HOOKS, HostState
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.reach import of_argument, reach
from optimizations.capture.step.source_lines import last_word
from optimizations.capture.step.user_code import all_names, with_inner
from optimizations.options import Concurrency
from optimizations.report.steps import Refusal

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True, slots=True)
class Options:
    """Hold the options of `graph_callables`."""

    warm_up: int
    copied: bool
    share_io: bool
    draws_unused: bool
    concurrency: Concurrency


def taken_apart(callables: Any) -> tuple[list[Callable[..., Any]], list[int]]:
    """Return a flat list of the callables, and the number of callables in each member of `callables`.

    Raises:
        ValueError, TypeError: there are none, or one of them is not callable or has graphs already.
    """
    given = list(callables) if isinstance(callables, (list, tuple, torch.nn.ModuleList)) else [callables]
    if not given:
        raise ValueError("graph_callables needs at least one module or function")
    members = [list(one) if isinstance(one, (list, torch.nn.ModuleList)) else [one] for one in given]
    flat: list[Callable[..., Any]] = [one for several in members for one in several]
    for one in flat:
        if not callable(one):
            raise TypeError(f"graph_callables needs modules and functions, not {type(one).__name__}")
        if is_graphed(one):
            raise ValueError("a module has graphs of an earlier graph_callables: call close() on that first")
    return flat, list(map(len, members))


def samples_of(sample_args: Any, sample_kwargs: Any, count: int) -> list[Sample]:
    """Return the arguments of each callable; one sequence of tensors is used for all.

    Raises:
        ValueError: their number differs from that of the callables.
        TypeError: they are not sequences.
    """
    if not isinstance(sample_args, Sequence):
        raise TypeError(
            f"sample_args is a {type(sample_args).__name__}: give a list with a tuple of arguments for each callable, "
            "or one tuple of tensors for all"
        )
    keywords = [{}] * count if sample_kwargs is None else sample_kwargs
    if not isinstance(keywords, Sequence) or not all(isinstance(one, Mapping) for one in keywords):
        raise TypeError("sample_kwargs has to be a list with a dict of keyword arguments for each callable")
    several: Sequence[Any] = sample_args
    if sample_args and not any(isinstance(member, tuple) for member in sample_args):
        several = [tuple(sample_args)] * count
    for name, given in (("sample_args", several), ("sample_kwargs", keywords)):
        if len(given) != count or not all(isinstance(member, (tuple, Mapping)) for member in given):
            raise ValueError(
                f"{name} has {len(given)} entries for {count} callables: give a tuple of arguments, or a dict of "
                "keyword arguments, for each"
            )
    return [(args, dict(of_one)) for args, of_one in zip(several, keywords, strict=True)]


def difference(sample: Any, found: Any) -> str | None:
    """Return how the signature of arguments differs from that of the sample; None if it does not."""
    if sample == found:
        return None
    (structure, metadata, _), (other, others, _) = sample, found
    if structure != other:
        return (
            "the structure or names of its arguments differ from the sample's, or they hold other numbers or objects: "
            "what is passed by keyword in calls has to be so in sample_kwargs"
        )
    for index, (one, another) in enumerate(zip(metadata, others, strict=True)):
        if one != another:  # sizes are not named: reasons are counted, and sizes may vary by call
            names = [name for name, a, b in zip(_METADATA, one, another, strict=False) if a != b]
            return f"tensor {index} of its arguments differs from the sample's in {', '.join(names)}"
    return "the same tensor is passed twice where the sample has two, or the other way round"


_METADATA = ("class", "shape", "strides", "dtype", "device", "requires_grad", "conjugation")
"""The fields of `tensor_key`."""


def device_of(samples: Sequence[Any]) -> Device:
    tensors: list[torch.Tensor] = []
    flatten(list(samples), tensors)
    found = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    if len(found) != 1:
        where = f"{len(found)} GPUs" if found else "no GPU"
        raise ValueError(f"the sample arguments are on {where}; put them, and the modules, on one")
    return Device(found.pop())


def reached_by(number: int, function: Callable[..., Any], sample: Sample) -> HostState:
    """Return the Python state that a callable and the objects among its arguments reach.

    Raises:
        StepRefused: the state has an iterator, or a module that uses several processes or GPUs. For example,
            DistributedDataParallel runs Python in each forward and after the backward, which a launch does not. The
            module that it wraps may be graphed.
    """
    args, kwargs = sample
    given = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
    held = [found for name, value in given for found in of_argument(value, name)]
    named = type(function) if isinstance(function, torch.nn.Module) else function
    name = getattr(named, "__qualname__", f"callable {number}")
    state = reach([(name, function), (name, as_it_is(function)), *held], hooks_of_tensors=False)
    names = set().union(*(all_names(one) for code in state.code for one in with_inner(code)))
    iterators = refused_iterators(state, lambda path: last_word(path) in names)
    if (refusal := refused_sources(state) or next(iterators, None)) is not None:
        raise StepRefused(refusal)
    for path, module in state.modules.items():
        if isinstance(module, _PARALLEL) or is_fully_sharded(module):
            kind = type(module).__qualname__
            what = f"is a {kind}" if module is function else f"reaches {path}, a {kind}"
            raise StepRefused(
                Refusal(
                    f"{what}: it uses other processes or GPUs by Python code, which a graph does not run",
                    "pass the module that it wraps, or layers of that",
                )
            )
    return state


_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def check_callables(
    callables: Sequence[Callable[..., Any]],
    samples: Sequence[Sequence[Sample]],
    holds: Callable[[torch.Tensor], bool],
) -> None:
    """Refuse callables that cannot be captured. `holds`: whether a tensor is on the GPU.

    Raises:
        ValueError: a callable is given twice.
        StepRefused: a module has hooks, a function is a coroutine or generator, or an argument is not on the GPU.
    """
    first: dict[int, int] = {}
    for number, (function, of_one) in enumerate(zip(callables, samples, strict=True), start=1):
        if first.setdefault(id(function), number) != number:
            raise ValueError(
                f"callable {number} is callable {first[id(function)]} again: give each once, and its number in `order` "
                "as often as it is called"
            )
        refusal = refused_function(function.forward if isinstance(function, torch.nn.Module) else function)
        if refusal is None and isinstance(function, torch.nn.Module):
            refusal = _refused_module(function)
        if refusal is None and not all(map(copies, of_one)):
            refusal = Refusal("is given an object of a class of which no copy can be made", "pass a dict or a list")
        if refusal is not None:
            raise StepRefused(replace(refusal, reason=f"callable {number} {refusal.reason}"))
        for sample in of_one:
            tensors: list[torch.Tensor] = []
            flatten(sample, tensors)
            for index, tensor in enumerate(tensors):
                refusal = refused_tensor(f"tensor {index} of callable {number}", tensor.detach(), holds)
                if refusal is not None:
                    raise StepRefused(refusal)


def _refused_module(function: torch.nn.Module) -> Refusal | None:
    """Return a refusal of a module with hooks that its graphs would not run, or that is compiled in place.

    Forward hooks of inner modules are allowed: they run during the captures, and their changes are detected.
    """
    if _has_hooks(function, MODULE_HOOKS):
        return Refusal(
            "has hooks on itself",
            "they run around its graphs: register them after graph_callables, and give as samples what they pass",
        )
    of_backward = [name for name in MODULE_HOOKS if "backward" in name]
    if found := [name for name, module in function.named_modules() if _has_hooks(module, of_backward)]:
        return Refusal(
            f"has hooks of the backward on {found[0]}",
            "a graph runs no Python: use hooks of what the callable returns, or leave that module out",
        )
    if vars(function).get("_compiled_call_impl") is not None:
        return Refusal(
            "is compiled in place, so that its forward is not called",
            "pass torch.compile(module) instead of calling module.compile()",
        )
    return None


def _has_hooks(module: torch.nn.Module, names: Sequence[str]) -> bool:
    return any(vars(module).get(name) for name in names)
