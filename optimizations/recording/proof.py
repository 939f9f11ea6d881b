"""Proof by outcome: an indirected graph is used only if it computes what the copying one computes.

The comparison is made on `Trial.data_sets` sets of input data. For each, the graph as captured runs twice on filled
placeholders; then the indirected one runs with inputs at new addresses and their placeholders poisoned. A pointer that
was missed, hidden in device memory or in a descriptor nobody knows, reads poison there and shows in the outcome: in the
outputs, or in what the function writes into its inputs.

Where two runs of the captured graph agree bit for bit, so must the indirected one. Where they do not (atomics, say), it
must stay within `SPREAD_MARGIN` times the distance between them, tensor by tensor.

Only the decision is here; `Trial` does the work, on a GPU or in a test.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SPREAD_MARGIN = 4.0
"""Two runs understate how far runs can lie apart; a wrong pointer is off by far more than this."""

RUNS_PER_COMPARISON = 4
"""Three of the graph as captured, one of the indirected one."""


class Trial(Protocol):
    """A captured graph, an indirected one, and data to run both on.

    A deviation is the largest absolute difference in a tensor: 0.0 exactly where it is the same bit for bit, infinity
    where a number became none or none became a number. Deviations come one per tensor of the outcome, in a fixed order.
    """

    data_sets: int

    def reference(self, data: int) -> None:
        """Run the graph as captured and keep the outcome."""

    def repeat(self, data: int) -> Sequence[float]:
        """Run it once more: deviations from the outcome kept."""

    def indirect(self, data: int, moved: Collection[int]) -> Sequence[float]:
        """Run the graph as captured on other data, so that nothing is left of the outcome; then the indirected graph
        with these inputs moved: deviations from the outcome kept."""

    def failure(self) -> str | None:
        """What went wrong on the device outside of any outcome; None where nothing did."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was proven of one plan: the inputs that may be indirected, together, and why each of the rest may not.

    `runs` counts the runs of either graph that it took.
    """

    proven: tuple[int, ...]
    refused: Mapping[int, str]
    runs: int


def prove(inputs: Collection[int], trial: Trial) -> Verdict:
    """Try all inputs together; only if that fails each by itself, and then those that passed together again.

    An empty `proven` says that the variant cannot be used at all.
    """
    counted = _Counted(trial)
    together = counted.objection(inputs)
    if together is None:
        return Verdict(tuple(sorted(inputs)), {}, counted.runs)
    unmoved = counted.objection(())
    if unmoved is not None:
        reason = f"with all inputs in their placeholders {unmoved}"
        return Verdict((), dict.fromkeys(inputs, reason), counted.runs)
    objections = {index: counted.objection((index,)) for index in sorted(inputs)}
    refused = {index: reason for index, reason in objections.items() if reason is not None}
    passed = [index for index in objections if index not in refused]
    rest = counted.objection(passed) if len(passed) > 1 else None
    if rest is not None:
        reason = f"alone it passed, but with inputs {', '.join(map(str, passed))} moved together {rest}"
        return Verdict((), refused | dict.fromkeys(passed, reason), counted.runs)
    return Verdict(tuple(passed), refused, counted.runs)


def objection(repeated: Sequence[float], indirect: Sequence[float]) -> str | None:
    """Why the outcome of an indirected run is not that of the captured graph; None where it is."""
    if len(repeated) != len(indirect):
        raise ValueError(f"{len(indirect)} deviations of the indirected run for {len(repeated)} of the captured one")
    for place, (spread, deviation) in enumerate(zip(repeated, indirect, strict=True)):
        if spread == 0.0:
            if deviation != 0.0:
                return f"tensor {place} of the outcome differs by up to {deviation:g}, two copying runs by nothing"
        elif not math.isfinite(spread):
            return f"tensor {place} of the outcome is a number in one run of the captured graph and none in another"
        elif not deviation <= SPREAD_MARGIN * spread:
            return f"tensor {place} of the outcome differs by up to {deviation:g}, two copying runs by {spread:g}"
    return None


class _Counted:
    """Runs a trial and counts."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.runs = 0

    def objection(self, moved: Collection[int]) -> str | None:
        """The first objection over all sets of data."""
        for data in range(self._trial.data_sets):
            self._trial.reference(data)
            repeated = self._trial.repeat(data)
            indirect = self._trial.indirect(data, moved)
            self.runs += RUNS_PER_COMPARISON
            failed = self._trial.failure()
            if failed is not None:
                return f"on data set {data} {failed}"
            found = objection(repeated, indirect)
            if found is not None:
                return f"on data set {data} {found}"
        return None
