"""Bring calls of a step to a graph: observe and capture them, and do their work otherwise where the capture fails.

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
from optimizations.capture.signature import texts
from optimizations.capture.static_loader import Fetches
from optimizations.capture.step.audit import Audits
from optimizations.capture.step.call import Call, refused_iterators
from optimizations.capture.step.changes import Changes, tokens_of, with_changed
from optimizations.capture.step.failed_captures import cause, is_programs_own, why
from optimizations.capture.step.gradients import copied, put
from optimizations.capture.step.host_random import HostRandom, decides
from optimizations.capture.step.host_tensors import HostTensors, on_the_host
from optimizations.capture.step.kept_recordings import KeptRecordings
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.mentioned import GradientsMentioned
from optimizations.capture.step.observer import SETS_UP, StepDiffers, StepRefused
from optimizations.capture.step.observing import Observed, observe
from optimizations.capture.step.offloaded import OffloadedGradients
from optimizations.capture.step.options import StepOptions
from optimizations.capture.step.progress import OBSERVED, Progress
from optimizations.capture.step.recording import capture
from optimizations.capture.step.surroundings import alone
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.used_names import RanCode
from optimizations.report.steps import Refusal


class Mentioned(enum.Enum):
    """Name what captures of a call had in them of gradients from before. Note [Words that are left over] in
    `gradients`."""

    NOT_SEEN = enum.auto()
    ONCE = enum.auto()
    ALWAYS = enum.auto()


class CallRecorder(ABC):
    """Observe and record calls of `step`, or run them as they are. `_call` says what becomes of a call."""

    def __init__(self, step: Callable[..., Any], device: Device | None, options: StepOptions) -> None:
        self._step = step
        self._options = options
        self._device = device
        self._fetches = Fetches()
        self._start()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step's Python."""
        with self._fetches.run():
            return self._step(*args, **kwargs)

    def _start(self) -> None:
        self._rates = LearningRates()
        self._recordings = KeptRecordings()
        self._changes = Changes(self._options.ignore)
        self._refused: dict[Hashable, Refusal] = {}
        self._refusals: list[Refusal] = []
        self._drawn: set[str] = set()
        self._with_findings: dict[Hashable, int] = {}
        self._eager = 0
        self._carries = True
        self._observes = False
        self._key_value: Hashable = None

    @abstractmethod
    def _call(self, args: Any, kwargs: Any) -> Any:
        """Run a call from its beginning."""

    def _changes_streams(self, device: Device | None, *, observes: bool) -> None:
        """Give memory back before a call that runs on another stream than the calls before it.

        Calls that are observed are on another stream than the program's. The allocator keeps the memory of each stream
        for itself, so that a step would have its memory twice.
        """
        if self._observes is not observes and device is not None and not device.is_capturing():
            self._observes = observes
            device.give_back()

    def _observe(self, device: Device, key: Hashable, call: Call, progress: Progress) -> Any:
        self._eager += 1
        self._changes_streams(device, observes=True)
        seen = self._observed(device, call, progress, progress.outside)
        if seen.set_up:
            if progress.passed_over():
                self._refuse(key, SETS_UP, progress)
            return seen.returned
        progress.asked = progress.asked or seen.asked
        if seen.findings and seen.asked and progress.told_to_be_captured():
            return seen.returned
        numbers = tokens_of(self._changes.numbers(call.state, self._rates.stands_for))
        refusal = progress.note(seen.operations, seen.structure, seen.findings, seen.host_draws)
        if refusal is not None:
            differs = refusal is progress.difference
            self._refuse(key, with_changed(refusal, progress.numbers, numbers) if differs else refusal, progress)
        elif seen.findings:  # perhaps in numbers that the step itself changes, so that no two calls begin alike
            self._with_findings[key] = self._with_findings.get(key, 0) + 1
            if self._with_findings[key] > OBSERVED:
                self._refuse(key, seen.findings[0])
        if not seen.findings:
            self._with_findings.pop(key, None)
        progress.numbers = numbers
        progress.outside, progress.generators, progress.draws = seen.outside, seen.generators, seen.draws
        progress.kept_casts = seen.kept_casts
        progress.drops_gradients, progress.gradients = seen.drops_gradients, seen.gradients
        progress.host = HostTensors(on_the_host(call.state.tensors, device.holds))
        progress.saw(call.tensors)
        return seen.returned

    def _observed(self, device: Device, call: Call, progress: Progress, outside: frozenset[int]) -> Observed:
        """Run a call under the observer, and take in the names in the code that ran."""
        ran = RanCode()

        def step(*args: Any, **kwargs: Any) -> Any:
            with ran:
                return self._run(*args, **kwargs)

        with alone():
            seen = observe(
                device,
                step,
                call,
                self._rates,
                outside,
                generators=progress.generators,
                as_captured=progress.as_captured,
                draws_unused=self._draws_unused,
            )
        if self._changes.take_in_names(ran, call.state, texts((call.args, call.kwargs))):
            self._recordings.look_again()
        named = self._changes.names.has_path
        static = call.state.static_loaders
        seen.findings.extend(refused_iterators(call.state, lambda path: path not in static and named(path)))
        self._drawn.update(seen.host_draws.states)
        return seen

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
        began = time.perf_counter()
        host_random = HostRandom(with_torch=device.has_own_random, generators=call.state.generators)
        snapshot, states = call.state.snapshot(), device.random_states()
        marks = TensorMarks(call.state.tensors, to_restore=True)
        pool = self._recordings.pool_for(call.parameters) or device.new_pool()
        elsewhere = sum(device.pool_bytes(other) for other in self._recordings.pools() if other != pool)
        graph = device.new_graph()
        in_place = progress.in_place(call.tensors) - self._recordings.copied_inputs(key)
        offloaded, captured = OffloadedGradients(device), call
        of_gradients: TensorMarks | None = None
        try:
            if mentioned is Mentioned.ONCE:
                captured = replace(call, before=copied(call.before))
            elif mentioned is Mentioned.NOT_SEEN and progress.drops_gradients and not progress.needs_gradients:
                captured = replace(call, before=offloaded.take(call.before))
            if captured is not call:
                put(call.parameters, captured.before)
            of_gradients = TensorMarks(call.gradients_as_they_are(captured.before), to_restore=True)
            if offloaded:
                device.give_back()
            with alone():
                recording = capture(
                    device,
                    self._run,
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
                    offloaded=offloaded,
                    dropped=self._changes.dropped,
                    audits=Audits(self._options.check_every),
                    concurrency=self._options.concurrency if self._carries else "off",
                )
            recording.key_value = self._key_value
            if mentioned is Mentioned.ONCE and any(recording.gradients.stay(captured.before)):
                raise GradientsMentioned("the step reads gradients from before the call")
        except BaseException as raised:
            error = cause(raised)
            if captured is not call:
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
                functools.partial(_bring_back, device, offloaded, call, raised),
            ]
            _do_all(undo)
            of_gradients = None  # it holds their memory
            if not isinstance(error, Exception):
                raise error  # noqa: B904 (with its own cause and context, as the program would see it)
            instead = self._instead(device, key, call, progress, error, offloaded, mentioned)
            del error  # and with it what the capture made: its frames hold that
        else:
            of_gradients = None
            try:
                recording.report = replace(recording.report, record_s=time.perf_counter() - began)
                self._recordings.add(device, key, recording)
                progress.recorded()
                stay = recording.gradients.stay(call.before)
                call.before.clear()  # gradients that are unused from now on
                captured.before.clear()
                offloaded.drop()
                if not any(one.in_workspace for one in self._recordings):
                    device.let_go_of_workspaces()
                recording.inputs.free()
                device.give_back()
                self._observes = False  # the program goes on on its own stream
                device.follow()
                put(call.parameters, stay)
                recording.audits.start(time.perf_counter())
                return recording.launch(call.tensors, self._rates)
            except BaseException as error:
                if not recording.replays:  # what the capture left was never computed
                    call.state.restore(snapshot)
                    put(call.parameters, stay)
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
        offloaded: OffloadedGradients,
        mentioned: Mentioned,
    ) -> Callable[[], Any]:
        """Return what does the work of a call whose capture failed with `error`, which it does not hold."""
        record = functools.partial(self._record, device, key, call, progress)
        mentions = isinstance(error, GradientsMentioned)
        in_compiled_code = call.state.compiled and is_programs_own(error) and not isinstance(error, NotCarried)
        if offloaded and (offloaded.needed or mentions or in_compiled_code):
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
                numbers = tokens_of(self._changes.numbers(call.state, self._rates.stands_for))
                refusal = with_changed(refusal, progress.numbers, numbers)
        else:
            again = progress.told_to_be_captured()
        if again:
            return functools.partial(self._observe, device, key, call, progress)
        if refusal is not SETS_UP and is_programs_own(error) and self._options.on_refusal == "run":
            return functools.partial(self._run_and_refuse, key, refusal, call, progress)
        return functools.partial(self._refuse_and_run_call, key, refusal, call, progress)

    def _run_and_refuse(self, key: Hashable, refusal: Refusal, call: Call, progress: Progress) -> Any:
        """Run a call, and refuse later ones unless it raises outside of a capture as well: the program gets that."""
        call.before.clear()  # the step may let go of them
        returned = self._as_it_is(call.args, call.kwargs, None)
        self._refuse(key, refusal, progress)
        return returned

    # Calls that run as they are.

    def _as_it_is(self, args: Any, kwargs: Any, refusal: Refusal | None) -> Any:
        if refusal is not None and self._options.on_refusal == "raise":
            raise StepRefused(refusal)
        self._eager += 1
        return self._run(*args, **kwargs)

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

    def _refuse(self, key: Hashable, refusal: Refusal, progress: Progress | None = None) -> None:
        """Let calls of this `progress` run as they are; without one, all of this signature."""
        if progress is not None:
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
        KeyboardInterrupt: one was; after the last.
    """
    try:
        while actions:
            actions[0]()
            del actions[0]
    except KeyboardInterrupt:
        _do_all(actions)
        raise


def _bring_back(device: Device, offloaded: OffloadedGradients, call: Call, error: BaseException) -> None:
    """Give offloaded gradients their memory back. `error` ended the capture.

    Raises:
        torch.OutOfMemoryError: there is none, which others must have taken meanwhile. Gradients without are None.
    """
    try:
        offloaded.restore()
        return
    except torch.OutOfMemoryError:
        traceback.clear_frames(error.__traceback__)  # which hold what the capture made
        device.give_back()
    try:
        offloaded.restore()
    except torch.OutOfMemoryError:
        lost = set(map(id, offloaded.lost()))
        put(call.parameters, [None if id(gradient) in lost else gradient for gradient in call.before])
        raise
