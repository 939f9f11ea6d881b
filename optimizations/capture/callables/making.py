"""Make the graphs of callables: each is run until nothing is set up any more, and then all are captured.

The program sees nothing of it. What warm-up and captures changed is put back: what tensors hold, gradients, random
states, and what attributes and variables were bound to. If one of the callables cannot be captured, there are no graphs
at all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from optimizations.capture.callables.arguments import Sample, check_sources, parameters_of, reached_by
from optimizations.capture.callables.binding import Binding, Outset
from optimizations.capture.callables.capturing import Captures, Member, Update, check_kept
from optimizations.capture.callables.graphed import Slot
from optimizations.capture.callables.installed import as_it_is
from optimizations.capture.callables.order import Event, is_training
from optimizations.capture.callables.parallel import not_run
from optimizations.capture.callables.run import Run, naming, run_once
from optimizations.capture.callables.warm_up import FirstWrites, warmed_up
from optimizations.capture.device import Device
from optimizations.capture.inputs import copy_all
from optimizations.capture.step.host_random import HostRandom
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.observer import Observer, StepRefused
from optimizations.capture.step.reach import reach
from optimizations.graph.memory import overlaps
from optimizations.report.steps import Refusal


@dataclass(frozen=True, slots=True)
class Made:
    """Hold callables and their graphs.

    `members` are the callables as they were captured, `slots` the graphs by callable and micro-batch, in the order of
    their captures. `update`: the graph of what is launched once per step, None where there is nothing.
    `without_backward`: graphs with nothing to differentiate. `drawn_on_the_host`: names of generators of the host that
    were drawn from.
    """

    members: Sequence[Member]
    slots: dict[tuple[int, int], Slot]
    update: Update | None
    without_backward: set[tuple[int, int]]
    drawn_on_the_host: tuple[str, ...]


def make_graphs(
    device: Device,
    callables: Sequence[Callable[..., Any]],
    samples: Sequence[Sample],
    order: Sequence[Event],
    *,
    warm_up: int,
    outputs: Literal["static", "copied"],
    after_step: Callable[[], None] | None,
    draws_unused: bool,
) -> Made:
    """Warm up the callables, on these samples, and capture them. `draws_unused`: as of `warmed_up`.

    Raises:
        StepRefused: a graph could not repeat what one of them does.
    """
    if is_training(order) and torch.is_anomaly_enabled():
        raise StepRefused(ANOMALIES)
    states = [reached_by(number, *pair) for number, pair in enumerate(zip(callables, samples, strict=True), start=1)]
    for number, state in enumerate(states, start=1):
        check_sources(f"callable {number}", state)
    outset = [state.snapshot() for state in states]
    slots: Mapping[tuple[int, int], Slot] = {}
    try:
        members, update = _all_warmed_up(
            device,
            callables,
            samples,
            states,
            after_step,
            training=is_training(order),
            least=warm_up,
            draws_unused=draws_unused,
        )
        for member in members:  # with the attributes that first runs make
            member.state = reached_by(member.number, callables[member.number - 1], member.sample)
            check_kept(member, states[member.number - 1])
        before = [member.state.snapshot() for member in members]
        captures = Captures(device, members, order, outputs=outputs)
        slots = captures.slots
        captures.capture()
        captured_update = None if update is None else captures.capture_update(update)
    except BaseException:
        device.wait()
        for slot in slots.values():
            slot.free()
        _restore(states, outset)
        raise
    if not captures.compute_in_workspaces([captured_update.graph] if captured_update is not None else []):
        device.let_go_of_workspaces()
    _restore([member.state for member in members], before)
    _bind(captures.slots.values(), members, [Outset(*pair) for pair in zip(states, outset, strict=True)])
    ran = [one.run for one in (*members, update) if one is not None]
    drawn = tuple(sorted({name for run in ran for name in run.host_draws.states}))
    return Made(members, captures.slots, captured_update, captures.without_backward(), drawn)


ANOMALIES = Refusal(
    "a callable is captured under torch.autograd.set_detect_anomaly, whose backwards look for NaN on the host",
    "turn it off while graph_callables runs; calls under it run as they are",
)


def _restore(states: Sequence[HostState], contents: Sequence[Any]) -> None:
    for state, content in zip(states, contents, strict=True):
        state.restore(content)


def _bind(slots: Collection[Slot], members: Sequence[Member], before_warm_up: Sequence[Outset]) -> None:
    """Give the graphs what stood where their calls bind something, and let it stand there again."""
    as_first = {member.number for member in members if member.run.as_first}
    for slot in slots:
        slot.binding = Binding(
            [entry for entry, _ in slot.bound],
            before_warm_up[slot.number - 1],
            as_first=slot.number in as_first,
        )
    for slot in slots:
        slot.binding.put_back()


def _all_warmed_up(
    device: Device,
    callables: Sequence[Callable[..., Any]],
    samples: Sequence[Sample],
    states: Sequence[HostState],
    after_step: Callable[[], None] | None,
    *,
    training: bool,
    least: int,
    draws_unused: bool,
) -> tuple[list[Member], Member | None]:
    """Run everything on the side stream, then put back what that changed. `states`: what the callables reach."""
    updated = reach([("after_step", after_step)]) if after_step is not None else HostState()
    check_sources("after_step", updated)
    warmed = functools.partial(warmed_up, draws_unused=draws_unused)
    with _putting_back(device, [*states, updated]) as writes:
        content = updated.snapshot()
        try:
            members = []
            for number, (function, sample) in enumerate(zip(callables, samples, strict=True), start=1):
                member = Member(number, as_it_is(function), sample, states[number - 1], Run())
                given = member.function, sample, parameters_of(function), training, member.state
                with naming(f"callable {number}"), not_run(function, member.state.modules):
                    member.run = warmed(device, functools.partial(run_once, *given), member.state, least, writes)
                members.append(member)
            update = None
            if after_step is not None:
                update = Member(0, after_step, ((), {}), updated, Run())
                with naming("after_step"):
                    update.run = warmed(device, _update_of(after_step), updated, 1, writes)
            return members, update
        except BaseException:
            updated.restore(content)
            raise


@contextlib.contextmanager
def _putting_back(device: Device, states: Sequence[HostState]) -> Iterator[FirstWrites]:
    """Put back after the block what tensors hold that these reach, their gradients and random states.

    Yields what notes writes to tensors that take part in differentiation: of those no copy is made ahead.
    """
    random_states = device.random_states()
    tensors = {id(one): one for state in states for one in state.tensors.values()}.values()
    # What a tensor holds that holds others is among these itself.
    plain = [tensor for tensor in tensors if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__]
    state_tensors = [tensor for tensor in plain if not tensor.requires_grad]
    # Nothing copies into elements that share memory, as those of an expanded tensor do.
    shared = [tensor for tensor in state_tensors if tensor.layout is torch.strided and overlaps(tensor)]
    memory = [(storage, storage.clone()) for storage in map(torch.Tensor.untyped_storage, shared)]
    apart = {id(tensor) for tensor in shared}
    kept = [(tensor, tensor.detach().clone()) for tensor in state_tensors if id(tensor) not in apart]
    writes = FirstWrites([tensor for tensor in plain if tensor.requires_grad])
    collecting = [parameter for state in states for parameter in state.parameters()]
    grads = [(parameter, parameter.grad) for parameter in collecting]
    own = {name: one for state in states for name, one in state.generators.items()}
    drawn = HostRandom(with_torch=device.has_own_random, generators=own)
    try:
        yield writes
    finally:
        with torch.no_grad():
            copy_all([tensor for tensor, _ in kept], [old for _, old in kept])
        for storage, old in memory:
            storage.copy_(old)
        writes.restore()
        for parameter, gradient in grads:
            parameter.grad = gradient
        device.restore_random_states(random_states)
        drawn.restore()


def _update_of(after_step: Callable[[], None]) -> Callable[[Observer, Run | None], Run]:
    def run(observer: Observer, first: Run | None) -> Run:
        with torch.no_grad():
            after_step()
        return Run(forward=observer.operations)

    return run
