"""Find every place in the captured graph of one recording that holds an input's address.

There are two methods, and both return `Findings` with a plan:

* *by name*: if the generated code names every use of an input, and all are arguments of Triton kernels, the addresses
  are searched in the recorded graph itself (`graph.named_uses`). Nothing is captured or run. So this also works for
  functions that must not be captured once more: with collectives, custom operators or random numbers;
* *by comparison*: the function is captured once more with its inputs at other addresses, and never launched. The two
  graphs are compared (`graph.pointers`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from optimizations.concurrency.branches import Graph
from optimizations.graph.device import DeviceTools
from optimizations.graph.editing import EditableGraph
from optimizations.graph.memory import MemoryRanges, memory_of, size_bytes, storage_of
from optimizations.graph.named_uses import find_named_uses
from optimizations.graph.plan import Available, Choice, Plan, limit, make_plan, with_reasons
from optimizations.graph.pointers import Analysis, ReasonCode, find_pointer_uses
from optimizations.graph.pools import pool_memory
from optimizations.graph.prelude_check import available
from optimizations.graph.read import read_graph
from optimizations.graph.recapture import Recaptured, buffer_bytes, displace
from optimizations.graph.records import Capture, CapturedGraph, MemoryRange, Placeholder
from optimizations.in_place import budget
from optimizations.in_place.addresses import AddressTracker, TrackedInput
from optimizations.in_place.budget import waiting_for_memory
from optimizations.in_place.generated import GeneratedCode
from optimizations.options import Options
from optimizations.torch_internals.geometry import is_lazy_view

SHIFT_BYTES = 4096
"""The distance by which all inputs move once more for the last capture; it keeps their alignment."""


class KeptGraph(Graph, Protocol):
    """Define the methods used of a `torch.cuda.CUDAGraph` that was captured with `keep_graph=True`."""

    def raw_cuda_graph_exec(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """Describe a recording as stock made it. No tensor here owns its memory.

    Attributes:
        graph: the graph that is replayed.
        inputs: the tensors that the graph reads: placeholders, inputs at fixed addresses, results of earlier graphs.
        copied: inputs that stock copies before each replay.
        without_placeholder: those of them that were recorded in the caller's memory.
        written: inputs at fixed addresses that the function writes.
        returned: copied inputs whose placeholder shares memory with an output.
        pool: handle of the graph's memory pool.
        seconds: how long the recording took.
    """

    graph: KeptGraph
    inputs: Sequence[Any]
    copied: Sequence[int]
    written: Sequence[int]
    returned: frozenset[int]
    pool: Any
    seconds: float
    without_placeholder: frozenset[int] = frozenset()


class Host(Protocol):
    """Define what a session uses of its node."""

    @property
    def options(self) -> Options:
        """Return the user's options; `indirection` is anything but `off`."""

    @property
    def code(self) -> GeneratedCode:
        """Return the facts from the generated function's source."""

    @property
    def tools(self) -> DeviceTools:
        """Return the tools of the device."""

    def has_one_caller(self) -> bool:
        """Return whether only one thread calls the function, so that no other draws random numbers in a capture."""

    def is_seldom(self) -> bool:
        """Note a replay. Return whether other recordings of the function were replayed many times since the last."""

    def capture_again(self, inputs: Sequence[Any]) -> Recaptured:
        """Capture the function once more with these inputs."""

    def fill(self, values: Mapping[int, torch.Tensor]) -> None:
        """Copy values into placeholders, as stock does before a replay."""

    def at_address(self, index: int, address: int) -> torch.Tensor:
        """Return the recording input `index` as a tensor at another address, which it does not own."""

    def use_tracker(self, tracker: AddressTracker, unused: frozenset[int]) -> None:
        """Read the tracker's inputs in place from now on, and ignore `unused` ones."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Hold the findings on a recording, and the plan made from them.

    `unused` are inputs that the generated code does not use at all.
    """

    captured: CapturedGraph
    analysis: Analysis
    plan: Plan
    unused: frozenset[int]

    @property
    def in_place(self) -> list[int]:
        """Return the inputs that the plan reads in place."""
        return [one.input for one in self.plan.inputs if one.indirect]


class Examination:
    """Examine one recording. Facts about function and device are fetched once, when first needed.

    Args:
        recorded: the recording.
        host: its node.
    """

    def __init__(self, recorded: Recorded, host: Host) -> None:
        self.recorded = recorded
        self._host = host

    @functools.cached_property
    def tools(self) -> DeviceTools:
        """Return the tools of the device."""
        return self._host.tools

    @functools.cached_property
    def code(self) -> GeneratedCode:
        """Return the facts from the generated function's source."""
        return self._host.code

    @functools.cached_property
    def editable(self) -> EditableGraph:
        """Return the recorded graph as it was captured.

        Raises:
            CudaCallFailed: the graph cannot be read.
        """
        driver = self.tools.driver
        raw = driver.CUgraph(self.recorded.graph.raw_cuda_graph())
        return EditableGraph.of(driver, raw, read_graph(driver, raw))

    def candidates(self, indices: Iterable[int]) -> dict[int, MemoryRange]:
        """Return the memory that the graph reads of those inputs whose address may be replaced."""
        recorded = self.recorded.inputs
        return {index: memory_of(recorded[index]) for index in indices if ineligible_reason(recorded[index]) is None}

    # By name

    def by_name(self, candidates: Mapping[int, MemoryRange], others: str, choice: Choice) -> Findings:
        """Return the findings from the recorded graph alone, for inputs whose uses the generated code names.

        All other inputs are copied, for the reason `others`.

        Raises:
            CudaCallFailed: the graph cannot be read.
        """
        return self._findings(self._named_analysis(candidates, others), choice)

    @functools.cached_property
    def available(self) -> Available:
        """Return the updaters that the nodes of the recorded graph may have."""
        return available(self.tools, self.editable.captured, self.code.triton_kernels)

    def _named_analysis(self, candidates: Mapping[int, MemoryRange], others: str) -> Analysis:
        recorded = Capture(graph=self.editable.captured, placeholders=_placeholders(candidates))
        launches = [(launch.kernel, launch.inputs) for launch in self.code.launches]
        return find_named_uses(recorded, launches, self.code.triton_uses, self.available.triton, others)

    # By comparison

    def not_captured_again(self) -> str | None:
        """Return why the function must not be captured once more; None if it may."""
        if self.code.opaque is not None:
            return f"the function is not captured once more: {self.code.opaque}"
        draws = self.code.random or any(isinstance(one, torch.Generator) for one in self.recorded.inputs)
        if draws and not self._host.has_one_caller():
            return "the function is not captured once more: it may draw random numbers, and several threads call it"
        return None

    def short_of_memory(self, candidates: Mapping[int, MemoryRange]) -> str | None:
        """Return why a capture must wait for memory; None if it may be made now.

        The function itself needs at most as much memory as its graph's pool has.
        """
        pool = sum(one.size_bytes for one in pool_memory(self.recorded.pool))
        return waiting_for_memory(pool + buffer_bytes(candidates), self.tools.free_bytes())

    def compare(self, candidates: Mapping[int, MemoryRange], choice: Choice) -> Findings:
        """Capture once more with the candidates at other addresses, and compare the two graphs.

        Raises:
            torch.OutOfMemoryError, CudaCallFailed: no memory, or a graph that cannot be read.
        """
        analysis = self._analysis(candidates)
        if any(not verdict.indirect for verdict in analysis.verdicts):
            named = self._named_analysis(candidates, "it has other uses")
            analysis = replace(
                analysis,
                verdicts=tuple(
                    other if other.indirect and not one.indirect else one
                    for one, other in zip(analysis.verdicts, named.verdicts, strict=True)
                ),
            )
        return self._findings(analysis, choice)

    def _findings(self, analysis: Analysis, choice: Choice) -> Findings:
        """Return the findings that follow from an analysis, with reasons against inputs that must be copied."""
        captured, code = self.editable.captured, self.code
        analysis = limit(analysis, captured, self.recorded.returned)
        reused = dict.fromkeys(code.reused or (), "the function takes its memory for something else once it is dead")
        analysis = with_reasons(analysis, ReasonCode.OUTPUT_ALIAS, reused)
        verdicts = analysis.verdicts
        unused = frozenset(one.input for one in verdicts if not one.uses and code.triton_uses.get(one.input) == 0)
        return Findings(captured, analysis, make_plan(captured, analysis, choice, self.available), unused)

    def _analysis(self, candidates: Mapping[int, MemoryRange]) -> Analysis:
        device = self.tools.device
        buffer = torch.empty(buffer_bytes(candidates) + 512 + 2 * SHIFT_BYTES, dtype=torch.uint8, device=device)
        start = -(-buffer.data_ptr() // 512) * 512
        offsets = displace(candidates, start)
        recorded = self.recorded.inputs
        owned = pool_memory(self.recorded.pool)
        first = Capture(graph=self.editable.captured, placeholders=_placeholders(candidates), owned=owned)

        def capture_at(shift: int | None) -> Capture:
            """Capture with the candidates at displaced addresses, or at their own (None)."""
            places = {
                index: one.address if shift is None else start + offsets[index] + shift
                for index, one in candidates.items()
            }
            inputs = enumerate(recorded)
            made = self._host.capture_again(
                [self._host.at_address(index, places[index]) if index in places else one for index, one in inputs]
            )
            moved = {index: one.model_copy(update={"address": places[index]}) for index, one in candidates.items()}
            return Capture(graph=made.graph, placeholders=_placeholders(moved), owned=made.owned)

        started = time.perf_counter()
        second, more = capture_at(0), list[Capture]()
        # Each further capture is made only if the earlier ones are inconclusive.
        doubts = (None, 0, SHIFT_BYTES, None, 0, 2 * SHIFT_BYTES)
        while True:
            analysis = find_pointer_uses(first, second, further=more, replace_address=self.tools.replace_address)
            spent_s = time.perf_counter() - started
            too_long = spent_s * (2 + len(more)) / (1 + len(more)) > budget.MOST_WORK * self.recorded.seconds
            if not analysis.doubtful or len(more) == len(doubts) or too_long:
                return analysis
            more.append(capture_at(doubts[len(more)]))

    def planned(self, findings: Findings, analysis: Analysis, choice: Choice) -> Findings:
        """Return the findings with another analysis, and the plan that follows from it."""
        plan = make_plan(findings.captured, analysis, choice, self.available)
        return replace(findings, analysis=analysis, plan=plan)

    def unproven(self, indices: Iterable[int]) -> list[int]:
        """Return the inputs that may be used by more than the Triton kernels and products in the generated code."""
        known = self.code.products.union(self.code.triton_uses)
        return [index for index in indices if index not in known]

    def overwritten(self) -> MemoryRanges:
        """Return the memory that the graph writes: its own, and that of the inputs that the function writes."""
        written = (storage_of(self.recorded.inputs[index]) for index in self.recorded.written)
        return MemoryRanges([*pool_memory(self.recorded.pool), *written])

    def tracked(self, findings: Findings) -> list[TrackedInput]:
        found = []
        for one in findings.plan.inputs:
            if one.indirect:
                value, is_cloned = self.recorded.inputs[one.input], one.input in self.recorded.without_placeholder
                placeholder = None if is_cloned else value.data_ptr()
                found.append(TrackedInput(one.input, one.alignment_bytes, placeholder, size_bytes(value)))
        return found


def ineligible_reason(value: Any) -> str | None:
    """Return why the address of a recording input is not searched; None if it is."""
    if not isinstance(value, torch.Tensor):
        return "it is not a tensor"
    if not value.is_cuda:
        return f"it lies on {value.device}"
    if is_lazy_view(value):
        return "it is a lazy conjugate or negative, which a copy resolves"
    if size_bytes(value) == 0:
        return "it holds no bytes, so there is nothing to gain"
    return None


def _placeholders(memory: Mapping[int, MemoryRange]) -> tuple[Placeholder, ...]:
    return tuple(Placeholder(input=index, memory=where) for index, where in sorted(memory.items()))
