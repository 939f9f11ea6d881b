"""Time generation token by token: how long the prompt and a step take, and how many tokens come in a second.

Whole generations are timed without synchronization inside; prompt and steps in other generations, with synchronization
around each. This hides work of the host, so two modes may be ranked differently there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from suite.measure.metrics import Metric, PreparedCell

if TYPE_CHECKING:
    from suite.measure.timing import DeviceTimer

ROUNDS = 20
"""Generations of each kind."""


def decode_us(cell: PreparedCell) -> Mapping[str, float | None]:
    """Return medians over generations, in microseconds; nothing for programs that do not mark their steps."""
    from models.nanogpt.decoding import Generation
    from suite.measure.timing import bound_to, timer_for

    module = cell.module
    if not isinstance(module, Generation):
        return {}
    timer = timer_for(cell.device)
    watch, whole_us = StepTimes(timer), []
    with bound_to(cell.core):
        for index in range(ROUNDS):
            timer.synchronize()
            begun = time.perf_counter()
            cell.iterate(index)
            timer.synchronize()
            whole_us.append(1e6 * (time.perf_counter() - begun))
            module.watch = watch
            try:
                cell.iterate(index)
            finally:
                module.watch = None
    whole = median(whole_us)
    return {
        "tokens": module.new_tokens,
        "tokens_per_s": 1e6 * module.new_tokens / whole,
        "generation_us": whole,
        "prompt_us": median(watch.prompt_us),
        "step_us": median(watch.call_us),
        "fed_step_us": median(watch.step_us),
    }


class StepTimes:
    """Synchronize around the prompt and each step, and record their times in microseconds.

    `call_us` is the article's time, between two CUDA events around the step (on a CPU host time); `step_us` is host
    time from before the token is fed until the device has finished.
    """

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self.prompt_us: list[float] = []
        self.step_us: list[float] = []
        self.call_us: list[float] = []

    def prompt(self) -> None:
        self._begin()

    def prompt_ended(self) -> None:
        self._timer.synchronize()
        self.prompt_us.append(1e6 * (time.perf_counter() - self._begun))

    def feeding(self) -> None:
        self._begin()

    def step(self) -> None:
        self._called = time.perf_counter()
        self._timer.start()

    def step_ended(self) -> None:
        self._timer.stop()
        self._timer.synchronize()
        ended = time.perf_counter()
        device_us = self._timer.elapsed_us()
        self.step_us.append(1e6 * (ended - self._begun))
        self.call_us.append(1e6 * (ended - self._called) if device_us is None else device_us)

    def _begin(self) -> None:
        self._timer.synchronize()
        self._begun = time.perf_counter()


METRIC = Metric(
    name="decode",
    title="Generation token by token",
    note=f"Of programs that generate (NANOGPT). Medians over {ROUNDS} generations. tokens/s and generation: whole "
    "generations, prompt included, nothing waited for inside. prompt, step, fed step: in others, each waited for; step "
    "is the time between two CUDA events around it, fed step host time with feeding the token.",
    columns=("tokens", "tokens_per_s", "generation_us", "prompt_us", "step_us", "fed_step_us"),
    measure=decode_us,
)
