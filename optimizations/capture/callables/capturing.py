"""Warm up callables and capture them: a forward and a backward graph for each micro-batch in flight.

Warm-up and captures have no visible effect: all their changes are undone. If one of the callables cannot be captured,
no graphs are made.

A callable runs on copies of its sample a fixed number of times, forward and backward, under an observer of its
operators, and more often while code is compiled or kernels are timed. Only the last of these runs is checked, and
compared with the captures. Code that queries whether it is captured gets False in the first run and True in all others,
so that libraries skip what cannot be captured.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.callables.arguments import Options, Plan, Sample, naming, reached_by
from optimizations.capture.callables.installed import Installed
from optimizations.capture.callables.slot import Slot, StaticResults
from optimizations.capture.device import Device
from optimizations.capture.inputs import CopiedInputs, copy_all
from optimizations.capture.side_by_side import RacedGraph
from optimizations.capture.signature import OTHER_RESULT, PLAIN, alias_pattern, flatten, parts, replaced, tensor_key
from optimizations.capture.step.audit import Operation, first_difference
from optimizations.capture.step.gradients import gradients, put
from optimizations.capture.step.host_state import Content, HostState
from optimizations.capture.step.observer import SETS_UP, Observer, StepRefused, storage
from optimizations.capture.step.observing import (
    CHANGES_ARGUMENT,
    RandomStates,
    changed_itself,
    contents,
    drawn_on_the_host,
    observed,
)
from optimizations.capture.step.recording import FREED_MEANWHILE
from optimizations.capture.step.tensor_marks import TensorMarks, Writes, storages
from optimizations.graph.memory import memory_of
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import depending_on, recorded_of, without_hooks

RUNS = 3
MOST_SET_UPS = 8
"""Runs beyond the fixed number that may compile code or time kernels."""


@dataclass(slots=True)
class Variant:
    """Hold a callable to capture with one of its samples, and the observations of its last warm-up.

    Attributes:
        called: the callable; `index` is the number of the sample.
        pairs: how many pairs of graphs are made.
        state: what it reaches; `outset` is its state before the warm-up, with `marks` of the tensors.
        parameters: leaves whose gradients it computes; `leaves`: all leaves that were reached.
        structure: the structure of its results.
        operations: the operators of the forward, and those of the backward if there is one.
        as_captured: the value that a query for a capture returns.
    """

    called: Installed
    index: int
    pairs: int
    sample: Sample
    state: HostState
    outset: list[Content]
    marks: TensorMarks
    device: Device
    options: Options
    parameters: list[torch.Tensor] = field(default_factory=list)
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    structure: Hashable = None
    operations: list[list[Operation]] = field(default_factory=list)
    as_captured: bool = False

    @contextlib.contextmanager
    def observing(
        self, before_write: Callable[[torch.Tensor], None], around: AbstractContextManager[None], *, forbid: bool
    ) -> Iterator[Observer]:
        """Observe a run in the block. With `forbid` it is a capture: operators that cannot be captured raise.

        After the block the observer's `refusals` list everything that a graph could not repeat.

        Args:
            before_write: is called with each tensor that is about to be written.
            around: the context of the warm-up or capture.
        """
        device, state = self.device, self.state
        observer = Observer(device, {}, forbid=forbid, as_captured=self.as_captured)
        observer.in_region = False  # autocast's cached casts are cleared before each run
        observer.before_write = before_write
        random, snapshot = RandomStates(device), state.snapshot()
        with around, observed(observer, state):
            yield observer
        found = observer.refusals  # the callable may catch exceptions
        found += [OWN_BACKWARD for parameter in state.parameters() if parameter.grad is not None]
        found += map(changed_itself, self.marks.changed())
        if self.options.host_draws == "refused":
            found += [drawn_on_the_host(name, state.code, "call") for name in random.drawn_on_host()]
        if not forbid:
            found += random.refusals(observer)
        found += state.changes(snapshot)


def make_slots(device: Device, plan: Plan, options: Options, slots: list[Slot]) -> list[Variant]:
    """Warm up the callables, on these samples of each, and capture them. Their graphs are appended to `slots`.

    Raises:
        StepRefused: a graph could not repeat one of them.
    """
    variants: list[Variant] = []
    # Pairs of one index read each other's results, so all callables have the same number of pairs.
    least = max((pairs for *_, pairs in plan), default=1) if options.share_io else 1
    for called, index, sample, pairs in plan:
        with naming(called.number):
            state = reached_by(called, sample, device)
        outset, marks = state.snapshot(), TensorMarks(state.tensors, to_restore=True)
        variants.append(Variant(called, index, max(pairs, least), sample, state, outset, marks, device, options))
    memory: dict[int, torch.Tensor] = {}
    with _putting_back(device, variants) as note, device.here():
        for one in variants:
            with naming(one.called.number):
                _warm_up(one, note)
        device.streams.ready()  # a different stream would do, as nothing is captured yet
        for one in variants:
            targets: list[torch.Tensor] = []
            if sum(other.pairs for other in variants if other.called is one.called) > 1:
                # All slots of a callable write gradients of parameters to the same memory. It is outside of all pools,
                # because a slot may save tensors for its backward in a pool.
                memory.update({id(p): torch.empty_like(p).detach() for p in one.parameters if id(p) not in memory})
                targets = [memory[id(p)] for p in one.parameters]
            for index in range(one.pairs):
                with naming(one.called.number):
                    slots.append(_capture(one, index, slots, targets))
        if not device.streams.ready():
            raise StepRefused(FREED_MEANWHILE)
    return variants


def _warm_up(variant: Variant, note: Callable[[torch.Tensor], None]) -> None:
    """Run a callable `RUNS` times, or more often while it compiles.

    `note` is called with tensors to be written.

    Raises:
        StepRefused: a graph could not repeat the last run, or the runs changed Python state.
    """
    for count in itertools.count(1):
        inputs = inputs_like(variant.sample).recording_inputs
        run = _Run(variant, inputs, variant.observing(note, variant.device.warming_up(), forbid=False))
        run.backward(variant.observing(note, variant.device.warming_up(), forbid=False))
        variant.structure, variant.parameters, variant.operations = run.structure, run.parameters, run.operations
        refusals, sets_up = run.refusals, run.sets_up
        del run, inputs  # the next run may have their memory
        if count >= RUNS and not sets_up:
            break
        if count >= RUNS + MOST_SET_UPS:
            raise StepRefused(SETS_UP)
        variant.as_captured = True
    for refusal in refusals:
        raise StepRefused(refusal)
    for change in variant.state.changes(variant.outset):
        raise StepRefused(replace(SETS_ITSELF_UP, reason=f"{SETS_ITSELF_UP.reason} ({change.reason})"))


def _capture(variant: Variant, index: int, slots: Sequence[Slot], targets: Sequence[torch.Tensor]) -> Slot:
    """Capture a pair of graphs after these slots. `targets`: of `_Run.backward`."""
    previous = [one for one in slots if (one.place[0], one.place[2]) == (variant.called.number - 1, index)]
    copied, pool = variant.options.outputs == "copied", variant.device.new_pool()
    shares = variant.options.share_io and not copied and len(previous) == 1
    inputs, reached = inputs_like(variant.sample, previous[0] if shares else None), variant.state.tensors.values()
    forward, backward = (RacedGraph(variant.device, pool, variant.options.concurrency) for _ in range(2))
    try:
        copies = inputs.recording_inputs
        run = _Run(variant, copies, _capturing(forward, variant, variant.operations[0], copies))
        if run.structure != variant.structure:
            raise StepRefused(OTHER_RESULT)
        depends = depending_on(run.outputs, [*run.inputs, *variant.parameters])
        run.backward(_capturing(backward, variant, variant.operations[-1]), targets)
    except BaseException:
        for graph in (forward, backward):
            graph.captured.reset()
        raise
    saved, static = [one for one in reached if storage(one) in run.saved], [one.detach() for one in run.results]
    places = {id(one): place for place, one in enumerate([*run.inputs, *run.results])}
    return Slot(
        place=(variant.called.number, variant.index, index),
        forward=forward,
        backward=backward,
        inputs=inputs,
        parameters=run.parameters,
        nest=replaced(run.returned, iter([one.detach() for one in run.tensors])),
        order=[places[id(one)] for one in run.tensors],
        results=StaticResults(static, run.saved_results(), storages(reached), copied=copied),
        differentiable=[bool(run.tangents) and one.requires_grad for one in run.results],
        read_back=[one for one in saved if one.layout is torch.strided and not one.is_inference()],
        tangents=run.tangents,
        gradients=run.gradients,
        depends=depends,
    )


@contextlib.contextmanager
def _capturing(
    graph: RacedGraph, variant: Variant, expected: Sequence[Operation], inputs: Sequence[torch.Tensor] = ()
) -> Iterator[Observer]:
    """Capture the block, and check that its operators are as expected, and that it does not write these inputs."""
    if not variant.device.streams.ready():  # a backward has to be on the stream of its forward
        raise StepRefused(FREED_MEANWHILE)
    reached = variant.state.tensors.values()
    writes = Writes([*reached, *inputs], compiled=variant.state.compiled)
    with variant.observing(writes.note, graph.capturing(), forbid=True) as observer:
        yield observer
    for refusal in filter(None, [*observer.refusals, first_difference(expected, observer.operations)]):
        raise StepRefused(refusal)
    if any(map(writes.include, inputs)):
        raise StepRefused(WRITES_ARGUMENT)
    written = [tensor for tensor in reached if writes.include(tensor)]
    graph.written = storages(written)
    graph.mutated = [tensor for tensor in written if writes.counted(tensor) or tensor.is_inference()]


class _Run:
    """Run the forward of a callable on these inputs, in the context `forward`. Then `backward` may run.

    Leaves that the callable's state does not reach count as parameters, too, if the previous run reached them.

    Attributes:
        returned: what it returned, of this `structure`.
        tensors: those that it returned; `results` are those that are no inputs, each once; `outputs` require gradients.
        saved: addresses of storages that the backward reads.
        tangents: gradients of `outputs`, if there is a backward.
        parameters: leaves whose gradients it computes.
        gradients: of the inputs, and of the parameters; None for those without one.
        operations: the operators of the forward, and those of the backward if there is one.
        refusals: what a graph could not repeat; `sets_up`: whether something was compiled, or kernels were timed.
    """

    def __init__(
        self, variant: Variant, inputs: Sequence[torch.Tensor], forward: AbstractContextManager[Observer]
    ) -> None:
        self.inputs = inputs
        args, kwargs = replaced(variant.sample, iter(inputs))
        before, since = contents(args, kwargs), torch_internals.next_sequence_number()
        torch.clear_autocast_cache()
        try:
            with forward as observer:
                self.returned = variant.called.before(*args, **kwargs)
        except RuntimeError as error:
            if "leaf Variable" not in str(error):  # copies of arguments are leaves
                raise
            raise StepRefused(WRITES_ARGUMENT) from error
        torch.clear_autocast_cache()
        self.tensors: list[torch.Tensor] = []
        self.structure = flatten(self.returned, self.tensors)
        self.results = _distinct(self.tensors, inputs)
        self.outputs = [tensor for tensor in self.results if tensor.requires_grad]
        leaves, is_older, self.saved = recorded_of(self.outputs, since)
        lasting = {*map(id, variant.state.parameters()), *(id(one()) for one in variant.leaves)}
        self.parameters = [leaf for leaf in _distinct(leaves, inputs) if id(leaf) in lasting]
        variant.leaves = list(map(weakref.ref, leaves))
        returned_leaves = [one for _, one, is_leaf in parts(self.returned, "") if is_leaf]
        self.refusals = [] if contents(args, kwargs) == before else [CHANGES_ARGUMENT]
        self.refusals += filter(None, map(_refused_result, returned_leaves))
        self.refusals += [*([OLDER] if is_older else []), *observer.refusals]
        self.operations, self.sets_up = [observer.operations], observer.set_up
        has_backward = not is_older and any(one.requires_grad for one in [*inputs, *self.parameters])
        self.tangents = [torch.zeros_like(output) for output in self.outputs if has_backward]
        self.gradients: list[torch.Tensor | None] = [None for _ in inputs]

    def backward(self, context: AbstractContextManager[Observer], targets: Sequence[torch.Tensor] = ()) -> None:
        """Run the backward. The gradients of parameters are copied to `targets`, if there are any.

        Hooks of parameters run when autograd accumulates the gradients, after the graph. Hooks of arguments are
        captured: the callable registered them on the copies.
        """
        if not self.tangents:
            return
        wanted = {id(one): one for one in [*self.inputs, *self.parameters] if one.requires_grad}
        with context as observer, without_hooks(self.parameters):
            found = torch.autograd.grad(self.outputs, list(wanted.values()), self.tangents, allow_unused=True)
            by_id: dict[int, torch.Tensor | None] = dict(zip(wanted, found, strict=True))
            self.gradients = [by_id.pop(id(one), None) for one in self.inputs]  # one for a tensor that is passed twice
            # As in eager, hooks of parameters without a gradient must not be called.
            self.parameters = [one for one in self.parameters if by_id[id(one)] is not None]
            of_parameters = [gradient for gradient in by_id.values() if gradient is not None]
            if targets:
                with observer.unseen():
                    copy_all(targets, of_parameters)
            self.gradients += targets or of_parameters
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
            self.refusals.append(SPARSE)
        self.refusals += observer.refusals
        self.operations.append(observer.operations)
        self.sets_up |= observer.set_up

    def saved_results(self) -> list[int]:
        """Return the indices of results that must not be written before the backward: it reads them, or they overlap.

        Autograd treats results that overlap as separate tensors: a write into one is not in the other's gradient.
        """
        pairs = itertools.combinations([one for one in self.outputs if storage(one)], 2)
        shared = {id(one) for pair in pairs if memory_of(pair[0]).overlaps(memory_of(pair[1])) for one in pair}
        return [index for index, one in enumerate(self.results) if id(one) in shared or storage(one) in self.saved]


def _distinct(tensors: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return these tensors, each once, without those that are inputs."""
    others = set(map(id, inputs))
    return [one for one in {id(one): one for one in tensors}.values() if id(one) not in others]


def _refused_result(value: Any) -> Refusal | None:
    """Return a refusal of a result that a graph cannot return."""
    kind = type(value)
    is_tensor = kind in (torch.Tensor, torch.nn.Parameter)
    if kind in PLAIN or (is_tensor and value.layout is torch.strided):
        return None
    return Refusal(
        f"returns a {f'tensor of layout {value.layout}' if is_tensor else kind.__qualname__}",
        "return strided tensors, numbers, and containers of such: what an object holds would be overwritten",
    )


def inputs_like(sample: Sample, before: Slot | None = None) -> CopiedInputs:
    """Return copies of the tensors among these arguments, as leaves with the same strides and `requires_grad`.

    A tensor that is passed twice has one copy, because code may check identity (`if query is key`).

    `before`: a slot whose results are read in place instead. The n-th tensor may be the n-th result if both have equal
    metadata and are differentiable.
    """
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    given, in_place, aliases = list(tensors), list[int](), alias_pattern(tensors)
    for index, (tensor, result) in enumerate(zip(tensors, [] if before is None else before.shareable(), strict=False)):
        if result is None or not tensor.requires_grad or aliases.count(index) > 1:
            continue
        if tensor_key(tensor.detach()) == tensor_key(result):
            given[index] = result.detach()
            in_place.append(index)
    inputs = CopiedInputs(given, in_place)
    for tensor, placeholder in zip(tensors, inputs.recording_inputs, strict=True):
        placeholder.requires_grad_(tensor.requires_grad)
    return inputs


@contextlib.contextmanager
def _putting_back(device: Device, variants: Sequence[Variant]) -> Iterator[Callable[[torch.Tensor], None]]:
    """Restore after the block Python state, values of all reached tensors, gradients and random states.

    Yield a function to call with each tensor that is about to be written, so that only written ones are copied.
    """
    random = RandomStates(device)
    tensors = [tensor for one in variants for tensor in one.state.tensors.values()]
    # Inner tensors of wrapper subclasses are in this list themselves.
    plain = [tensor for tensor in tensors if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__]
    reached = storages(plain)
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def note(tensor: torch.Tensor) -> None:
        if (place := storage(tensor)) in reached and place not in saved:
            memory = tensor.detach().untyped_storage()
            saved[place] = memory, memory.clone()

    for one in plain:
        if not one.requires_grad:  # compiled code may write it unobserved
            note(one)
    parameters = [parameter for one in variants for parameter in one.state.parameters()]
    before = gradients(parameters)
    try:
        put(parameters, [None for _ in parameters])
        yield note
    finally:
        for memory, content in saved.values():
            memory.copy_(content)
        for variant in variants:
            variant.marks.restore()
            variant.state.restore(variant.outset)
        put(parameters, before)
        random.restore()


SETS_ITSELF_UP = Refusal(
    "sets itself up in its first call, which is made with a sample",
    "call it once, with the first batch, before graph_callables",
)
WRITES_ARGUMENT = Refusal(
    "writes into an argument, and a graph would write into a copy of it",
    "work on a copy, or keep what is written in a buffer; of modules with `inplace=True`, pass inplace=False to those "
    "that come first",
)
OLDER = Refusal(
    "uses a tensor that takes part in differentiation and was computed before the call",
    "pass it as an argument: its gradient then goes on from there",
)
OWN_BACKWARD = Refusal(
    "changes the `.grad` of a parameter, as a backward inside of it does",
    "use torch.autograd.grad there, or capture it with graph_step",
)
SPARSE = Refusal("computes a sparse gradient, which has no fixed size", "use sparse=False")
