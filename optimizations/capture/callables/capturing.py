"""Capture callables: a forward and a backward graph for each place of the plan.

Warm-up and captures have no visible effect: all their changes are undone. If one of the callables cannot be captured,
no graphs are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from optimizations.capture.callables.arguments import Options, Sample, naming, reached_by
from optimizations.capture.callables.installed import as_it_is
from optimizations.capture.callables.order import Place
from optimizations.capture.callables.results import StaticResults
from optimizations.capture.callables.slot import Slot
from optimizations.capture.callables.warm_up import (
    WRITES_ARGUMENT,
    Member,
    gradients_of,
    inputs_like,
    observing,
    putting_back,
    warm_up,
)
from optimizations.capture.device import Device
from optimizations.capture.inputs import copy_all
from optimizations.capture.side_by_side import RacedGraph
from optimizations.capture.signature import OTHER_RESULT, alias_pattern, flatten, replaced, tensor_key
from optimizations.capture.step.observer import Observer, StepRefused, storage
from optimizations.capture.step.operations import Operation, first_difference
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.written_memory import Writes, WrittenMemory
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import depending_on

FREED_MEANWHILE = Refusal(
    "was captured in part when cuBLAS's workspaces were freed, as a recording in any thread may do",
    "call graph_callables while no other thread records a step, or runs compiled code for the first time",
)


def make_slots(
    device: Device,
    callables: Sequence[Callable[..., Any]],
    samples: Sequence[Sequence[Sample]],
    plan: Sequence[Place],
    options: Options,
    *,
    training: bool,
) -> tuple[list[Member], list[Slot]]:
    """Warm up the callables, on these samples of each, and capture them as planned.

    Raises:
        StepRefused: a graph could not repeat one of them.
    """
    members = []
    for number, function in enumerate(callables, start=1):
        for variant, sample in enumerate(samples[number - 1]):
            with naming(number):
                state = reached_by(number, function, sample, device)
            marks = TensorMarks(state.tensors, to_restore=True)
            members.append(Member(number, variant, as_it_is(function), sample, state, marks, options.draws_unused))
    captures = Captures(device, members, options, training=training)
    try:
        with putting_back(device, members) as note:
            for member in members:
                with naming(member.number):
                    warm_up(device, member, options.warm_up, training, note)
            captures.capture(plan)
    except BaseException:
        device.wait()
        for slot in captures.slots:
            slot.free()
        raise
    return members, captures.slots


class Captures:
    """Capture the graphs of callables one after another. `slots` are the pairs captured so far."""

    def __init__(self, device: Device, members: Sequence[Member], options: Options, *, training: bool) -> None:
        self.slots: list[Slot] = []
        self._device, self._options, self._training = device, options, training
        self._members = {(member.number, member.variant): member for member in members}
        self._gradients: dict[int, torch.Tensor] = {}

    def capture(self, plan: Sequence[Place]) -> None:
        """Capture each forward and then its backward; with `share_io` first all forwards of one index.

        Raises:
            StepRefused: a graph could not repeat a callable.
        """
        groups = [[place] for place in plan]
        if self._options.share_io:
            indices = dict.fromkeys(place.index for place in plan)
            groups = [sorted([p for p in plan if p.index == index], key=lambda p: p.callable) for index in indices]
        several = {place.callable for place in plan if place.index or place.variant}
        for group in groups:
            here: list[tuple[Slot, list[torch.Tensor]]] = []
            for place in group:
                before = [slot for slot, _ in here if slot.place.callable == place.callable - 1]
                with naming(place.callable):
                    here.append(self._forward(place, before[0] if len(before) == 1 else None))
                self.slots.append(here[-1][0])
            while here:
                slot, outputs = here.pop()
                with naming(slot.place.callable):
                    if outputs and any(slot.differentiable):
                        self._backward(slot, outputs, several=slot.place.callable in several)
                del outputs  # they reference memory of the pool
        self._ready()

    def _ready(self) -> None:
        if not self._device.ready() and self.slots:  # a backward has to be on the stream of its forward
            raise StepRefused(FREED_MEANWHILE)

    @contextlib.contextmanager
    def _capturing(
        self, graph: RacedGraph, member: Member, expected: Sequence[Operation], others: Sequence[torch.Tensor] = ()
    ) -> Iterator[tuple[Writes, Observer]]:
        """Capture the block, and check that its operators are as expected. On an error the graph is freed.

        Yield the record of writes to tensors that the member reaches and to `others`, and the observer.
        """
        self._ready()
        writes = Writes([*member.state.tensors.values(), *others], compiled=member.state.compiled)
        try:
            captured = graph.capturing(member.generators)
            with observing(self._device, member, writes.note, captured, forbid=True) as observer:
                yield writes, observer
            difference = first_difference(expected, observer.operations)
            for refusal in [*observer.refusals, *([] if difference is None else [difference])]:
                raise StepRefused(refusal)
        except BaseException:
            graph.captured.reset()
            raise

    def _forward(self, place: Place, before: Slot | None) -> tuple[Slot, list[torch.Tensor]]:
        """Capture a forward. Return also the results from which its backward starts."""
        member = self._members[place.callable, place.variant]
        state = member.state
        tensors: list[torch.Tensor] = []
        flatten(member.sample, tensors)
        shared = {} if before is None else _shared(tensors, before)
        with self._device.here():
            inputs = inputs_like(member.sample, shared)
        placeholders = inputs.recording_inputs
        args, kwargs = replaced(member.sample, iter(placeholders))
        graph = RacedGraph(self._device, self._device.new_pool(), self._options.concurrency)
        torch.clear_autocast_cache()
        captured = self._capturing(graph, member, member.forward, placeholders)
        with torch.set_grad_enabled(self._training), captured as (writes, _):
            nest = member.function(*args, **kwargs)
        torch.clear_autocast_cache()
        outputs: list[torch.Tensor] = []
        if flatten(nest, outputs) != member.structure:
            raise StepRefused(OTHER_RESULT)
        if any(map(writes.include, placeholders)):
            raise StepRefused(WRITES_ARGUMENT)
        static = [output.detach() for output in outputs]
        by_id = {id(one): index for index, one in enumerate(placeholders)}
        passed = {index: by_id[id(output)] for index, output in enumerate(outputs) if id(output) in by_id}
        takes_part = [output.requires_grad and index not in passed for index, output in enumerate(outputs)]
        differentiable = any(takes_part) and any(one.requires_grad for one in [*placeholders, *member.parameters])
        reached = {storage(tensor) for tensor in state.tensors.values()} - {0}
        slot = Slot(
            place=place,
            forward=graph,
            inputs=inputs,
            shared=list(shared),
            reads=[before, *before.reads] if before is not None and shared else [],
            parameters=list(member.parameters) if differentiable else [],
            nest=replaced(nest, iter(static)),
            results=StaticResults(
                static,
                member.saved_results,
                [index for index, output in enumerate(outputs) if storage(output) in reached],
                copied=self._options.copied,
            ),
            differentiable=[takes and differentiable for takes in takes_part],
            mutated=_counted(member, writes),
            passed=passed,
            repeated={index: first for index, first in enumerate(alias_pattern(outputs)) if first != index},
            read_back=[one for one in state.tensors.values() if _is_plain(one) and storage(one) in member.saved],
            written_memory=WrittenMemory([tensor for tensor in state.tensors.values() if writes.include(tensor)]),
        )
        member.slots.append(slot)
        return slot, [output for output, takes in zip(outputs, takes_part, strict=True) if takes]

    def _backward(self, slot: Slot, outputs: Sequence[torch.Tensor], *, several: bool) -> None:
        """Capture the backward of a slot.

        `several`: all slots of the callable write gradients of its parameters to the same memory. It is outside all
        pools, because a slot may save tensors for its backward in a pool.
        """
        member = self._members[slot.place.callable, slot.place.variant]
        arguments, parameters = slot.inputs.recording_inputs, slot.parameters
        slot.tangents = [torch.zeros_like(output) for output in outputs]
        depends = depending_on(outputs, [*arguments, *parameters])
        slot.backward = RacedGraph(self._device, slot.forward.pool, self._options.concurrency)
        count = len(arguments)
        own: list[torch.Tensor] = []
        for parameter in parameters if several else ():
            if id(parameter) not in self._gradients:
                self._gradients[id(parameter)] = torch.empty_like(parameter).detach()
            own.append(self._gradients[id(parameter)])
        with self._capturing(slot.backward, member, member.backward) as (writes, observer):
            gradients = gradients_of(outputs, arguments, parameters, slot.tangents)
            if own:
                with observer.unseen():
                    copy_all(own, [one for one in gradients[count:] if one is not None])
                gradients[count:] = own
        slot.mutated_back = _counted(member, writes)
        slot.gradients, slot.depends = gradients, depends
        if all(one is None for one in gradients):
            slot.differentiable = [False for _ in slot.differentiable]
        slot.without_gradient = [index for index, one in enumerate(gradients[:count]) if one is None]


def _shared(tensors: Sequence[torch.Tensor], before: Slot) -> dict[int, torch.Tensor]:
    """Return the results of the previous slot that a callable can read in place, by the indices of its arguments.

    The n-th tensor of its arguments may be the n-th result if both have equal metadata and are differentiable.
    """
    aliases, found = alias_pattern(tensors), {}
    for index, (tensor, result) in enumerate(zip(tensors, before.results.static, strict=False)):
        is_equal = tensor.requires_grad and tensor_key(tensor.detach()) == tensor_key(result)
        if is_equal and before.differentiable[index] and not before.results.copied and aliases.count(index) == 1:
            found[index] = result
    return found


def _counted(member: Member, writes: Writes) -> list[torch.Tensor]:
    """Return the tensors that a launch writes and whose versions it increments for autograd."""
    written = [tensor for tensor in member.state.tensors.values() if writes.include(tensor)]
    return [tensor for tensor in written if writes.counted(tensor) or tensor.is_inference()]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_inference()
