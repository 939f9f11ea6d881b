"""Run torch.profiler over a few steady iterations and analyse the trace.

`PROFILED_ITERATIONS` iterations are profiled, so that a stray event results in a count that is no multiple. Where they
differ (data-dependent programs), a single iteration is profiled instead, and the result has `profiled_iterations` = 1.

The result lists the GPU's work in steady iterations: kernels by launch, and kernel time.

The analysis reads a Chrome trace as `torch.profiler.profile.export_chrome_trace` writes it. It uses complete events
(`"ph": "X"`) with these fields of Kineto:

* `cat` is "kernel", "gpu_memcpy" or "gpu_memset" for work on the device, "cuda_runtime" or "cuda_driver" for the call
  that launched it.
* `args.correlation` is equal in a call and in all device work that it launched. A launch of a CUDA graph is one call,
  so all of the graph's work has that call's number.
* `name` of a call is the API function, perhaps with a version or `_ptsz` suffix.
* `dur` is in microseconds; `args.grid` and `args.block` of a kernel are its launch configuration.
* `args["graph node id"]`, in some CUPTI versions, marks device work of a graph even if its launch is missing.

Device work belongs to a graph if its call is `cudaGraphLaunch` or `cuGraphLaunch`; all other work counts as launched
one by one, so no list of kernel-launching functions is needed (there are many: `cudaLaunchKernel`,
`cudaLaunchKernelExC`, `cuLaunchKernel`, `cuLaunchKernelEx`, cooperative ones).

The module also records the source of each generated kernel, because kernels with different sources may have the same
name: `triton_poi_fused__to_copy_3`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.tuning import without_number
from suite.measure.kernels import count_kernels, kernel_key
from suite.results.schema import Coverage

PROFILED_ITERATIONS = 3

BEFORE = -1
"""The number of the iteration before a trace: it uses the last of the rotating input sets."""


def profile_iterations(
    iterate: Callable[[int], object],
    agreed: Callable[[bool], bool] = lambda uneven: uneven,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> IterationProfile | None:
    """Profile `iterate(0)`, `iterate(1)`, ... on the current CUDA device, after `load_profiler`.

    `agreed` returns whether any rank has to profile again; `sources` are digests of generated kernels' sources, by name
    (`KernelSources`).

    Return None if the trace has no kernel: every workload runs some, so the profiler lacks permission.
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
    """Run a first session, whose trace is dropped.

    It loads CUPTI, which slows down all later launches of this process; so call it after all timing.
    """
    trace(iterate, 1)


def kernels_of(
    iterate: Callable[[int], object], sources: Mapping[str, str] = MappingProxyType({})
) -> dict[str, int] | None:
    """Return only the kernels of one iteration, which is faster than `profile`; None if the trace has none."""
    load_profiler(iterate)
    return analyse(trace(iterate, 1), 1, sources).kernels or None


def trace(iterate: Callable[[int], object], iterations: int) -> dict[str, Any]:
    """Return the Chrome trace of that many iterations, with a synchronization after each.

    An iteration without profiling precedes them, on other inputs than the first profiled one. Otherwise the addresses
    of inputs would not change, a graph that reads them in place would write no pointers, and the first profiled
    iteration would differ from the others.
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


_GRAPH_LAUNCH = re.compile(r"cu(da)?GraphLaunch(_|$)")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


class UnevenIterations(ValueError):
    """Report that the iterations in a trace differ, so that a mean of their counts is not the count of one."""


@dataclass(frozen=True, slots=True)
class IterationProfile:
    """Describe one iteration: mean times over the trace, and exact counts, which are equal in all iterations."""

    coverage: Coverage
    kernels: dict[str, int] | None
    kernel_time_us: float


def analyse(
    trace: Mapping[str, Any], iterations: int, sources: Mapping[str, str] = MappingProxyType({})
) -> IterationProfile:
    """Analyse one of the `iterations` in `trace`. `sources` are digests of generated kernels' sources, by name.

    Raises:
        UnevenIterations: a count does not divide by `iterations`; the message names it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = graph_launches(events)
    totals: Counter[tuple[str, bool]] = Counter()
    kernel_us, keys = 0.0, list[str]()
    for event in events:
        if (category := event.get("cat")) not in _DEVICE_WORK:
            continue
        name, facts = event["name"], event["args"]
        totals[category, facts["correlation"] in launches or bool(facts.get("graph node id"))] += 1
        if category == "kernel":
            kernel_us += float(event["dur"])
            keys.append(kernel_key(name, facts.get("grid", ()), facts.get("block", ()), sources))

    def per_iteration(total: int, what: str) -> int:
        each, rest = divmod(total, iterations)
        if rest:
            raise UnevenIterations(f"{total} {what} in {iterations} iterations: they were not alike")
        return each

    def count(category: str, *, in_graph: bool) -> int:
        where = "in" if in_graph else "outside of"
        return per_iteration(totals[category, in_graph], f"{category} events {where} graphs")

    graph_kernels, eager_kernels = count("kernel", in_graph=True), count("kernel", in_graph=False)
    kernels = graph_kernels + eager_kernels
    return IterationProfile(
        coverage=Coverage(
            graph_kernels=graph_kernels,
            eager_kernels=eager_kernels,
            percent=100.0 * graph_kernels / kernels if kernels else None,
            graph_launches=per_iteration(len(launches), "graph launches"),
            graph_memcpys=count("gpu_memcpy", in_graph=True),
            graph_memsets=count("gpu_memset", in_graph=True),
            eager_memcpys=count("gpu_memcpy", in_graph=False),
            eager_memsets=count("gpu_memset", in_graph=False),
            profiled_iterations=iterations,
        ),
        kernels=count_kernels(keys, iterations),
        kernel_time_us=kernel_us / iterations,
    )


def graph_launches(events: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return correlation numbers of the calls that launched a graph."""
    return {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in _CALLS and _GRAPH_LAUNCH.match(event["name"])
    }


_KERNEL = re.compile(r"async_compile\.triton\(\s*'(\w+)',\s*'''(.*?)'''", re.DOTALL)
_DIGITS = 6


class KernelSources:
    """Collect the kernel sources of the modules that Inductor loads after the construction of this object."""

    def __init__(self) -> None:
        self._before = len(torch_internals.PyCodeCache.modules)

    def digests(self) -> dict[str, str]:
        """Return digests by a kernel's name, including its number, without names of several sources."""
        sources: dict[str, set[str]] = defaultdict(set)
        for module in torch_internals.PyCodeCache.modules[self._before :]:
            for name, source in _kernels_of(module.__file__):
                sources[name].add(source)
        return {
            name: hashlib.sha256(found.pop().encode()).hexdigest()[:_DIGITS]
            for name, found in sources.items()
            if len(found) == 1
        }


def _kernels_of(file: str | None) -> list[tuple[str, str]]:
    """Return names and sources in a generated module, sources without the number; none if it cannot be read."""
    try:
        text = Path(file or "").read_text(encoding="utf-8")
    except OSError:
        return []
    return [(name, without_number(source, name)) for name, source in _KERNEL.findall(text)]
