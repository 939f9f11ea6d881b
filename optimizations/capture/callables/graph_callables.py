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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from optimizations import torch_internals
from optimizations.capture.callables.arguments import Options, Plan, Sample, device_of, listed, samples_of
from optimizations.capture.callables.capturing import Variant, make_slots
from optimizations.capture.callables.installed import Installed
from optimizations.capture.callables.order import FirstIteration, live_at_once
from optimizations.capture.callables.slot import RESULT_HELD, Slot
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

    def __init__(self, made: Variant, slots: Sequence[Slot]) -> None:
        # Hooks of the callable itself run around its graphs. Hooks of other callables that it calls are captured.
        around = id(getattr(made.called.function, "__dict__", None))
        self.watch = Watch(
            made.state,
            lambda held, key: key in MODULE_HOOKS and id(held) == around,
            lambda tensor: True,
            made.parameters,
            hooks_of_tensors=False,  # they run after the graph
        )
        self.slots = [slot for slot in slots if slot.place[:2] == (made.called.number, made.index)]
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
        self._options, found = Options(outputs, share_io, host_draws, concurrency), listed(callables)
        count, samples = len(found), list[tuple[Sample, int]]()
        if sample_args is not None:
            pairs = [1] * count if order is None else live_at_once(order, count)
            samples = list(zip(samples_of(sample_args, sample_kwargs, count), pairs, strict=True))
        elif order is not None or sample_kwargs is not None:
            raise ValueError("order and sample_kwargs need sample_args; without it the first iteration has both")
        self._device = device
        self._slots: list[Slot] = []
        self._closed = False
        self._callables = [Installed(number, one, self._call) for number, one in enumerate(found, start=1)]
        self._first = None if samples else FirstIteration(self._callables)
        _groups.add(self)
        if samples:
            self._make([(called, 0, *one) for called, one in zip(self._callables, samples, strict=True)])

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
            self._device = device = self._device or device_of([sample for _, _, sample, _ in plan])
            with torch.enable_grad():  # as in replayed calls
                for one in make_slots(device, plan, self._options, self._slots):
                    one.called.variants.append(_Variant(one, self._slots))
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
        return [one.graphed for one in self._callables][index]

    def __reduce__(self) -> Any:
        raise TypeError("graphs cannot be copied or saved: copy or save the modules, and call graph_callables again")

    def close(self) -> None:
        """Free the graphs. Later calls run eagerly."""
        self._closed = True
        self.end_iteration()
        if self._device is not None:
            self._device.wait()
        for one in self._callables:
            one.leave()
            one.variants = []  # they reference weights, also replaced ones
        for slot in self._slots:
            slot.free()
        self._slots = []

    @property
    def calls_without_graph(self) -> int:
        """Return the number of calls that ran without a graph. `report()` has the reasons."""
        return sum(one.without_graph.total() for one in self._callables)

    def report(self) -> tuple[CallableReport, ...]:
        """Return reports on the graphs, forward and backward of each pair."""
        found: list[CallableReport] = []
        for slot in self._slots:
            number, *others = slot.place
            reasons = {} if any(others) else dict(self._callables[number - 1].without_graph)
            graph, copied = slot.forward, (slot.inputs.copied_bytes, slot.inputs.copied_tensors)
            found.append(CallableReport(*slot.place, "forward", *copied, graph.replays, reasons, report_of(graph.race)))
            if slot.tangents:
                graph, copied = slot.backward, (sum(one.nbytes for one in slot.tangents), len(slot.tangents))
                found.append(CallableReport(*slot.place, "backward", *copied, graph.replays, {}, report_of(graph.race)))
        return tuple(found)

    # Calls.

    def _call(self, called: Installed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captures = self._device is not None and self._device.is_capturing()
        without = self._closed or captures or not torch.is_grad_enabled()  # such as validation between steps
        if without or watched_by_others():
            return called.before(*args, **kwargs)
        if self._first is not None:
            if not self._first.is_over:
                return self._first.call(called, args, kwargs)
            first, self._first = self._first, None
            self._make(first.plan())
        found = self._fitting(called.variants, args, kwargs)
        if isinstance(found, str):
            self._note(called, found)
            return called.before(*args, **kwargs)
        return found()

    def _fitting(self, variants: list[_Variant], args: Any, kwargs: Any) -> Callable[[], Any] | str:
        """Return a function that replays the graphs for a call, or the reason why there are none."""
        assert self._device is not None
        if self._device.is_on_other_stream():
            return OTHER_STREAM
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
        return slot.refused(tensors) or functools.partial(slot.run, tensors)

    def _note(self, called: Installed, reason: str) -> None:
        """Count a call without a graph. Warn once for each callable if it matters, or no call was replayed so far."""
        called.without_graph[reason] += 1
        was_replayed = any(slot.forward.replays for slot in self._slots if slot.place[0] == called.number)
        if called.is_warned_of or (was_replayed and reason not in WARNED_OF):
            return
        called.is_warned_of = True
        more = "" if was_replayed else "; none of its calls had one so far"
        if reason == OTHER_STATE and (names := called.variants[0].watch.differing()):
            more = f"; another now: {', '.join(sorted(names)[:MOST_NAMES])}"
        warnings.warn(f"callable {called.number} runs without its graphs: {reason}{more}", stacklevel=4)


graph_callables = GraphedCallables


def release_callables() -> None:
    """Free the graphs of all graphed callables."""
    for group in _groups.alive():
        group.close()
