"""Share results that a process has compared with eager's: others that have the same bits are as right.

The modes of a workload compute the same on the same inputs, most of them with the same kernels. Comparing takes seconds
in each, and minutes where eager in the own dtype is no reference and the program is compiled in higher precision, too.
So the first process that finds results right says what they were, and the others look there. Some programs give a few
tensors other bits in each call, those of atomic additions, for example. A tensor whose bits differ is compared with
eager by itself: it must be within the tolerance, or hardly farther off than that of the results that were found right.

One file for each comparison, in a folder that all processes of the workload share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimizations.atomic_file import write_atomically
from suite.measure.correctness import MOST_ERROR, Agreement

NOT_FARTHER = 1.25
"""Largest ratio of a tensor's error to the error of the same tensor that was found right."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Hold the bits and errors of all tensors of each input set by name, and the verdict on them, "passed".

    `first`, where they were not compared as a whole: the results that were, and that others are measured by. One that
    is hardly farther off than another must not be what a third one is measured by.
    """

    bits: tuple[Mapping[str, str], ...]
    errors: tuple[Mapping[str, float], ...]
    verdict: Agreement
    first: Judged | None = None


@dataclass(frozen=True, slots=True)
class JudgedResults:
    """Keep the judged results of a folder. A caller that reads and adds does so in a turn of its own."""

    folder: Path

    def add(self, judged: Judged) -> None:
        """Add results for other processes; where there is no room for it, they compare by themselves."""
        content = json.dumps(asdict(judged)).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / f"{hashlib.sha256(content).hexdigest()}.json", content)
        except OSError as error:
            print(f"what was found right is not kept for other processes: {error}")

    def as_right(
        self,
        bits: Sequence[Mapping[str, str]],
        errors: Callable[[int, Collection[str]], Mapping[str, float]],
        tolerance: float,
    ) -> Judged | None:
        """Return results that are as right as these, with the verdict on them; None where none are known to be. The
        caller adds them, or others that have the same bits compare them once more.

        Args:
            bits: of each input set, by name.
            errors: relative errors of the tensors named against eager, by place of the input set.
            tolerance: what is accepted at once.
        """
        alike = [known for known in self._known() if [one.keys() for one in known.bits] == [one.keys() for one in bits]]
        # Those that have most bits in common first: the fewest tensors have to be compared.
        for known in sorted(
            alike, key=lambda one: sum(len(_others(*pair)) for pair in zip(bits, one.bits, strict=True))
        ):
            if (found := _as_right(known, bits, errors, tolerance)) is not None:
                return found
        return None

    def _known(self) -> Iterator[Judged]:
        for file in sorted(self.folder.glob("*.json")):
            yield _judged(json.loads(file.read_bytes()))


def _judged(record: Mapping[str, Any]) -> Judged:
    first = record.get("first")
    return Judged(
        tuple(record["bits"]),
        tuple(record["errors"]),
        Agreement(**record["verdict"]),
        _judged(first) if first is not None else None,
    )


def _as_right(
    known: Judged,
    bits: Sequence[Mapping[str, str]],
    errors: Callable[[int, Collection[str]], Mapping[str, float]],
    tolerance: float,
) -> Judged | None:
    """Return results with the first one's verdict, or that of their own errors where all are within the tolerance; None
    if a tensor that has other bits is not as right."""
    first = known.first or known
    all_errors: list[Mapping[str, float]] = []
    for place, (own, right) in enumerate(zip(bits, known.bits, strict=True)):
        others = _others(own, right)
        if not all(name in first.errors[place] for name in others):  # one that is not compared with eager at all
            return None
        found = errors(place, others) if others else {}
        for name, error in found.items():
            if not error <= max(tolerance, min(NOT_FARTHER * first.errors[place][name], MOST_ERROR)):
                return None
        all_errors.append({**known.errors[place], **found})
    merged = {name: max(one.get(name, 0.0) for one in all_errors) for one in all_errors for name in one}
    worst = max(merged, key=lambda name: merged[name])
    verdict = first.verdict
    if merged[worst] <= tolerance:
        verdict = Agreement(True, first.verdict.compared_tensors, merged[worst], worst, None)
    return Judged(tuple(bits), tuple(all_errors), verdict, first)


def _others(own: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    """Return the tensors that have other bits than those that were found right."""
    return [name for name in own if own[name] != right[name]]
