"""Capture modules and functions as forward and backward CUDA graphs, for the micro-batches of a schedule.

It does for any callables what Transformer Engine's `make_graphed_callables` does for its own modules, and
`torch.cuda.make_graphed_callables` for one micro-batch. Differences that users notice: the order of a pipeline is found
in the first iteration; changes by the warm-up (buffers, the random state) are undone; a call that does not fit the
graphs, or whose graphs are in use, runs eagerly; gradients may be accumulated over micro-batches; functions may use
parameters that are not their arguments.

This module decides which calls are replayed and which run eagerly. The graphs are made in `capturing`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from optimizations import torch_internals
from optimizations.capture.callables.arguments import Options, Plan, device_of, listed, samples_of
from optimizations.capture.callables.capturing import make_slots
from optimizations.capture.callables.installed import Installed
from optimizations.capture.callables.order import FirstIteration, live_at_once
from optimizations.capture.callables.slot import RESULT_HELD, Slot
from optimizations.capture.callables.warm_up import Variant
from optimizations.capture.device import Device
from optimizations.capture.side_by_side import report_of
from optimizations.capture.step.call import Arguments, watched_by_others
from optimizations.capture.step.changes import MOST_NAMES
from optimizations.capture.step.host_state import MODULE_HOOKS
from optimizations.capture.step.watch import Watch
from optimizations.options import CONCURRENCY, Concurrency
from optimizations.report.steps import CallableReport
from optimizations.weak_registry import WeakRegistry

OTHER_ARGUMENTS = (
    "its arguments or settings differ from those of the capture: structure, numbers, objects, what is passed by "
    "keyword, shapes, strides, dtypes, requires_grad, one tensor in two places, autocast or precision"
)
IN_USE = (
    "it is called while backwards of earlier calls may still come, of as many as it has graphs for; free the "
    "results of these calls, or give graph_callables the order in which the program runs; where one forward calls it "
    "several times, graph a function that makes all these calls"
)
OTHER_STREAM = "it is called on another stream than its graphs before: calls of one group have to use one stream"
OTHER_STATE = (
    "it uses other tensors or numbers, or another mode (train, eval), than those they were captured with; write new "
    "values into the same tensors, or call close() and graph_callables again"
)
NOT_CALLED = "it was not called in the first iteration"
NOT_SHARED = "with share_io=True its arguments have to be the results of the callable before"
WARNED_OF = (IN_USE, OTHER_STATE, OTHER_STREAM, NOT_SHARED, RESULT_HELD)
"""Reasons for a warning even if other calls of the callable were replayed."""

_groups: WeakRegistry[GraphedCallables] = WeakRegistry()


class _Variant:
    """Hold the graphs of a callable for the signature of one sample. They are valid while its state is unchanged."""

    def __init__(self, made: Variant, function: Callable[..., Any], slots: Sequence[Slot]) -> None:
        # Hooks of the callable itself run around its graphs. Hooks of other callables that it calls are captured.
        around = id(vars(function)) if isinstance(function, torch.nn.Module) else 0
        self.watch = Watch(
            made.state,
            lambda held, key: key in MODULE_HOOKS and id(held) == around,
            lambda tensor: True,
            made.parameters,
            hooks_of_tensors=False,  # they run after the graph
        )
        self.slots = [slot for slot in slots if slot.place[:2] == (made.number, made.index)]
        for slot in self.slots:
            slot.in_place = self.watch.in_place
        self.arguments = Arguments(*made.sample)


class GraphedCallables(Sequence[Callable[..., Any]]):
    """Return modules and functions, each with forward and backward CUDA graphs for the micro-batches of a schedule.

    It is a sequence of the callables: modules as they are, which run their graphs from now on wherever they stand in a
    model, and functions as new ones. A call runs as it is where no graph fits its arguments, its mode or what it uses,
    or where the backwards of earlier calls still need the graphs' memory. So do calls without gradients, such as
    validation. `.report()` lists the graphs, `.end_iteration()` ends the first iteration of a program without an
    optimizer, `.close()` frees the graphs.

    Args:
        callables: a module or function, or a list of them.
        sample_args: a tuple of arguments for each, nests of tensors on the GPU; or one sequence of tensors for all.
            Default: samples and order are found in the first iteration, which runs as it is and ends when an optimizer
            of PyTorch's has made its step.
        order: forwards as 1, 2, ..., their backwards as -1, -2, ..., micro-batch after micro-batch, as
            `[1, 1, 2, -2, -1, 2, -2, -1]`; numbers stand for the entries of `callables`. It tells how many
            micro-batches are alive at one time. Default: one.
        sample_kwargs: keyword arguments of each, where it is called with such.
        outputs: "static" returns results where the graph writes them, and gives live ones memory of their own before
            the next launch; "copied" copies all of them.
        share_io: a callable reads the results of the one before where they lie, and copies none.
        host_draws: as of `graph_step`.
        concurrency: as of `graph_step`, for each of the graphs.
        device: the GPU of the samples. Tests simulate one.

    Raises:
        WrongOrder: no training loop can follow `order`.
        ValueError, TypeError: an argument is wrong; the message says what is allowed.
        StepRefused: a graph could not repeat what a callable does; nothing was recorded. Without samples it is raised
            by the first call after the first iteration, and later calls run as they are.
    """

    def __init__(
        self,
        callables: Any,
        sample_args: Sequence[Any] | None = None,
        *,
        order: Sequence[int] | None = None,
        sample_kwargs: Sequence[Mapping[str, Any]] | None = None,
        outputs: Literal["static", "copied"] = "static",
        share_io: bool = False,
        host_draws: Literal["refused", "unused"] = "refused",
        concurrency: Concurrency = CONCURRENCY,
        device: Device | None = None,
    ) -> None:
        torch_internals.require_supported()
        self._options, self._callables = Options(outputs, share_io, host_draws, concurrency), listed(callables)
        count = len(self._callables)
        self._first: FirstIteration | None = None
        plan: Plan = ()
        if sample_args is None:
            if order is not None or sample_kwargs is not None:
                raise ValueError("order and sample_kwargs need sample_args; without it the first iteration has both")
            self._first = FirstIteration(count)
        else:
            pairs = [1] * count if order is None else live_at_once(order, count)
            plan = [[one] for one in zip(samples_of(sample_args, sample_kwargs, count), pairs, strict=True)]
            device = device or device_of(plan)
        self._device = device
        self._variants: list[list[_Variant]] = [[] for _ in self._callables]
        self._slots: list[Slot] = []
        self._closed = False
        self._without_graph: Counter[tuple[int, str]] = Counter()
        self._warned: set[int] = set()
        self._installed = [
            Installed(functools.partial(self._call, number), one) for number, one in enumerate(self._callables, start=1)
        ]
        self._graphed = [one.take_place() for one in self._installed]
        _groups.add(self)
        if plan:
            self._make(plan)

    def end_iteration(self) -> None:
        """End the first iteration of a program without a PyTorch optimizer. The next call makes the graphs."""
        if self._first is not None:
            self._first.end()

    def _make(self, plan: Plan) -> None:
        """Make the graphs for these samples.

        Raises:
            StepRefused: a graph could not repeat one of the callables.
        """
        try:
            self._device = device = self._device or device_of(plan)
            with torch.enable_grad():  # as in replayed calls
                for one in make_slots(device, self._callables, plan, self._options, self._slots):
                    variant = _Variant(one, self._callables[one.number - 1], self._slots)
                    self._variants[one.number - 1].append(variant)
        except BaseException:
            self.close()
            raise
        finally:
            if self._device is not None:
                with contextlib.suppress(Exception):  # the first exception matters more
                    self._device.give_back()  # memory that the warm-up cached on its side stream

    def __len__(self) -> int:
        return len(self._callables)

    def __getitem__(self, index: Any) -> Any:
        return self._graphed[index]

    def __reduce__(self) -> Any:
        raise TypeError("graphs cannot be copied or saved: copy or save the modules, and call graph_callables again")

    def close(self) -> None:
        """Free the graphs. Later calls run eagerly."""
        self._closed = True
        self.end_iteration()
        if self._device is not None:
            self._device.wait()
        for one in self._installed:
            one.leave()
        for slot in self._slots:
            slot.free()
        self._slots = []
        self._variants = [[] for _ in self._callables]  # they reference weights, also replaced ones

    @property
    def calls_without_graph(self) -> int:
        """Return the number of calls that ran without a graph. `report()` has the reasons."""
        return self._without_graph.total()

    def report(self) -> tuple[CallableReport, ...]:
        """Return reports on the graphs, forward and backward of each pair."""
        found: list[CallableReport] = []
        for slot in self._slots:
            number, inputs, tangents = slot.place[0], slot.inputs, slot.tangents
            reasons = {reason: times for (of, reason), times in self._without_graph.items() if of == number}
            calls = slot.forward.replays, {} if any(one.callable == number for one in found) else reasons
            copied = inputs.copied_bytes, inputs.copied_tensors
            found.append(CallableReport(*slot.place, "forward", *copied, *calls, report_of(slot.forward.race)))
            if slot.backward is not None:
                copied, raced = (sum(one.nbytes for one in tangents), len(tangents)), slot.backward.race
                found.append(
                    CallableReport(*slot.place, "backward", *copied, slot.backward.replays, {}, report_of(raced))
                )
        return tuple(found)

    # Calls.

    def _call(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        before = self._installed[number - 1].before
        captures = self._device is not None and self._device.is_capturing()
        without = self._closed or captures or not torch.is_grad_enabled()  # such as validation between steps
        if without or watched_by_others():
            return before(*args, **kwargs)
        if self._first is not None:
            if not self._first.is_over:
                return self._first.call(number, before, args, kwargs)
            first, self._first = self._first, None
            self._make(first.plan())
        found = self._fitting(number, args, kwargs)
        if isinstance(found, str):
            self._note(number, found)
            return before(*args, **kwargs)
        slot, tensors = found
        return slot.run(tensors)

    def _fitting(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Slot, list[torch.Tensor]] | str:
        """Return the graphs to replay for a call and its tensors, or the reason why there are none."""
        assert self._device is not None
        if self._device.is_on_other_stream():
            return OTHER_STREAM
        variants = self._variants[number - 1]
        for place, variant in enumerate(variants):
            if (tensors := variant.arguments.tensors_of(args, kwargs)) is not None:
                if place:
                    variants.insert(0, variants.pop(place))  # consecutive calls mostly have the same signature
                break
        else:
            return OTHER_ARGUMENTS if variants else NOT_CALLED
        if not variant.watch.unchanged():
            return OTHER_STATE
        free = [slot for slot in variant.slots if not slot.is_awaited]
        slot = next((one for one in free if not one.inputs.moved(tensors)), None)
        if slot is None:
            return NOT_SHARED if free else IN_USE
        self._device.follow()
        return slot.refused(tensors) or (slot, tensors)

    def _note(self, number: int, reason: str) -> None:
        """Count a call without a graph. Warn once for each callable if it matters, or no call was replayed so far."""
        self._without_graph[number, reason] += 1
        was_replayed = any(slot.forward.replays for slot in self._slots if slot.place[0] == number)
        if number in self._warned or (was_replayed and reason not in WARNED_OF):
            return
        self._warned.add(number)
        more = "" if was_replayed else "; none of its calls had one so far"
        if reason == OTHER_STATE and (names := self._variants[number - 1][0].watch.differing()):
            more = f"; another now: {', '.join(sorted(names)[:MOST_NAMES])}"
        warnings.warn(f"callable {number} runs without its graphs: {reason}{more}", stacklevel=4)


graph_callables = GraphedCallables


def release_callables() -> None:
    """Free the graphs of all graphed callables."""
    for group in _groups.alive():
        group.close()
