"""Decide whether a call without a matching recording is run eagerly, observed or recorded. This only counts calls.

Calls of one signature, with the same parameters having gradients, must run equally twice before one is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from optimizations.capture.signature import OTHER_RESULT, is_gone
from optimizations.capture.step.observer import Observer
from optimizations.capture.step.operations import first_difference
from optimizations.report.steps import Refusal

OBSERVED = 2
"""Number of equal observed calls before a recording."""
PATIENCE = 6
"""Observed calls of one signature without a recording, after which a difference or a finding refuses the signature."""
MOST_SET_UPS = 16
"""Calls of one signature that may be ignored because something was compiled in them."""
MOST_SIGNATURES = 64
"""Different calls without a recording, after which no further call is observed."""


class Action(Enum):
    """Name how a call is run."""

    RUN = "run"
    OBSERVE = "observe"
    RECORD = "record"


@dataclass(slots=True)
class Progress:
    """Record the observed calls of one signature.

    Attributes:
        last: what the last observed call did.
        agreeing: number of equal observed calls in a row.
        failed: captures that differed from the observed calls.
        set_ups: calls and captures in which something was compiled.
        queries_capture: whether the step queries if it is captured.
        as_captured: the value that this query returns.
        refusal: why these calls run uncaptured, although others of their signature may be replayed.
    """

    last: Observer | None = None
    agreeing: int = 0
    observed: int = 0
    findings: int = 0
    failed: int = 0
    set_ups: int = 0
    queries_capture: bool = False
    as_captured: bool = False
    refusal: Refusal | None = None

    def note(self, seen: Observer) -> Refusal | None:
        """Record an observed call; return a refusal if no further call is to be observed."""
        before, self.last = self.last, seen
        seen.read.clear()  # `torch.utils.swap_tensors` refuses a tensor with weak references
        self.observed += 1
        if seen.refusals:
            self.findings += 1
            self.agreeing = 0
            return seen.refusals[0] if self.findings >= OBSERVED or self.observed >= PATIENCE else None
        self.findings = 0
        difference = None
        if before is not None:
            difference = first_difference(before.operations, seen.operations)
            if difference is None and seen.structure != before.structure:
                difference = OTHER_RESULT
        self.agreeing = 1 if difference is not None else self.agreeing + 1
        return difference if self.observed >= PATIENCE else None

    def recorded(self) -> None:
        """Record that a recording was made. If it becomes unusable, observed calls are counted from zero again."""
        self.observed = self.failed = 0

    def passed_over(self) -> bool:
        """Count a call or capture that compiled something; return whether the limit is reached."""
        self.set_ups += 1
        self.agreeing = min(self.agreeing, 1)
        return self.set_ups >= MOST_SET_UPS

    def try_as_captured(self) -> bool:
        """After a refusal, let queries for a capture return True. Return False if there are none or they do."""
        if self.as_captured or not self.queries_capture:
            return False
        self.as_captured = True
        self.observed = self.agreeing = self.findings = 0
        self.last = None
        return True

    def differed(self) -> bool:
        """Count a capture that differed from the observed calls; return whether to try again."""
        self.failed += 1
        self.agreeing = 0
        return self.failed < OBSERVED


@dataclass(slots=True)
class Plan:
    """Decide for all signatures of one step.

    Attributes:
        warm_up: calls before a recording, observed ones included.
        fruitless: signatures that were new since the last recording.
    """

    warm_up: int
    calls: int = 0
    by_key: dict[object, Progress] = field(default_factory=dict)
    fruitless: int = 0

    def next(self, key: object) -> tuple[Action, Progress]:
        """Return how to run a call of this signature."""
        self.calls += 1
        if (progress := self.by_key.get(key)) is None:
            progress = self.by_key[key] = Progress()
            self.fruitless += 1
        if self.calls <= self.warm_up - OBSERVED:
            return Action.RUN, progress
        return (Action.RECORD if progress.agreeing >= OBSERVED else Action.OBSERVE), progress

    def forget(self) -> None:
        """Observe everything again."""
        self.by_key.clear()

    def rekey(self, make: Callable[[object], object]) -> None:
        """Replace the key of each signature."""
        self.by_key = {make(key): progress for key, progress in self.by_key.items()}

    def forget_findings(self) -> None:
        """Forget findings of calls that are not refused: they may be about objects that were replaced.

        An example is an optimizer, which makes its state in its first call.
        """
        for progress in self.by_key.values():
            if progress.findings and progress.refusal is None:
                progress.observed = progress.findings = 0

    def forget_gone(self) -> None:
        """Forget calls with an object among their arguments that was freed."""
        self.by_key = {key: progress for key, progress in self.by_key.items() if not is_gone(key)}

    def exhausted(self) -> Refusal | None:
        """Return a refusal if there were too many signatures without a recording."""
        if self.fruitless <= MOST_SIGNATURES:
            return None
        return Refusal(
            f"more than {MOST_SIGNATURES} different calls were seen",
            "a number, string, shape or object that differs in each call would need a graph each: pass numbers as "
            "tensors on the GPU, pad the batch to a few sizes, and pass what objects hold in a dict or a list",
        )
