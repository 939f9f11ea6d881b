"""Observe, capture and replay the calls of a step, and run a call eagerly if its capture fails.

Note [Nothing twice, nothing lost]. A capture runs the Python of a call and executes no work of the GPU. If it succeeds,
the launch after it does the work of that call. If it fails, all changes of Python state are undone
(`HostState.restore`, gradients, the states of random generators), everything that the capture made is freed, and the
call runs from its beginning. The same is done if the launch fails, or is interrupted before it. Then only earlier
gradients that the step does not read are lost, and are None. They are alive during the capture, in addition to those
that it makes.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.device import Device
from optimizations.capture.side_by_side import NotLaunched, RacedGraph
from optimizations.capture.signature import exact, named_arguments, signature
from optimizations.capture.static_loader import Fetches, StaticLoader
from optimizations.capture.step.audit import changed, difference
from optimizations.capture.step.call import (
    DDP_WARM_UP,
    Call,
    Key,
    alone,
    ambient,
    refused_call,
    refused_iterators,
    watched_by_others,
)
from optimizations.capture.step.changes import Changes, argument_names, named
from optimizations.capture.step.gradients import gradients, put
from optimizations.capture.step.host_state import HostState, hooks_of, of_argument, reach
from optimizations.capture.step.kept_recordings import KeptRecordings
from optimizations.capture.step.learning_rates import RATE, LearningRates
from optimizations.capture.step.observer import Observer, StepDiffers, StepRefused
from optimizations.capture.step.observing import RandomStates, observe
from optimizations.capture.step.options import StepOptions
from optimizations.capture.step.progress import OBSERVED, PATIENCE, Plan, Progress
from optimizations.capture.step.recording import Recording, capture, cause, do_all, why
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.report.steps import Refusal, StepReport

MOST_DROPPED = 4
"""Recordings that may become unusable before they were replayed enough, as a multiple of the limit of recordings."""

SHARE_FRUITLESS = 4
"""Replays per observed call that a graph could not repeat, and number of such calls, after which their signature is
refused."""


class CallRecorder:
    """Replay, observe and record the calls of one step, or run them eagerly.

    Attributes:
        device: the GPU of the step; None until it is known.
        recordings: the captured graphs.
    """

    def __init__(self, step: Callable[..., Any], device: Device | None, options: StepOptions) -> None:
        self._step, self._options, self.device = step, options, device
        self._names = argument_names(step)
        self._fetches = Fetches()
        self._rates = LearningRates()
        self.recordings = KeptRecordings()
        self._changes = Changes(options.ignore)
        self._plan = Plan()
        self._refused: set[Key | None] = set()  # with None, all calls are
        self._refusals: list[Refusal] = []
        self._findings: dict[Key, int] = {}
        self._calls = self._eager = 0
        self._observes = False
        self._key_value: Hashable = None

    def call(self, args: Any, kwargs: Any) -> Any:
        """Do the work of one call, and return its results."""
        self._calls += 1
        key = None if self._options.key is None else _hashable(self._options.key())
        try:
            if (fetched := self._fetches.take()) is None:  # the step handles the end of the epoch
                return self._uncaptured(args, kwargs)
            self._key_value = (key, fetched) if fetched else key
            try:
                return self._call(args, kwargs)
            except NotLaunched:  # nothing was done yet: record without branches
                self._options = replace(self._options, concurrency="off")
                self.recordings.drop(self.recordings.tried)
                return self._call(args, kwargs)
        finally:
            self._fetches.end()

    def close(self) -> None:
        """Free the graphs and their memory. Later calls run eagerly."""
        self._forget_recordings()
        self._rates = LearningRates()  # it references parameters
        self._refused.add(None)

    def name(self) -> str:
        """Return the step's name in the program."""
        return getattr(self._step, "__qualname__", type(self._step).__name__)

    def report(self) -> StepReport:
        """Return a report of all calls so far."""
        return StepReport(
            name=self.name(),
            calls=self._calls,
            eager_calls=self._eager,
            replays=self.recordings.replays,
            recordings=tuple(one.report() for one in reversed(self.recordings.tried)),
            dropped_recordings=self.recordings.dropped,
            patched_learning_rates=self._rates.patched,
            refusals=tuple(self._refusals),
            not_compared=tuple(sorted(self._changes.dropped)),
        )

    def _call(self, args: Any, kwargs: Any) -> Any:
        if self.recordings.tried and self.device is not None and not self.device.follow():
            return self._uncaptured(args, kwargs)
        if watched_by_others():
            return self._uncaptured(args, kwargs)
        for recording in self.recordings.tried:
            known = recording.arguments.tensors_of(args, kwargs)
            if known is not None and recording.key[-1] == self._key_value and recording.fits(known):
                return self._replay_or_audit(recording, args, kwargs, known)
        tensors: list[torch.Tensor] = []
        key = signature((args, kwargs), tensors), ambient(), self._key_value
        if not self._refused.isdisjoint((None, key)):
            return self._uncaptured(args, kwargs)
        return self._without_recording(key, args, kwargs, tensors)

    @property
    def _gpu(self) -> Device:
        assert self.device is not None
        return self.device

    def _replay_or_audit(self, recording: Recording, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """Replay a recording that fits, or audit it by this call."""
        if recording.audits.due(recording.replays):
            free = self._gpu.free_bytes()
            fits = free is None or free >= self._gpu.pool_bytes(recording.graph.pool)
            if fits and isinstance(state := self._reached(args, kwargs), HostState):
                return self._audit(recording, Call(args, kwargs, tensors, state))
            recording.audits.skip(time.perf_counter(), recording.replays)
        if (name := self.recordings.referenced_gradient(recording)) is not None:
            if recording.gradients.lost():
                self.recordings.drop([recording])
            self._note(
                Refusal(
                    f"is called while the program holds the gradient of {name}, which a launch would overwrite",
                    "clone() what is kept of gradients, or drop it before the step is called again",
                )
            )
            return self._uncaptured(args, kwargs)
        return recording.launch(tensors, self._rates)

    def _audit(self, recording: Recording, call: Call) -> Any:
        """Run a call eagerly, and compare its operators with those of the recording that would have been replayed.

        Raises:
            StepChanged: they differ, and `on_change="raise"`.
        """
        began = time.perf_counter()
        replays = recording.audits.since + 1, recording.replays
        returned, seen = self._observed(call, recording.progress, audits=True)
        now = time.perf_counter()
        recording.audits.took(now - began, now, recording.replays)
        why = "compiled code again" if seen.set_up else seen.refusals[0].reason if seen.refusals else None
        found = (why, None) if why else difference(recording.trace, seen.operations, "its recorded graph")
        if found is not None:
            error = changed(self.name(), found, *replays)
            self._forget_recordings()
            if self._options.on_change == "raise":
                raise error
            warnings.warn(f"{error} The step is recorded again.", stacklevel=4)
        return returned

    # Calls that no recording fits.

    def _without_recording(self, key: Key, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        state = self._reached(args, kwargs)
        if isinstance(state, Refusal):
            self._refuse(key, state)
            return self._uncaptured(args, kwargs)
        if (none := self._find_device([*tensors, *state.tensors.values()])) is not None:
            self._refuse(None, none)
            return self._uncaptured(args, kwargs)
        if self._gpu.is_capturing():
            return self._uncaptured(args, kwargs)
        if any(map(torch.nn.parameter.is_lazy, state.tensors.values())):  # its shape is set in this call or later
            return self._warm_up(state, args, kwargs)
        if self._rates.changed(state.optimizers.values(), numbers_only=self._changes.names.has_key(RATE)):
            self._forget_recordings()
        given = named_arguments(args, kwargs, self._names)
        numbers, changing = self._changes.note(state, self._rates.stands_for, given, self.recordings.replays)
        for recording in self.recordings.of(key):  # containers may have been replaced by equal ones
            if recording.fits(tensors, state):
                return self._replay_or_audit(recording, args, kwargs, tensors)
        self._plan.forget_gone()
        moved = self.recordings.drop_unusable(key, state)
        if any(recording.shares(tensors) for recording in self.recordings.of(key)):
            return self._uncaptured(args, kwargs)  # the graph is kept for other calls of this signature
        call = Call(args, kwargs, tensors, state)
        if self.recordings.little_used > MOST_DROPPED * self._options.limit:
            reads = f"it reads {named(moved)}" if moved else "its model or other objects are new after a few calls"
            refusal = Refusal(
                f"was recorded again and again: {reads}",
                "write new values into the same tensors (`copy_`, `load_state_dict`), or pass them as arguments",
            )
            return self._refuse_and_run(None, refusal, call)
        if any(isinstance(one, torch.nn.parallel.DistributedDataParallel) for one in state.modules.values()):
            self._plan.warm_up = max(self._plan.warm_up, DDP_WARM_UP)
        if (refused := refused_call(call, self._gpu.holds)) is not None:
            return self._refuse_and_run(key, refused, call)
        if changing is not None:
            return self._refuse_and_run(None, changing, call)
        found = tuple([gradient is not None for gradient in call.before])
        frozen = tuple([not parameter.requires_grad for parameter in call.parameters])
        held = hooks_of(call.parameters, map(vars, [*state.modules.values(), *state.optimizers.values()]))
        hooks = tuple([id(hook) for registered in held for hook in registered.values()])
        # New code runs uncaptured first: tensors that it caches (`functools.lru_cache`) would never be computed if the
        # capture failed.
        code = tuple(map(type, state.modules.values())), frozenset(state.code)
        progress = self._plan.next((key, found, frozen, hooks, numbers, code))
        if (exhausted := self._plan.exhausted()) is not None:
            return self._refuse_and_run(None, exhausted, call)
        if progress.agreeing >= OBSERVED:
            return self._record(key, call, progress)
        if self._plan.calls > self._plan.warm_up - OBSERVED:
            return self._observe(key, call, progress)
        call.before.clear()  # the step may free them
        return self._warm_up(state, args, kwargs)

    def _warm_up(self, state: HostState, args: Any, kwargs: Any) -> Any:
        """Run a call eagerly on the stream of captures, so that autograd's nodes belong to that stream."""
        self._eager += 1
        self._changes_streams(observes=True)
        with alone(), self._gpu.warming_up(), self._rates.as_tensors():
            self._gpu.may_read(gradients(state.parameters()))
            returned = self._changes.names.run(self._run, *args, **kwargs)
        self._changes.take_in_names(state)
        return returned

    def _find_device(self, tensors: Sequence[torch.Tensor]) -> Refusal | None:
        """Find the GPU of the first of these tensors. Return why all calls are refused if none is on a GPU."""
        if (unknown := torch_internals.unsupported()) is not None:
            return Refusal(f"needs a supported version of PyTorch. {unknown}", "install one of these")
        if self.device is None:
            found = [tensor.device.index for tensor in tensors if tensor.device.type == "cuda"]
            if not found:
                return Refusal("works on no tensor of a GPU", "move the model and the batch to the GPU")
            self.device = Device(found[0])
        return None

    def _reached(self, args: Any, kwargs: Any) -> HostState | Refusal:
        """Return what the step reaches, or a refusal if an object of the program cannot be read."""
        try:
            given = named_arguments(args, kwargs, self._names)
            objects = [one for name, value in given for one in of_argument(value, name)]
            return reach([(self.name(), self._step), *objects])
        except Exception as error:  # for example a module that is imported on first access
            return Refusal(
                f"reaches something that raises {type(error).__name__} when it is read: {error}",
                "keep it where the step does not reach it, or let it raise AttributeError for what it does not have",
            )

    # Observe and record.

    def _observe(self, key: Key, call: Call, progress: Progress) -> Any:
        returned, seen = self._observed(call, progress, audits=False)
        obstacle = progress.note(seen)
        if obstacle is None:
            self._findings.pop(key, None)
        elif seen.set_up or not seen.refusals:
            if progress.tries >= PATIENCE:
                self._refuse(key, obstacle)
        elif not progress.try_as_captured():
            # Of the signature: the step may change numbers itself, so that all calls are of different kinds. What is
            # told that it is captured may compute other numbers, so few calls are.
            found = self._findings[key] = self._findings.get(key, 0) + 1
            if found == OBSERVED:
                self._note(obstacle)
            enough = OBSERVED if progress.as_captured else SHARE_FRUITLESS
            if found * SHARE_FRUITLESS >= max(self.recordings.replays, SHARE_FRUITLESS * enough):
                self._refused.add(key)
        return returned

    def _observed(self, call: Call, progress: Progress, *, audits: bool) -> tuple[Any, Observer]:
        """Run a call under the observer, and collect the names in the code that ran. `audits`: it is an audit."""
        self._eager += 1
        self._changes_streams(observes=True)
        with alone():
            returned, seen = observe(
                self._gpu,
                functools.partial(self._changes.names.run, self._run),
                call,
                self._rates,
                progress.last.outside if progress.last is not None and not audits else (),
                as_captured=progress.as_captured,
                draws_unused=self._options.host_draws == "unused",
            )
        self._changes.take_in_names(call.state)
        named, iterators = self._changes.names.has_path, call.state.iterators
        is_read = lambda path: named(path) and not isinstance(iterators[path], StaticLoader)  # noqa: E731
        seen.refusals.extend(refused_iterators(call.state, is_read))
        return returned, seen

    def _record(self, key: Key, call: Call, progress: Progress) -> Any:
        """Capture the call and launch it, or run it eagerly. Note [Nothing twice, nothing lost]."""
        device = self._gpu
        if len(self.recordings.tried) >= self._options.limit and not self.recordings.drop_idle():
            of_values = bool(self.recordings.of(key))
            fewer = "pass numbers that change as tensors on the GPU" if of_values else "pad the batch to fewer sizes"
            refusal = Refusal(
                f"has {self._options.limit} graphs already, which is the limit",
                f"{fewer}, or raise graph_step's limit",
            )
            return self._refuse_and_run(key, refusal, call)
        try:
            if not device.streams.ready():  # the last observed call was on another stream
                return self._observe(key, call, progress)
        except RuntimeError as not_ready:
            return self._refuse_and_run(key, why(not_ready), call)
        began = time.perf_counter()
        undo: list[Callable[[], Any]] = [functools.partial(put, call.parameters, [*call.before])]
        undo.append(RandomStates(device).restore)
        snapshot = call.state.snapshot()
        marks = TensorMarks({**call.state.tensors, **call.named_gradients()}, to_restore=True)
        pool = self.recordings.pool_for(call.parameters) or device.new_pool()
        graph = RacedGraph(device, pool, self._options.concurrency)
        try:
            with alone():
                recording = capture(
                    graph,
                    self._run,
                    key,
                    call,
                    self._rates,
                    progress,
                    self._options,
                    snapshot=snapshot,
                    marks=marks,
                    dropped=self._changes.dropped,
                )
        except BaseException as raised:
            error = cause(raised)
            # The allocator may still treat the pool as in a capture.
            freed = [graph.captured.reset, functools.partial(self.recordings.spoiled.append, pool)]
            do_all([*freed, functools.partial(call.state.restore, snapshot), marks.restore, *undo])
            del marks, undo  # they reference the memory of gradients
            if not isinstance(error, Exception):
                raise error  # noqa: B904 (with its own cause and context, as in eager)
            instead = self._instead(key, call, progress, error)
            del error  # its frames reference what the capture made
        else:
            del marks, undo
            try:
                recording.record_s = time.perf_counter() - began
                self.recordings.add(recording)
                progress.tries = 0
                self._plan.fruitless = 0
                stay = recording.gradients.stay(call.before)
                call.before.clear()  # these gradients are unused from now on
                device.give_back()
                self._observes = False  # the program continues on its own stream
                device.follow()
                put(call.parameters, stay)
                return recording.launch(call.tensors, self._rates)
            except BaseException:
                if not recording.replays:  # gradients of the capture were never computed
                    put(call.parameters, stay)
                raise
        device.give_back()
        return instead()

    def _instead(self, key: Key, call: Call, progress: Progress, error: Exception) -> Callable[[], Any]:
        """Return a function that runs a call whose capture failed. It does not reference `error`.

        The program may have raised it, so that it does so uncaptured as well. Then the call is not refused.
        """
        refusal = progress.failed(why(error))
        again = progress.tries < PATIENCE if isinstance(error, StepDiffers) else progress.try_as_captured()
        if again:
            return functools.partial(self._observe, key, call, progress)
        may_raise = not isinstance(error, (StepRefused, torch.OutOfMemoryError))
        return functools.partial(self._refuse_and_run, key, refusal, call, may_raise=may_raise)

    # Calls that run eagerly.

    def _run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the step's Python."""
        with self._fetches.run():
            return self._step(*args, **kwargs)

    def _changes_streams(self, *, observes: bool) -> None:
        """Free cached memory before a call on a different stream from the previous calls.

        Observed calls run on a side stream. The allocator caches memory per stream, so a step would use its memory
        twice.
        """
        if self._observes is not observes and self.device is not None and not self.device.is_capturing():
            self._observes = observes
            self.device.give_back()

    def _uncaptured(self, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run a call eagerly, without references to the earlier gradients: the step may free them."""
        if call is not None:
            call.before.clear()
        self._changes_streams(observes=False)
        self._eager += 1
        return self._run(*args, **kwargs)

    def _refuse_and_run(self, key: Key | None, refusal: Refusal, call: Call, *, may_raise: bool = False) -> Any:
        """Refuse this call and later equal ones, or without a key all. If it `may_raise`, run it first."""
        if not may_raise:
            self._refuse(key, refusal)
        returned = self._uncaptured(call.args, call.kwargs, call)
        if may_raise:
            self._refuse(key, refusal)
        return returned

    def _refuse(self, key: Key | None, refusal: Refusal) -> None:
        """Make no further recording of this signature, or without one of any."""
        self._refused.add(key)
        if key is None:
            self._plan.by_kind.clear()
        self._note(refusal)

    def _forget_recordings(self) -> None:
        """Free all recordings, and observe calls of every kind again before the next one."""
        self.recordings.drop(self.recordings.tried)
        self._plan.by_kind.clear()

    def _note(self, refusal: Refusal) -> None:
        if refusal not in self._refusals:
            self._refusals.append(refusal)
            runs = "runs some of its calls" if len(self.recordings.tried) else "runs"
            warnings.warn(f"{self.name()} {runs} without a CUDA graph: it {refusal}", stacklevel=5)


def _hashable(value: Any) -> Hashable:
    """Return what `key` returned, so that 1, 1.0 and True differ.

    Raises:
        TypeError: it cannot be compared.
    """
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"key() returned a {type(value).__name__}, which has no hash: return numbers, strings or tuples of these"
        ) from error
    return exact(value)
