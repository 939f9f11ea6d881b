"""Check the callables and samples of `graph_callables`: parameters, modes, hooks and the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from optimizations.capture.callables.installed import Installed, is_graphed
from optimizations.capture.device import Device
from optimizations.capture.signature import copies, flatten, refused_tensor
from optimizations.capture.step.call import is_fully_sharded, refused_iterators, refused_sources
from optimizations.capture.step.host_state import MODULE_HOOKS, HostState, of_argument, reach
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.options import HOST_DRAWS, require_one_of
from optimizations.capture.step.user_code import all_names, last_word, with_inner
from optimizations.options import Concurrency
from optimizations.report.steps import Refusal

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


Plan = Sequence[tuple[Installed, int, Sample, int]]
"""Callables with each of their samples, its number, and how many pairs of graphs are made for it."""


@dataclass(frozen=True, slots=True)
class Options:
    """Hold the checked options of `graph_callables`.

    Raises:
        ValueError: an option is wrong; the message says what is allowed.
    """

    outputs: Literal["static", "copied"]
    share_io: bool
    host_draws: Literal["refused", "unused"]
    concurrency: Concurrency

    def __post_init__(self) -> None:
        require_one_of("outputs", self.outputs, ("static", "copied"))
        require_one_of("host_draws", self.host_draws, HOST_DRAWS)
        require_one_of("concurrency", self.concurrency, get_args(Concurrency))


def listed(callables: Any) -> list[Callable[..., Any]]:
    """Return the callables as a list.

    Raises:
        ValueError, TypeError: there are none, or one of them is not callable, has graphs already or is given twice.
        StepRefused: a module has hooks or is compiled in place.
    """
    found = list(callables) if isinstance(callables, (list, tuple, torch.nn.ModuleList)) else [callables]
    if not found:
        raise ValueError("graph_callables needs at least one module or function")
    if len(set(map(id, found))) < len(found):
        raise ValueError(
            "a callable is given twice: give each once, and its number in `order` as often as it is called"
        )
    for number, one in enumerate(found, start=1):
        if not callable(one) or isinstance(one, torch.nn.ModuleList):
            raise TypeError(f"graph_callables needs modules and functions, not {type(one).__name__}")
        if is_graphed(one):
            raise ValueError("a module has graphs of an earlier graph_callables: call close() on that first")
        attributes = vars(one) if isinstance(one, torch.nn.Module) else {}
        with naming(number):
            # Hooks of inner modules are allowed: they run during the captures, and their changes are detected.
            if any(attributes.get(name) for name in MODULE_HOOKS):
                raise StepRefused(HAS_HOOKS)
            if attributes.get("_compiled_call_impl") is not None:
                raise StepRefused(COMPILED_IN_PLACE)
    return found


def samples_of(sample_args: Any, sample_kwargs: Any, count: int) -> list[Sample]:
    """Return the arguments of each callable; one sequence of tensors is used for all.

    Raises:
        TypeError, ValueError: they are not sequences of tuples and dicts, one for each callable.
    """
    keywords = [{}] * count if sample_kwargs is None else sample_kwargs
    several = sample_args
    if isinstance(several, Sequence) and several and not any(isinstance(member, tuple) for member in several):
        several = [tuple(several)] * count
    for name, given, kind, what in (
        ("sample_args", several, tuple, "a tuple of arguments"),
        ("sample_kwargs", keywords, Mapping, "a dict of keyword arguments"),
    ):
        if not isinstance(given, Sequence) or not all(isinstance(member, kind) for member in given):
            raise TypeError(f"{name} has to be a list with {what} for each callable")
        if len(given) != count:
            raise ValueError(f"{name} has {len(given)} entries for {count} callables: give {what} for each")
    return [(args, dict(of_one)) for args, of_one in zip(several, keywords, strict=True)]


def device_of(samples: Sequence[Any]) -> Device:
    tensors: list[torch.Tensor] = []
    flatten(list(samples), tensors)
    found = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    if len(found) != 1:
        where = f"{len(found)} GPUs" if found else "no GPU"
        raise ValueError(f"the sample arguments are on {where}; put them, and the modules, on one")
    return Device(found.pop())


def reached_by(called: Installed, sample: Sample, device: Device) -> HostState:
    """Return the Python state that a callable and the objects among its arguments reach.

    Raises:
        StepRefused: an argument cannot be copied or is not on the GPU. Or the state has an iterator, or a module that
            uses several processes or GPUs.
    """
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    for index, one in enumerate(tensors):
        name = f"is given a sample of which tensor {index}"
        plain = one.detach() if type(one) is torch.Tensor else one
        if (refusal := refused_tensor(name, plain, device.holds)) is not None:
            raise StepRefused(refusal)
    if not all(map(copies, sample)):
        advice = "pass a dict or a list"
        raise StepRefused(Refusal("is given an object of a class of which no copy can be made", advice))
    named = type(called.function) if isinstance(called.function, torch.nn.Module) else called.function
    name = getattr(named, "__qualname__", f"callable {called.number}")
    held = [*of_argument(sample[0], "args"), *of_argument(sample[1], "kwargs")]
    state = reach([(name, called.function), (name, called.before), *held], hooks_of_tensors=False)
    names = set().union(*(all_names(one) for code in state.code for one in with_inner(code)))
    iterators = refused_iterators(state, lambda path: last_word(path) in names)
    if (refusal := refused_sources(state) or next(iterators, None)) is not None:
        raise StepRefused(refusal)
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    for path, module in state.modules.items():
        if isinstance(module, parallel) or is_fully_sharded(module):
            reason = f"uses {path}, a {type(module).__qualname__}, whose Python code uses other processes or GPUs"
            raise StepRefused(Refusal(reason, "pass the module that it wraps, or layers of that"))
    return state


HAS_HOOKS = Refusal(
    "has hooks on itself",
    "they run around its graphs: register them after graph_callables, and give as samples what they pass",
)
COMPILED_IN_PLACE = Refusal(
    "is compiled in place, so that its forward is not called",
    "pass torch.compile(module) instead of calling module.compile()",
)


@contextlib.contextmanager
def naming(number: int) -> Iterator[None]:
    """Name the callable in refusals that are raised in the block."""
    try:
        yield
    except StepRefused as error:
        raise StepRefused(replace(error.refusal, reason=f"callable {number} {error.refusal.reason}")) from error
