"""Gradients that another thread takes while it is counted what Encore holds of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches

from optimizations.capture.step.gradients import Gradients
from optimizations.capture.step.graphed_step import GraphedStep
from tests.optimizations.capture.step.test_gradients_held import Alike


class Stashing:
    """A thread that takes what `take` gives when it is asked to, and holds it."""

    def __init__(self, take: Callable[[], list[torch.Tensor]]) -> None:
        self.held: list[torch.Tensor] = []
        self._take, self._asked, self._done = take, threading.Semaphore(0), threading.Semaphore(0)
        self._over = False

    def __enter__(self) -> Stashing:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while self._asked.acquire() and not self._over:
            self.held += self._take()
            self._done.release()

    def stash(self) -> None:
        self._asked.release()
        self._done.acquire()

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._asked.release()
        self._thread.join()


@pytest.mark.parametrize("time", range(4))
def test_other_threads_references_are_not_encores(time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch overwrites it, whichever time of the making it is."""
    training, plain = Alike("set to None"), Alike("set to None")
    step = GraphedStep(training.step, device=CpuDevice())
    owner: Any = Gradients
    name = "_take_in"
    stock, times = getattr(owner, name), [0]
    with Stashing(training.gradients) as other:

        def taking(*args: Any, **options: Any) -> Any:
            found = stock(*args, **options)
            times[0] += 1
            if times[0] == time + 1:
                other.stash()
            return found

        monkeypatch.setattr(owner, name, taking)
        copies: list[torch.Tensor] = []
        for batch in batches("cpu", 14):
            step(*batch)
            plain.step(*batch)
            if other.held and not copies:
                copies = [one.clone() for one in other.held]
        # What is taken during the recording was not computed yet, and reads as nan here.
        assert all(map(functools.partial(torch.allclose, rtol=0, atol=0, equal_nan=True), other.held, copies))
        assert all(map(torch.equal, training.gradients(), plain.gradients()))
        assert copies or time
