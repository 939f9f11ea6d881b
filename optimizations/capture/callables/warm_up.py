"""Run a callable on copies of its sample, and record what it did and what a graph of it could not hold.

It runs a fixed number of times before its capture, forward and backward, with an observer of its operators. Only the
last run is compared with the capture: earlier ones compile code, time kernels and load libraries. What the callable
sets up in its first run, and not in later ones, is refused, for warm-up computes it of a sample.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimizations.capture.callables.arguments import Sample, names_of_attributes, unknown_object
from optimizations.capture.device import Device
from optimizations.capture.inputs import CopiedInputs, copy_all, with_classes_of
from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step import compilations, forbidden_calls
from optimizations.capture.step.call import sparse_tensors
from optimizations.capture.step.host_random import HostDraws, HostRandom, decides
from optimizations.capture.step.host_state import HostState, Rebound, entries_of
from optimizations.capture.step.observer import SETS_UP, Observer, StepRefused, storage
from optimizations.capture.step.observing import (
    CHECKPOINT_DRAWS,
    Given,
    call_changes,
    changed_itself,
    drawn_on_the_host,
    host_generators,
    kept_results,
    sets_attributes,
)
from optimizations.capture.step.operations import Operation, first_difference
from optimizations.capture.step.reseeding import Reseeding
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.graph.memory import memory_of
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import next_number, recorded_of, without_hooks
from optimizations.torch_internals.generator_identity import identity

MOST_SET_UPS = 8
"""Runs beyond the fixed number that may compile code or time kernels."""


@dataclass(slots=True)
class Member:
    """Hold a callable to capture with one of its samples: `variant` is the number of that.

    Attributes:
        function: what runs; `state` is what it reaches.
        parameters: leaves that get gradients of it.
        draws_unused: the caller says that what it draws on the host decides nothing.
        run: what the last run did.
    """

    number: int
    variant: int
    function: Callable[..., Any]
    sample: Sample
    state: HostState
    parameters: Sequence[torch.Tensor]
    draws_unused: bool
    run: Run

    def names(self) -> dict[int, str]:
        """Return names of parameters by where they lie, if numbers of the host may choose which of them is read."""
        there = enumerate(map(storage, self.state.parameters() if self.draws_unused else ()))
        return {place: f"parameter {index}" for index, place in there if place}


@dataclass(slots=True)
class Run:
    """Record what one run of a callable did.

    Attributes:
        parameters: leaves whose gradients it computes, `leaves` others that it met.
        saved: where the storages lie that its backward reads.
        saved_results: results that must not be written before the backward, for it reads them, or for they overlap.
        structure: of what it returned.
        forward, backward: operators that ran.
        kept: entries of Python that it bound to tensors it made.
        findings: what a graph of it could not do.
        generators, draws: random numbers of the GPU were drawn, from these too.
        as_captured: what it was told when it asked whether it is captured.
        as_first: whether the first run ran the same operators.
        drawn_on_the_host: names of generators of the host that were drawn from.
        of_results: which of the tensors it computed it returned, and what those in CPU memory hold.
    """

    parameters: list[torch.Tensor] = field(default_factory=list)
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    saved: frozenset[int] = frozenset()
    saved_results: tuple[int, ...] = ()
    structure: Hashable = None
    forward: Sequence[Operation] = ()
    backward: Sequence[Operation] = ()
    kept: Sequence[Rebound] = ()
    findings: list[Refusal] = field(default_factory=list)
    generators: Sequence[torch.Generator] = ()
    draws: bool = False
    as_captured: bool = False
    as_first: bool = False
    drawn_on_the_host: Sequence[str] = ()
    of_results: HostDraws = field(default_factory=HostDraws)


@dataclass(slots=True)
class Seen:
    """Hold the observer of one run or capture of a member. When that is over, `findings` are what a graph could not do.

    Attributes:
        watching: a context for what is the program's.
        asked: what it asked of the random state, and of captures.
        drawn_on_the_host: names of generators of the host that were drawn from.
    """

    observer: Observer
    asked: forbidden_calls.Asked
    watching: Callable[[], contextlib.AbstractContextManager[None]]
    findings: list[Refusal] = field(default_factory=list)
    drawn_on_the_host: Sequence[str] = ()


@contextlib.contextmanager
def observing(device: Device, member: Member, like: Run, *, forbid: bool, compiled: bool = False) -> Iterator[Seen]:
    """Observe a run of a member in the block, or with `forbid` a capture, in which what a graph cannot hold raises.

    What is changed of tensors themselves is put back, and after a capture so are generators of the host.

    Args:
        like: the run before, of which the capture knows generators, and what to tell code that asks if it is captured.
        compiled: another callable is compiled.
    """
    state = member.state
    observer = Observer(
        device.holds,
        member.names(),
        forbid=forbid,
        generators=like.generators,
        keeps_workspace=device.keeps_workspace,
    )
    observer.sparse = sparse_tensors(state)
    if member.draws_unused:
        observer.compare_values(host_generators(device, state))
    asked = forbidden_calls.Asked(as_captured=like.as_captured)

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        watched = forbidden_calls.watched(observer, asked, capturing=forbid, compiled=compiled or state.compiled)
        with compilations.noticed(observer, forbid=forbid), watched, observer:
            yield

    seen = Seen(observer, asked, watching)
    host_random = HostRandom(with_torch=device.has_own_random, generators=state.generators)
    marks = TensorMarks(state.tensors, to_restore=True)
    try:
        yield seen
        seen.drawn_on_the_host = tuple(host_random.drawn())
        seen.findings = [*observer.refusals, *map(changed_itself, marks.changed())]  # the callable may catch exceptions
        if not member.draws_unused:
            seen.findings += [drawn_on_the_host(name, state, "call") for name in seen.drawn_on_the_host]
    finally:
        marks.restore()
        if forbid:
            host_random.restore()


def warm_up(device: Device, member: Member, times: int, training: bool, note: Callable[[torch.Tensor], None]) -> Run:
    """Run a callable so many times, or more while it compiles; return the last run. `note` is given what is written.

    Raises:
        StepRefused: a graph could not repeat the last run, or the first did more than later ones.
    """
    state, outset = member.state, member.state.snapshot()
    first: Run | None = None
    before: Run | None = None
    as_captured = False
    for count in itertools.count(1):
        snapshot, parameters = state.snapshot(), state.parameters()
        states, gradients = device.random_states(), _gradients(parameters)
        with observing(device, member, Run(as_captured=as_captured), forbid=False) as seen:
            observer, asked = seen.observer, seen.asked
            observer.before_write, observer.default_generator = note, device.default_generator()
            drawn_from = [one for one in _generators(state) if identity(one) not in observer.host_generators]
            observer.reseeding = reseeding = Reseeding([observer.default_generator, *drawn_from])
            known = {identity(one): one.get_state() for one in drawn_from}
            try:
                with device.warming_up(), seen.watching():
                    run = _run_once(member, training, observer, first)
            finally:
                reseeded = reseeding.refusals()
                for generator, content in zip(observer.generators, observer.first_states, strict=True):
                    generator.set_state(known.get(identity(generator), content))
        first = first or run
        runs_again = count < max(times, 2 if observer.refusals else 1) or observer.set_up
        if asked.captured and not as_captured:
            as_captured = runs_again = True
        if runs_again:
            if count >= times + MOST_SET_UPS:
                raise StepRefused(SETS_UP)
            before = run
            continue
        run.generators, run.as_captured = observer.generators, as_captured
        run.draws = observer.draws or not all(map(torch.equal, states, device.random_states()))
        run.drawn_on_the_host, run.findings = seen.drawn_on_the_host, [*run.findings, *seen.findings]
        if run.draws:
            run.findings += [CHECKPOINT_DRAWS] if asked.random_state else reseeded
        if any(a is not b or old != new for (a, old), (b, new) in zip(gradients, _gradients(parameters), strict=True)):
            run.findings.append(OWN_BACKWARD)
        if run.drawn_on_the_host and before is not None:
            check_draws(run, first_difference(before.forward, run.forward))
            check_draws(run, run.of_results.other_results(before.of_results))
        for refusal in [*run.findings, *call_changes(state, snapshot, run.kept)]:
            raise StepRefused(refusal)
        for change in state.changes(outset, _without_new_keys(state, outset, run.kept)):
            raise StepRefused(replace(SETS_ITSELF_UP, reason=f"{SETS_ITSELF_UP.reason} ({change.words})"))
        run.saved, run.saved_results = first.saved, first.saved_results
        run.as_first = first_difference(first.forward, run.forward) is None
        return run
    raise AssertionError("unreachable")


def check_draws(run: Run, difference: Refusal | None) -> None:
    """Raise the difference of another run, or a capture, from this one. What it drew on the host may be why."""
    if difference is not None:
        raise StepRefused(decides(difference, run.drawn_on_the_host) if run.drawn_on_the_host else difference)


def _run_once(member: Member, training: bool, observer: Observer, first: Run | None) -> Run:
    """Run a callable on a copy of its sample, forward and backward. The `first` run looks at what is saved between.

    Leaves that are not reached through its state are parameters, too, if they were there in the first run.
    """
    with observer.unseen():
        inputs = inputs_like(member.sample)
        marks = [*inputs.recording_inputs]
        given = replaced(member.sample, iter(marks))
        takes_part = [one.requires_grad for one in marks]
        hooks = _hooks([*marks, *member.state.parameters(), *member.parameters])
        containers, snapshot, since = Given(*given), member.state.snapshot(), next_number()
        torch.clear_autocast_cache()
    with torch.set_grad_enabled(training):
        returned = call(member.function, given)
    middle = len(observer.operations)
    run = Run(parameters=list(member.parameters), forward=observer.operations[:middle])
    run.findings += [*containers.changes(*given), *changed_inputs(marks, takes_part)]
    run.findings += [sets_attributes(names, "an argument") for mark in marks if (names := names_of_attributes(mark))]
    for tensor, known_hooks in hooks:
        for held, key in _hooks_of(tensor) - known_hooks:
            getattr(tensor, held).pop(key)
            run.findings.append(REGISTERS_HOOKS)
    results: list[torch.Tensor] = []
    run.structure = flatten(returned, results)
    known = {id(tensor) for tensor in [*marks, *member.state.tensors.values()]}
    made = [one for one in results if id(one) not in known]
    run.findings += [sets_attributes(names, "what it returns") for one in made if (names := names_of_attributes(one))]
    observer.returned = frozenset(map(storage, results))
    with observer.unseen():
        run.kept = in_order(kept_results(member.state, snapshot, observer, added=first is None))
        results += [entry.new for entry in run.kept]
        run.of_results = HostDraws({}, *observer.of_results(results))
    observer.forget_origins()  # the backward is captured on its own
    run.findings += _strange_results(run.structure, results)
    outputs = [tensor for tensor in results if tensor.requires_grad and not is_one_of(tensor, marks)]
    if not (training and outputs):
        return run
    with observer.unseen():
        recorded = recorded_of(outputs, since, saved_too=first is None)
        tangents = [torch.zeros_like(output) for output in outputs]
    if recorded.older:
        run.findings.append(OLDER)
        return run
    before = {id(tensor) for tensor in [*marks, *member.parameters]}
    others = [leaf for leaf in recorded.leaves if id(leaf) not in before]
    run.leaves = list(map(weakref.ref, others))
    lasting = [] if first is None else [reference() for reference in first.leaves]
    run.parameters += [leaf for leaf in others if any(leaf is one for one in lasting)]
    run.saved, shared = recorded.saved, overlapping(results)
    run.saved_results = tuple(
        index for index, one in enumerate(results) if index in shared or storage(one) in recorded.saved
    )
    if wanted := differentiated([*marks, *run.parameters]):
        found = gradients_of(outputs, wanted, tangents)
        run.backward = observer.operations[middle:]
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
            run.findings.append(SPARSE)
    return run


def _without_new_keys(state: HostState, outset: Sequence[Any], kept: Sequence[Rebound]) -> list[Rebound]:
    """Return the entries that are attributes, or were there at the outset: a dict with another key is another dict."""
    pairs = zip(state.containers, outset, strict=True)
    there = {(id(one.held), key) for one, content in pairs for key, _ in entries_of(one, content)} if kept else set()
    return [one for one in kept if one.container.is_attributes or (id(one.container.held), one.key) in there]


def is_one_of(tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> bool:
    """Return whether it is an argument, which the caller gets back as it is: no graph makes it or its gradient."""
    return any(tensor is one for one in arguments)


def in_order(kept: Iterable[Rebound]) -> list[Rebound]:
    """Return the entries in the same order in each run. They are results like others."""
    return sorted(kept, key=lambda entry: (entry.container.path, str(entry.key)))


def call(function: Callable[..., Any], given: Sample) -> Any:
    """Call it with copies of its arguments, which are leaves.

    Raises:
        StepRefused: it writes into one that takes part in differentiation.
    """
    try:
        return function(*given[0], **given[1])
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


def _strange_results(structure: Hashable, results: Sequence[torch.Tensor]) -> Iterator[Refusal]:
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


def inputs_like(sample: Sample, shared: dict[int, torch.Tensor] | None = None) -> CopiedInputs:
    """Return copies of the tensors among these arguments, leaves that take part in differentiation as they do.

    What is passed twice has one copy, for code may ask whether two arguments are the same (`if query is key`).

    Args:
        shared: tensors in whose memory some lie, by index, instead of copies.
    """
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    by_id = {id(tensor): tensor.detach() for tensor in tensors}
    detached = [by_id[id(tensor)] for tensor in tensors]
    for index, there in (shared or {}).items():
        detached[index] = there.detach()
    inputs = CopiedInputs(detached, list(shared or ()))
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


def _hooks(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, set[tuple[str, int]]]]:
    """Return these tensors with the hooks of each for its gradient."""
    return [(one, _hooks_of(one)) for one in tensors]


def _hooks_of(tensor: torch.Tensor) -> set[tuple[str, int]]:
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    return {(name, key) for name in names for key in getattr(tensor, name) or ()}


def _generators(state: HostState) -> list[torch.Generator]:
    """Return the generators of the program's own."""
    found = [*state.device_generators, *state.generators.values()]
    return [one for one in found if isinstance(one, torch.Generator)]


def _gradients(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor | None, int]]:
    found = [parameter.grad for parameter in parameters]
    return [(gradient, -1 if gradient is None or gradient.is_inference() else gradient._version) for gradient in found]


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Name what is refused in refusals that are raised in the block."""
    try:
        yield
    except StepRefused as error:
        raise StepRefused(replace(error.refusal, reason=f"{what} {error.refusal.reason}")) from error


class _FirstWrites:
    """Keep what the memory of these tensors held before an operator wrote it. `note` is for `Observer.before_write`."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._places = {storage(tensor) for tensor in tensors} - {0}
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Copy the memory of a tensor that is about to be written."""
        if (place := storage(tensor)) in self._places and place not in self._saved:
            memory = tensor.detach().untyped_storage()
            self._saved[place] = memory, memory.clone()

    def restore(self) -> None:
        """Put back what was written."""
        for memory, content in self._saved.values():
            memory.copy_(content)


@contextlib.contextmanager
def putting_back(device: Device, states: Sequence[HostState]) -> Iterator[Callable[[torch.Tensor], None]]:
    """Put back after the block what tensors hold that these reach, their gradients and random states.

    Yields what is to be called for each tensor that is about to be written: of those that take part in differentiation
    no copy is made ahead.
    """
    random_states = device.random_states()
    tensors = {id(one): one for state in states for one in state.tensors.values()}.values()
    # What a tensor holds that holds others is among these itself.
    plain = [tensor for tensor in tensors if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__]
    others = [tensor for tensor in plain if not tensor.requires_grad]
    strided = {storage(tensor): tensor for tensor in others if tensor.layout is torch.strided and storage(tensor)}
    memory = [(one.untyped_storage(), one.untyped_storage().clone()) for one in strided.values()]
    kept = [(one, one.detach().clone()) for one in others if one.layout is not torch.strided]
    writes = _FirstWrites([tensor for tensor in plain if tensor.requires_grad])
    grads = [(parameter, parameter.grad) for state in states for parameter in state.parameters()]
    own = {name: one for state in states for name, one in state.generators.items()}
    host_random = HostRandom(with_torch=device.has_own_random, generators=own)
    try:
        yield writes.note
    finally:
        with torch.no_grad():
            copy_all([tensor for tensor, _ in kept], [old for _, old in kept])
        for there, old in memory:
            there.copy_(old)
        writes.restore()
        for parameter, gradient in grads:
            parameter.grad = gradient
        device.restore_random_states(random_states)
        host_random.restore()


SETS_ITSELF_UP = Refusal(
    "sets itself up in its first call, which is made with a sample",
    "call it once, with the first batch, before graph_callables",
)
WRITES_LEAF = Refusal(
    "writes into an argument that takes part in differentiation",
    "work on a copy of it; of modules with `inplace=True`, pass inplace=False to those that come first",
)
REGISTERS_HOOKS = Refusal(
    "registers hooks with an argument or a parameter, and a graph registers nothing",
    "register them before the call: they run after the graph; or, for hooks of its own, register them with "
    "`argument.view_as(argument)`",
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
