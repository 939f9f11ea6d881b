"""Report what Encore did with each FX graph, as plain records that are kept until `reset()`.

A reason for not doing something is a value here, with the line of the user's program it comes from. Every field is a
string, a number or a tuple of such, so that `dataclasses.asdict` of a record can be written as JSON.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from optimizations.byte_units import format_bytes
from optimizations.report.recordings import CountedCalls, Direction, KeptResults, RecordingReport, SelectionReport

CpuKind = Literal["constant", "attribute", "argument", "computed"]
Size = int | str
"""A size, or its symbol if it differs from call to call."""


@dataclass(frozen=True, slots=True)
class CpuNode:
    """Describe a node of an FX graph whose value lives on the CPU.

    `kind` is where the value comes from: made in the graph, read from a module or global, passed with each call, or
    computed from others. `shape` and `dtype` are None for a node that holds several tensors.
    """

    node: str
    operation: str
    kind: CpuKind
    shape: tuple[Size, ...] | None
    dtype: str | None
    source_line: str | None


CopyKind = Literal["copy", "implicit", "scalar"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Describe a host-to-device copy of each call: `node` reads `value` on the GPU. `blocking`: the host waits for it.

    `kind`: an explicit copy in the program (`copy`), or an operation on the GPU takes a CPU tensor, for example as an
    index (`implicit`). A CPU tensor of rank 0 in GPU arithmetic (`scalar`) is passed by value and does not block.
    """

    node: str
    value: str
    copied_bytes: int | None
    blocking: bool
    source_line: str | None
    kind: CopyKind = "copy"


HoistedForm = Literal["kept", "literal"]


@dataclass(frozen=True, slots=True)
class Hoisted:
    """Describe a value that does not depend on the call.

    `form`: "kept" values are computed once on the CPU and kept on the GPU, `hoisted_bytes` each; `attributes` are the
    program's names of what they are computed from, guarded in every call. Constants of rank 0 became "literal"s of the
    graph, which take no memory.
    """

    node: str
    form: HoistedForm
    shape: tuple[Size, ...]
    dtype: str
    hoisted_bytes: int
    attributes: tuple[str, ...]
    source_line: str | None


@dataclass(frozen=True, slots=True)
class Staged:
    """Describe a CPU value that is copied on each call, in the one asynchronous copy of its graph.

    `argument` is the program's name of an argument, or the operation that computes the value before the graph.
    """

    node: str
    argument: str
    shape: tuple[Size, ...]
    dtype: str
    staged_bytes: int | None
    source_line: str | None


@dataclass(frozen=True, slots=True)
class Left:
    """Describe a node that is unchanged although it is on the CPU or reads from there, with the reason."""

    node: str
    operation: str
    reason: str
    source_line: str | None


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """Report the placement of one FX graph, before and after.

    `untouched` is why the graph was not rewritten; None if it was. `before` and `after` are the operations that are
    evaluated on the CPU in each call before the graph and after it; `cpu_nodes_after` are left in it. `cpu_outputs` are
    results for the CPU that come from GPU values; they are copied out after the graph. `copies_*` are the
    host-to-device copies of a call according to the FX graph, before Inductor compiles it.
    """

    device: str | None
    untouched: str | None
    nodes: int
    cpu_nodes_before: tuple[CpuNode, ...] = ()
    cpu_nodes_after: tuple[CpuNode, ...] = ()
    copies_before: tuple[Copy, ...] = ()
    copies_after: tuple[Copy, ...] = ()
    hoisted: tuple[Hoisted, ...] = ()
    staged: tuple[Staged, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    cpu_outputs: tuple[str, ...] = ()
    left: tuple[Left, ...] = ()

    def lines(self) -> Iterator[str]:
        """Write the report as text."""
        if self.untouched is not None:
            yield f"untouched: {self.untouched}"
        yield f"on the CPU:       {len(self.cpu_nodes_before)} nodes before, {len(self.cpu_nodes_after)} after"
        yield f"copied to device: {_copies(self.copies_before)} before, {_copies(self.copies_after)} after"
        for hoisted in self.hoisted:
            what = format_bytes(hoisted.hoisted_bytes) if hoisted.form == "kept" else hoisted.form
            depends = f", depends on {', '.join(hoisted.attributes)}" if hoisted.attributes else ""
            yield f"hoisted {hoisted.node} ({what}{depends}){_at(hoisted.source_line)}"
        for staged in self.staged:
            known = staged.staged_bytes is not None
            size = format_bytes(staged.staged_bytes or 0) if known else "size differs between calls"
            yield f"staged {staged.argument} ({size}){_at(staged.source_line)}"
        if self.before:
            yield f"evaluated before the graph, on the CPU: {', '.join(self.before)}"
        if self.after:
            yield f"evaluated after the graph, on the CPU: {', '.join(self.after)}"
        for output in self.cpu_outputs:
            yield f"copied out after the graph: {output}"
        for left in self.left:
            yield f"left {left.node} ({left.operation}): {left.reason}{_at(left.source_line)}"


def _copies(copies: Sequence[Copy]) -> str:
    blocking = sum(copy.blocking for copy in copies)
    return f"{len(copies)} ({blocking} blocking)"


def _at(source_line: str | None) -> str:
    return f"  [{source_line}]" if source_line else ""


@dataclass(frozen=True, slots=True)
class BindingReport:
    """Report the parameters and buffers that Dynamo's bytecode does not load on each call.

    `tensors` counts them; `untouched` is the reason if there are none, else None.
    """

    tensors: int
    untouched: str | None


@dataclass(frozen=True, slots=True)
class ShortcutReport:
    """Report whether calls skip the wrappers of AOTAutograd and Inductor. `kept` is the reason if not, else None."""

    kept: str | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Describe, with Inductor's reason, an operation outside of all CUDA graphs; with the user's line if available."""

    reason: str
    source_line: str | None
    count: int = 1


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """Describe how Inductor compiled one direction of an FX graph.

    Attributes:
        partitions: pieces that become CUDA graphs; 1 for a graph that is captured whole.
        not_captured: why there are none.
        left_out: operations outside of these pieces; empty for a graph from a warm cache.
    """

    direction: Direction
    partitions: int
    not_captured: tuple[LeftOut, ...]
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Report one FX graph that went through the backend, numbered in the order of compilation since the last `reset`.

    Attributes:
        placement: the placement of values on the CPU.
        compiled: Inductor's outcome for each direction; a backward is added once it is compiled.
        recordings: a record for each CUDA graph, in the order they were recorded; freed ones come first.
        binding: parameters and buffers that calls do not load; None without `lean`.
        shortcut: whether calls skip PyTorch's wrappers; None without `lean`.
        kept: results that are copied out of graph memory because the program keeps them.
        uncaptured: calls that ran without a graph although Inductor made the function for one, by reason.
        selection: for each function of Inductor's, how its calls run and why; empty with `selection="off"`.
        slow_calls: calls on the slow path, by reason in order of first occurrence; none are counted without `lean`.
    """

    index: int
    placement: PlacementReport
    compiled: tuple[CompiledGraph, ...]
    recordings: tuple[RecordingReport, ...] = ()
    binding: BindingReport | None = None
    shortcut: ShortcutReport | None = None
    kept: tuple[KeptResults, ...] = ()
    uncaptured: tuple[CountedCalls, ...] = ()
    selection: tuple[SelectionReport, ...] = ()
    slow_calls: tuple[CountedCalls, ...] = ()

    @property
    def full_ways(self) -> tuple[CountedCalls, ...]:
        """Return `slow_calls`, by its name in release 0.1."""
        warnings.warn("GraphReport.full_ways is called slow_calls now", DeprecationWarning, stacklevel=2)
        return self.slow_calls


class ReportedFunction(Protocol):
    """Define the report of a function of Inductor's that is made into CUDA graphs."""

    def recordings(self) -> Sequence[RecordingReport]:
        """Return its graphs in the order they were recorded, freed ones first, with their last state."""

    def kept(self) -> KeptResults | None:
        """Return its results that the program keeps; None if it keeps none."""

    def uncaptured(self) -> Sequence[CountedCalls]:
        """Return the calls without a graph, by reason."""

    def slow_calls(self) -> Sequence[CountedCalls]:
        """Return the calls on the slow path by reason, in order of first occurrence."""

    def selection(self) -> SelectionReport | None:
        """Return how its calls run, and why; None with `selection="off"`."""


@dataclass(slots=True)
class Entry:
    """Collect a graph's record: its backward is compiled, and graphs are recorded, much later."""

    placement: PlacementReport
    compiled: list[CompiledGraph] = field(default_factory=list)
    binding: BindingReport | None = None
    shortcut: ShortcutReport | None = None
    functions: list[ReportedFunction] = field(default_factory=list)

    def note_shortcut(self, report: ShortcutReport) -> None:
        self.shortcut = report

    def snapshot(self, index: int) -> GraphReport:
        return GraphReport(
            index,
            self.placement,
            tuple(self.compiled),
            tuple(report for function in self.functions for report in function.recordings()),
            self.binding,
            self.shortcut,
            tuple(kept for function in self.functions if (kept := function.kept()) is not None),
            tuple(calls for function in self.functions for calls in function.uncaptured()),
            tuple(found for function in self.functions if (found := function.selection()) is not None),
            tuple(ways for function in self.functions for ways in function.slow_calls()),
        )


ENTRIES: list[Entry] = []
"""One for each graph that was compiled since the last `reset`. Dynamo may request a graph twice; only one counts."""


def recordings() -> tuple[RecordingReport, ...]:
    """Return all CUDA graphs recorded since the start of the process or the last `reset`, with their counters."""
    return tuple(recording for graph in report() for recording in graph.recordings)


def report() -> tuple[GraphReport, ...]:
    """Return what the backend did with each FX graph since the start of the process or the last `reset`."""
    return tuple(entry.snapshot(index) for index, entry in enumerate(list(ENTRIES)))
