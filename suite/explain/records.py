"""Define the records of `encore explain`'s results, which are written as JSON and read by the report.

All results are computed without a GPU: from Dynamo's FX graphs over fake CUDA tensors and, where possible, from a full
lowering for an H100. Limits of the analysis are listed in `limits`; nothing is guessed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from suite.results.schema import NotCaptured, Record

TO_THE_END = "seen to its end"
"""The value of `Explanation.seen` if the call was traced to its end."""


CpuKind = Literal["constant", "attribute", "argument", "computed", "output"]


class ExplainedCpuNode(Record):
    """Describe a node of an FX graph whose value is on the CPU.

    `kind` is its source: made in the graph, read from a module or global, passed with each call, computed from other
    CPU nodes; `output` marks a CPU value that the graph returns.
    """

    node: str
    operation: str
    kind: CpuKind
    shape: list[int] | None
    dtype: str | None
    source_line: str | None


CopyKind = Literal["copy", "implicit", "scalar"]


class ExplainedCopy(Record):
    """Describe a host-to-device copy of each call. `blocking`: the host waits for it, as it does by default.

    `kind`: the program copies explicitly (`copy`), or an operation on the GPU reads a CPU tensor, for example as an
    index (`implicit`). A CPU tensor of rank 0 in GPU arithmetic (`scalar`) is passed by value and does not block.
    """

    node: str
    kind: CopyKind = "copy"
    copied_bytes: int | None
    blocking: bool
    source_line: str | None


class NonStaticInput(Record):
    """Describe an input whose data stock CUDA graphs copy before each replay."""

    node: str
    shape: list[int] | None
    dtype: str | None
    input_bytes: int | None


class Lowering(Record):
    """Hold Inductor's outcome for one FX graph under one setting, from an offline lowering for `target` (no GPU).

    `partitions` counts partitions that would become CUDA graphs; `kernels_in_graphs` the kernels inside them; kernels
    outside are launched one by one; `cpu_kernels` run on the host in each call; `host_to_device_copies` counts copies
    in the call, and `blocking_copies` those that make the host wait. A kernel is a call in the generated code: a
    library call may launch more than one.
    """

    setting: str
    target: str
    partitions: int
    kernels_in_graphs: int
    kernels_outside: int
    cpu_kernels: int
    host_to_device_copies: int
    blocking_copies: int = 0
    not_captured: list[NotCaptured]


PlacedForm = Literal["kept", "literal", "rebuilt", "staged", "cpu output"]


class PlacedValue(Record):
    """Describe a CPU value that placement moves to the GPU.

    `form`: "kept" on the GPU and refreshed when an attribute changes, a "literal" of the graph, "rebuilt" there on the
    GPU, "staged" with each call, or a "cpu output", computed on the GPU and copied to the CPU after the graph.
    `value_bytes` is 0 if it needs no memory, and None if that is unknown before the call.
    """

    node: str
    form: PlacedForm
    value_bytes: int | None
    source_line: str | None


class LeftInPlace(Record):
    """Describe a node on the CPU, or with a CPU input, that placement does not change, and the reason."""

    node: str
    operation: str
    reason: str
    source_line: str | None


class Placed(Record):
    """Hold one FX graph after placement.

    `untouched` is the reason why it is unchanged. `cpu_nodes`, `copies` and `blocking_copies` count those that remain:
    host-to-device copies of one call, including the staging copy and without scalars passed by value.
    """

    untouched: str | None
    cpu_nodes: int
    copies: int
    blocking_copies: int
    values: list[PlacedValue]
    left: list[LeftInPlace]


class FxGraph(Record):
    """Hold one FX graph of the model, in the order Dynamo made them. `placement` None: it was not planned.

    `backward`: the lowerings of its backward graph, in a program that trains.
    """

    index: int
    operations: int
    cpu_nodes: list[ExplainedCpuNode]
    copies: list[ExplainedCopy]
    non_static_inputs: list[NonStaticInput]
    non_static_input_bytes: int
    stock_captures: bool | None
    """True if stock CUDA graphs (default settings) would capture all its kernels: those of its backward and those that
    run on the CPU are included. None if it is unknown, or if it has no kernel."""
    lowerings: list[Lowering]
    placement: Placed | None = None
    backward: list[Lowering] = Field(default_factory=list)


class GraphBreak(Record):
    reason: str
    source_line: str | None


class Explanation(Record):
    """Hold the explanation of one model. If the analysis failed, `error` is set, and the rest may be empty.

    `commit` is the git commit of Encore, and `dirty` whether its code was changed since.
    """

    schema_version: int
    target: str
    variant: str | None
    size: Literal["full", "tiny"] = "full"
    task: str
    batch: int | None
    torch: str
    commit: str | None = None
    dirty: bool | None = None
    graphs: list[FxGraph]
    breaks: list[GraphBreak]
    limits: list[str]
    error: str | None
    seen: str | None = None
    """The part of the call that was seen, in words: to its end, or up to which line. Older explanations do not say."""

    @property
    def host_to_device(self) -> list[ExplainedCopy]:
        """Return the host-to-device copies of one call, without scalars, which are passed by value."""
        return [copy for graph in self.graphs for copy in graph.copies if copy.kind != "scalar"]

    @property
    def cpu_nodes(self) -> int:
        """Return the CPU values of one call; a value that is also returned counts once."""
        return sum(len({node.node for node in graph.cpu_nodes}) for graph in self.graphs)

    def forwards(self, setting: str) -> list[Lowering]:
        """Return the lowerings of FX graphs under this setting; those that could not be lowered have none."""
        return [one for graph in self.graphs for one in graph.lowerings if one.setting == setting]

    def backwards(self, setting: str) -> list[Lowering]:
        """Return the lowerings of their backward graphs."""
        return [one for graph in self.graphs for one in graph.backward if one.setting == setting]


class WorkerAnswer(Record):
    """Hold the answer of a worker: an explanation, or an error that the user has to fix first."""

    explanation: Explanation | None = None
    wrong_use: str | None = None
