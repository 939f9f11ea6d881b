"""Blocks keep every sample, rotate inputs at different addresses, and synchronize the device where needed."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable

import pytest
import torch
from manual_clock import Clock

from models.registry import Inputs
from suite.measure import timing
from suite.measure.timing import DeviceTimer, iteration_us, measure_block, require_distinct_addresses
from suite.results.schema import GpuState

LEAD_IN = 2


class ScriptedTimer:
    """Notes every call in `events` and claims the device took 7 us."""

    def __init__(self, events: list[str]) -> None:
        self.synchronize, self.start, self.stop = (
            functools.partial(events.append, name) for name in ("synchronize", "start", "stop")
        )
        self.elapsed_us = lambda: 7.0


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch, timing)


def sets(count: int) -> list[Inputs]:
    return [Inputs(args=(torch.full((2,), float(index)),)) for index in range(count)]


def noting() -> tuple[list[int], Callable[[Inputs], None]]:
    """A list of the input sets that were used, and the iteration that notes them."""
    used: list[int] = []
    return used, lambda inputs: used.append(int(inputs.args[0][0]))


def block_of(iterate, input_sets, *, index=0, samples=5, timer=None, read_gpu=lambda: None, **options):
    options = {"lead_in": LEAD_IN, "turn": index} | options
    return measure_block(
        iterate, input_sets, timer or DeviceTimer(), index=index, samples=samples, read_gpu=read_gpu, **options
    )


@pytest.mark.parametrize(("count", "samples"), [(2, 1), (2, 5), (4, 5), (4, 9), (3, 10)])
def test_inputs_move_in_every_iteration(count, samples):
    used, iterate = noting()
    block_of(iterate, sets(count), samples=samples)
    assert len(used) == LEAD_IN + samples
    assert all(now != before for before, now in itertools.pairwise(used))


def test_slow_sample_is_kept(clock):
    took_us = iter([*[40] * (LEAD_IN + 2), 50_000, *[40] * 17])
    block = block_of(lambda inputs: clock.pass_us(next(took_us)), sets(2), samples=20)
    assert block.host_us == [40.0] * 2 + [50_000.0] + [40.0] * 17
    assert block.device_us is None


def test_each_sample_waits_for_the_device():
    events: list[str] = []
    block = block_of(lambda inputs: events.append("iterate"), sets(3), samples=2, timer=ScriptedTimer(events))
    sample = ["synchronize", "start", "iterate", "stop", "synchronize"]
    assert events == sample * (LEAD_IN + 2)
    assert block.device_us == [7.0, 7.0]


def test_gpu_is_read_before_and_after_the_samples():
    readings = iter(GpuState(throttle_reasons=[reason]) for reason in ("first", "second"))
    block = block_of(lambda inputs: None, sets(2), read_gpu=lambda: next(readings))
    assert block.gpu_before is not None and block.gpu_before.throttle_reasons == ["first"]
    assert block.gpu_after is not None and block.gpu_after.throttle_reasons == ["second"]


def test_sets_that_share_a_tensor_are_refused():
    shared = torch.ones(3)
    first, second = Inputs(args=(torch.ones(3), shared)), Inputs(args=(torch.ones(3), shared))
    with pytest.raises(ValueError, match="input tensor 1 "):
        require_distinct_addresses([first, second])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no thread to a core")
def test_block_runs_on_its_core_and_releases_it():
    before = os.sched_getaffinity(0)
    core = min(before)
    seen = []
    block = block_of(
        lambda inputs: seen.append(os.sched_getaffinity(0)), sets(2), samples=1, lead_in=0, core=core, process=2
    )
    assert seen == [{core}]
    assert (block.core, block.process) == (core, 2)
    assert os.sched_getaffinity(0) == before


def test_unavailable_core_is_not_recorded(monkeypatch):
    def refused(thread: int, cores: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    block = block_of(lambda inputs: None, sets(2), samples=1, core=0)
    assert block.core is None


def test_time_of_an_iteration_is_the_typical_one(clock):
    took_us = iter([50_000, 2_000, 2_000, 2_000, 2_000])
    assert iteration_us(lambda inputs: clock.pass_us(next(took_us)), sets(2), DeviceTimer()) == 2_000
