"""Define the records of `encore explain`'s results, which are written as JSON.

All results are computed without a GPU: from Dynamo's FX graphs over fake CUDA tensors and, where possible, from a full
lowering for an H100. Limits of the analysis are listed in `limits`; nothing is guessed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from optimizations.report import PlacementReport
from suite.results.schema import NotCaptured, Record

TO_THE_END = "seen to its end"
"""The value of `Explanation.seen` if the call was traced to its end."""


class NonStaticInput(Record):
    """Describe an input whose data stock CUDA graphs copy before each replay."""

    node: str
    shape: list[int] | None
    dtype: str | None
    input_bytes: int | None


class Lowering(Record):
    """Hold Inductor's outcome for one FX graph under one setting, from an offline lowering for an H100 (no GPU).

    `partitions` counts partitions, or whole graphs, that would become CUDA graphs; `kernels_in_graphs` the kernels
    inside them; kernels outside are launched one by one; `cpu_kernels` run on the host in each call;
    `host_to_device_copies` counts copies in the call, and `blocking_copies` those that make the host wait. A kernel is
    a call in the generated code: a library call may launch more than one.
    """

    setting: str = ""
    partitions: int
    kernels_in_graphs: int
    kernels_outside: int
    cpu_kernels: int
    host_to_device_copies: int
    blocking_copies: int = 0
    not_captured: list[NotCaptured]
    takes_cpu_tensors: tuple[str, ...] = Field(default=(), exclude=True)
    """User's lines of operations in partitions that read a CPU tensor with dimensions. Inductor allows them; only a GPU
    shows whether they can be recorded."""
    source: str = Field(default="", exclude=True)
    """The generated module; "" where Inductor had nothing to generate (a graph of views)."""


class FxGraph(Record):
    """Hold one FX graph of the model, in the order Dynamo made them, with what the backend's placement finds in it."""

    index: int
    operations: int
    placement: PlacementReport
    non_static_inputs: list[NonStaticInput]
    non_static_input_bytes: int
    stock_captures: bool | None = None
    """True if stock CUDA graphs (default settings) would capture all its kernels, those that run on the CPU included.
    None if it is unknown, or if it has no kernel."""
    lowerings: list[Lowering] = Field(default_factory=list)

    def of(self, setting: str) -> list[Lowering]:
        """Return its lowering under this setting; none where it could not be lowered."""
        return [one for one in self.lowerings if one.setting == setting]


class GraphBreak(Record):
    reason: str
    source_line: str | None


class Explanation(Record):
    """Hold the explanation of one model. If the analysis failed, `error` is set, and the rest may be empty."""

    schema_version: int
    target: str
    variant: str | None
    size: Literal["full", "tiny"] = "full"
    task: str
    batch: int | None
    torch: str
    graphs: list[FxGraph]
    breaks: list[GraphBreak]
    limits: list[str]
    error: str | None
    seen: str | None = None
    """The part of the call that was seen, in words: to its end, or up to which line. Older explanations do not say."""


class WorkerAnswer(Record):
    """Hold the answer of a worker: an explanation, or an error that the user has to fix first."""

    explanation: Explanation | None = None
    wrong_use: str | None = None
