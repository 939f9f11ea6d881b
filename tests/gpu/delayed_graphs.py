"""Delay kernels of a captured graph: an order that is not right then gives other results."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import torch
from cuda.bindings import driver

from optimizations.graph.driver import check
from optimizations.graph.read import node_handles

CYCLES = (5_000, 20_000, 100_000)
"""Lengths of a delay in cycles of the GPU's clock: about 3, 10 and 50 us."""
SHARE = 0.15
"""Share of nodes that are delayed."""
MOST = 200


@functools.cache
def _sleep(cycles: int) -> tuple[Any, Any]:
    """A kernel that does nothing for so many cycles: its parameters, and the graph that holds them."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        torch.cuda._sleep(cycles)
    (node,) = node_handles(driver, driver.CUgraph(graph.raw_cuda_graph()))
    return check(driver.cuGraphKernelNodeGetParams, node), graph


@contextlib.contextmanager
def delayed(graph: Any, seed: int) -> Iterator[None]:
    """In the block, replays of a `torch.cuda.CUDAGraph` that keeps its graph delay some nodes, drawn from the seed.

    A delay comes between a node and all that it waits for, so that others overtake it wherever they may.
    """
    raw = driver.CUgraph(graph.raw_cuda_graph())
    handles = node_handles(driver, raw)
    drawn = random.Random(seed)
    chosen = drawn.sample(range(len(handles)), min(MOST, max(1, round(SHARE * len(handles)))))
    added = []
    try:
        for index in chosen:
            node = handles[index]
            *_, count = check(driver.cuGraphNodeGetDependencies, node, 0)
            before = list(check(driver.cuGraphNodeGetDependencies, node, count)[0]) if count else []
            parameters, _ = _sleep(drawn.choice(CYCLES))
            added.append(check(driver.cuGraphAddKernelNode, raw, before or None, len(before), parameters))
            check(driver.cuGraphAddDependencies, raw, [added[-1]], [node], None, 1)
        graph.instantiate()
        yield
    finally:
        torch.cuda.synchronize()
        for node in added:
            check(driver.cuGraphDestroyNode, node)
        graph.instantiate()


@contextlib.contextmanager
def without_edges(graph: Any) -> Iterator[None]:
    """In the block, no node of the graph waits for another once it is instantiated."""
    raw = driver.CUgraph(graph.raw_cuda_graph())
    *_, count = check(driver.cuGraphGetEdges, raw, 0)
    sources, targets, data, _ = check(driver.cuGraphGetEdges, raw, count) if count else ([], [], [], 0)
    if count:
        check(driver.cuGraphRemoveDependencies, raw, sources, targets, data, count)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        if count:
            check(driver.cuGraphAddDependencies, raw, sources, targets, data, count)
        graph.instantiate()
