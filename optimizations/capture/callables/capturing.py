"""Capture callables: a forward and a backward graph for each micro-batch in flight.

Warm-up and captures have no visible effect: all their changes are undone. If one of the callables cannot be captured,
no graphs are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from optimizations.capture.callables.arguments import Options, Plan, naming, reached_by
from optimizations.capture.callables.installed import as_it_is
from optimizations.capture.callables.results import StaticResults
from optimizations.capture.callables.slot import Slot
from optimizations.capture.callables.warm_up import (
    WRITES_ARGUMENT,
    Variant,
    distinct,
    gradients_of,
    inputs_like,
    putting_back,
    warm_up,
)
from optimizations.capture.device import Device
from optimizations.capture.inputs import copy_all
from optimizations.capture.side_by_side import RacedGraph
from optimizations.capture.signature import OTHER_RESULT, alias_pattern, flatten, replaced, tensor_key
from optimizations.capture.step.audit import Operation, first_difference
from optimizations.capture.step.observer import Observer, StepRefused, storage
from optimizations.capture.step.recording import FREED_MEANWHILE
from optimizations.capture.step.tensor_marks import TensorMarks, Writes, storages
from optimizations.torch_internals.autograd_graph import depending_on


def make_slots(
    device: Device, callables: Sequence[Callable[..., Any]], plan: Plan, options: Options, slots: list[Slot]
) -> list[Variant]:
    """Warm up the callables, on these samples of each, and capture them. Their graphs are appended to `slots`.

    Raises:
        StepRefused: a graph could not repeat one of them.
    """
    variants: list[Variant] = []
    # Pairs of one index read each other's results, so all callables have the same number of pairs.
    least = max((pairs for samples in plan for _, pairs in samples), default=1) if options.share_io else 1
    for number, (function, samples) in enumerate(zip(callables, plan, strict=True), start=1):
        for index, (sample, pairs) in enumerate(samples):
            with naming(number):
                state = reached_by(number, function, sample, device)
            marks, called = TensorMarks(state.tensors, to_restore=True), as_it_is(function)
            variants.append(Variant(number, index, max(pairs, least), called, sample, state, marks, device, options))
    gradients: dict[int, torch.Tensor] = {}
    with putting_back(device, variants) as note:
        for one in variants:
            with naming(one.number):
                warm_up(one, note)
        for one in variants:
            several = sum(other.pairs for other in variants if other.number == one.number) > 1
            for index in range(one.pairs):
                with naming(one.number):
                    slot, outputs = _forward(one, index, slots)
                    slots.append(slot)
                    if outputs and any(slot.differentiable):
                        _backward(one, slot, outputs, gradients if several else None)
                del outputs  # they reference memory of the pool
        if not device.streams.ready():
            raise StepRefused(FREED_MEANWHILE)
    return variants


@contextlib.contextmanager
def _capturing(
    graph: RacedGraph,
    variant: Variant,
    expected: Sequence[Operation],
    others: Sequence[torch.Tensor] = (),
    *,
    is_first: bool = False,
) -> Iterator[tuple[Writes, Observer]]:
    """Capture the block, and check that its operators are as expected. On an error the graph is freed.

    Yield the record of writes to tensors that the callable reaches and to `others`, and the observer.
    """
    if not variant.device.streams.ready() and not is_first:  # a backward has to be on the stream of its forward
        raise StepRefused(FREED_MEANWHILE)
    writes = Writes([*variant.state.tensors.values(), *others], compiled=variant.state.compiled)
    try:
        with variant.observing(writes.note, graph.capturing(), forbid=True) as observer:
            yield writes, observer
        difference = first_difference(expected, observer.operations)
        for refusal in [*observer.refusals, *([] if difference is None else [difference])]:
            raise StepRefused(refusal)
        written = [tensor for tensor in variant.state.tensors.values() if writes.include(tensor)]
        graph.mutated = [tensor for tensor in written if writes.counted(tensor) or tensor.is_inference()]
    except BaseException:
        graph.captured.reset()
        raise


def _forward(variant: Variant, index: int, slots: Sequence[Slot]) -> tuple[Slot, list[torch.Tensor]]:
    """Capture a forward after these slots. Return also the results from which its backward starts."""
    device, state = variant.device, variant.state
    before = [one for one in slots if (one.place[0], one.place[2]) == (variant.number - 1, index)]
    shares = variant.options.share_io and variant.options.outputs == "static" and len(before) == 1
    shared = _shared(variant, before[0]) if shares else {}
    with device.here():
        inputs = inputs_like(variant.sample, shared)
    placeholders = inputs.recording_inputs
    args, kwargs = replaced(variant.sample, iter(placeholders))
    graph = RacedGraph(device, device.new_pool(), variant.options.concurrency)
    torch.clear_autocast_cache()
    captured = _capturing(graph, variant, variant.forward, placeholders, is_first=not slots)
    with captured as (writes, _):
        nest = variant.function(*args, **kwargs)
    torch.clear_autocast_cache()
    tensors: list[torch.Tensor] = []
    if flatten(nest, tensors) != variant.structure:
        raise StepRefused(OTHER_RESULT)
    if any(map(writes.include, placeholders)):
        raise StepRefused(WRITES_ARGUMENT)
    results = distinct(tensors, placeholders)
    static = [result.detach() for result in results]
    places = {id(one): place for place, one in enumerate([*placeholders, *results])}
    order = [places[id(one)] for one in tensors]
    takes_part = [result.requires_grad for result in results]
    differentiable = any(one.requires_grad for one in [*placeholders, *variant.parameters])
    reached = {storage(tensor) for tensor in state.tensors.values()} - {0}
    slot = Slot(
        place=(variant.number, variant.index, index),
        forward=graph,
        inputs=inputs,
        parameters=variant.parameters,
        nest=replaced(nest, iter([[*placeholders, *static][place] for place in order])),
        order=order,
        results=StaticResults(
            static,
            variant.saved_results,
            [place for place, result in enumerate(results) if storage(result) in reached],
            copied=variant.options.outputs == "copied",
        ),
        differentiable=[takes and differentiable for takes in takes_part],
        read_back=[
            one
            for one in state.tensors.values()
            if one.layout is torch.strided and not one.is_inference() and storage(one) in variant.saved
        ],
        written=storages([tensor for tensor in state.tensors.values() if writes.include(tensor)]),
    )
    return slot, [result for result, takes in zip(results, takes_part, strict=True) if takes]


def _backward(
    variant: Variant, slot: Slot, outputs: Sequence[torch.Tensor], own: dict[int, torch.Tensor] | None
) -> None:
    """Capture the backward of a slot.

    `own`: memory for the gradients of parameters, by id, to which all slots of a callable write. It is outside of all
    pools, because a slot may save tensors for its backward in a pool.
    """
    arguments, parameters = slot.inputs.recording_inputs, slot.parameters
    slot.tangents = [torch.zeros_like(output) for output in outputs]
    slot.depends = depending_on(outputs, [*arguments, *parameters])
    slot.backward = RacedGraph(variant.device, slot.forward.pool, variant.options.concurrency)
    count, targets = len(arguments), list[torch.Tensor]()
    if own is not None:
        own.update({id(one): torch.empty_like(one).detach() for one in parameters if id(one) not in own})
        targets = [own[id(one)] for one in parameters]
    with _capturing(slot.backward, variant, variant.backward) as (_, observer):
        gradients = gradients_of(outputs, arguments, parameters, slot.tangents)
        if targets:
            with observer.unseen():
                copy_all(targets, [one for one in gradients[count:] if one is not None])
            gradients[count:] = targets
    slot.gradients = gradients


def _shared(variant: Variant, before: Slot) -> dict[int, torch.Tensor]:
    """Return the results of the previous slot that a callable can read in place, by the indices of its arguments.

    The n-th tensor of its arguments may be the n-th result if both have equal metadata and are differentiable.
    """
    tensors: list[torch.Tensor] = []
    flatten(variant.sample, tensors)
    aliases, found, count = alias_pattern(tensors), {}, len(before.inputs.recording_inputs)
    for index, (tensor, place) in enumerate(zip(tensors, before.order, strict=False)):
        if place < count or not before.differentiable[place - count]:
            continue
        result = before.results.static[place - count]
        if tensor.requires_grad and tensor_key(tensor.detach()) == tensor_key(result) and aliases.count(index) == 1:
            found[index] = result
    return found
