"""The runs of callables before their capture, and what a capture of them cannot hold."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from optimizations.capture.device import Device
from optimizations.capture.step import compilations, forbidden_calls
from optimizations.capture.step.host_state import HostState, Rebound
from optimizations.capture.step.observer import SETS_UP, Observer, StepRefused
from optimizations.capture.step.observing import host_change, kept_results
from optimizations.capture.step.progress import MOST_SET_UPS, OBSERVED
from optimizations.report.steps import Refusal


def warmed_up(device: Device, run: Callable[[], None], state: HostState, least: int) -> bool:
    """Run a callable at least so many times, until nothing is set up any more; what it is told if it asks whether it is
    captured. What a capture cannot hold is refused if it comes again: only first runs compile code, time kernels and
    make what stays.

    Raises:
        StepRefused: two runs, the last of these, did something that cannot be captured, or all compiled something.
    """
    refused, as_captured = 0, False
    for count in itertools.count(1):
        snapshot = state.snapshot()
        observer = Observer(device.holds, {}, forbid=False)
        asked = forbidden_calls.Asked(as_captured=as_captured)
        watched = forbidden_calls.watched(observer, asked, capturing=False, compiled=state.compiled)
        noticed = compilations.noticed(observer, forbid=False)
        with device.warming_up(), noticed, watched, observer:
            run()
        if observer.set_up:
            if count >= least + MOST_SET_UPS:
                raise StepRefused(SETS_UP)
            continue
        refusal = next(_refusals(state, snapshot, observer), None)
        if refusal is None:
            refused = 0
            if count >= least:
                return as_captured
        elif asked.captured and not asked.as_captured:
            as_captured = True
        else:
            refused += 1
            if refused >= OBSERVED and count >= least:
                raise StepRefused(refusal)
    raise AssertionError("unreachable")


class Forbidding:
    """What a capture cannot hold raises before it runs. See `step.observer`."""

    def __init__(self, device: Device, *, compiled: bool, as_captured: bool) -> None:
        self.observer = Observer(device.holds, {}, forbid=True)
        self._asked = forbidden_calls.Asked(as_captured=as_captured)
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


def refuse_changes(state: HostState, snapshot: list[Any], observer: Observer) -> list[Rebound]:
    """Attributes and variables that a run bound to what it made; it may have changed nothing else in Python.

    Raises:
        StepRefused: it has.
    """
    kept = kept_results(state, snapshot, observer)
    for change in state.changes(snapshot, kept):
        raise StepRefused(host_change(change))
    return kept


def _refusals(state: HostState, snapshot: list[Any], observer: Observer) -> Iterator[Refusal]:
    """Why a run cannot be captured."""
    yield from observer.refusals
    for change in state.changes(snapshot, kept_results(state, snapshot, observer)):
        yield host_change(change)
