"""Runs torch.profiler over a few steady iterations and hands the trace to the analysis.

`PROFILED_ITERATIONS` iterations are taken, so that a stray event shows as a count that does not divide. Where they do
not all run the same (data-dependent programs), one iteration alone is profiled instead, and the result says so by
`profiled_iterations` = 1.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from suite.measure.coverage import IterationProfile, UnevenIterations, analyse

PROFILED_ITERATIONS = 3

BEFORE = -1
"""The number of the iteration before a trace: of input sets that take turns, the last one."""


def profile_iterations(
    iterate: Callable[[int], object],
    agreed: Callable[[bool], bool] = lambda uneven: uneven,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> IterationProfile | None:
    """Profile `iterate(0)`, `iterate(1)`, ... on the current CUDA device, with a profiler that is loaded.

    `agreed` tells whether another process with which the iterations work has to profile again; `sources` are digests of
    generated kernels' sources, by name (`KernelSources`).

    None where the profiler saw no kernel: then it was not allowed to, for every workload runs some.
    """
    profile, uneven = None, "they differ in another process"
    try:
        profile = analyse(trace(iterate, PROFILED_ITERATIONS), PROFILED_ITERATIONS, sources)
    except UnevenIterations as error:
        uneven = str(error)
    if agreed(profile is None) or profile is None:
        print(f"profiling one iteration alone: {uneven}")
        profile = analyse(trace(iterate, 1), 1, sources)
    if profile.coverage.percent is None:
        print("not profiled: the profiler saw no kernel (is this user allowed to profile the GPU?)")
        return None
    return profile


def load_profiler(iterate: Callable[[int], object]) -> None:
    """A first session, which is thrown away.

    It loads CUPTI, and slows down all later launches of this process; so this comes after everything that is timed.
    """
    trace(iterate, 1)


def kernels_of(
    iterate: Callable[[int], object], sources: Mapping[str, str] = MappingProxyType({})
) -> dict[str, int] | None:
    """Which kernels one iteration runs, for less time; None where the profiler saw none."""
    load_profiler(iterate)
    return analyse(trace(iterate, 1), 1, sources).kernels or None


def trace(iterate: Callable[[int], object], iterations: int) -> dict[str, Any]:
    """Return the Chrome trace of that many iterations, each awaited before the next begins.

    One that is not seen comes before, on other inputs than the first that is: where inputs are where they were in the
    last call, a graph that reads them in place writes no pointers, and that iteration is not like the others.
    """
    iterate(BEFORE)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for index in range(iterations):
            iterate(index)
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found: dict[str, Any] = json.loads(file.read_bytes())
    return found
