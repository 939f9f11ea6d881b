"""Profiled iterations are counted, differing or empty profiles handled, and generated kernels have sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizations import torch_internals
from suite.measure import profiling
from suite.measure.profiling import KernelSources


def trace_of(kernels: int) -> dict:
    return {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "k", "dur": 2.0, "args": {"correlation": number}}
            for number in range(kernels)
        ]
    }


@pytest.fixture
def sessions(monkeypatch):
    """Profiler sessions that see as many kernels as the list `seen` says, in turn; their lengths are in `asked`."""
    seen: list[int] = []
    asked: list[int] = []

    def scripted(iterate, iterations: int) -> dict:
        asked.append(iterations)
        return trace_of(seen[len(asked) - 1])

    monkeypatch.setattr(profiling, "trace", scripted)
    return seen, asked


def test_first_session_is_thrown_away(sessions):
    seen, asked = sessions
    seen += [99, 6, 99, 6]
    profiling.load_profiler(lambda index: None)
    profile = profiling.profile_iterations(lambda index: None)
    assert profile is not None
    assert asked == [1, 3]
    assert (profile.coverage.eager_kernels, profile.coverage.profiled_iterations) == (2, 3)
    assert profile.kernel_time_us == 4.0
    kernels = profiling.kernels_of(lambda index: None)
    assert kernels is not None and list(kernels.values()) == [6]
    assert asked == [1, 3, 1, 1]


def test_iterations_that_differ_are_profiled_alone(sessions, capsys):
    seen, asked = sessions
    seen += [7, 4]
    profile = profiling.profile_iterations(lambda index: None)
    assert profile is not None
    assert asked == [3, 1]
    assert (profile.coverage.eager_kernels, profile.coverage.profiled_iterations) == (4, 1)
    assert "7 kernel events outside of graphs in 3 iterations" in capsys.readouterr().out


def test_profile_without_kernels_is_an_error(sessions):
    seen, _ = sessions
    seen += [0]
    assert profiling.profile_iterations(lambda index: None) is None


MODULE = """
class Compiler:
    def triton(self, name, source, device_str):
        return name

async_compile = Compiler()
{name} = async_compile.triton('{name}', \'\'\'
def {name}(in_ptr0, out_ptr0):
    {body}
\'\'\', device_str='cuda')
"""


def load(name: str, body: str) -> str:
    module = torch_internals.PyCodeCache.load(MODULE.format(name=name, body=body))
    assert getattr(module, name) == name and module.__file__
    return str(module.__file__)


def test_kernels_of_one_source_have_one_digest() -> None:
    first, second = KernelSources(), KernelSources()
    load("triton_poi_fused_add_0", "first body")
    load("triton_poi_fused_add_4", "first body")
    load("triton_poi_fused_add_7", "second body")
    found = first.digests()
    assert set(found) == {"triton_poi_fused_add_0", "triton_poi_fused_add_4", "triton_poi_fused_add_7"}
    assert found["triton_poi_fused_add_0"] == found["triton_poi_fused_add_4"] != found["triton_poi_fused_add_7"]
    assert second.digests() == found


def test_name_of_several_sources_has_no_digest() -> None:
    sources = KernelSources()
    load("triton_red_fused_sum_1", "of one graph")
    assert set(sources.digests()) == {"triton_red_fused_sum_1"}
    load("triton_red_fused_sum_1", "of another graph")
    assert sources.digests() == {}


def test_earlier_and_unreadable_sources_do_not_count() -> None:
    load("triton_per_fused_max_2", "of the trial")
    sources = KernelSources()
    load("triton_per_fused_max_2", "of the real compilation")
    gone = load("triton_per_fused_max_3", "of a folder that is gone")
    assert set(sources.digests()) == {"triton_per_fused_max_2", "triton_per_fused_max_3"}
    Path(gone).unlink()
    assert set(sources.digests()) == {"triton_per_fused_max_2"}
