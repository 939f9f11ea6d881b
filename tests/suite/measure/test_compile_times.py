"""Dynamo's timers and counters cover one compilation, not what was compiled before it."""

from __future__ import annotations

import threading
import time

import pytest
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


def test_headers_are_compiled_into_the_folder_of_all_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_DIR", "own")
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_LOCK_DIR", "own/locks")
    torch.compiler.reset()
    torch_internals.codecache._precompile_header.cache_clear()  # a test before this one may have compiled them
    with torch_internals.fresh_cache():
        compile_times.start_toolchain(torch.device("cpu"), headers=str(tmp_path))
    assert list(tmp_path.glob("*.gch")), "the compiler's own folder was used"


@pytest.mark.parametrize(("told", "checked"), [(True, []), (None, ["code"])])
def test_who_needs_what_another_is_being_asked_waits_for_it(monkeypatch, tmp_path, told, checked):
    kind, asked = torch_internals.cpu_vec_isa.VecISA, []
    monkeypatch.setattr(kind, "check_build", lambda isa, code: asked.append(code) or True)
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_DIR", "own")
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_LOCK_DIR", "own/locks")
    compile_times.share_toolchain(None, str(tmp_path), being_asked=True)
    other = threading.Timer(0.3, compile_times.tell_toolchain, (told, str(tmp_path)))
    begin = time.monotonic()
    other.start()
    assert kind.check_build(object(), "code") and kind.check_build(object(), "code")
    assert time.monotonic() - begin >= 0.3
    assert asked == 2 * checked


def test_what_a_compilation_waits_for_is_in_no_time_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_internals.cpu_vec_isa.VecISA, "check_build", lambda isa, code: True)
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_DIR", "own")
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_LOCK_DIR", "own/locks")
    compiled = []
    monkeypatch.setattr(compile_times.torch, "compile", lambda function, **options: compiled.append(1) or function)
    device, folder = torch.device("meta"), str(tmp_path)
    assert compile_times.start_toolchain(device, None, folder, being_asked=True) is None
    assert compiled == [1], "for the device alone: for the CPU it would wait for the answer"
    restart_timers()
    threading.Timer(0.3, compile_times.tell_toolchain, (True, folder)).start()
    torch_internals.cpu_vec_isa.VecISA.check_build(object(), "code")
    assert 0.2 < compile_times.waited_s() < 5.0
    restart_timers()
    assert compile_times.waited_s() == 0.0
    compile_times.start_toolchain(device, None, folder, being_asked=True)
    assert compiled == [1] * 3


def test_who_is_told_nothing_finds_it_out_after_a_while(monkeypatch, tmp_path, capfd):
    kind = torch_internals.cpu_vec_isa.VecISA
    monkeypatch.setattr(kind, "check_build", lambda isa, code: False)
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_DIR", "own")
    monkeypatch.setattr(torch_internals.codecache, "_HEADER_LOCK_DIR", "own/locks")
    monkeypatch.setattr(compile_times, "MOST_WAIT_S", 0.1)
    compile_times.share_toolchain(None, str(tmp_path), being_asked=True)
    assert not kind.check_build(object(), "code")
    assert "no other process said" in capfd.readouterr().out


def test_what_c_plus_plus_can_use_is_found_out_once(monkeypatch):
    """A process that was told checks nothing: where all instructions work, each kind is asked about by a process."""
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
