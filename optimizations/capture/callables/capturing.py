"""Capture callables: a forward and a backward graph for each place of the plan.

The program sees nothing of it. What warm-up and captures changed is put back: what tensors hold, gradients and random
states, and what attributes were bound to (`Bound.put_back`). If one of the callables cannot be captured, there are no
graphs at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations.capture.callables.arguments import Sample, check_sources, parameters_of, reached_by
from optimizations.capture.callables.installed import as_it_is
from optimizations.capture.callables.order import Place
from optimizations.capture.callables.parallel import not_run
from optimizations.capture.callables.results import StaticResults
from optimizations.capture.callables.slot import ABSENT, Bound, Pool, Slot, kind_of
from optimizations.capture.callables.warm_up import (
    Member,
    Run,
    Seen,
    call,
    changed_inputs,
    check_draws,
    differentiated,
    gradients_of,
    in_order,
    inputs_like,
    is_one_of,
    naming,
    observing,
    overlapping,
    putting_back,
    warm_up,
)
from optimizations.capture.copy_nodes import NotCarried
from optimizations.capture.device import Device
from optimizations.capture.inputs import copy_all
from optimizations.capture.other_results import other_result
from optimizations.capture.signature import alias_pattern, flatten, replaced, tensor_key
from optimizations.capture.step.host_random import HostDraws
from optimizations.capture.step.host_state import HostState, Rebound, entries_of
from optimizations.capture.step.mentioned import check_unread
from optimizations.capture.step.observer import Observer, StepRefused, storage
from optimizations.capture.step.observing import (
    CHECKPOINT_DRAWS,
    Given,
    call_changes,
    kept_results,
)
from optimizations.capture.step.operations import Operation, first_difference
from optimizations.capture.step.outputs import view_of
from optimizations.capture.step.written_memory import Writes, WrittenMemory, refuse_shared
from optimizations.lazy_view import is_lazy_view
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import depending_on

ANOMALIES = Refusal(
    "a callable is captured under torch.autograd.set_detect_anomaly, whose backwards look for NaN on the host",
    "turn it off while graph_callables runs; calls under it run as they are",
)
FREED_MEANWHILE = Refusal(
    "was captured in part when cuBLAS's workspaces were freed, as a recording in any thread may do",
    "call graph_callables while no other thread records a step, or runs compiled code for the first time",
)


def make_slots(
    device: Device,
    callables: Sequence[Callable[..., Any]],
    samples: Sequence[Sequence[Sample]],
    plan: Sequence[Place],
    *,
    training: bool,
    times: int,
    copied: bool,
    share_io: bool,
    draws_unused: bool,
) -> tuple[list[Member], list[Slot]]:
    """Warm up the callables, on these samples of each, and capture them as planned.

    Args:
        times: runs of each before its capture.
        copied: whether the program asked for copies of results.
        share_io: whether a callable reads the results of the one before where they lie.
        draws_unused: the caller says that what they draw on the host decides nothing.

    Raises:
        StepRefused: a graph could not repeat what one of them does.
    """
    if training and torch.is_anomaly_enabled():
        raise StepRefused(ANOMALIES)
    members = [
        Member(
            number,
            variant,
            as_it_is(function),
            sample,
            reached_by(number, function, sample),
            parameters_of(function),
            draws_unused,
            Run(),
        )
        for number, function in enumerate(callables, start=1)
        for variant, sample in enumerate(samples[number - 1])
    ]
    states = [member.state for member in members]
    for member in members:
        check_sources(f"callable {member.number}", member.state)
    outset = [state.snapshot() for state in states]
    captures = Captures(device, members, outset, training=training, copied=copied)
    try:
        with putting_back(device, states) as note:
            for member in members:
                with naming(f"callable {member.number}"), not_run(callables[member.number - 1], member.state.modules):
                    member.run = warm_up(device, member, times, training, note)
        captures.capture(plan, share_io=share_io)
    except BaseException:
        device.wait()
        for slot in captures.slots:
            slot.free()
        for state, content in zip(states, outset, strict=True):
            state.restore(content)
        raise
    if not captures.compute_in_workspaces():
        device.let_go_of_workspaces()
    return members, captures.slots


class Captures:
    """Capture the graphs of callables one after another. `slots` are the pairs that are there so far.

    `outset`: snapshots of what members reached before their first run.
    """

    def __init__(
        self, device: Device, members: Sequence[Member], outset: Sequence[Any], *, training: bool, copied: bool
    ) -> None:
        self.slots: list[Slot] = []
        self._device = device
        self._outset = {id(member): content for member, content in zip(members, outset, strict=True)}
        self._members = {(member.number, member.variant): member for member in members}
        self._compiled = any(member.state.compiled for member in members)
        self._training, self._copied = training, copied
        self._carries = True
        self._open: dict[int, list[torch.Tensor]] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._observers: list[Observer] = []

    def capture(self, plan: Sequence[Place], *, share_io: bool) -> None:
        """Capture forwards, and after each its backward; with `share_io` all forwards of one index come first.

        Raises:
            StepRefused: a graph could not repeat what a callable does.
        """
        pools = {place.pool: Pool(self._device.new_pool()) for place in plan}
        states = self._device.random_states()
        groups = [[place] for place in plan]
        if share_io:
            indices = dict.fromkeys(place.index for place in plan)
            groups = [sorted([p for p in plan if p.index == index], key=lambda p: p.callable) for index in indices]
        several = {place.callable for place in plan if place.index or place.variant}
        for group in groups:
            here: list[Slot] = []
            for place in group:
                before = [slot for slot in here if slot.place.callable == place.callable - 1] if share_io else []
                with naming(f"callable {place.callable}"):
                    self._ready()
                    here.append(self._forward(place, pools, before[0] if len(before) == 1 else None))
                self.slots.append(here[-1])
            for slot in reversed(here):
                with naming(f"callable {slot.place.callable}"):
                    if any(slot.differentiable):
                        self._ready()
                        self._backward(slot, several=slot.place.callable in several)
        self._ready()
        self._device.restore_random_states(states)
        for index, slot in enumerate(self.slots):
            slot.mates = [later for later in self.slots[index + 1 :] if later.place.pool == slot.place.pool]

    def _ready(self) -> None:
        if not self._device.ready() and self.slots:  # a backward has to be on the stream of its forward
            raise StepRefused(FREED_MEANWHILE)

    def compute_in_workspaces(self) -> bool:
        """Return whether a graph that was captured may write to a workspace of cuBLAS."""
        graphs = [graph for slot in self.slots for graph in (slot.forward, slot.backward) if graph is not None]
        return any(one.multiplies for one in self._observers) or any(map(self._device.computes_in_workspace, graphs))

    @contextlib.contextmanager
    def _capturing(self, graph: Any, pool: Pool, member: Member, expected: Sequence[Operation]) -> Iterator[Seen]:
        """Capture what runs in the block, and check that `Seen.watching` saw the expected operators in it.

        On an error the graph is freed. What the capture changed in Python is put back by the caller.
        """
        run = member.run
        try:
            with observing(self._device, member, run, forbid=True, compiled=self._compiled) as seen:
                self._observers.append(seen.observer)
                with self._device.capturing(graph, pool.handle, run.generators):
                    yield seen
            if seen.asked.random_state and (run.draws or seen.observer.draws):
                seen.findings.append(CHECKPOINT_DRAWS)
            for refusal in seen.findings:
                raise StepRefused(refusal)
            check_draws(run, first_difference(expected, seen.observer.operations))
        except BaseException:
            graph.reset()
            raise

    def _forward(self, place: Place, pools: Mapping[int, Pool], before: Slot | None) -> Slot:
        """Capture a forward graph that copies its inputs itself where that is possible. See `copy_nodes`."""
        member = self._members[place.callable, place.variant]
        shared = {} if before is None else _shared(member, before)
        pool = pools[place.pool]
        if self._carries:
            try:
                return self._captured_forward(place, pool, member, shared, before)
            except NotCarried:
                self._carries = False
                if all(slot.place.pool != place.pool for slot in self.slots):
                    pool.handle = self._device.new_pool()  # PyTorch's is gone with the only graph that was in it
        return self._captured_forward(place, pool, member, shared, before)

    def _captured_forward(
        self, place: Place, pool: Pool, member: Member, shared: dict[int, torch.Tensor], before: Slot | None
    ) -> Slot:
        run, state = member.run, member.state
        tensors: list[torch.Tensor] = []
        flatten(member.sample, tensors)
        with self._device.here():
            given = [shared.get(index, tensor).detach() for index, tensor in enumerate(tensors)]
            inputs = inputs_like(member.sample, shared)
        placeholders = list(inputs.recording_inputs)
        arguments = replaced(member.sample, iter(placeholders))
        containers, snapshot = Given(*arguments), state.snapshot()
        graph = self._device.new_graph()
        torch.clear_autocast_cache()
        to_carry = inputs.to_carry(given) if self._carries else {}
        try:
            with (
                torch.set_grad_enabled(self._training),
                self._capturing(graph, pool, member, run.forward) as seen,
            ):
                observer = seen.observer
                inputs.capture_copies({index: (of, to.detach()) for index, (of, to) in to_carry.items()})
                writes = _writes_of(state, observer, placeholders)
                with seen.watching():
                    nest = call(member.function, arguments)
            torch.clear_autocast_cache()
            if to_carry:
                nodes = self._device.copies(graph, list(to_carry.values()))
                inputs.carry(dict(zip(to_carry, nodes, strict=True)), given)
            kept = in_order(kept_results(state, snapshot, observer))
            refusals = [*call_changes(state, snapshot, kept), *containers.changes(*arguments)]
            refusals += changed_inputs(placeholders, [tensor.requires_grad for tensor in tensors])
            for refusal in refusals:
                raise StepRefused(refusal)
            check_unread(self._device, graph, kept, state.code)
            outputs: list[torch.Tensor] = []
            if (structure := flatten(nest, outputs)) != run.structure:
                raise StepRefused(other_result(run.structure, structure))
            returned = len(outputs)
            outputs += [entry.new for entry in kept]
            check_draws(run, HostDraws({}, *observer.of_results(outputs)).other_results(run.of_results))
            written = [index for index, tensor in enumerate(placeholders) if writes.include(tensor)]
            mutated = [tensor for tensor in state.tensors.values() if writes.include(tensor)]
            labels = [f"tensor {index} of its arguments" for index in range(len(tensors))]
            read_memory = WrittenMemory(_read(state, observer) if written else ())
            refuse_shared(tensors, labels, written, mutated, written, read_memory)
        except BaseException:
            graph.reset()
            raise
        finally:
            state.restore(snapshot)
        static = [output.detach() for output in outputs]
        # What the backward reads of attributes is not known from the runs before, which may have had others.
        read_of_results = {*run.saved_results, *range(returned, len(outputs))}
        if kept:
            read_of_results |= overlapping(outputs)
        takes_part = [output.requires_grad and not is_one_of(output, placeholders) for output in outputs]
        differentiable = any(takes_part) and any(tensor.requires_grad for tensor in [*placeholders, *run.parameters])
        reached = {storage(tensor) for tensor in state.tensors.values()} - {0}
        slot = Slot(
            place=place,
            pools=[pool, *(before.pools if before is not None and shared else ())],
            forward=graph,
            inputs=inputs,
            shared=list(shared),
            parameters=list(run.parameters) if differentiable else [],
            nest=replaced(nest, iter(static)),
            results=StaticResults(
                static,
                sorted(read_of_results) if not self._copied else (),
                [index for index, output in enumerate(outputs) if storage(output) in reached],
            ),
            differentiable=[takes and differentiable for takes in takes_part],
            copied=self._copied,
            bound=self._bound(member, kept, returned),
            written=written,
            mutated=_counted(state, writes),
            passed=_passed(outputs, placeholders),
            repeated={index: first for index, first in enumerate(alias_pattern(outputs)) if first != index},
            read_back=[one for one in state.tensors.values() if _is_plain(one) and storage(one) in run.saved],
            written_memory=WrittenMemory(mutated),
            read_memory=read_memory,
        )
        self._open[id(slot)] = [output for output, takes in zip(outputs, takes_part, strict=True) if takes]
        return slot

    def _bound(self, member: Member, kept: Sequence[Rebound], first: int) -> list[Bound]:
        """Return what calls bind to results, from the index `first` on.

        Where the first run ran the operators of the others, what stood there before it may stand there again.
        """
        found = []
        pairs = zip(member.state.containers, self._outset[id(member)], strict=True)
        contents = {id(one.held): dict(entries_of(one, content)) for one, content in pairs} if kept else {}
        for index, entry in enumerate(kept, start=first):
            before = contents[id(entry.container.held)].get(entry.key, ABSENT)
            kinds = {kind_of(entry.old), kind_of(entry.new), *([kind_of(before)] if member.run.as_first else [])}
            found.append(Bound(entry, index, kinds, before))
        return found

    def _backward(self, slot: Slot, *, several: bool) -> None:
        """Capture the backward of a slot. `several`: other slots of the callable write gradients of its parameters to
        the same memory, which lies in no pool then, for one of them may keep something there for its backward."""
        member = self._members[slot.place.callable, slot.place.variant]
        given = self._open.pop(id(slot))
        slot.tangents = [torch.zeros_like(output) for output in given]
        surface = [*slot.inputs.recording_inputs, *slot.parameters]
        wanted = differentiated(surface)
        depends = depending_on(given, surface)
        count = len(slot.inputs.recording_inputs)
        slot.backward, snapshot = self._device.new_graph(), member.state.snapshot()
        for parameter in slot.parameters if several else ():
            if id(parameter) not in self._gradients:
                self._gradients[id(parameter)] = torch.empty_like(parameter).detach()
        own = [self._gradients[id(one)] if several else None for one in slot.parameters]
        with self._capturing(slot.backward, slot.pools[0], member, member.run.backward) as seen:
            writes = _writes_of(member.state, seen.observer)
            with seen.watching():
                found = gradients_of(given, wanted, slot.tangents)
            by_id = dict(zip(map(id, wanted), found, strict=True))
            gradients = [by_id.pop(id(tensor), None) for tensor in surface]  # of what is passed twice, once
            pairs = [
                (there, here)
                for there, here in zip(own, gradients[count:], strict=True)
                if there is not None and here is not None
            ]
            copy_all([there for there, _ in pairs], [here for _, here in pairs])
        for refusal in call_changes(member.state, snapshot, ()):
            raise StepRefused(refusal)
        slot.mutated_back = _counted(member.state, writes)
        for index, there in enumerate(own, start=count):
            gradients[index] = there if there is not None and gradients[index] is not None else gradients[index]
        # Hooks of what gets no gradient must not be called, as they are not in eager.
        used = [*[True] * count, *(gradient is not None for gradient in gradients[count:])]
        slot.parameters = [one for one, takes in zip(slot.parameters, used[count:], strict=True) if takes]
        slot.gradients = [one for one, takes in zip(gradients, used, strict=True) if takes]
        slot.depends = [one for one, takes in zip(depends, used, strict=True) if takes]
        if all(one is None for one in gradients):
            slot.differentiable = [False for _ in slot.differentiable]
        slot.without_gradient = [index for index, one in enumerate(gradients[:count]) if one is None]


def _shared(member: Member, before: Slot) -> dict[int, torch.Tensor]:
    """Return the results of the slot before that this callable can read where they lie, by its arguments' indices.

    The n-th tensor of its arguments may be the n-th result, if it looks so and is differentiated.
    """
    tensors: list[torch.Tensor] = []
    flatten(member.sample, tensors)
    found = {}
    for index, (tensor, result) in enumerate(zip(tensors, before.results.static, strict=False)):
        takes_part = before.differentiable[index] and index not in before.passed and not before.copied
        is_given_once = alias_pattern(tensors).count(index) == 1
        looks_so = tensor.requires_grad and tensor_key(tensor.detach()) == tensor_key(result)
        if takes_part and is_given_once and looks_so and type(tensor) is torch.Tensor:
            found[index] = result
    return found


def _writes_of(state: HostState, observer: Observer, others: Sequence[torch.Tensor] = ()) -> Writes:
    """Return what notes writes to what a callable reaches, and to `others`, in the capture that begins."""
    writes = Writes([*state.tensors.values(), *others], compiled=state.compiled)
    observer.before_write = writes.note
    return writes


def _counted(state: HostState, writes: Writes) -> list[torch.Tensor]:
    """Return the tensors that a launch writes and whose versions are counted up for autograd."""
    written = [tensor for tensor in state.tensors.values() if writes.include(tensor)]
    return [tensor for tensor in written if writes.counted(tensor) or tensor.is_inference()]


def _passed(outputs: Sequence[torch.Tensor], placeholders: Sequence[torch.Tensor]) -> dict[int, tuple[int, Any]]:
    """Return, by index, the results that are inputs (None), or views of inputs that are not differentiated."""
    by_id = {id(one): index for index, one in enumerate(placeholders)}
    by_storage = {storage(one): index for index, one in enumerate(placeholders) if storage(one)}
    found: dict[int, tuple[int, Any]] = {}
    for index, output in enumerate(outputs):
        of = by_id.get(id(output), by_storage.get(storage(output)))
        if id(output) in by_id:
            found[index] = by_id[id(output)], None
        elif of is not None and not output.requires_grad and not is_lazy_view(output):
            found[index] = of, view_of(output, placeholders[of])
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_inference()


def _read(state: HostState, observer: Observer) -> list[torch.Tensor]:
    """Return tensors from before that a call may have read: which of them compiled code reads is not known."""
    found = [tensor for tensor in state.tensors.values() if _is_plain(tensor)]
    return [tensor for tensor in found if state.compiled or storage(tensor) in observer.outside]
