"""Record the outcome of a cell's compilation: FX graphs, breaks, partitions, CUDA graphs, and Inductor's reasons.

Collected while the cell compiles and warms up, by the observer in `optimizations.torch_internals.outcome`. Encore's own
report on each graph is returned as JSON values. Its texts contain no path of this machine: source lines and Inductor's
messages are written by `suite.measure.source_line`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import JsonValue

import optimizations
from optimizations import torch_internals
from optimizations.report import CompiledGraph
from optimizations.torch_internals import outcome
from optimizations.trees.containers import manager_of
from suite.measure.environment import without_paths
from suite.measure.source_line import Reasons, reason_and_line, short_line
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


_SOURCE_LINE = "source_line"


def encore_report() -> list[JsonValue]:
    """Return `optimizations.report()`, a dictionary per FX graph.

    The order of launches is left out: it is large, and `encore draw graph` gives it.
    """
    records = json.loads(json.dumps([dataclasses.asdict(graph) for graph in optimizations.report()]))
    for recording in (one for record in records for one in record["recordings"] if one["concurrency"] is not None):
        del recording["concurrency"]["order"]
    return [with_short_paths(record) for record in records]


def graphs_wait_for_memory() -> str | None:
    """Return the reason if one of Encore's graphs waits for memory in this process."""
    every = (one for graph in optimizations.report() for one in graph.recordings)
    return next((one.waiting for one in every if one.waits_for_memory), None)


def with_short_paths(value: JsonValue) -> JsonValue:
    """Return the same JSON value without paths of this machine."""
    match value:
        case str():
            return without_paths(_said(value))
        case list():
            return [with_short_paths(one) for one in value]
        case dict():
            return {
                key: short_line(one) if key == _SOURCE_LINE and isinstance(one, str) else with_short_paths(one)
                for key, one in value.items()
            }
        case _:
            return value


def _said(text: str) -> str:
    """Return the first part of a message of Inductor's that ends with a stack trace, and the user's line."""
    reason, line = reason_and_line(text)
    return text if line is None else f"{reason} [{line}]"
