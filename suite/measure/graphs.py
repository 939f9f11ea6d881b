"""What a cell compiled to: FX graphs, breaks, partitions, CUDA graphs, and why Inductor left something out of them.

Collected while the cell compiles and warms up, from where the decisions are made:

* `CompiledFxGraph.post_compile` runs once per compiled graph, from a cache or not. It tells the partitions that will
  be captured, or why the whole graph will not be.
* `Scheduler.graph_partition` splits a graph. It is asked for the reason and stack trace of each node it leaves out.
  A graph that comes from a warm cache was split earlier, in another process: such reasons are then missing.
* Mutated inputs are found out only when a graph is called, and only told to the `cudagraphs` log.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.trees.containers import managers
from suite.schema import GraphCounts, NotCaptured
from suite.source_line import reason_and_line, user_line

SKIPPED = "skipping cudagraphs due to "
MUTATED = SKIPPED + "mutated inputs"
FORWARD_NOT_CAPTURED = "backward of a graph that was not captured"
NO_CUDA_WORK = "nothing in the graph runs on a CUDA device"


def split_reason(message: str) -> tuple[str, str | None]:
    """Inductor's message as (reason, the user's source line), its set phrases and the stack trace taken off."""
    reason, line = reason_and_line(message)
    return reason.removeprefix(SKIPPED), line


class GraphLog:
    """Graphs and reasons of one cell. `wants_cuda_graphs`: whether the mode asked for any; if not, none is missed."""

    def __init__(self, *, wants_cuda_graphs: bool) -> None:
        self._wants_cuda_graphs = wants_cuda_graphs
        self._reasons: Counter[tuple[str, str | None]] = Counter()
        self._partitions = 0

    def counts(self, cuda_graphs: int) -> GraphCounts:
        """All of it as a record; `cuda_graphs` is the number of recordings there are now."""
        counters = torch_internals.dynamo_utils.counters
        return GraphCounts(
            fx_graphs=counters["stats"]["unique_graphs"],
            graph_breaks=sum(counters["graph_break"].values()),
            partitions=self._partitions if self._wants_cuda_graphs else None,
            cuda_graphs=cuda_graphs,
            not_captured=[
                NotCaptured(reason=reason, source_line=line, count=count)
                for (reason, line), count in self._reasons.items()
            ],
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Collect what is compiled, and what is called for the first time, inside the block."""
        if not self._wants_cuda_graphs:
            yield
            return
        graph_class, scheduler_class = torch_internals.CompiledFxGraph, torch_internals.Scheduler
        stock_post_compile, stock_partition = graph_class.post_compile, scheduler_class.graph_partition
        log = self

        def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
            wanted = bool(graph_kwargs["cudagraphs"])
            stock_post_compile(self, example_inputs, constants, graph_kwargs)
            log.note_graph(self, wanted=wanted, enabled=bool(graph_kwargs["cudagraphs"]))

        def graph_partition(self: Any) -> Any:
            partitions, signatures = stock_partition(self)
            for partition, signature in zip(partitions, signatures, strict=True):
                if signature.skip_cudagraph:
                    log.note_left_out(self, partition)
            return partitions, signatures

        logger = torch_internals.cudagraph_utils.cudagraphs_log
        handler = _MutationHandler(self)
        graph_class.post_compile, scheduler_class.graph_partition = post_compile, graph_partition
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            graph_class.post_compile, scheduler_class.graph_partition = stock_post_compile, stock_partition

    def note_graph(self, graph: Any, *, wanted: bool, enabled: bool) -> None:
        """A `CompiledFxGraph`: were CUDA graphs wanted before `post_compile`, and are they still enabled after it?"""
        if enabled:
            # None: the graph was not partitioned, and is captured whole.
            self._partitions += 1 if graph.partition_maps is None else len(graph.partition_maps)
        elif "cuda" not in graph.device_types:
            self.note_reason(NO_CUDA_WORK)
        elif graph.disabled_cudagraphs_reason:
            self.note_reason(graph.disabled_cudagraphs_reason)
        elif not wanted:
            self.note_reason(FORWARD_NOT_CAPTURED)
        elif graph.cudagraph_info is not None:
            for reason in graph.cudagraph_info.cudagraph_fail_reasons:
                self.note_reason(reason)

    def note_left_out(self, scheduler: Any, partition: Any) -> None:
        """Scheduler nodes of one partition that will run outside of CUDA graphs."""
        for node in partition:
            for single in node.get_nodes():
                if reason := scheduler.should_partition(single):
                    traces = sorted(single.node.get_stack_traces())
                    self._reasons[reason, user_line(traces[0] if traces else None)] += 1

    def note_reason(self, message: str) -> None:
        """A reason in Inductor's words, with or without a stack trace at its end."""
        self._reasons[split_reason(message)] += 1


class _MutationHandler(logging.Handler):
    """Passes on what CUDAGraph Trees say of mutated inputs; all other messages of that log are known otherwise."""

    def __init__(self, log: GraphLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()).startswith(MUTATED):
            self._log.note_reason(message)


def recorded_graphs(device: torch.device) -> list[Any]:
    """Every `torch.cuda.CUDAGraph` that CUDAGraph Trees, stock's and Encore's, hold a recording in on this device."""
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    stock = torch_internals.cudagraph_trees.get_manager(index, False)
    found = [*managers(index), *([stock] if stock is not None else [])]
    nodes = [root for manager in found for root in manager.get_roots()]
    for node in nodes:  # grows while it is walked: the trees are visited breadth first
        for children in node.children.values():
            nodes.extend(children)
    return [node.graph for node in nodes]
