"""Profiled iterations are counted, and differing or empty profiles handled. Traces are scripted."""

from __future__ import annotations

import pytest

from suite.measure import profiling


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
