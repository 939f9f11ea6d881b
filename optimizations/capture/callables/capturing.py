"""Capture callables: a forward and a backward graph for each micro-batch, in the order of the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from optimizations.capture.callables.arguments import Sample
from optimizations.capture.callables.forbidding import Forbidding, draws_of, refuse_changes
from optimizations.capture.callables.gradient_memory import TRIES, GradientMemory, writable
from optimizations.capture.callables.graphed import Slot
from optimizations.capture.callables.memory_plan import pools
from optimizations.capture.callables.order import Event, is_training
from optimizations.capture.callables.results import HandedOut, over
from optimizations.capture.callables.run import (
    Run,
    bound_results,
    call,
    changed_inputs,
    differentiated,
    gradients_of,
    in_order,
    inputs_like,
    is_one_of,
    naming,
    overlapping,
)
from optimizations.capture.callables.warm_up import keeps_of_first
from optimizations.capture.copy_nodes import NotCarried
from optimizations.capture.device import Device
from optimizations.capture.inputs import copy_all
from optimizations.capture.other_results import other_result
from optimizations.capture.signature import alias_pattern, flatten, replaced
from optimizations.capture.step.graphed_step import steps_exist
from optimizations.capture.step.host_random import HostRandom
from optimizations.capture.step.host_state import HostState, Rebound
from optimizations.capture.step.mentioned import check_unread
from optimizations.capture.step.observer import Observer, StepRefused, storage
from optimizations.capture.step.observing import Given, changed_itself
from optimizations.capture.step.outputs import view_of
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.written_memory import Writes, WrittenMemory, refuse_shared
from optimizations.graph.memory import MemoryRanges, overlaps
from optimizations.lazy_view import is_lazy_view
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import depending_on


@dataclass(slots=True)
class Member:
    """Hold a callable to capture: what runs, arguments like those of its calls, what it reaches, what its runs did."""

    number: int
    function: Callable[..., Any]
    sample: Sample
    state: HostState
    run: Run


@dataclass(frozen=True, slots=True)
class Update:
    """Hold the graph of what is launched once per step. `mutated`: tensors that it writes."""

    graph: Any
    mutated: Sequence[torch.Tensor]

    def run(self) -> None:
        """Launch the graph."""
        self.graph.replay()
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)


def check_kept(member: Member, before: HostState) -> None:
    """Refuse a callable whose first run made of its sample what its later calls read. `before`: what it reached then.

    Raises:
        StepRefused: there is such.
    """
    known = {storage(tensor) for tensor in before.tensors.values()} | member.run.bound
    for path, tensor in member.state.tensors.items():
        if storage(tensor) in member.run.from_arguments - known:
            with naming(f"callable {member.number}"):
                raise StepRefused(keeps_of_first(path))


class Captures:
    """Capture all events of an order. `slots` are the graphs by callable and micro-batch, as they are made."""

    def __init__(
        self,
        device: Device,
        members: Sequence[Member],
        order: Sequence[Event],
        *,
        outputs: Literal["static", "copied"],
    ) -> None:
        self.slots: dict[tuple[int, int], Slot] = {}
        self._device = device
        self._members = members
        self._order = order
        self._training = is_training(order)
        self._copied = outputs == "copied"
        self._carries = True
        self._open: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._shared: dict[int, list[torch.Tensor | None]] = {}
        self._captured: list[tuple[Slot, str]] = []
        self._first_backward: dict[int, int] = {}
        self._observers: list[Observer] = []

    def without_backward(self) -> set[tuple[int, int]]:
        """Return the micro-batches of callables with nothing to differentiate: no backward of theirs will ever run."""
        return {key for key, slot in self.slots.items() if not any(slot.differentiable)}

    def capture(self) -> None:
        """Capture the graphs.

        Raises:
            StepRefused: a graph could not repeat what a callable does.
        """
        plan = pools(self._order)
        handles = {pool: self._device.new_pool() for pool in sorted(set(plan.values()))}
        states = self._device.random_states()
        for event in self._order:
            key = event.callable, event.micro_batch
            if not self._device.ready() and self.slots:  # a backward has to be on the stream of its forward
                raise StepRefused(FREED_MEANWHILE)
            with naming(f"callable {event.callable}"):
                if event.direction == "forward":
                    self._forward(key, plan[key], handles)
                    self.slots[key].left_memory = MemoryRanges(self._device.used_ranges(handles[plan[key]]))
                elif any(self.slots[key].differentiable):
                    self._backward(key, handles[plan[key]])
                    self._first_backward.setdefault(event.callable, len(self._captured))
                else:
                    continue
            self._captured.append((self.slots[key], event.direction))
        if not self._device.ready() and self.slots:
            raise StepRefused(FREED_MEANWHILE)
        self._device.restore_random_states(states)
        self._share_out(handles)

    def _share_out(self, pools: Mapping[int, Any]) -> None:
        """Tell the graphs whose gradients of parameters they overwrite. Note [Donated gradients].

        The memory is in use while later graphs are captured. So the graphs of the callable overwrite it, and those
        before in the pool of the first, which made it.
        """
        fixed = [one for member in self._members for one in [*member.state.tensors.values(), *member.run.parameters]]
        for slot in self.slots.values():
            fixed += [*slot.inputs.recording_inputs, *slot.tangents, *slot.results.static]
            fixed += [one for one in slot.gradients[: len(slot.gradients) - len(slot.parameters)] if one is not None]
            fixed += [made for _, made in slot.bound if not isinstance(made, int)]
        used = set(map(storage, fixed))
        for number, place in self._first_backward.items():
            pool = self._captured[place][0].pool
            made_in = MemoryRanges(self._device.pool_ranges(pools[pool]))
            alone = {id(one): over(one) for one in writable(self._shared.pop(number), made_in, used)}
            for slot in self.slots.values():  # what autograd made may be a view, which holds what it is a view of
                slot.gradients = [alone.get(id(one), one) for one in slot.gradients]
            tries = 0 if self._copied else TRIES
            memory = GradientMemory(f"callable {number}", alone.values(), steps_exist, tries=tries)
            for index, (slot, direction) in enumerate(self._captured):
                if slot.number == number:
                    slot.gradient_memory = memory
                overwrites = slot.forward_overwrites if direction == "forward" else slot.backward_overwrites
                before = slot.pool == pool and index < place
                if (direction == "backward" and slot.number == number) or before:
                    overwrites.append(memory)
                if direction == "forward" and before and (places := memory.among(slot.left_memory)):
                    slot.in_left_memory.append((memory, places))

    def capture_update(self, update: Member) -> Update:
        """Capture what is launched once per step, as a graph of its own."""
        graph, forbidding = self._device.new_graph(), self._forbidding(update)
        snapshot = update.state.snapshot()
        marks = TensorMarks(update.state.tensors, to_restore=True)
        try:
            pool = self._device.new_pool()
            with naming("after_step"):
                self._device.ready()
                with self._device.capturing(graph, pool, update.run.generators), forbidding, torch.no_grad():
                    writes = _writes_of(update.state, forbidding.observer)
                    update.function()
                self._check(update, forbidding, snapshot, marks, bound=False)
                forbidding.check(update.run.forward)
        except BaseException:
            graph.reset()
            raise
        finally:
            update.state.restore(snapshot)
            marks.restore()
        return Update(graph, _counted(update.state, writes))

    def compute_in_workspaces(self, others: Iterable[Any]) -> bool:
        """Return whether a graph that was captured, or one of these `others`, may write to a workspace of cuBLAS."""
        graphs = [graph for slot in self.slots.values() for graph in (slot.forward, slot.backward)]
        return any(observer.multiplies for observer in self._observers) or any(
            self._device.computes_in_workspace(graph) for graph in [*graphs, *others] if graph is not None
        )

    def _forbidding(self, member: Member) -> Forbidding:
        compiled = any(one.state.compiled for one in self._members)
        found = Forbidding(self._device, member.run, member.state, compiled=compiled)
        self._observers.append(found.observer)
        return found

    def _check(self, member: Member, forbidding: Forbidding, snapshot: Any, marks: TensorMarks, *, bound: bool) -> Any:
        for name in marks.changed():
            raise StepRefused(changed_itself(name))
        return refuse_changes(member.state, snapshot, forbidding.observer, bound=bound)

    def _forward(self, key: tuple[int, int], pool: int, handles: dict[int, Any]) -> None:
        """Capture a forward graph that copies its inputs itself where that is possible. See `copy_nodes`."""
        if self._carries:
            try:
                self._captured_forward(key, pool, handles[pool])
                return
            except NotCarried:
                self._carries = False
                if all(slot.pool != pool for slot in self.slots.values()):
                    handles[pool] = self._device.new_pool()  # PyTorch's is gone with the only graph that was in it
        self._captured_forward(key, pool, handles[pool])

    def _captured_forward(self, key: tuple[int, int], pool: int, handle: Any) -> None:
        member = self._members[key[0] - 1]
        run, state = member.run, member.state
        tensors: list[torch.Tensor] = []
        flatten(member.sample, tensors)
        with self._device.here():
            given = [tensor.detach() for tensor in tensors]
            inputs = inputs_like(member.sample)
        placeholders = list(inputs.recording_inputs)
        arguments = replaced(member.sample, iter(placeholders))
        containers, snapshot = Given(*arguments), state.snapshot()
        marks = TensorMarks(state.tensors, to_restore=True)
        drawn = HostRandom(with_torch=self._device.has_own_random, generators=state.generators)
        graph, forbidding = self._device.new_graph(), self._forbidding(member)
        torch.clear_autocast_cache()
        to_carry = inputs.to_carry(given) if self._carries else {}
        try:
            with (
                torch.set_grad_enabled(self._training),
                self._device.capturing(graph, handle, run.generators),
            ):
                inputs.capture_copies({index: (of, to.detach()) for index, (of, to) in to_carry.items()})
                writes = _writes_of(state, forbidding.observer, placeholders)
                with forbidding:
                    nest = call(member.function, arguments)
            torch.clear_autocast_cache()
            if to_carry:
                nodes = self._device.copies(graph, list(to_carry.values()))
                inputs.carry(dict(zip(to_carry, nodes, strict=True)), given)
            forbidding.check(run.forward)
            bound = self._check(member, forbidding, snapshot, marks, bound=True)
            for refusal in [
                *containers.changes(*arguments),
                *changed_inputs(placeholders, [tensor.requires_grad for tensor in tensors]),
                *draws_of(drawn, run, state),
            ]:
                raise StepRefused(refusal)
            check_unread(self._device, graph, bound, state.code)
            outputs: list[torch.Tensor] = []
            if (structure := flatten(nest, outputs)) != run.structure:
                raise StepRefused(other_result(run.structure, structure))
            forbidding.check_results([*outputs, *(entry.new for entry in bound)])
            returned = len(outputs)
            kept = bound_results(bound)
            shared = in_order(_shared(bound, outputs, placeholders))
            kept += shared
            outputs += [entry.new for entry in kept]
            written = [index for index, tensor in enumerate(placeholders) if writes.include(tensor)]
            mutated = [tensor for tensor in state.tensors.values() if writes.include(tensor)]
            labels = [f"tensor {index} of its arguments" for index in range(len(tensors))]
            read_memory = WrittenMemory(_read(state, forbidding.observer) if written else ())
            refuse_shared(tensors, labels, written, mutated, written, read_memory)
        except BaseException:
            graph.reset()
            raise
        finally:
            marks.restore()
            drawn.restore()
        static = [output.detach() for output in outputs]
        # What the backward reads of attributes is not known from the runs before, which may have had others.
        read_of_results = {*run.saved_results, *range(returned, len(outputs) - len(shared))}
        if kept:
            read_of_results |= overlapping(outputs)
        takes_part = [output.requires_grad and not is_one_of(output, placeholders) for output in outputs]
        differentiable = any(takes_part) and any(tensor.requires_grad for tensor in [*placeholders, *run.parameters])
        read_back = [tensor for tensor in state.tensors.values() if _is_plain(tensor) and storage(tensor) in run.saved]
        indices = {id(entry): index for index, entry in enumerate(kept, start=returned)}
        reached = {storage(tensor) for tensor in state.tensors.values()} - {0}
        theirs = [index for index, output in enumerate(outputs) if storage(output) in reached]
        self.slots[key] = Slot(
            number=key[0],
            micro_batch=key[1],
            pool=pool,
            forward=graph,
            inputs=inputs,
            parameters=list(run.parameters) if differentiable else [],
            nest=replaced(nest, iter(static)),
            results=HandedOut(static, sorted(read_of_results) if not self._copied else (), theirs),
            differentiable=[takes and differentiable for takes in takes_part],
            wait=self._device.wait,
            copied=self._copied,
            bound=[(entry, indices.get(id(entry), entry.new.detach())) for entry in bound],
            written=written,
            mutated=_counted(state, writes),
            passed=_passed(outputs, placeholders),
            repeated={index: first for index, first in enumerate(alias_pattern(outputs)) if first != index},
            read_back=read_back,
            written_memory=WrittenMemory(mutated),
            read_memory=read_memory,
        )
        self._open[key] = [output for output, takes in zip(outputs, takes_part, strict=True) if takes]

    def _backward(self, key: tuple[int, int], handle: Any) -> None:
        slot, member = self.slots[key], self._members[key[0] - 1]
        given = self._open.pop(key)
        slot.tangents = [torch.zeros_like(output) for output in given]
        surface = [*slot.inputs.recording_inputs, *slot.parameters]
        wanted = differentiated(surface)
        depends = depending_on(given, surface)
        slot.backward = self._device.new_graph()
        count = len(slot.inputs.recording_inputs)
        forbidding = self._forbidding(member)
        drawn = HostRandom(with_torch=self._device.has_own_random, generators=member.state.generators)
        snapshot = member.state.snapshot()
        try:
            with self._device.capturing(slot.backward, handle, member.run.generators):
                writes = _writes_of(member.state, forbidding.observer)
                with forbidding:
                    found = gradients_of(given, wanted, slot.tangents)
                by_id = dict(zip(map(id, wanted), found, strict=True))
                gradients = [by_id.pop(id(tensor), None) for tensor in surface]  # of what is passed twice, once
                # All micro-batches of a callable write the gradients of its parameters to the memory of the first.
                others = {storage(one) for one in [*slot.tangents, *slot.inputs.recording_inputs, *slot.results.static]}
                if slot.number not in self._shared:
                    self._shared[slot.number] = [_memory_of_its_own(one, others) for one in gradients[count:]]
                own = self._shared[slot.number]
                pairs = [
                    (there, here)
                    for there, here in zip(own, gradients[count:], strict=True)
                    if there is not None and here is not None and there is not here
                ]
                copy_all([there for there, _ in pairs], [here for _, here in pairs])
            forbidding.check(member.run.backward)
            for refusal in draws_of(drawn, member.run, member.state):
                raise StepRefused(refusal)
            refuse_changes(member.state, snapshot, forbidding.observer, bound=False)
            slot.mutated_back = _counted(member.state, writes)
        finally:
            drawn.restore()
        # Hooks of what gets no gradient must not be called, as they are not in eager.
        used = [gradient is not None for gradient in gradients[count:]]
        slot.parameters = [one for one, takes in zip(slot.parameters, used, strict=True) if takes]
        slot.gradients = [*gradients[:count], *(one for one, takes in zip(own, used, strict=True) if takes)]
        slot.depends = [*depends[:count], *(one for one, takes in zip(depends[count:], used, strict=True) if takes)]
        if all(one is None for one in gradients):
            slot.differentiable = [False for _ in slot.differentiable]
        slot.without_gradient = [index for index, one in enumerate(gradients[:count]) if one is None]


def _writes_of(state: HostState, observer: Observer, others: Sequence[torch.Tensor] = ()) -> Writes:
    """Return what notes writes to what a callable reaches, and to `others`, in the capture that begins."""
    writes = Writes([*state.tensors.values(), *others], compiled=state.compiled)
    observer.before_write = writes.note
    return writes


def _counted(state: HostState, writes: Writes) -> list[torch.Tensor]:
    """Return the tensors that a launch writes and whose versions are counted up for autograd."""
    written = [tensor for tensor in state.tensors.values() if writes.include(tensor)]
    return [tensor for tensor in written if writes.counted(tensor) or tensor.is_inference()]


FREED_MEANWHILE = Refusal(
    "was captured in part when cuBLAS's workspaces were freed, as a recording in any thread may do",
    "call graph_callables while no other thread records a step, or runs compiled code for the first time",
)


def _memory_of_its_own(gradient: torch.Tensor | None, others: set[int]) -> torch.Tensor | None:
    """Return the gradient if it can be written; new memory if its elements overlap, or lie in something else's."""
    if gradient is None or not (overlaps(gradient) or storage(gradient) in others):
        return gradient
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _shared(
    bound: Sequence[Rebound], outputs: Sequence[torch.Tensor], placeholders: Sequence[torch.Tensor]
) -> Iterator[Rebound]:
    """Yield entries that are not differentiated and lie in memory of a result, an argument or another of them.

    What is written into the one shows in the other. So these are results, too, and copies of the rest are bound.
    """
    places = Counter(storage(entry.new) for entry in bound)
    elsewhere = {storage(tensor) for tensor in [*outputs, *placeholders]}
    for entry in bound:
        place = storage(entry.new)
        if not entry.new.requires_grad and place and (places[place] > 1 or place in elsewhere):
            yield entry


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
