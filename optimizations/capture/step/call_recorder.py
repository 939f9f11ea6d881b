"""Bring calls of a step to a graph: observe and capture them, and do their work otherwise where the capture fails.

Note [Nothing twice, nothing lost]. A capture runs the Python of a call and executes nothing. If it succeeds, the launch
that follows is the work of that call. If it fails, what Python changed is put back (`HostState.restore`, gradients, the
states of random generators) and the call runs from its beginning, when nothing of the capture is alive any more. So it
is where the launch fails, or is interrupted before it; only gradients from before that the step does not depend on are
gone by then, and are None. During the capture they are alive next to those that it makes.
"""

from __future__ import annotations

import functools
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from optimizations.capture.device import Device
from optimizations.capture.inputs import NotLaunched
from optimizations.capture.signature import texts
from optimizations.capture.static_loader import Fetches
from optimizations.capture.step.call import Call, refused_iterators
from optimizations.capture.step.changes import Changes, tokens_of, with_changed
from optimizations.capture.step.failed_captures import cause, is_programs_own, why
from optimizations.capture.step.gradients import put
from optimizations.capture.step.host_random import HostRandom, decides
from optimizations.capture.step.host_tensors import HostTensors, on_the_host
from optimizations.capture.step.kept_recordings import KeptRecordings
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.observer import SETS_UP, StepDiffers, StepRefused
from optimizations.capture.step.observing import Observed, observe
from optimizations.capture.step.options import StepOptions
from optimizations.capture.step.progress import OBSERVED, Progress
from optimizations.capture.step.recording import capture
from optimizations.capture.step.surroundings import alone
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.used_names import RanCode
from optimizations.report.steps import Refusal


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
        self._follows = True
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
        undo, snapshot = _undo(device, call), call.state.snapshot()
        marks = TensorMarks({**call.state.tensors, **call.named_gradients()}, to_restore=True)
        pool = self._recordings.pool_for(call.parameters) or device.new_pool()
        graph = device.new_graph()
        try:
            with alone():
                recording = capture(
                    device,
                    self._run,
                    call,
                    graph,
                    pool,
                    self._rates,
                    progress,
                    self._options,
                    in_place=progress.in_place(call.tensors) - self._recordings.copied_inputs(key),
                    pool_bytes_elsewhere=sum(map(device.pool_bytes, self._recordings.pools(but=pool))),
                    follow=self._follows,
                    marks=marks,
                    dropped=self._changes.dropped,
                )
            recording.key_value = self._key_value
        except BaseException as raised:
            error = cause(raised)
            # The allocator may still take a pool for one in a capture.
            freed = [graph.reset, functools.partial(self._recordings.spoil, pool)]
            _do_all([*freed, functools.partial(call.state.restore, snapshot), marks.restore, *undo])
            del marks, undo  # which hold the memory of gradients
            if not isinstance(error, Exception):
                raise error  # noqa: B904 (with its own cause and context, as the program would see it)
            instead = self._instead(device, key, call, progress, error)
            del error  # and with it what the capture made: its frames hold that
        else:
            del marks, undo
            try:
                recording.report = replace(recording.report, record_s=time.perf_counter() - began)
                self._recordings.add(device, key, recording)
                progress.recorded()
                stay = recording.gradients.stay(call.before)
                call.before.clear()  # gradients that are unused from now on
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
                if not isinstance(error, NotLaunched):
                    raise
                self._follows = False
                self._recordings.drop(key, recording)
            return self._call(call.args, call.kwargs)
        device.give_back()
        return instead()

    def _instead(
        self, device: Device, key: Hashable, call: Call, progress: Progress, error: Exception
    ) -> Callable[[], Any]:
        """Return what does the work of a call whose capture failed with `error`, which it does not hold."""
        if isinstance(error, NotLaunched):
            self._follows = False
            return functools.partial(self._record, device, key, call, progress)
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


def _undo(device: Device, call: Call) -> list[Callable[[], Any]]:
    """Return what puts gradients and the states of random generators back to what they are now."""
    host_random = HostRandom(with_torch=device.has_own_random, generators=call.state.generators)
    before, states = [*call.before], device.random_states()
    return [
        functools.partial(put, call.parameters, before),
        host_random.restore,
        functools.partial(device.restore_random_states, states),
    ]
