"""Define records of what `encore explain` finds: they are written as JSON and read by the report.

Everything here is known without a GPU: from Dynamo's FX graphs over fake CUDA tensors and, where it works, from a
full lowering for an H100. What could not be seen is listed in `limits`, not guessed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from suite.results.schema import NotCaptured, Record

TO_THE_END = "seen to its end"
"""The value of `Explanation.seen` where nothing cut the call short."""


CpuKind = Literal["constant", "attribute", "argument", "computed", "output"]


class ExplainedCpuNode(Record):
    """Hold a node of an FX graph whose value lives on the CPU.

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
    """Hold a host-to-device copy of each call. `blocking`: the host waits for it, as it does by default.

    `kind`: the program asks for it (`copy`), or an operation on the GPU takes a CPU tensor, for example as an index
    (`implicit`). A CPU tensor of rank 0 in GPU arithmetic (`scalar`) is passed by value and does not block.
    """

    node: str
    kind: CopyKind = "copy"
    copied_bytes: int | None
    blocking: bool
    source_line: str | None


class NonStaticInput(Record):
    """Hold an input whose data stock CUDA graphs copy before each replay."""

    node: str
    shape: list[int] | None
    dtype: str | None
    input_bytes: int | None


class Lowering(Record):
    """Hold Inductor's outcome for one FX graph under one setting, from an offline lowering for `target` (no GPU).

    `partitions` counts pieces that would become CUDA graphs; `kernels_in_graphs` the kernels inside them; kernels
    outside run one launch at a time; `cpu_kernels` run on the host each call; `host_to_device_copies` counts copies in
    the call, `blocking_copies` those among them that make the host wait. A kernel is a call in the generated code: a
    library call may launch more than one.

    `captured_once` stands in older explanations: why Encore captures the graph only once, so that inputs are copied
    whose uses the generated code does not name.
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
    captured_once: list[str] = Field(default_factory=list)


PlacedForm = Literal["kept", "literal", "rebuilt", "staged", "cpu output"]


class PlacedValue(Record):
    """Hold a CPU value that placement brings to the GPU.

    `form`: "kept" on the GPU and refreshed when an attribute changes, a "literal" of the graph, "rebuilt" there on the
    GPU, "staged" with each call, or a "cpu output", computed on the GPU and copied out after the graph. `value_bytes`
    0: it takes no memory; None: not known beforehand.
    """

    node: str
    form: PlacedForm
    value_bytes: int | None
    source_line: str | None


class LeftInPlace(Record):
    """Hold a node that placement leaves as it is although it is on the CPU or reads from there, and why."""

    node: str
    operation: str
    reason: str
    source_line: str | None


class Placed(Record):
    """Hold one FX graph after placement.

    `untouched` says why it is as before. `cpu_nodes`, `copies` and `blocking_copies` are those that remain: host-to-
    device copies of one call, the one staging copy included and scalars passed by value left out.
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
    """Hold all that `explain` tells of one model. `error` is set, and the rest may be empty, where the analysis failed.

    `commit` and `dirty` are Encore's own: the git commit of the code that analysed, and whether it was changed since.
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
        """Return copies from host to device in one call. Scalars are not among them: they are passed by value."""
        return [copy for graph in self.graphs for copy in graph.copies if copy.kind != "scalar"]

    @property
    def cpu_nodes(self) -> int:
        """Return values on the CPU in one call, one that is returned counted once."""
        return sum(len({node.node for node in graph.cpu_nodes}) for graph in self.graphs)

    def forwards(self, setting: str) -> list[Lowering]:
        """Return the lowerings of FX graphs under this setting; those that could not be lowered have none."""
        return [one for graph in self.graphs for one in graph.lowerings if one.setting == setting]

    def backwards(self, setting: str) -> list[Lowering]:
        """Return the lowerings of their backward graphs."""
        return [one for graph in self.graphs for one in graph.backward if one.setting == setting]


class WorkerAnswer(Record):
    """Hold what the process that explains a target returns: an explanation, or what the user has to fix first."""

    explanation: Explanation | None = None
    wrong_use: str | None = None
