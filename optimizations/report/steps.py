"""Define the records of a step or a callable that is captured whole. See `report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optimizations.report.concurrency import ConcurrencyReport


@dataclass(frozen=True, slots=True)
class Refusal:
    """Report why something was not captured.

    Attributes:
        reason: what the program does, with the names it uses.
        advice: what to write instead.
        source_line: the user's line, "path:number in function", if known.
    """

    reason: str
    advice: str
    source_line: str | None = None

    def __str__(self) -> str:
        place = f" ({self.source_line})" if self.source_line else ""
        return f"{self.reason}{place}; {self.advice}"


class StepRefused(RuntimeError):
    """Report that a step or a callable cannot be captured. `refusal` has the reason."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class StepChanged(RuntimeError):
    """Report that an audited call of a step differed from its recorded graph. The message names the difference."""


class WrongOrder(ValueError):
    """Report an order of `graph_callables` that no training loop can follow."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Describe one CUDA graph of a whole step.

    Attributes:
        signature: shapes and dtypes of the batch it is for.
        operations: operators it ran through PyTorch's dispatcher; kernels of compiled modules are not among them.
        copied_bytes: data copied into placeholders before each replay, of `copied_tensors`.
        watched: Python values that the step can reach, and that each call compares before the launch.
        pool_bytes: growth of its graphs' memory pool.
        replays: how often it was launched.
        audits: calls that ran uncaptured to be compared with the recording; `audits_skipped` counts those that were
            skipped because memory was short.
        concurrency: whether independent kernels run at the same time.
        record_s: time from the beginning of the recording to its first launch.
    """

    signature: str
    operations: int
    copied_bytes: int
    copied_tensors: int
    watched: int
    pool_bytes: int
    replays: int
    record_s: float
    audits: int = 0
    audits_skipped: int = 0
    concurrency: ConcurrencyReport | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report one step given to `graph_step`.

    Attributes:
        name: the function's qualified name.
        calls: all calls; `eager_calls`: those that ran eagerly, for warm-up or because of a refusal; `replays`: those
            that launched a graph.
        recordings: the graphs that are alive; `dropped_recordings` counts those that became unusable.
        patched_learning_rates: learning rates and betas of parameter groups that are passed to the graph as tensors,
            because they change between calls.
        refusals: each reason once, in order of first occurrence.
        not_compared: Python values that changed between calls but are not compared, because no code that ran names
            them; and those given as `ignore=`.
    """

    name: str
    calls: int
    eager_calls: int
    replays: int
    recordings: tuple[RecordedStep, ...]
    dropped_recordings: int
    patched_learning_rates: int
    refusals: tuple[Refusal, ...]
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallableReport:
    """Report one forward or backward graph of `graph_callables`.

    Attributes:
        callable: its number, from 1; `variant` is the number of the sample with the same metadata, from 0.
        index: number of the micro-batch that the graph is for, among those alive at one time, from 0.
        direction: "forward" or "backward".
        copied_bytes: data copied into placeholders before each replay, of `copied_tensors`.
        without_graph: for the first forward of a callable, its eager calls by reason, except calls without gradients.
        concurrency: whether independent kernels run at the same time.
    """

    callable: int
    variant: int
    index: int
    direction: str
    copied_bytes: int
    copied_tensors: int
    replays: int
    without_graph: Mapping[str, int] = field(default_factory=dict)
    concurrency: ConcurrencyReport | None = None
