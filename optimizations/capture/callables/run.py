"""Run a callable once on a copy of its sample, and record what it did and what a graph of it could not hold."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimizations.capture.callables.arguments import Sample, called, names_of_attributes, unknown_object
from optimizations.capture.callables.questions import refused_questions
from optimizations.capture.inputs import CopiedInputs, with_classes_of
from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step.host_random import HostDraws
from optimizations.capture.step.host_state import HostState, Rebound
from optimizations.capture.step.observer import Observer, StepRefused, storage
from optimizations.capture.step.observing import Given, kept_results, sets_attributes
from optimizations.capture.step.operations import Operation
from optimizations.graph.memory import memory_of
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import next_number, recorded_of, without_hooks


@dataclass(slots=True)
class Run:
    """Record what one run of a callable did.

    `parameters`: leaves whose gradients it computes, `leaves` others that it met. `saved`: where the storages lie that
    its backward reads, and `saved_results` which of its results must not be written before it, these among them.
    `structure` is of what it returned. `refusals`: what a graph of it would do otherwise. `as_captured`: what it was
    told if it asked whether it is captured. `draws`: whether random numbers were drawn, from `generators` too.
    `of_results`: of what it returned, or kept, as `Observer.of_results` tells it. `host_draws`: what it drew on the
    host, where that is said to decide nothing (`draws_unused`). `wrote`: paths of tensors from before that it wrote;
    `bound`: storages that attributes were bound to. Of the first run, `from_arguments`: storages that held what it
    computed from its arguments. `as_first`: whether it did what the first run did.
    """

    parameters: list[torch.Tensor] = field(default_factory=list)
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    saved: frozenset[int] = frozenset()
    saved_results: tuple[int, ...] = ()
    structure: Hashable = None
    forward: Sequence[Operation] = ()
    backward: Sequence[Operation] = ()
    refusals: list[Refusal] = field(default_factory=list)
    as_captured: bool = False
    generators: Sequence[torch.Generator] = ()
    draws: bool = False
    of_results: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    wrote: frozenset[str] = frozenset()
    from_arguments: frozenset[int] = frozenset()
    bound: frozenset[int] = frozenset()
    as_first: bool = False
    host_draws: HostDraws = field(default_factory=HostDraws)
    draws_unused: bool = False


def run_once(
    function: Callable[..., Any],
    sample: Sample,
    parameters: Sequence[torch.Tensor],
    training: bool,
    state: HostState,
    observer: Observer,
    first: Run | None,
) -> Run:
    """Run a callable on a copy of its sample, forward and backward. `state` is what it reaches.

    `parameters`: leaves of which it is known that they collect gradients. Those that it reaches otherwise are added:
    they were there in the `first` run, too. That one sees what is saved for the backward.
    """
    with observer.unseen():
        inputs = inputs_like(sample)
        given = replaced(sample, iter(inputs.recording_inputs))
        marks = [*inputs.recording_inputs]
        looks = [tensor.requires_grad for tensor in marks]
        containers, snapshot = Given(*given), state.snapshot()
        since = next_number()
        torch.clear_autocast_cache()
        if first is None:
            observer.followed = set(map(storage, marks)) - {0}
    begin = len(observer.operations)
    leaves = [*parameters, *state.parameters()]
    asked = contextlib.nullcontext() if state.compiled else refused_questions(observer, marks, leaves)
    with torch.set_grad_enabled(training), asked:
        returned = call(function, given)
    middle = len(observer.operations)
    run = Run(parameters=list(parameters), forward=observer.operations[begin:middle])
    run.from_arguments = frozenset(observer.followed or ())
    run.refusals += containers.changes(*given)
    run.refusals += changed_inputs(marks, looks)
    run.refusals += [sets_attributes(names, "an argument") for mark in marks if (names := names_of_attributes(mark))]
    results: list[torch.Tensor] = []
    run.structure = flatten(returned, results)
    observer.returned = frozenset(map(storage, results))
    with observer.unseen():
        # What the first run adds, later ones bind again: its backward reads something, too.
        kept = kept_results(state, snapshot, observer, added=first is None)
        run.of_results = observer.of_results([*results, *(entry.new for entry in kept)])
        run.bound = frozenset(storage(entry.new) for entry in kept)
        results += [entry.new for entry in bound_results(kept)]
    observer.forget_origins()  # the backward is captured on its own
    run.refusals += strange_results(run.structure, results)
    known = {id(tensor) for tensor in [*marks, *state.tensors.values()]}
    made = [tensor for tensor in results if id(tensor) not in known]
    run.refusals += [sets_attributes(names, "what it returns") for one in made if (names := names_of_attributes(one))]
    outputs = [tensor for tensor in results if tensor.requires_grad and not is_one_of(tensor, marks)]
    if not (training and outputs):
        return run
    with observer.unseen():
        recorded = recorded_of(outputs, since, saved_too=first is None)
        tangents = [torch.zeros_like(output) for output in outputs]
    if recorded.older:
        run.refusals.append(OLDER)
        return run
    leaves_before = {id(tensor) for tensor in [*inputs.recording_inputs, *parameters]}
    others = [leaf for leaf in recorded.leaves if id(leaf) not in leaves_before]
    run.leaves = list(map(weakref.ref, others))
    lasting = [] if first is None else [reference() for reference in first.leaves]
    run.parameters += [leaf for leaf in others if any(leaf is one for one in lasting)]
    run.saved = recorded.saved
    shared = overlapping(results)
    run.saved_results = tuple(
        index for index, tensor in enumerate(results) if index in shared or storage(tensor) in recorded.saved
    )
    wanted = differentiated([*inputs.recording_inputs, *run.parameters])
    if not wanted:
        return run
    found = gradients_of(outputs, wanted, tangents)
    run.backward = observer.operations[middle:]
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
        run.refusals.append(SPARSE)
    return run


def is_one_of(tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> bool:
    """Return whether it is an argument, which the caller gets back as it is: no graph makes it or its gradient."""
    return any(tensor is one for one in arguments)


def bound_results(bound: Sequence[Rebound]) -> list[Rebound]:
    """Return those that bind what is differentiated, always in the same order. They are results like others."""
    return in_order(entry for entry in bound if entry.new.requires_grad)


def in_order(bound: Iterable[Rebound]) -> list[Rebound]:
    """Return the entries in the same order in each run."""
    return sorted(bound, key=lambda entry: (entry.container.path, str(entry.key)))


def call(function: Callable[..., Any], given: Sample) -> Any:
    """Call it with copies of its arguments, which are leaves.

    Raises:
        StepRefused: it writes into one that takes part in differentiation.
    """
    try:
        return called(function, given)
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        raise StepRefused(WRITES_LEAF) from error


def overlapping(results: Sequence[torch.Tensor]) -> set[int]:
    """Return results that take part in differentiation and lie in the memory of another such, wholly or in part.

    Autograd takes them for tensors of their own, so a write into one would be missing in the gradient of the other.
    """
    found: set[int] = set()
    there = [(index, one, memory_of(one)) for index, one in enumerate(results) if one.requires_grad and storage(one)]
    for (index, one, memory), (other, another, others) in itertools.combinations(there, 2):
        if one is not another and memory.overlaps(others):
            found |= {index, other}
    return found


def strange_results(structure: Hashable, results: Sequence[torch.Tensor]) -> Iterator[Refusal]:
    """Yield a refusal for each result that cannot be one of a graph."""
    if (strange := unknown_object(structure)) is not None:
        yield Refusal(
            f"returns a {type(strange).__qualname__}",
            "return tensors, numbers, and containers of such: what an object holds would be overwritten",
        )
    for result in results:
        if type(result) not in (torch.Tensor, torch.nn.Parameter):
            yield Refusal(f"returns a {type(result).__qualname__}", "return plain tensors")
        elif result.layout is not torch.strided:
            yield Refusal(f"returns a tensor of layout {result.layout}", "return strided tensors")
        elif result.retains_grad:
            yield RETAINS


def gradients_of(
    outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Return gradients of `wanted`, without hooks: these run where the gradients arrive, after the graph.

    Raises:
        StepRefused: there is a part whose backward cannot be computed so.
    """
    try:
        with without_hooks(wanted):
            return torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise StepRefused(REENTRANT) from error


def differentiated(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that require gradients, each once: an argument may be passed twice."""
    return list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())


def inputs_like(sample: Sample) -> CopiedInputs:
    """Return copies of the tensors among these arguments, leaves that take part in differentiation as they do.

    What is passed twice has one copy, for code may ask whether two arguments are the same (`if query is key`).
    """
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    detached = {id(tensor): tensor.detach() for tensor in tensors}
    inputs = CopiedInputs([detached[id(tensor)] for tensor in tensors])
    for tensor, placeholder in zip(tensors, inputs.recording_inputs, strict=True):
        placeholder.requires_grad_(tensor.requires_grad)
    with_classes_of(tensors, inputs.recording_inputs)
    return inputs


def changed_inputs(tensors: Sequence[torch.Tensor], takes_part: Sequence[bool]) -> Iterator[Refusal]:
    """Yield a refusal for each argument whose `requires_grad` differs from that before the call."""
    for index, (tensor, before) in enumerate(zip(tensors, takes_part, strict=True)):
        if tensor.requires_grad != before:
            yield Refusal(
                f"makes tensor {index} of its arguments a result of its own, by writing what takes part in "
                "differentiation into it",
                "write into a copy of it (`clone()`), and return that",
            )


WRITES_LEAF = Refusal(
    "writes into an argument that takes part in differentiation",
    "work on a copy of it; of modules with `inplace=True`, pass inplace=False to those that come first",
)
OLDER = Refusal(
    "uses a tensor that takes part in differentiation and was computed before the call",
    "pass it as an argument: its gradient then goes on from there",
)
OWN_BACKWARD = Refusal(
    "changes the `.grad` of a parameter, as a backward inside of it does",
    "use torch.autograd.grad there, or capture it with graph_step",
)
RETAINS = Refusal(
    "calls retain_grad() on what it returns or keeps in an attribute, whose gradient a graph computes on its way only",
    "get the gradient with torch.autograd.grad inside of it, and return that",
)
SPARSE = Refusal("computes a sparse gradient, which has no fixed size", "use sparse=False")
REENTRANT = Refusal(
    "uses torch.utils.checkpoint with use_reentrant=True, whose backward works as a part of a whole one only",
    "pass use_reentrant=False",
)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Name what is refused in refusals that are raised in the block."""
    try:
        yield
    except StepRefused as error:
        raise StepRefused(replace(error.refusal, reason=f"{what} {error.refusal.reason}")) from error
