"""Raise an error for what a capture of a callable cannot hold, before it runs or after it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from optimizations.capture.callables.run import Run
from optimizations.capture.device import Device
from optimizations.capture.step import compilations, forbidden_calls
from optimizations.capture.step.call import sparse_tensors
from optimizations.capture.step.host_random import HostDraws, HostRandom, decides
from optimizations.capture.step.host_state import HostState, Rebound
from optimizations.capture.step.observer import Observer, StepRefused, storage
from optimizations.capture.step.observing import (
    CHECKPOINT_DRAWS,
    call_changes,
    drawn_on_the_host,
    host_generators,
    kept_results,
)
from optimizations.capture.step.operations import Operation, first_difference
from optimizations.report.steps import Refusal


def names_of(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """Return names of parameters, by where they lie: which of them a call reads may be drawn."""
    return {storage(one): f"parameter {index}" for index, one in enumerate(parameters) if storage(one)}


def draws_of(host_random: HostRandom, run: Run, state: HostState) -> list[Refusal]:
    """Return a refusal for each source of random numbers of the host that was used, where these may decide something.

    `state`: what the callable reaches.
    """
    return [] if run.draws_unused else [drawn_on_the_host(name, state, "call") for name in host_random.drawn()]


class Forbidding:
    """Raise for what a capture cannot hold, before it runs. See `step.observer`. `like`: what the runs before it did.
    `state`: what it reaches."""

    def __init__(self, device: Device, like: Run, state: HostState, *, compiled: bool) -> None:
        names = names_of(state.parameters()) if like.draws_unused else {}
        self.observer = Observer(
            device.holds, names, forbid=True, generators=like.generators, keeps_workspace=device.keeps_workspace
        )
        self.observer.sparse = sparse_tensors(state)
        if like.draws_unused:
            self.observer.compare_values(host_generators(device, state))
        self._asked = forbidden_calls.Asked(as_captured=like.as_captured)
        self._draws, self._draws_unused, self._drawn = like.draws, like.draws_unused, like.host_draws
        self._host_draws = sorted(like.host_draws.states)
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

    def check(self, expected: Sequence[Operation]) -> None:
        """Check that what ran is what was expected.

        Raises:
            StepRefused: it was something else.
        """
        if self.observer.refusals:  # the callable may have caught the exception
            raise StepRefused(self.observer.refusals[0])
        if self._asked.random_state and (self._draws or self.observer.draws):
            raise StepRefused(CHECKPOINT_DRAWS)
        if (difference := first_difference(expected, self.observer.operations)) is not None:
            raise StepRefused(decides(difference, self._host_draws) if self._host_draws else difference)

    def check_results(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check that what was returned, or kept, is the same of what was computed, and in CPU memory holds the same.

        Raises:
            StepRefused: it is something else.
        """
        difference = HostDraws({}, *self.observer.of_results(tensors)).other_results(self._drawn)
        if self._draws_unused and difference is not None:
            raise StepRefused(decides(difference, self._host_draws) if self._host_draws else difference)


def refuse_changes(state: HostState, snapshot: list[Any], observer: Observer, *, bound: bool = True) -> list[Rebound]:
    """Return attributes and variables that a run bound to what it made; refuse any other change in Python.

    `bound`: whether it may bind any.

    Raises:
        StepRefused: it has.
    """
    kept = kept_results(state, snapshot, observer) if bound else []
    for refusal in call_changes(state, snapshot, kept):
        raise StepRefused(refusal)
    return kept
