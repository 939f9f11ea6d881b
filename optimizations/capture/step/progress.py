"""Decide what is done with a call that no recording fits: run as it is, observed, or recorded. Pure counting.

Calls of one signature, with gradients there or not, have to run twice in the same way before a graph is made of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from optimizations.capture.signature import OTHER_RESULT, is_gone
from optimizations.capture.step.changes import Tokens
from optimizations.capture.step.host_random import SAME_DRAWS, HostDraws, decides
from optimizations.capture.step.host_tensors import HostTensors
from optimizations.capture.step.operations import Operation, first_difference
from optimizations.report.steps import Refusal

OBSERVED = 2
"""Calls that have to agree before a recording."""
PATIENCE = 6
"""Observed calls of one signature, without a recording, after which differences between them are final, and findings
of every other call."""
MOST_SET_UPS = 16
"""Calls of one signature that may be passed over because something was compiled in them."""
MOST_SIGNATURES = 64


class Action(Enum):
    """Name what to do with a call."""

    RUN = "run"
    OBSERVE = "observe"
    RECORD = "record"


@dataclass(slots=True)
class Progress:
    """Record what is known of one signature. `trace` is of the last observed call, `agreeing` how many in a row were
    alike; `outside` where it read tensors that it did not make,
    `generators` those it drew from other than the default one, `failed` the captures that were not what was observed,
    `set_ups` the calls and captures in which something was compiled. `host_draws`: what the last observed call drew on
    the host, where that is said to decide nothing. `host`: tensors in CPU memory, as the last observed call left them.
    `asked`: it asks whether it is captured, and gets `as_captured` for an answer. `numbers`: what the last observed
    call compared of Python. `drops_gradients`: it let go of gradients from before, unread. `gradients`: which
    parameters (identities) had one after it. `refusal`: why its calls run as they are, where others of their signature
    are replayed, or may be."""

    trace: Sequence[Operation] = ()
    returned: Hashable = None
    outside: frozenset[int] = frozenset()
    generators: Sequence[torch.Generator] = ()
    draws: bool = False
    agreeing: int = 0
    observed: int = 0
    findings: int = 0
    failed: int = 0
    set_ups: int = 0
    asked: bool = False
    as_captured: bool = False
    host_draws: HostDraws = field(default_factory=HostDraws)
    host: HostTensors | None = None
    inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    same_inputs: set[int] = field(default_factory=set)
    difference: Refusal | None = None
    numbers: Tokens = field(default_factory=dict)
    drops_gradients: bool = False
    gradients: frozenset[int] = frozenset()
    refusal: Refusal | None = None

    def note(
        self,
        trace: Sequence[Operation],
        returned: Hashable,
        findings: Sequence[Refusal],
        host_draws: HostDraws | None = None,
    ) -> Refusal | None:
        """Take in an observed call; return a refusal if it is final."""
        before, self.host_draws = self.host_draws, host_draws or HostDraws()
        first = self.observed == 0
        self.observed += 1
        if findings:
            self.findings += 1
            self.agreeing = 0
            return findings[0] if self.findings >= OBSERVED or self.observed >= PATIENCE else None
        self.findings = 0
        difference = None if first else first_difference(self.trace, trace)
        if difference is None and not first and returned != self.returned:
            difference = OTHER_RESULT
        if difference is None and not first:
            difference = self.host_draws.other_results(before)
        names = sorted({*self.host_draws.states, *before.states})
        # Of calls that were not refused: the trace of the others is not kept. Note [Draws that decide nothing].
        contradicted = difference is not None and bool(names) and self.agreeing > 0
        if difference is not None and contradicted:
            difference = decides(difference, names)
        elif difference is None and not first and self.host_draws.repeats(before):
            difference = SAME_DRAWS
        self.agreeing = 1 if difference is not None or first else self.agreeing + 1
        self.trace, self.returned, self.difference = trace, returned, difference
        return difference if contradicted or self.observed >= PATIENCE else None

    def saw(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take in the tensors of an observed call."""
        known = self.inputs if len(self.inputs) == len(inputs) else []
        if known:
            same = [index for index, (was, now) in enumerate(zip(known, inputs, strict=True)) if was() is now]
            self.same_inputs = self.same_inputs.intersection(same) if self.observed > OBSERVED else set(same)
        self.inputs = [weakref.ref(tensor) for tensor in inputs]

    def in_place(self, inputs: Sequence[torch.Tensor]) -> set[int]:
        """Return inputs that were the same tensors in all observed calls, and are now."""
        return {index for index in self.same_inputs if self.inputs[index]() is inputs[index] and inputs[index].numel()}

    def recorded(self) -> None:
        """Take in a recording: should it become unusable, as many calls may be observed again."""
        self.observed = self.failed = 0

    def passed_over(self) -> bool:
        """Take in a call or capture that compiled something; return whether there were so many that it is final."""
        self.set_ups += 1
        self.agreeing = min(self.agreeing, 1)
        return self.set_ups >= MOST_SET_UPS

    def told_to_be_captured(self) -> bool:
        """Take in that a call cannot be captured; return whether it asks if it is, and gets yes from now on."""
        if self.as_captured or not self.asked:
            return False
        self.as_captured = True
        self.observed = self.agreeing = self.findings = 0
        self.outside = frozenset()
        return True

    def differed(self) -> bool:
        """Take in a capture that was not what was observed; return whether to observe calls, and capture one, again."""
        self.failed += 1
        self.agreeing = 0
        return self.failed < OBSERVED


@dataclass(slots=True)
class Plan:
    """Decide for all signatures of one step. `warm_up`: calls before a recording, observed ones included."""

    warm_up: int
    calls: int = 0
    by_key: dict[object, Progress] = field(default_factory=dict)

    def next(self, key: object) -> tuple[Action, Progress]:
        """Return what to do with a call of this signature."""
        self.calls += 1
        progress = self.by_key.setdefault(key, Progress())
        if self.calls <= self.warm_up - OBSERVED:
            return Action.RUN, progress
        return (Action.RECORD if progress.agreeing >= OBSERVED else Action.OBSERVE), progress

    def forget(self) -> None:
        """Observe everything again."""
        self.by_key.clear()

    def rekey(self, make: Callable[[object], object]) -> None:
        """Give each signature the key that it has from now on."""
        self.by_key = {make(key): progress for key, progress in self.by_key.items()}

    def forget_findings(self) -> None:
        """Forget findings of calls that are not refused: they may have been of what stands there no more. An optimizer
        makes its states in its first call."""
        for progress in self.by_key.values():
            if progress.findings and progress.refusal is None:
                progress.observed = progress.findings = 0

    def forget_gone(self) -> None:
        """Forget calls whose arguments held an object that was freed since."""
        self.by_key = {key: progress for key, progress in self.by_key.items() if not is_gone(key)}

    def exhausted(self) -> Refusal | None:
        """Return why no more signatures are looked at, if there were too many."""
        if len(self.by_key) <= MOST_SIGNATURES:
            return None
        return Refusal(
            f"more than {MOST_SIGNATURES} different calls were seen",
            "a number, string or shape that differs in each call would need a graph each: pass numbers as tensors on "
            "the GPU, and pad the batch to a few sizes",
        )
