"""Capture forward, loss, backward and optimizer of a training loop as one CUDA graph per signature of the batch.

A call goes one of four ways. The first calls run as they are, on the side stream that captures use. Then two calls of
a signature are observed: every operator, what Python changed, which gradients were read. If a graph could repeat them,
and they were alike, the next one is captured, and the launch of the graph does its work. From then on a call copies its
batch to where the graph reads it, launches, and copies the results out.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal, cast

import torch

from optimizations import torch_internals
from optimizations.capture.device import Device
from optimizations.capture.inputs import NotLaunched
from optimizations.capture.signature import class_of_objects, exact, is_hashable, signature, without_objects
from optimizations.capture.step.audit import CheckEvery, require_same
from optimizations.capture.step.bound_steps import NAME, is_no_method, step_of, steps_of
from optimizations.capture.step.call import Call, call_of, refused_call, refused_function
from optimizations.capture.step.call_recorder import CallRecorder
from optimizations.capture.step.changes import Numbers, named, numbers_given
from optimizations.capture.step.gradients import gradients, held, pattern
from optimizations.capture.step.hooks import hooks_of
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.learning_rates import RATE, LearningRates
from optimizations.capture.step.options import DEFAULT_LIMIT, DEFAULT_WARM_UP, StepOptions
from optimizations.capture.step.parallel import DDP_WARM_UP
from optimizations.capture.step.progress import Action, Plan
from optimizations.capture.step.reach import of_argument, reach
from optimizations.capture.step.recording import Recording
from optimizations.capture.step.surroundings import alone, ambient, inside, saved_tensor_hooks, watched_by_others
from optimizations.capture.step.used_names import RanCode
from optimizations.capture.step.watch import is_name_dropped, numbers_of
from optimizations.options import CONCURRENCY, Concurrency
from optimizations.report.steps import Refusal, StepChanged, StepReport
from optimizations.weak_registry import WeakRegistry

MOST_DROPPED = 4
"""Recordings that may become unusable before they were of use, as a multiple of those that may be alive."""

MOST_OBJECTS = 8
"""Objects that may stand in one place of the arguments in turn, where a graph belongs to one of them."""

SHARE_FRUITLESS = 4
"""Calls are looked at, only to find that they are refused, no more often than one in so many replays."""

_is_compiling, _this_thread = torch.compiler.is_compiling, threading.get_ident

_steps: WeakRegistry[GraphedStep] = WeakRegistry()


class GraphedStep(CallRecorder):
    """Replay a step function as CUDA graphs where that is possible. `options` are those of `graph_step`.

    Attributes:
        own_attributes: names of all others than those that the program keeps in it.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        if not callable(step):
            raise TypeError(f"graph_step needs a function, not {type(step).__name__}")
        functools.update_wrapper(self, step, updated=())
        self._works_later = refused_function(step)
        self._given_device = device
        self._no_method = is_no_method(step)
        self._of: tuple[GraphedStep, Any] | None = None
        """What decorates the method that this is, and the object whose method it is. See `bound_steps`."""
        self._lock = threading.Lock()
        self._thread: int | None = None
        super().__init__(step, device, StepOptions(**options))
        self.own_attributes = frozenset({*vars(self), "own_attributes"})
        for name, value in vars(step).items() if isinstance(step, types.FunctionType) else ():
            if name not in self.own_attributes and not name.startswith("__"):  # as `functools.wraps` does it
                setattr(self, name, value)
        _steps.add(self)

    def _start(self) -> None:
        super()._start()
        self._plan = Plan(self._options.warm_up)
        self._objects: dict[Hashable, set[Hashable]] = {}
        self._moved: list[str] = []
        self._gone = ""
        self._calls = self._fruitless = 0
        self._all: Refusal | None = None

    @property
    def __isabstractmethod__(self) -> bool:
        """Return whether a class that has it can have no objects, as Python asks."""
        return bool(getattr(self._step, "__isabstractmethod__", False))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return, of a decorated method, a step of its own for each instance, which keeps it."""
        if instance is None or self._no_method:
            return self
        try:  # on the way of every call of a method
            kept = instance.__dict__.get(NAME)
            if kept is not None and kept.owner() is instance:
                return kept.steps[self]
        except (AttributeError, KeyError):
            self._plan.forget_findings()
        held = getattr(instance, "__dict__", None)
        if not isinstance(held, dict):  # of a class, or an object with slots: one step for all, the object an argument
            return types.MethodType(self, instance)
        bound = self._like(self._step.__get__(instance, owner), self._given_device)
        bound._of = self, instance
        return steps_of(instance, held).setdefault(self, bound)

    def __getattr__(self, name: str) -> Any:
        """Return what the program keeps in the function of a method, as a method of Python has it."""
        method, _ = vars(self).get("_of") or (None, None)
        if method is not None and name in vars(method) and name not in method.own_attributes:
            return vars(method)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _like(self, step: Callable[..., Any], device: Device | None = None) -> GraphedStep:
        return GraphedStep(step, device=device, **asdict(self._options))

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedStep:
        """Return the step of the copied objects, which begins from its first call."""
        if self._of is not None:
            method, instance = self._of
            return cast(GraphedStep, step_of(method, copy.deepcopy(instance, memo)))
        return self._like(copy.deepcopy(self._step, memo))

    def __copy__(self) -> GraphedStep:
        return self._like(self._step)

    def __reduce__(self) -> Any:
        """Return where to find the step: a function's name leads to its step, and so does a method's object."""
        if self._of is not None:
            return step_of, self._of
        if not isinstance(self._step, types.MethodType):
            found: Any = sys.modules.get(str(getattr(self._step, "__module__", "")))
            for name in self._name().split("."):
                found = getattr(found, name, None)
            if found is self:
                return self._name()
        return functools.partial(GraphedStep, **asdict(self._options)), (self._step,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or inside.step or self._lock.locked():
            return self._step(*args, **kwargs)  # part of another step, or in another thread at the same time
        with self._lock:  # after `acquire()` an interrupt would leave it locked
            try:
                self._thread = _this_thread()
                self._calls += 1
                key = None if self._options.key is None else _hashable(self._options.key())
                if self._fetches:
                    if not self._fetches.take():  # the step sees to the end of the epoch
                        self._changes_streams(self._device, observes=False)
                        return self._as_it_is(args, kwargs, None)
                    key = key, self._fetches.key
                self._key_value = key
                return self._call(args, kwargs)
            finally:
                self._thread = None
                if self._fetches.is_open:
                    self._fetches.end()

    def _call(self, args: Any, kwargs: Any) -> Any:
        if self._recordings.steady and not self._recordings.follow():
            return self._as_it_is(args, kwargs, None)
        if self._works_later is not None:
            self._note(self._works_later)
            return self._as_it_is(args, kwargs, self._works_later)
        if watched_by_others() or saved_tensor_hooks(False) is not None:
            return self._as_it_is(args, kwargs, None)
        for recording in self._recordings.steady:
            known = recording.arguments.tensors_of(args, kwargs)
            if known is not None and recording.key_value == self._key_value and recording.fits(known):
                try:
                    return self._serve(recording, args, kwargs, known)
                except NotLaunched:
                    break  # the same is met below
        tensors: list[torch.Tensor] = []
        key = signature((args, kwargs), tensors), ambient(), self._key_value
        for recording in self._recordings.of(key):
            if recording.fits(tensors):
                return self._serve_again(key, recording, args, kwargs, tensors)
        refusal = self._all or self._refused.get(key)
        if refusal is not None:
            self._changes_streams(self._device, observes=False)
            return self._as_it_is(args, kwargs, refusal)
        device = self._find_device(tensors, args, kwargs)
        if device is None or device.is_capturing():
            return self._as_it_is(args, kwargs, self._all)
        return self._without_recording(device, key, args, kwargs, tensors)

    def _serve_again(self, key: Hashable, recording: Recording, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """Replay a recording that fits, and try it first from now on."""
        try:
            returned = self._serve(recording, args, kwargs, tensors)
        except NotLaunched:  # nothing was done yet: it is recorded again, with copies before the launch
            self._follows = False
            self._recordings.drop(key, recording)
            return self._call(args, kwargs)
        recording.arguments.renew(tensors)
        self._recordings.comes_first(recording)
        return returned

    def _serve(self, recording: Recording, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """Replay a recording that fits, or audit it by this call."""
        if recording.audits.due() and (device := self._device) is not None:
            free = device.free_bytes()
            state = None
            if free is None or free >= device.pool_bytes(recording.pool):
                state = self._reached(args, kwargs)
            if isinstance(state, HostState):
                return self._audit(device, recording, call_of(args, kwargs, tensors, state))
            recording.audits.skip(time.perf_counter())
        if (name := self._recordings.held_gradient(recording)) is not None:
            refusal = held(name)
            self._note(refusal)
            self._changes_streams(self._device, observes=False)
            return self._as_it_is(args, kwargs, refusal)
        return recording.launch(tensors, self._rates)

    def _audit(self, device: Device, recording: Recording, call: Call) -> Any:
        """Run a call as it is, and compare its operators with those of the recording that would have served it.

        Raises:
            StepChanged: they differ, and `on_change="raise"`.
        """
        began = time.perf_counter()
        replays = recording.audits.since + 1, recording.replays
        self._eager += 1
        self._changes_streams(device, observes=True)
        seen = self._observed(device, call, recording.progress, frozenset())
        now = time.perf_counter()
        recording.audits.took(now - began, now, recording.replays)
        why = "compiled code anew" if seen.set_up else seen.findings[0].reason if seen.findings else None
        try:
            require_same(self._name(), recording.trace, seen.operations, replays=replays, why=why)
        except StepChanged as changed:
            self._recordings.drop_all()
            self._plan.forget()
            if self._options.on_change == "raise":
                raise
            warnings.warn(f"{changed} The step is recorded again.", stacklevel=4)
        return seen.returned

    # Calls that no recording fits.

    def _without_recording(self, device: Device, key: Hashable, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        state = self._reached(args, kwargs)
        if isinstance(state, Refusal):
            return self._refuse_and_run(key, state, args, kwargs)
        if any(map(torch.nn.parameter.is_lazy, state.tensors.values())):
            # A parameter gets its shape in this call, or a later one. What autograd keeps of it may be held until a
            # capture reads it: it has to be of the stream that is captured.
            self._eager += 1
            self._changes_streams(device, observes=True)
            with alone(), device.warming_up():
                return self._run(*args, **kwargs)
        for recording in self._recordings.of(key):  # with other containers, which hold what those of before held
            if self._changes.drop_unnamed(recording.watch.differences(state)) and recording.fits(tensors, state):
                return self._serve_again(key, recording, args, kwargs, tensors)
        dropped = self._recordings.dropped
        self._gone = self._recordings.drop_gone() or self._gone
        self._plan.forget_gone()
        self._moved = self._recordings.drop_moved(key, state) or self._moved
        if self._recordings.dropped > dropped:
            self._plan.forget_findings()
        if any(recording.shares(tensors) for recording in self._recordings.of(key)):
            return self._as_it_is(args, kwargs, None)  # other calls of this signature are served by the graph
        self._recordings.drop_with_moved_inputs(key, tensors)
        if self._recordings.little_used > MOST_DROPPED * self._options.limit:
            self._all = self._little_used_because()
            return self._refuse_and_run(key, self._all, args, kwargs)
        read = self._options.learning_rate == "number" or self._changes.names.has_key(RATE)
        if self._rates.changed(state.optimizers.values(), numbers_only=read):
            self._recordings.drop_all()
            self._plan.forget()
        call = call_of(args, kwargs, tensors, state)
        refusal, distributed = refused_call(call, device.holds)
        if distributed:
            self._plan.warm_up = max(self._plan.warm_up, DDP_WARM_UP)
        if refusal is not None:
            return self._refuse_and_run_call(key, refusal, call)
        numbers = self._changes.numbers(state, self._rates.stands_for)
        changing = self._changes.note(numbers, numbers_given(self._step, args, kwargs), self._recordings.replays)
        if changing is not None:
            self._all = changing
            self._plan.forget()
            return self._refuse_and_run_call(key, changing, call)
        frozen = tuple([not parameter.requires_grad for parameter in call.parameters])
        held = hooks_of(call.parameters, map(vars, state.modules.values()))
        hooks = tuple([id(hook) for registered in held for hook in registered.values()])
        action, progress = self._plan.next((key, pattern(call.before), frozen, hooks, self._told_by(numbers)))
        exhausted = self._plan.exhausted()
        if (refusal := exhausted or self._others_each_time(key)) is not None:
            self._all = refusal
            self._plan.forget()
            return self._refuse_and_run_call(key, refusal, call)
        if progress.refusal is not None:
            self._fruitless += 1
            if self._fruitless * SHARE_FRUITLESS > max(self._recordings.replays, SHARE_FRUITLESS**2):
                self._refused[key] = progress.refusal
            call.before.clear()  # the step may let go of them
            self._changes_streams(device, observes=False)
            return self._as_it_is(args, kwargs, progress.refusal)
        if action is Action.RECORD:
            self._objects.pop(without_objects(key), None)  # it was given in several calls
            return self._record(device, key, call, progress)
        if action is Action.OBSERVE:
            return self._observe(device, key, call, progress)
        self._eager += 1
        self._changes_streams(device, observes=True)
        call.before.clear()  # the step may let go of them
        ran = RanCode()
        with alone(), device.warming_up(), self._rates.as_tensors():
            device.may_read(gradients(call.parameters))
            with ran:
                returned = self._run(*args, **kwargs)
        self._changes.names.take_in(ran, state)
        return returned

    def _told_by(self, numbers: Numbers) -> Hashable:
        """Return the numbers by which calls of one signature are told apart. What is left out now counts for no key."""
        dropped = self._changes.dropped
        if dropped:

            def without(key: Any) -> Any:
                return *key[:-1], frozenset(item for item in key[-1] if not is_name_dropped(item[0], dropped))

            self._plan.rekey(without)
        return numbers_of(
            {name: one for name, one in numbers.items() if not is_name_dropped(name, self._changes.dropped)}
        )

    def _little_used_because(self) -> Refusal:
        """Return why recordings were hardly used."""
        if self._gone and not self._moved:
            return Refusal(
                f"was recorded again and again: it is given another {self._gone} after a few calls",
                "copy what is new into one that stays (`load_state_dict`), or make more calls with each",
            )
        return Refusal(
            f"was recorded again and again: it reads {named(self._moved)}",
            "write new values into the same tensors (`copy_`), or pass them as arguments",
        )

    def _others_each_time(self, key: Hashable) -> Refusal | None:
        """Return why calls are no more observed: an argument is another object each time, equal to itself only."""
        if (unnamed := without_objects(key)) == key:
            return None
        self._objects[unnamed] = self._objects.get(unnamed, set()) | {key}
        if len(self._objects[unnamed]) <= MOST_OBJECTS:
            return None
        return Refusal(
            f"is given another {class_of_objects(key)} in each call, of which nothing is known but that it is another",
            "pass its tensors and numbers as they are, or in a dict, a list or a dataclass",
        )

    # Everything else.

    def _find_device(self, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Device | None:
        """Return the GPU of the batch, or of the tensors the step reaches; None also for an unknown PyTorch."""
        if (unknown := torch_internals.unsupported()) is not None:
            self._all = Refusal(f"needs a PyTorch that Encore knows. {unknown}", "install one of these")
            self._note(self._all)
            return None
        if self._device is None:
            reached: Sequence[torch.Tensor] = [*tensors]
            if not any(tensor.device.type == "cuda" for tensor in reached):
                state = self._reached(args, kwargs)
                reached = () if isinstance(state, Refusal) else list(state.tensors.values())
            found = sorted({tensor.device.index for tensor in reached if tensor.device.type == "cuda"})
            if found:
                self._device = Device(found[0])
            else:
                self._all = Refusal("works on no tensor of a GPU", "move the model and the batch to the GPU")
                self._note(self._all)
        return self._device

    def _reached(self, args: Any, kwargs: Any) -> HostState | Refusal:
        """Return what the step reaches; a reason where an object of the program's cannot be looked at."""
        try:
            return reach(self._roots(args, kwargs))
        except Exception as error:  # such as of a module that is imported when it is first looked at
            return Refusal(
                f"reaches something that raises {type(error).__name__} when it is read: {error}",
                "keep it where the step does not reach it, or let it raise AttributeError for what it does not have",
            )

    def _roots(self, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield getattr(self._step, "__qualname__", type(self._step).__name__), self._step
        for name, value in [*((f"args[{index}]", one) for index, one in enumerate(args)), *kwargs.items()]:
            yield from of_argument(value, name)

    def report(self) -> StepReport:
        """Return what became of the calls so far."""
        return StepReport(
            name=self._name(),
            calls=self._calls,
            eager_calls=self._eager,
            replays=self._recordings.replays,
            recordings=tuple(
                replace(
                    one.report,
                    replays=one.replays,
                    pointer_bytes=one.inputs.pointer_bytes,
                    audits=one.audits.done,
                    audits_skipped=one.audits.skipped,
                    concurrency=one.side_by_side.report(),
                )
                for one in self._recordings
            ),
            dropped_recordings=self._recordings.dropped,
            patched_learning_rates=self._rates.patched,
            refusals=tuple(self._refusals),
            host_draws=self._options.host_draws,
            drawn_on_the_host=tuple(sorted(self._drawn)),
            not_compared=tuple(sorted(self._changes.dropped)),
        )

    def close(self) -> None:
        """Free the graphs and their memory. Later calls run as they are.

        Raises:
            RuntimeError: it is called by the step itself.
        """
        self._refuse_inside("close")
        with self._alone():
            self._recordings.drop_all()
            self._rates = LearningRates()  # which holds parameters
            self._plan.forget()
            self._all = Refusal("was closed", "make a new one with graph_step")

    def reset(self) -> None:
        """Free the graphs and their memory, and begin from the first call.

        Raises:
            RuntimeError: it is called by the step itself.
        """
        self._refuse_inside("reset")
        with self._alone():
            self._recordings.drop_all()
            self._start()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no thread call the step in the block. What is freed may not close it: that is refused, not waited for."""
        with self._lock:
            self._thread = _this_thread()
            try:
                yield
            finally:
                self._thread = None

    def _refuse_inside(self, name: str) -> None:
        if self._thread == threading.get_ident():
            raise RuntimeError(f"{name}() was called by the step {self._name()} itself; call it after the step")


def _hashable(value: Any) -> Hashable:
    """Return what `key` returned, so that 1, 1.0 and True differ.

    Raises:
        TypeError: it cannot be compared.
    """
    if not is_hashable(value):
        raise TypeError(
            f"key() returned a {type(value).__name__}, which has no hash: return numbers, strings or tuples of these"
        )
    return exact(value)


def release_steps() -> None:
    """Free the graphs of all steps; they begin from their first calls."""
    for step in _steps.alive():
        step.reset()


def graph_step(
    step: Callable[..., Any] | None = None,
    *,
    warm_up: int = DEFAULT_WARM_UP,
    limit: int = DEFAULT_LIMIT,
    memory_budget_bytes: int | None = None,
    learning_rate: Literal["auto", "number"] = "auto",
    on_refusal: Literal["run", "raise"] = "run",
    host_draws: Literal["refused", "unused"] = "refused",
    key: Callable[[], Hashable] | None = None,
    ignore: Sequence[str] = (),
    check_every: CheckEvery = "auto",
    on_change: Literal["raise", "warn"] = "raise",
    concurrency: Concurrency = CONCURRENCY,
) -> Any:
    """Make a step that is replayed. `optimizations.graph_step` documents it."""
    make = functools.partial(
        GraphedStep,
        warm_up=warm_up,
        limit=limit,
        memory_budget_bytes=memory_budget_bytes,
        learning_rate=learning_rate,
        on_refusal=on_refusal,
        host_draws=host_draws,
        key=key,
        ignore=ignore if isinstance(ignore, str) else tuple(ignore),
        check_every=check_every,
        on_change=on_change,
        concurrency=concurrency,
    )
    return make if step is None else make(step)
