"""Dynamo's timers and counters cover one compilation, not what was compiled before it."""

from __future__ import annotations

import torch

from optimizations import torch_internals
from suite.measure import compile_times
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


def test_what_c_plus_plus_can_use_is_found_out_once(monkeypatch):
    """A process that was told does not ask; one that asked is configured as if it had been told."""
    asked = []

    class Instructions:
        def __init__(self, flags, works):
            self.flags, self.works = flags, works

        def __str__(self):
            return self.flags

        def __bool__(self):
            asked.append(self.flags)
            return self.works

    monkeypatch.setattr(compile_times.torch, "compile", lambda function, **options: function)
    isa, options = torch_internals.cpu_vec_isa, torch_internals.inductor_config.cpp
    monkeypatch.setattr(isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    for works, told, expected in ((True, None, True), (False, None, None), (True, True, True), (True, False, None)):
        asked.clear()
        monkeypatch.setattr(
            isa, "supported_vec_isa_list", [Instructions("avx512 amx", True), Instructions("avx2", works)]
        )
        monkeypatch.setattr(options, "vec_isa_ok", told)
        assert compile_times.start_toolchain(torch.device("cpu")) is expected
        assert options.vec_isa_ok is (expected if told is None else told)
        assert asked == (["avx2"] if told is None else [])
