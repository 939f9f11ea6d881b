"""Check callables and their samples for `graph_callables`: parameters, modes, hooks, the GPU they are on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimizations.capture.callables.installed import as_it_is, is_graphed
from optimizations.capture.device import Device
from optimizations.capture.signature import Same, copies, flatten, refused_tensor, signature
from optimizations.capture.step.call import is_fully_sharded, refused_function, refused_iterators, refused_sources
from optimizations.capture.step.host_state import MODULE_HOOKS, HostState
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.reach import of_argument, reach
from optimizations.capture.step.source_lines import last_word
from optimizations.capture.step.steady import Arguments
from optimizations.capture.step.surroundings import ambient
from optimizations.capture.step.tensor_marks import attributes_set
from optimizations.capture.step.user_code import all_names, with_inner
from optimizations.options import Concurrency
from optimizations.report.steps import Refusal

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True, slots=True)
class Options:
    """Hold what `graph_callables` was told of how to make graphs."""

    warm_up: int
    copied: bool
    share_io: bool
    draws_unused: bool
    concurrency: Concurrency


def taken_apart(callables: Any) -> tuple[list[Callable[..., Any]], list[int]]:
    """Return the single callables, those in lists too, and how many each member of `callables` has.

    Raises:
        ValueError, TypeError: there are none, or one of them cannot be called, or has graphs.
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


def samples_of(sample_args: Sequence[Any], sample_kwargs: Sequence[Any] | None, count: int) -> list[list[Sample]]:
    """Return the arguments of each callable, for its micro-batches in turn; one tuple of tensors stands for all.

    Raises:
        ValueError: there are not as many as callables.
        TypeError: they are not sequences.
    """
    if not isinstance(sample_args, Sequence):
        raise TypeError(
            f"sample_args is a {type(sample_args).__name__}: give a list with a tuple of arguments for each callable, "
            "or one tuple of tensors for all"
        )
    given = [{}] * count if sample_kwargs is None else sample_kwargs
    keywords = [one if isinstance(one, list) else [one] for one in given] if isinstance(given, Sequence) else []
    if not keywords or not all(of_one and all(isinstance(one, Mapping) for one in of_one) for of_one in keywords):
        raise TypeError(
            "sample_kwargs has to be a list with a dict of keyword arguments for each callable, or a list of dicts for "
            "its micro-batches"
        )
    if len(keywords) != count:
        raise ValueError(f"sample_kwargs has {len(keywords)} entries for {count} callables: give a dict for each")
    several: Sequence[Any] = sample_args
    if sample_args and not any(isinstance(member, tuple) for member in sample_args):
        several = [tuple(sample_args)] * count
    if len(several) != count or not all(isinstance(member, tuple) for member in several):
        raise ValueError(
            f"sample_args has {len(sample_args)} entries for {count} callables: give a tuple of arguments for each, or "
            "one tuple of tensors for all"
        )
    return [[(args, dict(one)) for one in of_one] for args, of_one in zip(several, keywords, strict=True)]


def variants_of(samples: Sequence[Sequence[Sample]]) -> tuple[list[list[Sample]], list[list[int]]]:
    """Return the samples of each callable that differ, and which of them each of its samples is like."""
    found: list[list[Sample]] = []
    places: list[list[int]] = []
    for of_one in samples:
        keys = [signature(sample, []) for sample in of_one]
        distinct = list(dict.fromkeys(keys))
        found.append([of_one[keys.index(key)] for key in distinct])
        places.append([distinct.index(key) for key in keys])
    return found, places


def arguments_of(sample: Sample) -> Arguments:
    """Return the `Arguments` that recognise calls with arguments like these."""
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    return Arguments(*sample, tensors)


def difference(sample: Any, found: Any) -> str | None:
    """Return how arguments differ from the sample's, by the signatures of both; None if they do not."""
    if sample == found:
        return None
    (structure, looks, _), (other, others, _) = sample, found
    if structure != other:
        return (
            "the structure or names of its arguments differ from the sample's, or they hold other numbers or objects: "
            "what is passed by keyword in calls has to be so in sample_kwargs"
        )
    for index, (one, another) in enumerate(zip(looks, others, strict=True)):
        if one != another:  # sizes are not named: reasons are counted, and sizes may vary by call
            pairs = zip(_LOOKS, one, another, strict=False)
            names = ["layout"] if len(one) != len(another) else [name for name, a, b in pairs if a != b]
            return f"tensor {index} of its arguments differs from the sample's in {', '.join(names)}"
    return "the same tensor is passed twice where the sample has two, or the other way round"


_LOOKS = ("class", "shape", "strides", "dtype", "device", "requires_grad", "conjugation")
"""As `tensor_key` has them."""


def unknown_object(structure: Any) -> Any:
    """Return an object in a structure that is neither a number nor a container, or None."""
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
        where = f"{len(found)} GPUs" if found else "no GPU"
        raise ValueError(f"the sample arguments are on {where}; put them, and the modules, on one")
    return Device(found[0])


def parameters_of(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the leaves that a callable uses and that collect gradients: of a module, or reached by a function."""
    if isinstance(function, torch.nn.Module):
        return [parameter for parameter in function.parameters() if parameter.requires_grad]
    return [tensor for tensor in reach([("callable", function)]).parameters() if tensor.requires_grad]


def reached_by(number: int, function: Callable[..., Any], sample: Sample) -> HostState:
    """Return what a callable reaches in Python, and what the objects among its arguments lead to."""
    args, kwargs = sample
    given = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
    held = [found for name, value in given for found in of_argument(value, name)]
    named = type(function) if isinstance(function, torch.nn.Module) else function
    name = getattr(named, "__qualname__", f"callable {number}")
    return reach([(name, function), (name, as_it_is(function)), *held], hooks_of_tensors=False)


_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def check_reached(state: HostState, function: Callable[..., Any]) -> None:
    """Refuse what gives another value in each call, and modules that work with other processes or GPUs.

    DistributedDataParallel makes itself ready in each forward, and exchanges gradients after the backward. A launch
    runs none of that. What it wraps may be graphed: it calls that as before.

    Raises:
        StepRefused: there is such.
    """
    named = set().union(*(all_names(one) for code in state.code for one in with_inner(code)))
    iterators = refused_iterators(state, lambda path: last_word(path) in named)
    if (refusal := refused_sources(state) or next(iterators, None)) is not None:
        raise StepRefused(refusal)
    for path, module in state.modules.items():
        if isinstance(module, _PARALLEL) or is_fully_sharded(module):
            kind = type(module).__qualname__
            what = f"is a {kind}" if module is function else f"reaches {path}, a {kind}"
            raise StepRefused(
                Refusal(
                    f"{what}: what it does with other processes or GPUs is Python, and a graph runs none",
                    "pass the module that it wraps, or layers of that",
                )
            )


def check_callables(
    callables: Sequence[Callable[..., Any]],
    samples: Sequence[Sequence[Sample]],
    holds: Callable[[torch.Tensor], bool],
) -> None:
    """Refuse what cannot be captured. `holds`: whether a tensor lies on the GPU.

    Raises:
        ValueError: a callable is given twice.
        StepRefused: a module has hooks, a call does not do the work, or an argument is not a tensor on the GPU.
    """
    first: dict[int, int] = {}
    for number, (function, of_one) in enumerate(zip(callables, samples, strict=True), start=1):
        if first.setdefault(id(function), number) != number:
            raise ValueError(
                f"callable {number} is callable {first[id(function)]} again: give each once, and its number in `order` "
                "as often as it is called"
            )
        body = function.forward if isinstance(function, torch.nn.Module) else function
        if (refusal := refused_function(body)) is not None:
            raise StepRefused(replace(refusal, reason=f"callable {number} {refusal.reason}"))
        if isinstance(function, torch.nn.Module):
            _check_module(number, function)
        for sample in of_one:
            _check_sample(number, sample, holds)


def _check_sample(number: int, sample: Sample, holds: Callable[[torch.Tensor], bool]) -> None:
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    if not copies(sample):
        raise StepRefused(
            Refusal(
                f"callable {number} is given an object of a class of which no copy can be made",
                "pass a dict, a list or a dataclass",
            )
        )
    for index, tensor in enumerate(tensors):
        name = f"tensor {index} of callable {number}"
        if (refusal := refused_tensor(name, tensor.detach(), holds)) is not None:
            raise StepRefused(refusal)
        # Those of parameters are left aside: optimizers set some.
        if type(tensor) is torch.Tensor and (names := ", ".join(attributes_set(tensor))):
            raise StepRefused(
                Refusal(
                    f"{name} has attributes of its own ({names}), which its copies have not",
                    "pass what they hold as arguments; where the callable reads none of them, give a sample without "
                    "(`x.detach()`)",
                )
            )


def _check_module(number: int, function: torch.nn.Module) -> None:
    """Refuse a module with hooks that its graphs would not run, or one that is compiled in place. Hooks of the forward
    of modules in it are part of what it does: they run in its captures, and are watched."""
    if _has_hooks(function):
        raise StepRefused(
            Refusal(
                f"callable {number} has hooks on itself",
                "they run around its graphs: register them after graph_callables, and give as samples what they pass",
            )
        )
    for name, module in function.named_modules():
        if _has_hooks(module, of_backward=True):
            raise StepRefused(
                Refusal(
                    f"callable {number} has hooks of the backward on {name}",
                    "a graph runs no Python: use hooks of what the callable returns, or leave that module out",
                )
            )
    if vars(function).get("_compiled_call_impl") is not None:
        raise StepRefused(
            Refusal(
                f"callable {number} is compiled in place, so that its forward is not called",
                "pass torch.compile(module) instead of calling module.compile()",
            )
        )


def modes_of(function: Callable[..., Any]) -> tuple[Hashable, ...]:
    """Return the mode of every module in a callable, training or evaluation, and settings around it, as autocast."""
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    return (ambient(), *[module.training for module in modules])


def _has_hooks(module: torch.nn.Module, *, of_backward: bool = False) -> bool:
    names = [name for name in MODULE_HOOKS if "backward" in name] if of_backward else MODULE_HOOKS
    return any(vars(module).get(name) for name in names)
