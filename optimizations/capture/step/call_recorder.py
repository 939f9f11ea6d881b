"""Calls of a step on their way to a graph: observed, captured, and done in another way where the capture fails.

Note [Nothing twice, nothing lost]. A capture runs the Python of a call and executes nothing. If it succeeds, the launch
that follows is the work of that call. If it fails, what Python changed is put back (`HostState.restore`, gradients, the
states of random generators) and the call runs from its beginning, when nothing of the capture is alive any more. So it
is where the launch fails, or is interrupted before it; only gradients from before that the step does not depend on are
gone by then, and are None.
"""

from __future__ import annotations

import enum
import functools
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from optimizations.capture.copy_nodes import NotCarried
from optimizations.capture.device import Device
from optimizations.capture.step.call import Call
from optimizations.capture.step.changing_values import numbers_in, with_names
from optimizations.capture.step.deciding_values import DecidingValues, Suspects
from optimizations.capture.step.failed_captures import cause, is_programs_own, why
from optimizations.capture.step.followed_calls import FollowedCalls
from optimizations.capture.step.gradient_copies import copied
from optimizations.capture.step.gradients import put
from optimizations.capture.step.host_random import HostRandom, decides
from optimizations.capture.step.host_tensors import HostTensors, on_the_host
from optimizations.capture.step.kept_recordings import KeptRecordings
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.library_counters import (
    READS_COUNTERS,
    LibraryCounters,
    in_both,
    leave_out,
    was_read,
)
from optimizations.capture.step.mentioned import GradientsMentioned
from optimizations.capture.step.observer import SETS_UP, StepDiffers, StepRefused
from optimizations.capture.step.observing import observe
from optimizations.capture.step.options import StepOptions
from optimizations.capture.step.progress import Progress
from optimizations.capture.step.recording import capture
from optimizations.capture.step.running_values import STANDS_ELSEWHERE, entries_at, with_running
from optimizations.capture.step.set_aside import SetAside
from optimizations.capture.step.surroundings import alone
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.unread_arguments import HANDED_ELSEWHERE, put_back, unread_arguments
from optimizations.report.steps import Refusal


class Mentioned(enum.Enum):
    """What captures of a call had in them of gradients from before. Note [Words that are left over] in `gradients`."""

    NOT_SEEN = enum.auto()
    ONCE = enum.auto()
    ALWAYS = enum.auto()


class CallRecorder(ABC):
    """Observes and records calls of `step`, or runs them as they are. `_call` says what becomes of a call."""

    def __init__(self, step: Callable[..., Any], device: Device | None, options: StepOptions) -> None:
        self._step = step
        self._unread = unread_arguments(step)
        self._options = options
        self._device = device
        self._start()

    def _start(self) -> None:
        self._rates = LearningRates()
        self._recordings = KeptRecordings()
        self._deciding = DecidingValues()
        self._counters = LibraryCounters()
        self._refused: dict[Hashable, Refusal] = {}
        self._refusals: list[Refusal] = []
        self._drawn: set[str] = set()
        self._eager = 0
        self._carries = True
        self._observes = False
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._handed_elsewhere = False

    @abstractmethod
    def _call(self, args: Any, kwargs: Any) -> Any:
        """A call from its beginning."""

    def _changes_streams(self, device: Device | None, *, observes: bool) -> None:
        """Before a call: those that are observed are on another stream than the program's. The allocator keeps the
        memory of each stream for itself, so that a step would have its memory twice."""
        if self._observes is not observes and device is not None and not device.is_capturing():
            self._observes = observes
            device.give_back()

    def _observe(self, device: Device, key: Hashable, call: Call, progress: Progress) -> Any:
        self._eager += 1
        self._changes_streams(device, observes=True)
        with alone(), self._counters.reading(call.state) as unread:
            as_captured = progress.as_captured
            seen = observe(
                device,
                self._run_followed,
                call,
                self._rates,
                progress.outside,
                generators=progress.generators,
                as_captured=as_captured,
                draws_unused=self._draws_unused,
            )
        self._drawn.update(seen.host_draws.states)
        progress.unread = in_both(progress.unread, unread)
        if seen.set_up:
            if progress.passed_over():
                self._refuse(key, SETS_UP, progress)
            return seen.returned
        progress.asked = progress.asked or seen.asked
        if seen.findings and seen.asked and progress.told_to_be_captured():
            return seen.returned
        numbers = numbers_in(call.state, self._rates.stands_for)
        refusal = progress.note(seen.operations, seen.structure, seen.findings, seen.host_draws)
        progress.suspects.note(numbers, agrees=progress.agrees)
        if refusal is not None:
            differs = refusal is progress.difference
            refusal = with_names(refusal, progress.numbers, numbers) if differs else refusal
            if not self._told_apart(key, refusal, progress):
                self._refuse(key, refusal, progress)
        progress.numbers = numbers
        progress.outside, progress.generators, progress.draws = seen.outside, seen.generators, seen.draws
        progress.kept_casts = seen.kept_casts
        progress.drops_gradients, progress.gradients = seen.drops_gradients, seen.gradients
        progress.host = HostTensors(on_the_host(call.state.tensors, device.holds))
        progress.saw(call.tensors)
        progress.bound(seen.running)
        return seen.returned

    def _record(
        self,
        device: Device,
        key: Hashable,
        call: Call,
        progress: Progress,
        *,
        mentioned: Mentioned = Mentioned.NOT_SEEN,
    ) -> Any:
        """Capture the call and launch it, or run it as it is. Note [Nothing twice, nothing lost]."""
        if len(self._recordings) >= self._options.limit and not self._recordings.drop_idle():
            of_values = bool(self._recordings.of(key))
            fewer = "pass numbers that change as tensors on the GPU" if of_values else "pad the batch to fewer sizes"
            refusal = Refusal(
                f"has {self._options.limit} graphs already, which is the limit",
                f"{fewer}, or raise graph_step's limit",
            )
            return self._refuse_and_run_call(key, refusal, call, progress)
        try:
            if not device.ready():  # the last observed call was on another stream
                return self._observe(device, key, call, progress)
        except RuntimeError as not_ready:
            return self._refuse_and_run_call(key, why(not_ready), call)
        if (running := entries_at(call.state, progress.running, device.holds)) is None:  # something else stands there
            if progress.met_another():
                return self._refuse_and_run_call(key, STANDS_ELSEWHERE, call, progress)
            return self._observe(device, key, call, progress)
        leave_out(call.state, progress.unread or {})
        given = with_running(call, running)
        began = time.perf_counter()
        host_random = HostRandom(with_torch=device.has_own_random, generators=call.state.generators)
        snapshot, states = call.state.snapshot(), device.random_states()
        marks = TensorMarks(call.state.tensors, to_restore=True)
        pool = self._recordings.pool_for(call.parameters) or device.new_pool()
        elsewhere = sum(device.pool_bytes(other) for other in self._recordings.pools() if other != pool)
        graph = device.new_graph()
        in_place = progress.in_place(given.tensors) - self._recordings.copied_inputs(key)
        set_aside, captured = SetAside(device), given
        of_gradients: TensorMarks | None = None
        try:
            if mentioned is Mentioned.ONCE:
                captured = replace(given, before=copied(call.before))
            elif mentioned is Mentioned.NOT_SEEN and progress.drops_gradients and not progress.needs_gradients:
                captured = replace(given, before=set_aside.take(call.before))
            if captured is not given:
                put(call.parameters, captured.before)
            of_gradients = TensorMarks(call.gradients_as_they_are(captured.before), to_restore=True)
            if set_aside:
                device.give_back()
            with alone(), self._counters.reading(call.state) as unread:
                recording = capture(
                    device,
                    self._run_followed,
                    captured,
                    graph,
                    pool,
                    self._rates,
                    progress,
                    self._options.memory_budget_bytes,
                    in_place,
                    pool_bytes_elsewhere=elsewhere,
                    carry=self._carries,
                    marks=(marks, of_gradients),
                    draws_unused=self._draws_unused,
                    may_mention=mentioned is Mentioned.ALWAYS,
                    set_aside=set_aside,
                    running=running,
                )
            if was_read(progress.unread or {}, unread):
                progress.unread = None
                raise StepDiffers(READS_COUNTERS)
            if self._handed_elsewhere:
                raise StepDiffers(HANDED_ELSEWHERE)
        except BaseException as raised:
            error = cause(raised)
            if captured is not given:
                captured.before.clear()
            undo: list[Callable[[], Any]] = [
                graph.reset,
                functools.partial(self._recordings.spoil, pool),  # the allocator may still take it for one in a capture
                functools.partial(call.state.restore, snapshot),
                marks.restore,
                *([of_gradients.restore] if of_gradients else []),
                functools.partial(put, call.parameters, call.before),
                host_random.restore,
                functools.partial(device.restore_random_states, states),
                functools.partial(_bring_back, device, set_aside, call, raised),
            ]
            _do_all(undo)
            of_gradients = None  # it holds their memory
            if not isinstance(error, Exception):
                raise error  # noqa: B904 (with its own cause and context, as the program would see it)
            instead = self._instead(device, key, call, progress, error, set_aside, mentioned)
            del error  # and with it what the capture made: its frames hold that
        else:
            of_gradients = None
            try:
                recording.report = replace(recording.report, record_s=time.perf_counter() - began)
                self._recordings.add(device, key, recording)
                progress.recorded()
                call.before.clear()  # gradients that play no part any more
                captured.before.clear()
                set_aside.drop()
                if not any(one.in_workspace for one in self._recordings):
                    device.let_go_of_workspaces()
                recording.inputs.free()
                device.give_back()
                self._observes = False  # the program goes on on its own stream
                device.follow()
                recording.gradients.take_back()
                return recording.launch(given.tensors, self._rates)
            except BaseException as error:
                if not recording.replays:  # what the capture left was never computed
                    call.state.restore(snapshot)
                    recording.gradients.take_back()
                if not isinstance(error, NotCarried):
                    raise
                self._carries = False
                self._recordings.drop(key, recording)
            return self._call(call.args, call.kwargs)
        device.give_back()
        return instead()

    def _instead(
        self,
        device: Device,
        key: Hashable,
        call: Call,
        progress: Progress,
        error: Exception,
        set_aside: SetAside,
        mentioned: Mentioned,
    ) -> Callable[[], Any]:
        """What does the work of a call whose capture failed with `error`, which it does not hold."""
        record = functools.partial(self._record, device, key, call, progress)
        mentions = isinstance(error, GradientsMentioned)
        in_compiled_code = call.state.compiled and is_programs_own(error) and not isinstance(error, NotCarried)
        if set_aside and (set_aside.needed or mentions or in_compiled_code):
            progress.needs_gradients = True
            return functools.partial(record, mentioned=Mentioned.ONCE if mentions else mentioned)
        if mentioned is Mentioned.ONCE:
            return functools.partial(record, mentioned=Mentioned.ALWAYS)
        if mentions:
            return functools.partial(record, mentioned=Mentioned.ONCE)
        if isinstance(error, NotCarried):
            self._carries = False
            return functools.partial(record, mentioned=mentioned)
        if self._options.on_refusal == "raise" and is_programs_own(error) and not isinstance(error, RuntimeError):
            raise error  # the call would have raised it too; nothing of it was done
        refusal = why(error)
        draws = isinstance(error, StepDiffers) and bool(progress.host_draws.states)
        if refusal is SETS_UP:
            again = not progress.passed_over()
        elif draws:
            again, refusal = False, decides(refusal, progress.host_draws.states)
        elif isinstance(error, StepDiffers):
            again = progress.differed()
            if not again:
                refusal = with_names(refusal, progress.numbers, numbers_in(call.state, self._rates.stands_for))
        else:
            again = progress.told_to_be_captured()
        if again:
            return functools.partial(self._observe, device, key, call, progress)
        if refusal is not SETS_UP and is_programs_own(error) and self._options.on_refusal == "run":
            return functools.partial(self._run_and_refuse, key, refusal, call, progress)
        final = draws or refusal is SETS_UP or isinstance(error, torch.OutOfMemoryError)
        if not final and self._is_exception(key, refusal, call, progress):
            call.before.clear()  # the step may let go of them
            return functools.partial(self._as_it_is, call.args, call.kwargs, None)
        return functools.partial(self._refuse_and_run_call, key, refusal, call, progress)

    def _run_and_refuse(self, key: Hashable, refusal: Refusal, call: Call, progress: Progress) -> Any:
        """The program gets what the call raises outside of a capture as well; then nothing is refused."""
        call.before.clear()  # the step may let go of them
        returned = self._as_it_is(call.args, call.kwargs, None)
        if not self._is_exception(key, refusal, call, progress):
            self._refuse(key, refusal, progress)
        return returned

    def _is_exception(self, key: Hashable, refusal: Refusal, call: Call, progress: Progress) -> bool:
        """Take in that a call cannot be captured; whether others may be, from which numbers of Python tell it."""
        progress.suspects.note(numbers_in(call.state, self._rates.stands_for), agrees=False)
        alone = bool(progress.suspects.changed()) and progress.not_like_others()
        return self._told_apart(key, refusal, progress) or alone

    # Calls that run as they are.

    def _as_it_is(self, args: Any, kwargs: Any, refusal: Refusal | None) -> Any:
        if refusal is not None and self._options.on_refusal == "raise":
            raise StepRefused(refusal)
        self._eager += 1
        return self._run(*args, **kwargs)

    def _run_followed(self, *args: Any, **kwargs: Any) -> Any:
        """The same, in a call that is looked at. Note [Numbers that are handed on] in `unread_arguments`."""
        self._handed_elsewhere = False
        sites = [] if self._unread is None else self._unread.followed()
        if not sites:
            return self._run(*args, **kwargs)
        calls = FollowedCalls(sites)
        try:
            with calls:
                return self._run(*args, **kwargs)
        finally:
            if calls.differ and self._unread is not None:
                self._handed_elsewhere = True
                self._unread.follow_no_more()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The step. Numbers that were left out of a call's arguments, because nothing reads them, are put back."""
        if self._given is not None:
            args, kwargs = put_back(args, self._given[0]), put_back(kwargs, self._given[1])
        return self._step(*args, **kwargs)

    def _refuse_and_run(
        self, key: Hashable, refusal: Refusal, args: Any, kwargs: Any, progress: Progress | None = None
    ) -> Any:
        self._refuse(key, refusal, progress)
        self._changes_streams(self._device, observes=False)
        return self._as_it_is(args, kwargs, refusal)

    def _refuse_and_run_call(
        self, key: Hashable, refusal: Refusal, call: Call, progress: Progress | None = None
    ) -> Any:
        call.before.clear()  # the step may let go of them
        return self._refuse_and_run(key, refusal, call.args, call.kwargs, progress)

    def _told_apart(self, key: Hashable, refusal: Refusal, progress: Progress) -> bool:
        """Whether calls of this signature are told apart by more numbers from now on, rather than refused."""
        if not self._deciding.tell_apart(key, progress.suspects, refusal):
            return False
        progress.suspects = Suspects()  # those calls have others from now on
        return True

    def _refuse(self, key: Hashable, refusal: Refusal, progress: Progress | None = None) -> None:
        """Calls of this signature run as they are; only those of this `progress` where others are replayed, or may be
        as they are told apart from these, which cannot be captured."""
        told_apart = progress is not None and progress.findings > 0 and self._deciding.known(key)
        if progress is not None and (self._recordings.of(key) or told_apart):
            progress.refusal = refusal
        else:
            self._refused[key] = refusal
        self._note(refusal)

    def _note(self, refusal: Refusal) -> None:
        if refusal not in self._refusals:
            self._refusals.append(refusal)
            runs = "runs some of its calls" if len(self._recordings) else "runs"
            warnings.warn(f"{self._name()} {runs} without a CUDA graph: it {refusal}", stacklevel=4)

    @property
    def _draws_unused(self) -> bool:
        return self._options.host_draws == "unused"

    def _name(self) -> str:
        return getattr(self._step, "__qualname__", type(self._step).__name__)


def _do_all(actions: list[Callable[[], Any]]) -> None:
    """Do each of these, also where one is interrupted, which is then done again from its beginning.

    Raises:
        KeyboardInterrupt: one was; behind the last.
    """
    try:
        while actions:
            actions[0]()
            del actions[0]
    except KeyboardInterrupt:
        _do_all(actions)
        raise


def _bring_back(device: Device, set_aside: SetAside, call: Call, error: BaseException) -> None:
    """Give gradients that were set aside their memory back. `error` ended the capture.

    Raises:
        torch.OutOfMemoryError: there is none, which others must have taken meanwhile. Gradients without are None.
    """
    try:
        set_aside.restore()
        return
    except torch.OutOfMemoryError:
        traceback.clear_frames(error.__traceback__)  # which hold what the capture made
        device.give_back()
    try:
        set_aside.restore()
    except torch.OutOfMemoryError:
        lost = set(map(id, set_aside.lost()))
        put(call.parameters, [None if id(gradient) in lost else gradient for gradient in call.before])
        raise
