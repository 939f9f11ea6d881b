"""Capture modules and functions as forward and backward CUDA graphs, in the order of a schedule.

For any callables it does what Transformer Engine's `make_graphed_callables` does for its own modules, and
`torch.cuda.make_graphed_callables` for one micro-batch. Differences that users notice: what the warm-up changed
(buffers, the random state) is put back; a call that the graphs do not fit runs as it is; a call out of order is an
error; gradients may be accumulated over micro-batches; functions may use parameters that are not their arguments.

Here is which calls the graphs serve, and which run as they are. How the graphs are made is in `making`.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from optimizations import torch_internals
from optimizations.capture.callables.arguments import (
    Sample,
    arguments_of,
    check_callables,
    device_of,
    difference,
    modes_of,
    samples_of,
    taken_apart,
)
from optimizations.capture.callables.binding import added_entries, filled
from optimizations.capture.callables.capturing import Member
from optimizations.capture.callables.graphed import Slot
from optimizations.capture.callables.installed import Installed
from optimizations.capture.callables.making import make_graphs
from optimizations.capture.callables.order import (
    Event,
    Follower,
    WrongOrder,
    default_order,
    events,
    expanded,
    is_training,
)
from optimizations.capture.device import Device
from optimizations.capture.signature import signature
from optimizations.capture.step.changes import MOST_NAMES
from optimizations.capture.step.host_state import MODULE_HOOKS, Entry
from optimizations.capture.step.host_tensors import HostTensors, on_the_host
from optimizations.capture.step.options import HOST_DRAWS, require_one_of
from optimizations.capture.step.surroundings import saved_tensors_are_watched, watched_by_others
from optimizations.capture.step.watch import Watch
from optimizations.report.steps import CallableReport
from optimizations.weak_registry import WeakRegistry

PATIENCE = 16
"""Calls in a row without a graph after which a warning says so."""

OTHER_MODE = "it is called in another mode than when they were captured: training, autocast or another setting"

_groups: WeakRegistry[GraphedCallables] = WeakRegistry()


class GraphedCallables(Sequence[Callable[..., Any]]):
    """Hold the graphed callables that `graph_callables` returns, in the order they were given."""

    def __init__(
        self,
        callables: Sequence[Callable[..., Any]],
        samples: Sequence[Sample],
        order: Sequence[Event],
        *,
        warm_up: int,
        outputs: Literal["static", "copied"],
        after_step: Callable[[], None] | None,
        device: Device,
        host_draws: str = "refused",
        any_order: bool = False,
    ) -> None:
        """Make the graphs. `any_order`: the program gave no order. Each callable has one micro-batch then, in memory of
        its own: it may run whenever no backward of its own may still come, and its backward whenever it comes."""
        self._callables = list(callables)
        self._device = device
        check_callables(self._callables, samples, device.holds)
        self._order = order
        self._outputs = outputs
        self._any_order = any_order
        self._follower = Follower(order)
        self._training = is_training(order)
        self._keys = [signature(sample, []) for sample in samples]
        self._arguments = [arguments_of(sample) for sample in samples]
        with torch.set_grad_enabled(self._training):  # as captures have it, and calls that graphs serve
            self._modes = [modes_of(function) for function in callables]
        self._update_due = False
        self._without_graph: Counter[tuple[int, int, str]] = Counter()
        self._closed = False
        self._warned: set[tuple[int, bool]] = set()
        self._left: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._in_a_row: Counter[int] = Counter()
        self._watches: list[Watch] = []
        self._filled: dict[int, Watch] = {}
        self.updates = 0
        self._installed = [Installed(self._serve(number), one) for number, one in enumerate(callables, start=1)]
        made = make_graphs(
            device,
            self._callables,
            samples,
            order,
            warm_up=warm_up,
            outputs=outputs,
            after_step=after_step,
            draws_unused=host_draws == "unused",
        )
        self._slots, self._update = made.slots, made.update
        self.drawn_on_the_host = made.drawn_on_the_host
        self._follower.leave_out(made.without_backward)
        for slot in self._slots.values():
            slot.begins, slot.ended, slot.results.told = self._begin_backward, self._end_of_step, self._moved
        try:
            self._graphed = [one.take_place() for one in self._installed]
            self._watches = [self._watch(member) for member in made.members]
        except BaseException:
            self.close()
            raise
        slots = list(self._slots.values())  # as they were captured
        for place, slot in enumerate(slots):
            slot.in_place = self._watches[slot.number - 1].in_place
            slot.mates = [later for later in slots[place + 1 :] if later.pool == slot.pool]
        for member in made.members:
            if added := added_entries(self._bound_by(member.number)):
                with filled(added):
                    self._filled[member.number] = self._watch(member)
        _groups.add(self)

    def _slots_of(self, number: int) -> list[Slot]:
        """Return the slots of one callable."""
        return [slot for slot in self._slots.values() if slot.number == number]

    def _bound_by(self, number: int) -> list[Entry]:
        """Return the entries that the graphs of a callable bind."""
        return [entry for slot in self._slots_of(number) for entry, _ in slot.bound]

    def __len__(self) -> int:
        return len(self._callables)

    def __getitem__(self, index: Any) -> Any:
        return self._graphed[index]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._graphed)

    def __reduce__(self) -> Any:
        raise TypeError("graphs cannot be copied or saved: copy or save the modules, and call graph_callables again")

    def _serve(self, number: int) -> Callable[..., Any]:
        def serve(*args: Any, **kwargs: Any) -> Any:
            return self._call(number, args, kwargs)

        return serve

    def _watch(self, member: Member) -> Watch:
        """Return a watch of what the graphs of a callable were made with: they serve it as long as that stands."""
        bound = {(id(entry.container.held), entry.key) for entry in self._bound_by(member.number)}
        reached = {id(tensor) for tensor in member.state.tensors.values()}
        replaced_here = {id(vars(one)) for one in self._callables if isinstance(one, torch.nn.Module)}
        function = self._callables[member.number - 1]
        # Hooks of its own run around its graphs. Those of other callables that it calls are part of it.
        around = id(vars(function)) if isinstance(function, torch.nn.Module) else 0
        return Watch(
            member.state,
            lambda held, key: (
                (id(held), key) in bound
                or (key == "forward" and id(held) in replaced_here)
                or (key in MODULE_HOOKS and id(held) == around)
            ),
            lambda tensor: True,
            [parameter for parameter in member.run.parameters if id(parameter) not in reached],
            host=HostTensors(on_the_host(member.state.tensors, self._device.holds)),
            hooks_of_tensors=False,  # they run after the graph
        )

    def restart(self) -> None:
        """Begin the order from its first event, after an iteration that was left early."""
        self._follower.restart()
        for slot in self._slots.values():
            slot.left = lambda: None

    def close(self) -> None:
        """Free the graphs. Calls run as they are from then on."""
        self._closed = True
        self._device.wait()
        for one in self._installed:
            one.leave()
        for slot in self._slots.values():
            slot.free()
        if self._update is not None:
            self._update.graph.reset()
        self._slots.clear()
        self._watches.clear()  # they hold weights, also those that were exchanged
        self._filled.clear()

    @property
    def calls_without_graph(self) -> int:
        """Return how many calls of the order ran as they are. `report()` has the reasons."""
        return self._without_graph.total()

    def report(self) -> tuple[CallableReport, ...]:
        """Return reports on the graphs, in the order of the schedule."""
        found = []
        for event in self._order:
            if (slot := self._slots.get((event.callable, event.micro_batch))) is not None:
                forward, memory = event.direction == "forward", slot.gradient_memory
                tangents = sum(tensor.nbytes for tensor in slot.tangents)
                found.append(
                    CallableReport(
                        callable=event.callable,
                        micro_batch=event.micro_batch,
                        direction=event.direction,
                        pool=slot.pool,
                        copied_bytes=slot.inputs.copied_bytes if forward else tangents,
                        copied_tensors=slot.inputs.copied_tensors if forward else len(slot.tangents),
                        replays=slot.forwards if forward else slot.backwards,
                        copied_gradient_bytes=0 if forward else slot.copied_gradient_bytes,
                        times_put_back=0 if memory is None else memory.times_put_back,
                        without_graph={
                            reason: count
                            for (number, micro_batch, reason), count in self._without_graph.items()
                            if forward and (number, micro_batch) == (event.callable, event.micro_batch)
                        },
                    )
                )
        return tuple(found)

    # Calls.

    def _call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        installed = self._installed[number - 1]
        if self._closed or self._device.is_capturing() or watched_by_others() or saved_tensors_are_watched():
            return installed.before(*args, **kwargs)
        self._follow()
        if self._update_due:
            self._run_update()
        if torch.is_grad_enabled() != self._training:  # validation between steps is not part of the order
            return installed.before(*args, **kwargs)
        micro_batch = 0 if self._any_order else self._follower.micro_batch(number)
        slot = self._slots[number, micro_batch]
        tensors, reason = self._fitting(number, slot, args, kwargs)
        if reason is not None:
            self._missed(number, reason)
            self._without_graph[number, micro_batch, reason] += 1
            self._passed(number, skip=True)
            return installed.before(*args, **kwargs)
        results = slot.run(tensors)
        self._in_a_row.pop(number, None)
        if self._outputs == "static":
            slot.results.remember(results)
        self._passed(number)
        return slot.returned(tensors, results)

    def _fitting(
        self, number: int, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], str | None]:
        """Return the tensors of a call, and why its graph cannot serve it; None if it can."""
        if self._any_order and slot.awaits_backward:
            return [], self._warn(
                number,
                "it is called while the backward of an earlier call may still come; let go of that call's results, or "
                "give graph_callables the order in which the program runs; where one forward calls it several times, "
                "graph a function that makes all these calls",
            )
        tensors = self._arguments[number - 1].tensors_of(args, kwargs)
        if tensors is None:
            tensors = []
            found = signature((args, kwargs), tensors)
            if (reason := difference(self._keys[number - 1], found)) is not None:
                return tensors, reason
            if not self._in_mode(number):
                return tensors, OTHER_MODE
            self._arguments[number - 1].renew(tensors)
        if not self._unchanged(number):
            if not self._in_mode(number):
                return tensors, OTHER_MODE
            return tensors, self._warn(
                number,
                "it uses other tensors or numbers than those they were captured with; write new values into the same "
                "tensors, or call close() and graph_callables again",
                self._watches[number - 1].differing,
            )
        if not slot.binding.fits():
            return tensors, self._warn(
                number,
                f"{slot.binding.name} holds another kind of value than when they were captured, which its code may ask "
                "for: None or a tensor, its shape and dtype; leave there what the last call put there",
            )
        if slot.shares(tensors):
            return tensors, "an argument lies in memory that it writes, other than that argument's own"
        if not slot.makes_room():
            return tensors, self._warn(
                number,
                "a result of an earlier call is held through a view, or because its backward did not run, or was "
                "resized, as a gradient may have been; drop it before, clone what you keep or resize, or pass "
                "outputs='copied'; results are copied from now on",
            )
        return tensors, None

    def _passed(self, number: int, *, skip: bool = False) -> None:
        """Note that a forward was called. If it was the last event, what is updated once per step is so before the next
        call: it may have a backward that no graph runs for."""
        if self._any_order:
            return
        self._follower.forward(number, skip=skip)
        if self._follower.at_start:
            if self._training:
                self._update_due = self._update is not None
            else:
                self._run_update()

    def _unchanged(self, number: int) -> bool:
        """Return whether all stands that the graphs of a callable were made with.

        The entries that its calls add to dicts are all there, or none of them.
        """
        watch, other = self._watches[number - 1], self._filled.get(number)
        if watch.unchanged():
            return True
        if other is None or not other.unchanged():
            return False
        self._watches[number - 1], self._filled[number] = other, watch  # most calls find what the one before found
        return True

    def _in_mode(self, number: int) -> bool:
        """Return whether training or evaluation, and autocast, are those of the capture."""
        return modes_of(self._callables[number - 1]) == self._modes[number - 1]

    def _warn(
        self, number: int, reason: str, differing: Callable[[], Sequence[str]] = list, *, first: bool = False
    ) -> str:
        """Warn once, for each callable, why one of its calls has no graph; return the reason.

        `differing`: names of what is another than at the capture. `first`: it is said as no call had one so far, or
        many had none; a later reason is said, too.
        """
        if (number, first) not in self._warned and (number, False) not in self._warned:
            self._warned.add((number, first))
            names = ", ".join(sorted(differing())[:MOST_NAMES])
            others = f"; another now: {names}" if names else ""
            warnings.warn(f"callable {number} runs without its graphs: {reason}{others}", stacklevel=5)
        return reason

    def _missed(self, number: int, reason: str) -> None:
        """Note that a call has no graph. Warn where no call had one, or many in a row had none: a batch that is smaller
        than others is nothing to warn of, nor is an evaluation."""
        self._in_a_row[number] += 1
        if not any(slot.forwards for slot in self._slots_of(number)):
            self._warn(number, f"{reason}; none of its calls had one so far", first=True)
        elif self._in_a_row[number] == PATIENCE and reason != OTHER_MODE:
            self._warn(number, f"{reason}; none of its last {PATIENCE} calls had one", first=True)

    def _begin_backward(self, number: int, micro_batch: int) -> None:
        """Prepare for the launch of a backward, which is on the stream of its forward."""
        if not self._any_order:
            self._follower.backward(number, micro_batch)
        self._follow()

    def _follow(self) -> None:
        """Wait, before a launch, for streams that the program has left. It may still read results there, and let go of
        them before the device is through. So such a stream is waited for as long as one of them lives, and once more.
        See `_moved` for those that get memory of their own meanwhile."""
        before = self._device.launched_on
        self._device.follow()
        stream = self._device.launched_on
        if self._left and stream is not None:
            self._left.pop(stream, None)
            for other in self._left:
                self._device.wait_for(other)
            alive = {other: [one for one in results if one() is not None] for other, results in self._left.items()}
            self._left = {other: results for other, results in alive.items() if results}
        if stream != before and before is not None:
            for slot in self._slots.values():
                if slot.gradient_memory is not None:
                    slot.gradient_memory.read_on_several_streams()
            handed = [one for slot in self._slots.values() for one in slot.results.handed if one() is not None]
            if handed:
                self._left[before] = handed

    def _moved(self) -> None:
        """Let streams that were left, where results are read, wait for copies of these to memory of their own."""
        for other in self._left:
            self._device.hold(other)

    def _end_of_step(self) -> None:
        """Run the update that is due after the last launch of a step."""
        if self._follower.at_start:
            self._run_update()

    def _run_update(self) -> None:
        """Update what is updated once per step."""
        self._update_due = False
        if self._update is not None:
            self._update.run()
            self.updates += 1


def graph_callables(
    callables: Any,
    sample_args: Sequence[Any],
    *,
    order: Sequence[int] | None = None,
    warm_up: int = 3,
    sample_kwargs: Sequence[Mapping[str, Any]] | None = None,
    outputs: Literal["static", "copied"] = "static",
    after_step: Callable[[], None] | None = None,
    host_draws: Literal["refused", "unused"] = "refused",
    device: Device | None = None,
) -> GraphedCallables:
    """Make graphs of callables. `optimizations.graph_callables` documents it."""
    torch_internals.require_supported()
    require_one_of("outputs", outputs, ("static", "copied"))
    require_one_of("host_draws", host_draws, HOST_DRAWS)
    if type(warm_up) is not int:
        raise TypeError(f"warm_up={warm_up!r} must be a whole number, not {type(warm_up).__name__}")
    if warm_up < 1:
        raise ValueError(f"warm_up={warm_up}: libraries must run once before a capture")
    if after_step is not None and not callable(after_step):
        raise TypeError(f"after_step needs a function without arguments, not {type(after_step).__name__}")
    if order is not None and not isinstance(order, Iterable):
        raise TypeError(f"order={order!r} has to be a list of whole numbers, such as [1, 1, 2, -2, -1, 2, -2, -1]")
    flat, sizes = taken_apart(callables)
    samples = samples_of(sample_args, sample_kwargs, len(flat))
    entries = default_order(len(sizes), training=torch.is_grad_enabled()) if order is None else list(order)
    planned = events(expanded(entries, sizes), len(flat))
    where = device or device_of(samples)
    try:
        made = GraphedCallables(
            flat,
            samples,
            planned,
            warm_up=warm_up,
            outputs=outputs,
            after_step=after_step,
            device=where,
            host_draws=host_draws,
            any_order=order is None and after_step is None,
        )
    except Exception:
        with contextlib.suppress(Exception):  # what was raised matters more
            where.give_back()
        raise
    where.give_back()  # what warm-up took on its own stream, where the program cannot have it
    return made


def release_callables() -> None:
    """Free the graphs of all graphed callables."""
    for group in _groups.alive():
        group.close()


__all__ = ["GraphedCallables", "WrongOrder", "graph_callables"]
