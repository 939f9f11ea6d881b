"""Run a callable before its capture, until two runs in a row did the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from optimizations.capture.callables.forbidding import draws_of, names_of
from optimizations.capture.callables.run import OWN_BACKWARD, Run
from optimizations.capture.device import Device
from optimizations.capture.other_results import other_result
from optimizations.capture.step import compilations, forbidden_calls
from optimizations.capture.step.call import sparse_tensors
from optimizations.capture.step.host_random import SAME_DRAWS, HostDraws, HostRandom, decides
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.observer import SETS_UP, Observer, StepRefused, storage
from optimizations.capture.step.observing import (
    CHECKPOINT_DRAWS,
    call_changes,
    changed_itself,
    host_generators,
    kept_results,
)
from optimizations.capture.step.operations import first_difference
from optimizations.capture.step.progress import MOST_SET_UPS, OBSERVED, PATIENCE
from optimizations.capture.step.reseeding import Reseeding
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.written_memory import Writes
from optimizations.report.steps import Refusal
from optimizations.torch_internals.generator_identity import identity


class FirstWrites:
    """Keep what the memory of these tensors held before an operator wrote it. `note` is for `Observer.before_write`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held = {storage(tensor): tensor for tensor in tensors}
        self._saved: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Copy the memory of a tensor that is about to be written."""
        place = storage(tensor)
        if place and place in self._held and place not in self._saved:
            held = self._held[place].detach()
            self._saved[place] = held, held.untyped_storage().clone()

    def restore(self) -> None:
        """Put back what was written."""
        for held, content in self._saved.values():
            held.untyped_storage().copy_(content)


def warmed_up(
    device: Device,
    run: Callable[[Observer, Run | None], Run],
    state: HostState,
    least: int,
    before_write: FirstWrites,
    *,
    draws_unused: bool = False,
) -> Run:
    """Run a callable at least so many times, until nothing is set up any more and two runs were alike. Gives the last.

    `run` is given the first run, which is not among the two. What a capture cannot hold is refused if it comes again:
    only first runs compile code, time kernels and make what stays. `draws_unused`: what it draws on the host is said to
    decide nothing. Note [Draws that decide nothing] in `host_random`.

    Raises:
        StepRefused: two runs, the last of these, did something that cannot be captured, or all compiled something, or
            differed.
    """
    refused, as_captured = 0, False
    first: Run | None = None
    last: Run | None = None
    outset, read_arguments = state.snapshot(), False
    parameters = state.parameters()
    for count in itertools.count(1):
        snapshot = state.snapshot()
        names = names_of(parameters) if draws_unused else {}
        observer = Observer(device.holds, names, forbid=False, keeps_workspace=device.keeps_workspace)
        writes = Writes(state.tensors.values(), compiled=False)
        observer.before_write, observer.sparse = _both(before_write.note, writes.note), sparse_tensors(state)
        observer.default_generator = device.default_generator()
        if draws_unused:
            observer.compare_values(host_generators(device, state))
        known = {key: one for key, one in _generators(state).items() if key not in observer.host_generators}
        observer.reseeding = reseeding = Reseeding([observer.default_generator, *(one for one, _ in known.values())])
        asked = forbidden_calls.Asked(as_captured=as_captured)
        watched = forbidden_calls.watched(observer, asked, capturing=False, compiled=state.compiled)
        noticed = compilations.noticed(observer, forbid=False)
        drawn = HostRandom(with_torch=device.has_own_random, generators=state.generators)
        states = device.random_states()
        collected = _gradients(parameters)
        marks = TensorMarks(state.tensors, to_restore=True)
        try:
            with device.warming_up(), noticed, watched, observer:
                ran = run(observer, first)
        finally:
            changed = list(marks.changed())
            marks.restore()
            reseeded = reseeding.refusals()
            for generator, content in zip(observer.generators, observer.first_states, strict=True):
                generator.set_state(known.get(identity(generator), (generator, content))[1])
        ran.wrote = frozenset(path for path, tensor in state.tensors.items() if writes.include(tensor))
        if first is None:
            first, read_arguments = ran, observer.read_followed
        if observer.set_up:
            last = None
            if count >= least + MOST_SET_UPS:
                raise StepRefused(SETS_UP)
            continue
        ran.generators = observer.generators
        ran.draws_unused = draws_unused
        ran.host_draws = drawn.draws(*ran.of_results) if draws_unused else HostDraws()
        findings = [*observer.refusals, *ran.refusals, *map(changed_itself, changed)]
        findings += draws_of(drawn, ran, state)
        draws = observer.draws or not all(map(torch.equal, states, device.random_states()))
        if asked.random_state and draws:
            findings.append(CHECKPOINT_DRAWS)
        elif draws:
            findings += reseeded
        if any(a is not b or old != new for (a, old), (b, new) in zip(collected, _gradients(parameters), strict=True)):
            findings.append(OWN_BACKWARD)
        kept = kept_results(state, snapshot, observer)
        refusal = next(itertools.chain(findings, call_changes(state, snapshot, kept)), None)
        if refusal is None:
            refused = 0
            difference = None if last is None else _difference(last, ran)
            if last is not None and difference is None and count >= least:
                if once := sorted(first.wrote - ran.wrote):
                    raise StepRefused(writes_once(once[0]))
                if read_arguments and (left := {change.name for change in state.changes(outset, kept)}):
                    raise StepRefused(keeps_of_first(" and ".join(sorted(left))))
                return replace(
                    ran,
                    saved=first.saved,
                    saved_results=first.saved_results,
                    from_arguments=first.from_arguments,
                    as_first=_difference(first, ran) is None,
                    as_captured=as_captured,
                    draws=draws,
                )
            sources = sorted({*ran.host_draws.states, *(last.host_draws.states if last is not None else ())})
            if difference not in (None, SAME_DRAWS) and sources:
                raise StepRefused(decides(difference, sources))
            if difference is not None and count >= least + PATIENCE:
                raise StepRefused(difference)
            last = ran if count > 1 else None
            continue
        last = None
        if asked.captured and not asked.as_captured:
            as_captured = True
        else:
            refused += 1
            if refused >= OBSERVED and count >= least:
                raise StepRefused(refusal)
    raise AssertionError("unreachable")


def _both(one: Callable[[Any], None], other: Callable[[Any], None]) -> Callable[[Any], None]:
    def call_both(value: Any) -> None:
        one(value)
        other(value)

    return call_both


def writes_once(path: str) -> Refusal:
    """Return the refusal of a callable whose first call writes a tensor that later ones leave as it is."""
    return Refusal(
        f"writes {path.removeprefix('.')} in its first call only, and what warm-up writes is put back",
        "call it once, with the first batch, before graph_callables",
    )


def keeps_of_first(path: str) -> Refusal:
    """Return the refusal of a callable whose first call keeps what it computes from its arguments, for later ones."""
    return Refusal(
        f"keeps {path.removeprefix('.')}, which only its first call computes from its arguments: in warm-up, of a "
        "sample",
        "call it once, with the first batch, before graph_callables",
    )


def _generators(state: HostState) -> dict[int, tuple[torch.Generator, torch.Tensor]]:
    """Return the generators of the program's own, with their states."""
    found = [*state.device_generators, *state.generators.values()]
    return {identity(one): (one, one.get_state()) for one in found if isinstance(one, torch.Generator)}


def _gradients(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor | None, int]]:
    found = [parameter.grad for parameter in parameters]
    return [(gradient, -1 if gradient is None or gradient.is_inference() else gradient._version) for gradient in found]


def _difference(before: Run, after: Run) -> Refusal | None:
    if before.structure != after.structure:
        return other_result(before.structure, after.structure)
    found = first_difference(before.forward, after.forward) or first_difference(before.backward, after.backward)
    if found is None:
        found = after.host_draws.other_results(before.host_draws)
    return SAME_DRAWS if found is None and after.host_draws.repeats(before.host_draws) else found
