"""Threads that call nested functions never deadlock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import KNOWN, Compiled, Model, values
from threads import LIMIT_S, in_threads

from optimizations.compiled_graph import _fed
from optimizations.in_place.generated import GeneratedCode
from optimizations.placement.feed_plan import FeedPlan
from optimizations.placement.feeds import Feeds


class Outer(Model):
    """A function with an operator that calls `inside`."""

    inside: Callable[[], None] = staticmethod(lambda: None)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.inside()
        return super().__call__(inputs)


@pytest.mark.parametrize("lean", [True, False])
def test_feeds_and_managers_never_deadlock(cuda_on_cpu: CudaOnCpu, lean: bool) -> None:
    """One thread holds `Feeds` and waits for the manager, another holds the manager and calls a fed function."""
    x, y, w = values(1), values(2), values(3)
    holds_feeds, holds_manager = threading.Event(), threading.Event()
    outer_model, inner = Outer(cuda_on_cpu), Compiled(Model(cuda_on_cpu), lean=lean)
    outer = Compiled(outer_model, lean=lean)
    found: list[torch.Tensor] = []

    def placed(*arguments: torch.Tensor) -> list[torch.Tensor]:
        holds_feeds.set()
        if threading.current_thread() is not threading.main_thread():
            assert holds_manager.wait(LIMIT_S)
        return [result.clone() for result in inner.function(list(arguments))]

    fed = _fed(
        placed, Feeds(FeedPlan(torch.device("cpu"), (0, 1, 2))), lambda x, y, w: [2 * x + y * w], own_operators=False
    )
    for _ in range(3):
        assert torch.equal(fed(x, y, w)[0], 2 * x + y * w)
    outer(x, y, w)  # it is warmed up here, and recorded in the thread
    holds_feeds.clear()

    def calls_inside() -> None:
        holds_manager.set()
        assert holds_feeds.wait(LIMIT_S)
        found.append(fed(x, y, w)[0])

    outer_model.inside = calls_inside
    in_threads(lambda: found.append(fed(x, y, w)[0]), lambda: found.append(outer(x, y, w)[0]))
    assert len(found) == 3
    assert all(torch.equal(one, 2 * x + y * w) for one in found)


def test_two_managers_never_deadlock(cuda_on_cpu: CudaOnCpu) -> None:
    """Two threads each run a function of their own device, whose operator calls a function of the other's."""
    x, y, w = values(1), values(2), values(3)
    both = threading.Barrier(2)
    ready = threading.Barrier(2)
    models = [Outer(cuda_on_cpu), Outer(cuda_on_cpu)]
    inner: dict[int, Compiled] = {}
    found: list[torch.Tensor] = []

    def run(number: int) -> None:
        inner[number] = Compiled(Model(cuda_on_cpu), device_index=number)
        for _ in range(3):
            inner[number](x, y, w)
        outer = Compiled(models[number], device_index=number)
        ready.wait(LIMIT_S)

        def calls_inside() -> None:
            models[number].inside = lambda: None
            both.wait(LIMIT_S)
            found.append(inner[1 - number].function([x, y, w])[0].clone())

        models[number].inside = calls_inside
        found.append(outer(x, y, w)[0])

    in_threads(lambda: run(0), lambda: run(1))
    assert len(found) == 4
    assert all(torch.equal(one, 2 * x + y * w) for one in found)


def test_first_calls_and_managers_never_deadlock(cuda_on_cpu: CudaOnCpu) -> None:
    """One thread makes a first call and waits for the manager, another holds the manager and calls the function."""
    x, y, w = values(1), values(2), values(3)
    warmed_up, holds_manager, in_first_call = threading.Event(), threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    class Inner(Model):
        @property
        def code(self) -> GeneratedCode:
            in_first_call.set()
            assert holds_manager.wait(LIMIT_S)
            return KNOWN

        @code.setter
        def code(self, code: GeneratedCode) -> None: ...

    outer_model, inner = Outer(cuda_on_cpu), Compiled(Inner(cuda_on_cpu))
    outer = Compiled(outer_model)

    def first_call() -> None:
        outer(x, y, w)
        outer.functions[0].without_graph = "a reason"
        warmed_up.set()
        found.append(inner(x, y, w)[0])

    def call_inside() -> None:
        assert warmed_up.wait(LIMIT_S)
        outer_model.inside = calls_inside
        found.append(outer(x, y, w)[0])

    def calls_inside() -> None:
        outer_model.inside = lambda: None
        holds_manager.set()
        assert in_first_call.wait(LIMIT_S)
        found.append(inner.function([x, y, w])[0].clone())

    in_threads(first_call, call_inside)
    assert len(found) == 3
    assert all(torch.equal(one, 2 * x + y * w) for one in found)


@pytest.mark.parametrize("lock", ["lock_of_the_manager", "lock_of_a_first_call", "lock_of_feeds"])
def test_operators_backward_never_waits_for_the_device(lock: str) -> None:
    """Autograd's thread of the device waits for a lock whose holder waits for a backward. A device stays registered."""
    program = Path(__file__).parents[2] / "support" / "device_thread.py"
    command, path = [sys.executable, str(program), lock], os.pathsep.join(sys.path)
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
