"""The runs of callables before their capture, and what a capture of them cannot hold."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimizations.capture.callables.arguments import Sample, called, unknown_object
from optimizations.capture.device import Device
from optimizations.capture.inputs import CopiedInputs
from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step import compilations, forbidden_calls
from optimizations.capture.step.call import sparse_tensors
from optimizations.capture.step.host_random import SAME_DRAWS, HostDraws, HostRandom, decides
from optimizations.capture.step.host_state import HostState, Rebound
from optimizations.capture.step.observer import SETS_UP, Observer, StepRefused, storage
from optimizations.capture.step.observing import (
    CHECKPOINT_DRAWS,
    Given,
    call_changes,
    changed_itself,
    drawn_on_the_host,
    host_generators,
    kept_results,
)
from optimizations.capture.step.operations import Operation, first_difference
from optimizations.capture.step.progress import MOST_SET_UPS, OBSERVED, PATIENCE
from optimizations.capture.step.reseeding import Reseeding
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.written_memory import Writes
from optimizations.captured.displaced import memory_of
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import next_number, recorded_of, without_hooks
from optimizations.torch_internals.generator_identity import identity


@dataclass(slots=True)
class Run:
    """What one run of a callable did.

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
    with torch.set_grad_enabled(training):
        returned = call(function, given)
    middle = len(observer.operations)
    run = Run(parameters=list(parameters), forward=observer.operations[begin:middle])
    run.from_arguments = frozenset(observer.followed or ())
    run.refusals += containers.changes(*given)
    run.refusals += changed_inputs(marks, looks)
    results: list[torch.Tensor] = []
    run.structure = flatten(returned, results)
    with observer.unseen():
        kept = kept_results(state, snapshot, observer)
        run.of_results = observer.of_results([*results, *(entry.new for entry in kept)])
        run.bound = frozenset(storage(entry.new) for entry in kept)
        results += [entry.new for entry in bound_results(kept)]
    observer.forget_origins()  # the backward is captured on its own
    run.refusals += strange_results(run.structure, results)
    outputs = [tensor for tensor in results if tensor.requires_grad and not is_one_of(tensor, marks)]
    if not (training and outputs):
        return run
    with observer.unseen():
        recorded = recorded_of(outputs, since, saved_too=first is None)
        tangents = [torch.zeros_like(output) for output in outputs]
    if recorded.older:
        run.refusals.append(OLDER)
        return run
    known = {id(tensor) for tensor in [*inputs.recording_inputs, *parameters]}
    leaves = [leaf for leaf in recorded.leaves if id(leaf) not in known]
    run.leaves = list(map(weakref.ref, leaves))
    lasting = [] if first is None else [reference() for reference in first.leaves]
    run.parameters += [leaf for leaf in leaves if any(leaf is one for one in lasting)]
    run.saved = recorded.saved
    shared = overlapping(results)
    run.saved_results = tuple(
        index for index, tensor in enumerate(results) if index in shared or storage(tensor) in recorded.saved
    )
    wanted = [tensor for tensor in [*inputs.recording_inputs, *run.parameters] if tensor.requires_grad]
    if not wanted:
        return run
    found = gradients_of(outputs, wanted, tangents)
    run.backward = observer.operations[middle:]
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
        run.refusals.append(SPARSE)
    return run


def is_one_of(tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> bool:
    """Whether it is an argument, which the caller gets back as it is: no graph makes it or its gradient."""
    return any(tensor is one for one in arguments)


def bound_results(bound: Sequence[Rebound]) -> list[Rebound]:
    """Those that bind what takes part in differentiation, always in the same order. They are results like others."""
    return in_order(entry for entry in bound if entry.new.requires_grad)


def in_order(bound: Iterable[Rebound]) -> list[Rebound]:
    """The same order in each run."""
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
    """Results that take part in differentiation and lie in the memory of another such, wholly or in part.

    Autograd takes them for tensors of their own, so a write into one would be missing in the gradient of the other.
    """
    found: set[int] = set()
    there = [(index, one, memory_of(one)) for index, one in enumerate(results) if one.requires_grad and storage(one)]
    for (index, one, memory), (other, another, others) in itertools.combinations(there, 2):
        ends = memory.address + memory.size_bytes, others.address + others.size_bytes
        if one is not another and memory.address < ends[1] and others.address < ends[0]:
            found |= {index, other}
    return found


def strange_results(structure: Hashable, results: Sequence[torch.Tensor]) -> Iterator[Refusal]:
    """A refusal for each result that cannot be one of a graph."""
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
    """Gradients of `wanted`, without hooks: these run where the gradients arrive, behind the graph.

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


def inputs_like(sample: Sample) -> CopiedInputs:
    """Copies of the tensors among these arguments, leaves that take part in differentiation as they do."""
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    inputs = CopiedInputs([tensor.detach() for tensor in tensors])
    for tensor, placeholder in zip(tensors, inputs.recording_inputs, strict=True):
        placeholder.requires_grad_(tensor.requires_grad)
    return inputs


def changed_inputs(tensors: Sequence[torch.Tensor], takes_part: Sequence[bool]) -> Iterator[Refusal]:
    """A refusal for each argument that takes part in differentiation otherwise than before the call."""
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
OTHER_RESULT = Refusal(
    "returns something else than a tensor that differs from call to call",
    "return tensors: Python does not run when a graph is launched",
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
    """Refusals in the block say that it is this that is refused."""
    try:
        yield
    except StepRefused as error:
        raise StepRefused(replace(error.refusal, reason=f"{what} {error.refusal.reason}")) from error


class FirstWrites:
    """What the memory of these tensors held before an operator wrote it. `note` is for `Observer.before_write`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held = {storage(tensor): tensor for tensor in tensors}
        self._saved: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """It is about to be written."""
        place = storage(tensor)
        if place and place in self._held and place not in self._saved:
            held = self._held[place].detach()
            self._saved[place] = held, held.untyped_storage().clone()

    def restore(self) -> None:
        """Put back what was written."""
        for held, content in self._saved.values():
            held.untyped_storage().copy_(content)


def warmed_up(
    device: Device,
    run: Callable[[Observer, Run | None], Run],
    state: HostState,
    least: int,
    before_write: FirstWrites,
    *,
    draws_unused: bool = False,
) -> Run:
    """Run a callable at least so many times, until nothing is set up any more and two runs were alike. Gives the last.

    `run` is given the first run, which is not among the two. What a capture cannot hold is refused if it comes again:
    only first runs compile code, time kernels and make what stays. `draws_unused`: what it draws on the host is said to
    decide nothing. Note [Draws that decide nothing] in `host_random`.

    Raises:
        StepRefused: two runs, the last of these, did something that cannot be captured, or all compiled something, or
            differed.
    """
    refused, as_captured = 0, False
    first: Run | None = None
    last: Run | None = None
    outset, read_arguments = state.snapshot(), False
    parameters = state.parameters()
    for count in itertools.count(1):
        snapshot = state.snapshot()
        names = _names(parameters) if draws_unused else {}
        observer = Observer(device.holds, names, forbid=False, keeps_workspace=device.keeps_workspace)
        writes = Writes(state.tensors.values(), compiled=False)
        observer.before_write, observer.sparse = _both(before_write.note, writes.note), sparse_tensors(state)
        observer.default_generator = device.default_generator()
        if draws_unused:
            observer.compare_values(host_generators(device, state))
        known = {key: one for key, one in _generators(state).items() if key not in observer.host_generators}
        observer.reseeding = reseeding = Reseeding([observer.default_generator, *(one for one, _ in known.values())])
        asked = forbidden_calls.Asked(as_captured=as_captured)
        watched = forbidden_calls.watched(observer, asked, capturing=False, compiled=state.compiled)
        noticed = compilations.noticed(observer, forbid=False)
        drawn = HostRandom(with_torch=device.has_own_random, generators=state.generators)
        states = device.random_states()
        collected = _gradients(parameters)
        marks = TensorMarks(state.tensors, to_restore=True)
        try:
            with device.warming_up(), noticed, watched, observer:
                ran = run(observer, first)
        finally:
            changed = list(marks.changed())
            marks.restore()
            reseeded = reseeding.refusals()
            for generator, content in zip(observer.generators, observer.first_states, strict=True):
                generator.set_state(known.get(identity(generator), (generator, content))[1])
        ran.wrote = frozenset(path for path, tensor in state.tensors.items() if writes.include(tensor))
        if first is None:
            first, read_arguments = ran, observer.read_followed
        if observer.set_up:
            last = None
            if count >= least + MOST_SET_UPS:
                raise StepRefused(SETS_UP)
            continue
        ran.generators = observer.generators
        ran.draws_unused = draws_unused
        ran.host_draws = drawn.draws(*ran.of_results) if draws_unused else HostDraws()
        findings = [*observer.refusals, *ran.refusals, *map(changed_itself, changed)]
        findings += draws_of(drawn, ran)
        draws = observer.draws or not all(map(torch.equal, states, device.random_states()))
        if asked.random_state and draws:
            findings.append(CHECKPOINT_DRAWS)
        elif draws:
            findings += reseeded
        if any(a is not b or old != new for (a, old), (b, new) in zip(collected, _gradients(parameters), strict=True)):
            findings.append(OWN_BACKWARD)
        kept = kept_results(state, snapshot, observer)
        refusal = next(itertools.chain(findings, call_changes(state, snapshot, kept, may_run=False)), None)
        if refusal is None:
            refused = 0
            difference = None if last is None else _difference(last, ran)
            if last is not None and difference is None and count >= least:
                if once := sorted(first.wrote - ran.wrote):
                    raise StepRefused(writes_once(once[0]))
                if read_arguments and (left := {change.name for change in state.changes(outset, kept)}):
                    raise StepRefused(keeps_of_first(" and ".join(sorted(left))))
                return replace(
                    ran,
                    saved=first.saved,
                    saved_results=first.saved_results,
                    from_arguments=first.from_arguments,
                    as_first=_difference(first, ran) is None,
                    as_captured=as_captured,
                    draws=draws,
                )
            sources = sorted({*ran.host_draws.states, *(last.host_draws.states if last is not None else ())})
            if difference not in (None, SAME_DRAWS) and sources:
                raise StepRefused(decides(difference, sources))
            if difference is not None and count >= least + PATIENCE:
                raise StepRefused(difference)
            last = ran if count > 1 else None
            continue
        last = None
        if asked.captured and not asked.as_captured:
            as_captured = True
        else:
            refused += 1
            if refused >= OBSERVED and count >= least:
                raise StepRefused(refusal)
    raise AssertionError("unreachable")


def _both(one: Callable[[Any], None], other: Callable[[Any], None]) -> Callable[[Any], None]:
    def call_both(value: Any) -> None:
        one(value)
        other(value)

    return call_both


def writes_once(path: str) -> Refusal:
    """The refusal of a callable whose first call writes a tensor that later ones leave as it is."""
    return Refusal(
        f"writes {path.removeprefix('.')} in its first call only, and what warm-up writes is put back",
        "call it once, with the first batch, before graph_callables",
    )


def keeps_of_first(path: str) -> Refusal:
    """The refusal of a callable whose first call keeps what it computes from its arguments, for later ones."""
    return Refusal(
        f"keeps {path.removeprefix('.')}, which only its first call computes from its arguments: in warm-up, of a "
        "sample",
        "call it once, with the first batch, before graph_callables",
    )


def _names(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """Names of parameters, by where they lie: which of them a call reads may be drawn."""
    return {storage(one): f"parameter {index}" for index, one in enumerate(parameters) if storage(one)}


def _generators(state: HostState) -> dict[int, tuple[torch.Generator, torch.Tensor]]:
    """The generators of the program's own, with their states."""
    found = [*state.device_generators, *state.generators.values()]
    return {identity(one): (one, one.get_state()) for one in found if isinstance(one, torch.Generator)}


def _gradients(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor | None, int]]:
    found = [parameter.grad for parameter in parameters]
    return [(gradient, -1 if gradient is None or gradient.is_inference() else gradient._version) for gradient in found]


def _difference(before: Run, after: Run) -> Refusal | None:
    if before.structure != after.structure:
        return OTHER_RESULT
    found = first_difference(before.forward, after.forward) or first_difference(before.backward, after.backward)
    if found is None:
        found = after.host_draws.other_results(before.host_draws)
    return SAME_DRAWS if found is None and after.host_draws.repeats(before.host_draws) else found


def draws_of(host_random: HostRandom, run: Run) -> list[Refusal]:
    """A refusal for each source of random numbers of the host that was used, where these may decide something."""
    return [] if run.draws_unused else [drawn_on_the_host(name, "call") for name in host_random.drawn()]


class Forbidding:
    """What a capture cannot hold raises before it runs. See `step.observer`. `like`: what the runs before it did.
    `state`: what it reaches."""

    def __init__(self, device: Device, like: Run, state: HostState, *, compiled: bool) -> None:
        names = _names(state.parameters()) if like.draws_unused else {}
        self.observer = Observer(
            device.holds, names, forbid=True, generators=like.generators, keeps_workspace=device.keeps_workspace
        )
        self.observer.sparse = sparse_tensors(state)
        if like.draws_unused:
            self.observer.compare_values(host_generators(device, state))
        self._asked = forbidden_calls.Asked(as_captured=like.as_captured)
        self._draws, self._draws_unused, self._drawn = like.draws, like.draws_unused, like.host_draws
        self._host_draws = sorted(like.host_draws.states)
        self._compiled = compiled
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        watched = forbidden_calls.watched(self.observer, self._asked, capturing=True, compiled=self._compiled)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compilations.noticed(self.observer, forbid=True))
            stack.enter_context(watched)
            stack.enter_context(self.observer)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def check(self, expected: Sequence[Operation]) -> None:
        """What ran must be what was expected.

        Raises:
            StepRefused: it was something else.
        """
        if self.observer.refusals:  # the callable may have caught the exception
            raise StepRefused(self.observer.refusals[0])
        if self._asked.random_state and (self._draws or self.observer.draws):
            raise StepRefused(CHECKPOINT_DRAWS)
        if (difference := first_difference(expected, self.observer.operations)) is not None:
            raise StepRefused(decides(difference, self._host_draws) if self._host_draws else difference)

    def check_results(self, tensors: Sequence[torch.Tensor]) -> None:
        """What was returned, or kept, must be the same of what was computed, and in CPU memory hold the same.

        Raises:
            StepRefused: it is something else.
        """
        difference = HostDraws({}, *self.observer.of_results(tensors)).other_results(self._drawn)
        if self._draws_unused and difference is not None:
            raise StepRefused(decides(difference, self._host_draws) if self._host_draws else difference)


def refuse_changes(state: HostState, snapshot: list[Any], observer: Observer, *, bound: bool = True) -> list[Rebound]:
    """Attributes and variables that a run bound to what it made, where that is allowed (`bound`); it may have changed
    nothing else in Python.

    Raises:
        StepRefused: it has.
    """
    kept = kept_results(state, snapshot, observer) if bound else []
    for refusal in call_changes(state, snapshot, kept, may_run=False):
        raise StepRefused(refusal)
    return kept
