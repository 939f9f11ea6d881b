"""Record the outcome of a cell's compilation: FX graphs, breaks, partitions, CUDA graphs, and Inductor's reasons.

Collected while the cell compiles and warms up, by the observer in `optimizations.torch_internals.outcome`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.report import CompiledGraph
from optimizations.torch_internals import outcome
from optimizations.trees.containers import manager_of
from suite.measure.source_line import Reasons
from suite.results.schema import GraphCounts


class GraphLog:
    """Collect graphs and reasons of one cell. `wants_cuda_graphs`: the mode uses CUDA graphs."""

    def __init__(self, *, wants_cuda_graphs: bool) -> None:
        self._wants_cuda_graphs = wants_cuda_graphs
        self._reasons = Reasons()
        self._partitions = 0

    def counts(self, cuda_graphs: int) -> GraphCounts:
        """Return the outcome as a record; `cuda_graphs` is the current number of recordings."""
        counters = torch_internals.dynamo_utils.counters
        return GraphCounts(
            fx_graphs=counters["stats"]["unique_graphs"],
            graph_breaks=sum(counters["graph_break"].values()),
            partitions=self._partitions if self._wants_cuda_graphs else None,
            cuda_graphs=cuda_graphs,
            not_captured=self._reasons.records(),
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Collect compilations and first calls inside the block."""
        if not self._wants_cuda_graphs:
            yield
            return
        with outcome.watched(self._note_graph, every_thread=True), outcome.mutations_noted(self._reasons.add):
            yield

    def _note_graph(self, graph: CompiledGraph, _: Any) -> None:
        self._partitions += graph.partitions
        self._reasons.add_graph(graph)


def recorded_graphs(device: torch.device) -> list[Any]:
    """Return every `torch.cuda.CUDAGraph` of a recording in stock's and Encore's CUDAGraph Trees on `device`."""
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    found = manager_of(index), torch_internals.cudagraph_trees.get_manager(index, False)
    nodes = [root for manager in found if manager is not None for root in manager.get_roots()]
    for node in nodes:  # grows during the loop: the trees are visited breadth first
        for children in node.children.values():
            nodes.extend(children)
    return [node.graph for node in nodes]
