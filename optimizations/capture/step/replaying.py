"""Steady replays of a step: calls in the state in which its recording served one, with few looks and one function.

`Recording.fits` and `Recording.launch` find out in each call what this recording has to do: gradients to bring, results
to bind, arrays to compare. A `SteadyReplay` is made behind a launch, of the parts that this recording needs. Structure,
the arguments' looks and aliases, settings, numbers and objects, the state's looks and gradients are a few comparisons
there, in compiled code (`host_code`) and PyTorch's guards. What it does not know as unchanged it does not serve: then
the recording is looked at as ever, and if it serves calls again and again, the steady replay is made of what is there
now.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimizations import host_code, torch_internals
from optimizations.capture.step.gradient_holders import taken_by
from optimizations.capture.step.guard import PROBE_EVERY, SLOW
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.optimizer_states import StatesMoved
from optimizations.capture.step.steady import anomalies_now
from optimizations.capture.step.surroundings import KERNELS, settings_of, watched_by_others
from optimizations.capture.step.watched_entries import UNREADABLE
from optimizations.torch_internals import hook_registry
from optimizations.torch_internals.argument_guard import Found, same_call
from optimizations.torch_internals.argument_words import argument_words, like_each
from optimizations.torch_internals.compiled_entries import CompiledEntries
from optimizations.torch_internals.entry_words import EntryWords, has_parts
from optimizations.torch_internals.tensor_words import TensorWords
from optimizations.torch_internals.versions import count_up

if TYPE_CHECKING:
    from optimizations.capture.step.recording import Recording

data_ptrs_equal = torch_internals.data_ptrs_equal

MISSED = object()
"""What a steady replay gives for a call that it does not serve. Nothing was done then."""

WORTH = 64
"""Calls that one must have served to be made again at once."""

SOONEST = 2
"""Calls after which one is made again that had served fewer, for the first time."""

HELD_OFTEN = 4
"""Calls in a row for which gradients were held, after which that counts as usual."""

STOOD_OFTEN = 8
"""Calls in a row that found gradients where they leave them, after which that counts as usual, for the first time."""


class SteadyReplay:
    """The steady replay of one recording, and when it is made.

    Attributes:
        serve: takes the recording, the positional and the named arguments of a call, and gives its results or `MISSED`.
            It may raise `NotCarried`, as `Recording.launch` does, and `StatesMoved` behind a launch. None while there
            is none. It does not hold the recording, whose graph is freed when nothing else holds it.
    """

    def __init__(self) -> None:
        self.serve: _Serve | None = None
        self._made_at = 0
        self._next, self._wait = 1, 0
        self._held = self._told_at = 0
        self._for_held = False
        self._missed_at = -1
        self._stood, self._stood_often = 0, STOOD_OFTEN

    def served_otherwise(self, recording: Recording, tensors: Sequence[torch.Tensor], rates: LearningRates) -> None:
        """To be told that the recording has served a call with these tensors in the full way.

        One call may be another than those around it, such as the first behind an evaluation. If the next one is served
        again nothing has changed. Where it is not, what is there now is what is steady from then on. Making a steady
        replay looks at everything, and takes as long as a few calls. So one that soon missed is made again after two
        calls, then four, twice as many each time: a program that begins to be steady late has its steady replay before
        it has made as many calls again. Where gradients were held from before it stays: they are let go of, as a rule,
        and it serves the calls after that. Where some are held call after call, one is made that puts back what is
        held, until none is.
        """
        gradients = recording.gradients
        # What was held is in the way of every other launch where all gradients are: the one before left copies.
        in_a_row = recording.replays <= self._told_at + 2
        self._held, self._told_at = (self._held * in_a_row + 1) * gradients.for_now, recording.replays
        for_held = self._held >= HELD_OFTEN and gradients.may_be_held()
        if for_held and not self._for_held:
            self._next, self.serve = recording.replays, None
        if self.serve is not None:
            if gradients.for_now and not self._for_held:
                return
            first, self._missed_at = self._missed_at != recording.replays - 1, recording.replays
            if first:
                return
            worth = recording.replays - self._made_at > max(self._wait, WORTH)
            self._wait = 0 if worth else 2 * self._wait or SOONEST
            self._next = recording.replays + self._wait
            self.serve = None
        if not for_held and gradients.brought:
            return  # calls that bring gradients have no steady replay
        if recording.replays >= self._next:
            self._made_at = recording.replays
            self._for_held = for_held
            # A list that is filled again in each call is another one to who reads words: asked, it is the same.
            by_words = not self._wait
            make = functools.partial(_made, recording, tensors, rates, for_held=for_held, by_words=by_words)
            self.serve, holds = taken_by(make, recording.gradients.known())
            if self.serve is not None:
                vars(self.serve)["holds"] = holds  # for as long as it lives

    def left(self, recording: Recording) -> None:
        """To be told by a steady replay that it has put gradients into their places, where they may have stood already.

        Where they did call after call, one is made that only looks whether they do. It takes twice as many calls the
        next time: a program may take them away again and again.
        """
        self._stood = (self._stood + 1) * recording.gradients.stood
        if self._stood >= self._stood_often:
            self._stood, self._stood_often = 0, 2 * self._stood_often
            self._next, self.serve = recording.replays, None

    def none_held(self, recording: Recording) -> None:
        """To be told that no gradients are held any more: the next call is looked at in the full way."""
        self._held, self._for_held, self._next = 0, False, recording.replays
        self.serve = None


class Pace:
    """Whether a comparison in C++ has become slow: once a dict was written, it looks into all dicts in each call.

    Then it is to be made again, at most once in so many replays, twice as many each time.
    """

    def __init__(self, replays: int, compare: Callable[[], bool]) -> None:
        compare()  # from the second time on it compares versions of dicts
        self._fastest_ns = _time_ns(compare)
        self._wait = PROBE_EVERY
        self._next_making = replays + self._wait
        self.next_look = replays + PROBE_EVERY

    def is_slow(self, replays: int, compare: Callable[[], bool]) -> bool:
        """To be asked at `next_look` replays; where True, it is taken as made again."""
        self.next_look = replays + PROBE_EVERY
        took_ns = min(_time_ns(compare), _time_ns(compare))
        self._fastest_ns = min(self._fastest_ns, took_ns)
        if took_ns <= SLOW * self._fastest_ns or replays < self._next_making:
            return False
        self._wait *= 2
        self._next_making = replays + self._wait
        return True


def _time_ns(function: Callable[[], object]) -> int:
    began = time.perf_counter_ns()
    function()
    return time.perf_counter_ns() - began


_Serve = Callable[["Recording", tuple[Any, ...], dict[str, Any]], Any]


def _made(
    recording: Recording,
    tensors: Sequence[torch.Tensor],
    rates: LearningRates,
    *,
    for_held: bool = False,
    by_words: bool = True,
) -> _Serve | None:
    """The function of a recording whose last launch was a moment ago; None where its calls bring gradients.

    Args:
        for_held: the program holds gradients of the calls before, which are put back behind the launch.
        by_words: what stands in lists and cells is read as words of memory.
    """
    expected, leaves = ((), True) if for_held else recording.gradients.steady()
    if expected is None:
        return None
    arguments, watch, inputs, outputs = recording.arguments, recording.watch, recording.inputs, recording.outputs
    take, inference, other = arguments.beside_guards()
    parameters = recording.gradients.parameters if expected else ()
    places, states = recording.gradients.places, watch.states
    looked_at = [*watch.tensors, *places.apart_from(expected)]
    all_words = by_words and host_code.looks() is None
    entries = EntryWords([one for one in watch.held() if all_words or has_parts(one)])
    words = TensorWords(looked_at, parameters, expected, entries)
    as_they_are = words.unchanged

    settings = settings_of(KERNELS)
    kinds = like_each(tensors, inputs.recording_inputs)
    look = None if kinds is None else argument_words(tensors, distinct=arguments.distinct)

    def compare(tensors: Sequence[torch.Tensor]) -> tuple[Callable[[Found], bool], Any, Callable[[], bool]]:
        asked = [one for one in watch.held() if not entries.tells_of(one)]
        in_dicts = watch.held_in_dicts()
        told = CompiledEntries(in_dicts, asked)
        same, rest = same_call(
            tensors if look is None else (),
            looked_at,
            asked,
            in_dicts,
            parameters,
            expected,
            unread=watch.held_unread(),
            settings=() if settings is not None else KERNELS,
            distinct=arguments.distinct,
            no_modes=arguments.no_modes,
            read_apart=words,
            of_each_kind=() if look is None else kinds or (),
            told_apart=told,
        )
        return same, rest, told.unchanged

    same, rest, entries_stand = compare(tensors)
    pace = Pace(recording.replays, functools.partial(same, (tuple(tensors) if look is None else (), rest)))
    next_look = pace.next_look
    remaining = watch.rest()
    data_ptr, handles = torch.Tensor.data_ptr, hook_registry.HANDLES
    registered, hooks_unchanged, in_python = remaining.hooks_registered, remaining.hooks, remaining.in_python
    lie = [*zip([*remaining.tensors, *places.own], [*remaining.addresses, *places.addresses], strict=True)]
    if any(data_ptr(tensor) != address for tensor, address in lie):
        return None
    not_read = [(tensor, address) for tensor, address in lie if not words.tells_of(tensor)]
    held, addresses_of_held = [one for one, _ in not_read], [address for _, address in not_read]
    places_of_held = list(range(len(held)))
    anomalies_are, anomalies = anomalies_now, anomalies_now()
    region, bound, written = recording.region, recording.bound, recording.written
    rare: list[Callable[[Recording, list[torch.Tensor]], bool]] = []
    if not (tensors or looked_at):  # in which looks would show it
        rare.append(lambda recording, found: torch.is_inference_mode_enabled() is inference and not watched_by_others())
    if other is not None:
        rare.append(lambda recording, found: other(found))
    if region is not None:
        rare.append(lambda recording, found: region.lasts())
    if places.has_others():
        rare.append(lambda recording, found: places.others_stand())
    if bound:
        rare.append(lambda recording, found: bound.fit())
    holds_one_at = recording.written_memory.holds_one_at
    moved = inputs.moved if inputs.in_place else None
    bind_at = inputs.bind_at
    prepare, take_results, graph = outputs.prepare, outputs.take, recording.graph
    bind = bound.bind if bound else None
    copy_out = outputs.copy_out if outputs.copies_behind else None
    only = outputs.only()
    allocate = None if only is None else only.allocate
    before = rates.write if rates.standing else None
    leave = recording.gradients.leave if leaves else None
    may_stand = leaves and not for_held and recording.gradients.may_stand()
    bring = recording.gradients.bring if for_held else None
    unheld = None if for_held else recording.gradients.unheld()
    counted = recording.counted()
    counts_up = count_up(counted) if counted else None
    keeps_states = bool(states)
    states_stand = states.compared_now()

    def serve(recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal same, rest, entries_stand, next_look
        found = take(args, kwargs)
        if found is None:
            return MISSED
        if look is None:
            given: tuple[torch.Tensor, ...] = tuple(found)
            addresses = None
        else:
            given = ()
            if (addresses := look(found)) is None:
                return MISSED
        if not same((given, rest)) or not entries_stand() or not (settings is None or settings()):
            return MISSED
        if anomalies_are() is not anomalies:
            return MISSED
        for one in rare:
            if not one(recording, found):
                return MISSED
        if addresses is None:
            addresses = list(map(data_ptr, found))
        lie_elsewhere = addresses != inputs.bound_at
        if lie_elsewhere:
            if recording.shares(found) if written else holds_one_at(found, addresses):
                return MISSED
            if moved is not None and moved(found):
                return MISSED
        if handles.next_id != registered and not hooks_unchanged():
            return MISSED
        if in_python:
            try:
                for unchanged in in_python:
                    if not unchanged():
                        return MISSED
            except UNREADABLE:
                return MISSED
        if not as_they_are():
            return MISSED
        if held and not data_ptrs_equal(held, addresses_of_held, places_of_held):
            return MISSED
        if unheld is not None and not unheld():
            return MISSED
        if recording.replays >= next_look:
            if pace.is_slow(recording.replays, functools.partial(same, (given, rest))):
                same, rest, entries_stand = compare(found)
            next_look = pace.next_look

        # From here on as `Recording.launch`.
        if allocate is None or only is None:
            fresh = prepare()
        else:
            result = allocate()
            if (address := data_ptr(result)) != only.address:
                only.lead(address)
        if lie_elsewhere:
            bind_at(found, addresses)
        if bring is not None:
            bring()
        if before is not None:
            before()
        graph.replay()  # by its name, for who times launches
        if copy_out is not None:
            copy_out(fresh)
        if leave is not None:
            leave()
            if may_stand:
                recording.steady.left(recording)
        if written:
            inputs.give_back(found, written)
        if counts_up is not None:
            counts_up()
        recording.replays += 1
        if bring is not None and not recording.gradients.for_now:
            recording.steady.none_held(recording)
        if allocate is None:
            results = take_results(found, fresh)
            result = results if bind is None else bind(results)
        # Behind the launch, while the GPU works: it would take too long before. Note [States behind the launch].
        if keeps_states and not states_stand():
            raise StatesMoved(states.differing(), states.given_back())
        return result

    return serve
