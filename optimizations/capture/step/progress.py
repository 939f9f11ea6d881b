"""Count calls without a matching recording, by which it is decided whether they run eagerly, observed or recorded.

Calls of one kind must run equally twice before one is captured. Calls are of one kind if they have the same signature,
the same numbers, hooks and code, and the same parameters with gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from optimizations.capture.signature import OTHER_RESULT, is_gone
from optimizations.capture.step.audit import first_difference
from optimizations.capture.step.observer import SETS_UP, Observer
from optimizations.report.steps import Refusal

OBSERVED = 2
"""Number of equal observed calls before a recording."""
WARM_UP = 3
"""Calls before the first recording, observed ones included."""
PATIENCE = 6
"""Observed and captured calls of one kind, without a recording, after which a difference refuses their signature."""
MOST_SIGNATURES = 64
"""Different calls without a recording, after which no further call is observed."""


@dataclass(slots=True)
class Progress:
    """Record the observed calls of one kind.

    Attributes:
        last: what the last observed call did.
        agreeing: number of equal observed calls in a row.
        tries: number of observed and captured calls since the last recording.
        as_captured: the value that a query returns whether the step is captured.
    """

    last: Observer | None = None
    agreeing: int = 0
    tries: int = 0
    as_captured: bool = False

    def note(self, seen: Observer) -> Refusal | None:
        """Record an observed call. Return what a graph could not repeat, or how it differs from the last one."""
        if seen.set_up:
            return self.failed(SETS_UP)
        difference, self.last = self.difference(seen), seen
        seen.read.clear()  # `torch.utils.swap_tensors` refuses a tensor with weak references
        if seen.refusals:
            return self.failed(seen.refusals[0])
        self.tries += 1
        self.agreeing = 1 if difference is not None else self.agreeing + 1
        return difference

    def difference(self, seen: Observer) -> Refusal | None:
        """Return how a call differs from the last observed one, if there is one."""
        if self.last is None:
            return None
        found = first_difference(self.last.operations, seen.operations)
        return OTHER_RESULT if found is None and seen.structure != self.last.structure else found

    def failed(self, why: Refusal) -> Refusal:
        """Record a call, or a capture, that does not count as observed, and return the reason."""
        self.tries += 1
        self.agreeing = min(self.agreeing, 1) if why is SETS_UP else 0
        return why

    def try_as_captured(self) -> bool:
        """After a refusal, let queries for a capture return True. Return False if there are none or they do."""
        if self.as_captured or self.last is None or not self.last.queries_capture:
            return False
        self.as_captured = True
        self.tries = self.agreeing = 0
        self.last = None
        return True


@dataclass(slots=True)
class Plan:
    """Store the progress of all kinds of calls of one step.

    Attributes:
        warm_up: calls before a recording, observed ones included.
        calls: calls without a matching recording.
        fruitless: kinds that were new since the last recording.
    """

    warm_up: int = WARM_UP
    calls: int = 0
    by_kind: dict[object, Progress] = field(default_factory=dict)
    fruitless: int = 0

    def next(self, kind: object) -> Progress:
        """Count a call, and return the progress of its kind."""
        self.calls += 1
        if (progress := self.by_kind.get(kind)) is None:
            progress = self.by_kind[kind] = Progress()
            self.fruitless += 1
        return progress

    def forget_gone(self) -> None:
        """Forget calls with an object among their arguments that was freed."""
        self.by_kind = {kind: progress for kind, progress in self.by_kind.items() if not is_gone(kind)}

    def exhausted(self) -> Refusal | None:
        """Return a refusal if there were too many kinds without a recording."""
        if self.fruitless <= MOST_SIGNATURES:
            return None
        return Refusal(
            f"more than {MOST_SIGNATURES} different calls were seen",
            "a number, string, shape or object that differs in each call would need a graph each: pass numbers as "
            "tensors on the GPU, pad the batch to a few sizes, and pass what objects hold in a dict or a list",
        )
