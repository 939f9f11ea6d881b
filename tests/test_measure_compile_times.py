"""Dynamo's timers and counters cover one compilation, not what was compiled before it."""

from __future__ import annotations

import torch

from optimizations import torch_internals
from suite.measure.compile_times import restart_timers, timer_seconds


def test_timers_count_from_their_restart():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert timer_seconds()["entire_frame_compile"] > 0
    assert torch_internals.dynamo_utils.counters["stats"]["unique_graphs"] >= 1

    restart_timers()
    assert timer_seconds() == {}
    assert torch_internals.dynamo_utils.counters["stats"]["unique_graphs"] == 0

    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
    assert 0 < timer_seconds()["entire_frame_compile"] < 600
    torch.compiler.reset()
