"""Capture forward, loss, backward and optimizer of a training loop as one CUDA graph per signature of the batch.

There are four kinds of calls. The first calls run eagerly, on the side stream of captures. Then two calls of a
signature are observed: every operator, changes of Python state, reads of gradients. If they are equal and a graph could
repeat them, the next call is captured, and the launch of the graph does its work. Later calls copy their batch to the
graph's placeholders, launch, and copy the results out.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch

from optimizations.capture.device import Device
from optimizations.capture.step.audit import CheckEvery
from optimizations.capture.step.call import inside
from optimizations.capture.step.call_recorder import CallRecorder
from optimizations.capture.step.options import DEFAULT_LIMIT, StepOptions
from optimizations.options import CONCURRENCY, Concurrency
from optimizations.report.steps import StepReport
from optimizations.weak_registry import WeakRegistry

_is_compiling = torch.compiler.is_compiling

_steps: WeakRegistry[GraphedStep] = WeakRegistry()


class GraphedStep:
    """Replay a step function as CUDA graphs if possible. `options` are those of `graph_step`."""

    def __init__(self, step: Callable[..., Any], *, device: Device | None = None, **options: Any) -> None:
        if not callable(step):
            raise TypeError(f"graph_step needs a function, not {type(step).__name__}")
        functools.update_wrapper(self, step, updated=("__dict__",) if isinstance(step, types.FunctionType) else ())
        self._step, self._options = step, StepOptions(**options)
        bound = isinstance(step, (types.MethodType, staticmethod)) or not hasattr(type(step), "__get__")
        self._no_method = bound or getattr(step, "_no_method", False)
        self._lock = threading.Lock()
        self._recorder = CallRecorder(step, device, self._options)
        _steps.add(self)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the bound method of a decorated method; its object is an argument like others."""
        return self if instance is None or self._no_method else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        """Return how to copy a step: by name if possible, else as a new step that begins with its first call."""
        if not isinstance(self._step, types.MethodType):
            found: Any = sys.modules.get(str(getattr(self._step, "__module__", "")))
            for name in self._recorder.name().split("."):
                found = getattr(found, name, None)
            if found is self:
                return self._recorder.name()
        return functools.partial(GraphedStep, **asdict(self._options)), (self._step,)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or inside.step or self._lock.locked():
            return self._step(*args, **kwargs)  # part of another step, or in another thread at the same time
        with self._lock:  # after `acquire()` an interrupt would leave it locked
            return self._recorder.call(args, kwargs)

    def report(self) -> StepReport:
        """Return a report of all calls so far."""
        return self._recorder.report()

    def close(self) -> None:
        """Free the graphs and their memory. Later calls run eagerly.

        Raises:
            RuntimeError: the step runs.
        """
        self._free_graphs("close")

    def reset(self) -> None:
        """Free the graphs and their memory, and begin from the first call.

        Raises:
            RuntimeError: the step runs.
        """
        self._free_graphs("reset")
        self._recorder = CallRecorder(self._step, self._recorder.device, self._options)

    def _free_graphs(self, name: str) -> None:
        """Free the graphs for the function of this `name`.

        Raises:
            RuntimeError: the step runs.
        """
        if self._lock.locked():
            raise RuntimeError(f"{name}() was called while {self._recorder.name()} runs; call it after the step")
        with self._lock:
            self._recorder.close()


def release_steps() -> None:
    """Free the graphs of all steps; they begin from their first calls."""
    for step in _steps.alive():
        step.reset()


def graph_step(
    step: Callable[..., Any] | None = None,
    *,
    limit: int = DEFAULT_LIMIT,
    host_draws: Literal["refused", "unused"] = "refused",
    key: Callable[[], Hashable] | None = None,
    ignore: Sequence[str] = (),
    check_every: CheckEvery = "auto",
    on_change: Literal["raise", "warn"] = "raise",
    concurrency: Concurrency = CONCURRENCY,
) -> Any:
    """Return `step`, replayed as one CUDA graph where that is possible; usable as a decorator, of methods too.

    A recorded step repeats the GPU work of the call it was recorded from. Before each replay Encore compares the
    arguments, settings, and the modules, optimizers and plain numbers that the step reaches. Anything else that decides
    which operators run, or with which numbers, is yours to name with `key`. From time to time a call runs uncaptured
    and its operators are compared with the recording's; a difference raises `StepChanged` with the line.

    `step(batch)` runs forward, loss, backward and optimizer, and returns losses and metrics as tensors. The first
    calls run eagerly. Then two calls of a signature (structure of the arguments; shape, strides and dtype of their
    tensors; numbers and strings) are observed, and if a graph could repeat them the next is recorded. Results are
    copied out and stay valid. What a graph cannot repeat is refused with a reason and a line, as a warning and in
    `.report()`, and runs eagerly. `.reset()` frees the graphs and begins again, `.close()` frees them for good.
    `docs/capture.md` describes what works.

    Args:
        step: a function or method, its modules and optimizers reached through its variables and attributes.
        limit: recordings alive at one time, at least 1; calls of further signatures run eagerly.
        host_draws: "refused" refuses a step that draws random numbers on the host (PyTorch's CPU generator, `random`,
            NumPy). "unused" is your word that these numbers decide nothing, as those of LayerDrop at rate 0: launches
            do not draw them. A step is still refused if they reach the GPU or its results.
        key: a function without arguments; each value that it returns has a recording of its own.
        ignore: names of values that change between calls and decide nothing, as a refusal writes them.
        check_every: "auto" audits a few early calls, and later 1 % of the time; N audits every N-th call, None none.
        on_change: "raise" raises `StepChanged` where an audit finds a difference, "warn" warns and records again.
        concurrency: "auto" runs kernels that do not depend on each other at the same time, where that is measured to
            make the graph 3 % faster; "off" one after the other. See `docs/concurrency.md`.

    Raises:
        TypeError: the step is not a function, `limit` is not a whole number, or `key` returns what has no hash.
        ValueError: an option is out of range; the message names the allowed values.
        StepChanged: in an audited call, which has done its work.
    """
    make = functools.partial(
        GraphedStep,
        limit=limit,
        host_draws=host_draws,
        key=key,
        ignore=ignore if isinstance(ignore, str) else tuple(ignore),
        check_every=check_every,
        on_change=on_change,
        concurrency=concurrency,
    )
    return make if step is None else make(step)
