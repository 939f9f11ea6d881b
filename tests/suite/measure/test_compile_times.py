"""Timers and counters of compiling, and peaks of memory, count from their restart; toolchains are tried once."""

from __future__ import annotations

import threading

import torch

from optimizations import torch_internals
from suite.measure import compile_times, memory
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


def test_headers_are_compiled_into_the_folder_of_all_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_DIR", "own")
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_LOCK_DIR", "own/locks")
    torch.compiler.reset()
    torch_internals.codecache._precompile_header.cache_clear()  # a test before this one may have compiled them
    with torch_internals.fresh_cache():
        compile_times.start_toolchain(torch.device("cpu"), headers=str(tmp_path))
    assert list(tmp_path.glob("*.gch")), "the compiler's own folder was used"


def test_cpp_features_are_detected_once(monkeypatch):
    """A process that gets the features checks nothing: each kind of instruction is tested by a separate process."""
    isa = torch_internals.cpu_vec_isa
    built = []
    together = threading.Barrier(2, timeout=30)

    class Kind(isa.VecISA):
        def __init__(self, flags, works):
            self.flags, self.works = flags, works

        def __str__(self):
            return self.flags

        def __bool__(self):
            return self.check_build(self.flags)

        __hash__ = isa.VecISA.__hash__

    def check_build(kind, code):
        built.append(code)
        together.wait()  # raises if one is asked about after the other
        return kind.works

    monkeypatch.setattr(compile_times.torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(isa, "x86_isa_checker", lambda: ["avx2", "avx512", "vnni"])
    for works, told, expected in ((True, None, True), (False, None, None), (True, True, True)):
        built.clear()
        monkeypatch.setattr(isa.VecISA, "check_build", check_build)
        kinds = [Kind("avx512 amx", True), Kind("avx512 vnni", True), Kind("avx2", works)]
        monkeypatch.setattr(isa, "supported_vec_isa_list", kinds)
        assert compile_times.start_toolchain(torch.device("cpu"), told) is expected
        assert sorted(built) == ([] if told else ["avx2", "avx512 vnni"])


def test_peaks_count_from_their_restart(monkeypatch):
    """Compiling needs far more than replaying; without a restart the larger peak would stand for both."""
    allocator = {"now": 100, "peak": 100}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device=None: allocator.update(peak=allocator["now"])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: allocator["peak"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * allocator["peak"])
    device = torch.device("cuda")
    allocator["peak"] = 5000
    memory.restart_peak(device)
    allocator["peak"] = 300
    assert memory.peak(device) == (300, 600)
    allocator["peak"] = 5000
    memory.restart_peak(device)
    assert memory.peak(device) == (100, 200)
