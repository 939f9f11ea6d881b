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
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch

from optimizations.capture.device import Device
from optimizations.capture.step.audit import CheckEvery
from optimizations.capture.step.call_recorder import CallRecorder
from optimizations.capture.step.options import DEFAULT_LIMIT, DEFAULT_WARM_UP, StepOptions
from optimizations.capture.step.surroundings import inside
from optimizations.options import CONCURRENCY, Concurrency
from optimizations.report.steps import StepReport
from optimizations.weak_registry import WeakRegistry

_is_compiling, _this_thread = torch.compiler.is_compiling, threading.get_ident

_steps: WeakRegistry[GraphedStep] = WeakRegistry()


class GraphedStep:
    """Replay a step function as CUDA graphs where that is possible. `options` are those of `graph_step`."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        if not callable(step):
            raise TypeError(f"graph_step needs a function, not {type(step).__name__}")
        functools.update_wrapper(self, step, updated=("__dict__",) if isinstance(step, types.FunctionType) else ())
        self._step, self._options = step, StepOptions(**options)
        bound = isinstance(step, (types.MethodType, staticmethod)) or not hasattr(type(step), "__get__")
        self._no_method = bound or getattr(step, "_no_method", False)
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._recorder = CallRecorder(step, device, self._options)
        _steps.add(self)

    @property
    def __isabstractmethod__(self) -> bool:
        """Return whether a class that has it can have no objects, as Python asks."""
        return bool(getattr(self._step, "__isabstractmethod__", False))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return, of a decorated method, the method of an object, which is an argument like others."""
        return self if instance is None or self._no_method else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedStep:
        """Return the step of the copied objects, which begins from its first call."""
        return GraphedStep(copy.deepcopy(self._step, memo), **asdict(self._options))

    def __copy__(self) -> GraphedStep:
        return GraphedStep(self._step, **asdict(self._options))

    def __reduce__(self) -> Any:
        """Return where to find the step: a function's name leads to it."""
        if not isinstance(self._step, types.MethodType):
            found: Any = sys.modules.get(str(getattr(self._step, "__module__", "")))
            for name in self._recorder.name().split("."):
                found = getattr(found, name, None)
            if found is self:
                return self._recorder.name()
        return functools.partial(GraphedStep, **asdict(self._options)), (self._step,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or inside.step or self._lock.locked():
            return self._step(*args, **kwargs)  # part of another step, or in another thread at the same time
        with self._lock:  # after `acquire()` an interrupt would leave it locked
            try:
                self._thread = _this_thread()
                return self._recorder.call(args, kwargs)
            finally:
                self._thread = None

    def report(self) -> StepReport:
        """Return what became of the calls so far."""
        return self._recorder.report()

    def close(self) -> None:
        """Free the graphs and their memory. Later calls run as they are.

        Raises:
            RuntimeError: it is called by the step itself.
        """
        self._refuse_inside("close")
        with self._alone():
            self._recorder.close()

    def reset(self) -> None:
        """Free the graphs and their memory, and begin from the first call.

        Raises:
            RuntimeError: it is called by the step itself.
        """
        self._refuse_inside("reset")
        with self._alone():
            self._recorder.close()
            self._recorder = CallRecorder(self._step, self._recorder.device, self._options)

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
            raise RuntimeError(
                f"{name}() was called by the step {self._recorder.name()} itself; call it after the step"
            )


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
