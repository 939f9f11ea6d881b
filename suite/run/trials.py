"""Plan trials of stochastic workloads by processes that are not measured, while those that are measured compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from models.registry import Workload
from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, REFERENCE_MODE, Mode
from suite.results.schema import Correctness
from suite.run.member import Member
from suite.worker.protocol import CellSpec, Tried, Try

TRIED = (REFERENCE_MODE, GRAPH_MODE, DEFAULT_MODE)
"""Modes whose programs are tried where trials are apart from what is measured. Others have the bits of one of them."""


class TrialsApart:
    """Keep the trials of a workload: which process tries which mode, and what was found.

    Note [Trials]: what is random is compiled once more with eager's random numbers, to be compared
    (`suite.worker.judge`). That takes as long as the real compilation, and in the process that is measured it would
    have to come before. So other processes do it meanwhile: the eager one, which has nothing to do, for the reference
    mode, and later ones for stock's graphs and Encore's. What has the bits of a mode that was tried is as right;
    whatever has not is tried by its own process, which then compiles again. Where the GPU has no memory for it, each
    process tries its own. They take turns on the GPU with who tunes, but for the one launch of each graph in a trial's
    first call, which may meet it: all modes have what was tuned, whatever it met.

    Attributes:
        verdicts: by the name of the mode that was tried.
    """

    def __init__(self, workload: Workload) -> None:
        self.verdicts: dict[str, Correctness] = {}
        self._workload = workload
        self._are_made = False
        self._given_up = False

    def who(
        self, members: Sequence[Member], modes: Sequence[Mode], waiting: Mapping[tuple[str, int], Member]
    ) -> dict[str, Member]:
        """Return which process tries which of these modes, by the mode's name; empty where each tries its own.

        `members` are to be measured next; `waiting` are later ones, by mode and number.
        """
        idle = next((member for member in members if self.tries_reference(member.mode, modes)), None)
        if members[0].process or idle is None or self._given_up:
            return {}
        found = {REFERENCE_MODE: idle}
        for mode in modes:
            if mode.name in TRIED and mode.name != REFERENCE_MODE:
                member = waiting.get((mode.name, 1))
                if member is None or member.failure:
                    return {}
                found[mode.name] = member
        return found

    def tries_reference(self, mode: Mode, modes: Sequence[Mode]) -> bool:
        """Return whether this mode has nothing to do while these compile, and there is something to be tried. Whole
        steps that are captured have the bits of none of those that are tried."""
        return (
            mode.backend is None
            and self._workload.stochastic
            and (self._workload.tp or 1) == 1
            and any(other.name == REFERENCE_MODE for other in modes)
            and not any(other.captures_more for other in modes)
        )

    def commands(self, trying: Mapping[str, Member], spec_of: Callable[[Member], CellSpec]) -> dict[Member, list[Try]]:
        """Return commands to try modes. The reference mode's trial leads the others (`suite.worker.compile_order`)."""
        living = {name: member for name, member in trying.items() if not member.failure}
        self._are_made |= bool(living)
        return {
            member: [Try(spec=spec_of(member).model_copy(update={"mode": name, "follows": len(living) > 1}))]
            for name, member in living.items()
        }

    def note(self, trying: Mapping[str, Member]) -> list[str]:
        """Keep the answers of these. Returns what to say of those that could not try their mode."""
        lines = []
        for name, member in trying.items():
            answer = member.by_rank[-1][0] if member.by_rank else None
            if isinstance(answer, Tried) and answer.correctness is not None:
                self.verdicts[name] = answer.correctness
            elif isinstance(answer, Tried):
                lines.append(f"{name}: could not be tried apart: {answer.error}")
        return lines

    def give_up(self) -> bool:
        """Give up trials where memory was not enough; return whether there was less of it because of trials in other
        processes. From now on there are none."""
        had, self._are_made, self._given_up = self._are_made, False, True
        return had
