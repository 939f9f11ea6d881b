"""Get the graphs of a workload on a GPU: the order of their launches from Encore's report, their times from a profile.

1. The workload is compiled in mode `lanes` and called until its graphs are settled. Reports have the dependencies.
   Nothing comes from Inductor's caches: what stock PyTorch left there does not say from which lines launches come.
2. It is compiled again in mode `placement`, whose graphs are chains of the same kernels, and profiled. In a chain the
   work of a launch of a graph has the order of its nodes, so each node gets a time of its own, which nothing disturbs.

A graph is found in the profile by its number of nodes and by the names of its generated kernels (`times_of`). A graph
that is not found has no times, and is drawn by numbers of nodes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import optimizations
from models.instance import Instance, instantiate
from models.own_program import WrongProgram
from models.registry import Size
from optimizations import torch_internals
from optimizations.torch_internals.tuning import mark_graphs
from suite.draw.timeline import DrawnGraph, graphs_of
from suite.measure.gpu import find_gpu
from suite.measure.iteration import callable_for, iteration, seed_all, set_numerics
from suite.measure.modes import LANES_MODE, MODES, PLACEMENT_MODE
from suite.measure.profiling import PROFILED_ITERATIONS, graph_launches, load_profiler, trace
from suite.results.errors import WrongUse
from suite.run.matrix import require_whole, select_workloads

SETTLE_S = 60.0
"""Longest time for which a workload is called until its graphs are settled, in seconds."""
CALLS_TO_RECORD = 4
INPUT_SETS = 2
SEED = 1337


def measured_graphs(workload: str, *, variant: str | None, size: Size, say: Callable[[str], None]) -> list[DrawnGraph]:
    """Return the graphs of a workload with the times of their launches.

    Raises:
        NoGpu: there is none.
        WrongUse: there is no such workload, it has no such variant, or it is split over several GPUs.
    """
    try:
        (found, chosen), *_ = select_workloads([workload], variant)
    except WrongProgram as error:
        raise WrongUse(str(error)) from error
    require_whole(found)
    find_gpu()
    set_numerics()
    seed_all(SEED)
    instance = instantiate(found, variant=chosen, size=size, device="cuda", seed=SEED)
    say("compiling and recording")
    with (
        torch_internals.inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch_internals.functorch_config.patch(enable_autograd_cache=False),
    ):
        iterate = _compiled(instance, LANES_MODE)
        calls, begun = 0, time.monotonic()
        while calls < CALLS_TO_RECORD or (not optimizations.settled() and time.monotonic() - begun < SETTLE_S):
            iterate(calls)
            calls += 1
        torch.cuda.synchronize()
    reports = [recording for report in optimizations.report() for recording in report.recordings]
    graphs = graphs_of(found.acronym, reports)
    torch.compiler.reset()
    optimizations.reset()
    say("profiling")
    iterate = _compiled(instance, PLACEMENT_MODE)
    for number in range(CALLS_TO_RECORD):
        iterate(number)
    load_profiler(iterate)
    return with_times(graphs, [work_of_graphs(trace(iterate, 1)) for _ in range(PROFILED_ITERATIONS)])


def _compiled(instance: Instance, mode: str) -> Callable[[int], object]:
    mark_graphs(mode)
    run = iteration(instance, callable_for(MODES[mode], instance.module), marks_steps=True)
    sets = [instance.inputs(index) for index in range(INPUT_SETS)]
    return lambda number: run(sets[number % INPUT_SETS])


GraphWork = list[tuple[str, float]]
"""Device work of one launch of a graph, in order: names, and times in microseconds."""


def work_of_graphs(traced: Mapping[str, Any]) -> list[GraphWork]:
    """Return the work of each launch of a graph in a trace (`suite.measure.profiling`), in order."""
    events = [event for event in traced["traceEvents"] if event.get("ph") == "X"]
    launches = graph_launches(events)
    found: dict[int, list[tuple[float, str, float]]] = defaultdict(list)
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and correlation in launches:
            found[correlation].append((float(event["ts"]), str(event["name"]), float(event["dur"])))
    whole = sorted(sorted(work) for work in found.values())
    return [[(name, us) for _, name, us in work] for work in whole]


def with_times(graphs: Iterable[DrawnGraph], iterations: Sequence[Sequence[GraphWork]]) -> list[DrawnGraph]:
    """Return the graphs with the median times of several iterations, those that were found in all of them."""
    graphs = list(graphs)
    found = [times_of(graphs, work) for work in iterations]
    return [
        replace(graph, times_us=tuple(median(column) for column in zip(*times, strict=True)))
        if graph.concurrency.order and all(times := [one[place] for one in found])
        else graph
        for place, graph in enumerate(graphs)
    ]


def times_of(graphs: Sequence[DrawnGraph], work: Iterable[GraphWork]) -> list[tuple[float, ...]]:
    """Return the times of each graph's launches, empty where the graph is not in the profile.

    Graphs with equal launches are matched in the profile's order.
    """
    left = list(work)
    found = []
    for graph in graphs:
        at = next((place for place, one in enumerate(left) if _is_of(one, graph)), None)
        found.append(() if at is None else _by_launch(graph, left.pop(at)))
    return found


def _is_of(work: GraphWork, graph: DrawnGraph) -> bool:
    nodes = [node for launch in graph.concurrency.order for node in launch.nodes]
    return len(nodes) == len(work) and all(
        node == name or not (_is_generated(node) or _is_generated(name))
        for node, (name, _) in zip(nodes, work, strict=True)
    )


def _is_generated(name: str) -> bool:
    """Return whether the driver and the profiler have the same name for it. C++ names are written in two ways."""
    return name.startswith("triton_")


def _by_launch(graph: DrawnGraph, work: GraphWork) -> tuple[float, ...]:
    times = iter([us for _, us in work])
    return tuple(sum(next(times) for _ in launch.nodes) for launch in graph.concurrency.order)
