"""Modes of a workload that are measured together, as far as they are: their rows, final or not yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from suite.results.schema import Cell, Grouping, Status
from suite.run.group import GroupSession
from suite.run.member import Member, interruptions


class MeasuredGroup:
    """The processes of modes that are measured in turn, and the rows that they make.

    Attributes:
        processes: those of each mode that have been measured or were about to be.
        have_rows: modes whose blocks are only for the others here, for they have rows of another group.
        through: whether nothing of it is measured any more.
    """

    def __init__(
        self, session: GroupSession, grouping: Grouping, modes: Sequence[str], have_rows: Collection[str]
    ) -> None:
        self._session = session
        self._grouping = grouping
        self.processes: dict[str, list[Member]] = {name: [] for name in modes}
        self.have_rows = frozenset(have_rows)
        self.through = False

    @property
    def guests(self) -> list[Member]:
        """Processes of modes that have rows."""
        return [member for name, members in self.processes.items() if name in self.have_rows for member in members]

    def final(self) -> dict[str, Cell]:
        """The rows by mode, without those that are to be measured in a smaller group: see Note [Short of memory] in
        `suite.run.runner`."""
        return {name: self._row(members) for name, members in self._with_rows()}

    def unfinished(self) -> list[Cell]:
        """The rows if the run ended now: of modes whose first process has blocks, and of those that have failed."""
        rows = []
        for _, members in self._with_rows():
            begun = [member for member in members if member.blocks or member.failure]
            if not begun:
                continue
            row = self._row(begun)
            if members[0].blocks or row.status is not Status.PASS:
                lacks = [*row.shortages, *interruptions(begun, self.guests)]
                rows.append(row.model_copy(update={"shortages": lacks}))
        return rows

    def _with_rows(self) -> list[tuple[str, list[Member]]]:
        alone = len(self.processes) == 1
        return [
            (name, members)
            for name, members in self.processes.items()
            if members and name not in self.have_rows and (alone or not lacked_memory(members))
        ]

    def _row(self, members: Sequence[Member]) -> Cell:
        return self._session.cell(members, self._grouping, list(self.processes), self.guests)


def lacked_memory(members: Sequence[Member]) -> bool:
    """Whether one of these ran out of memory, and none has measured anything."""
    return any(member.out_of_memory for member in members) and not any(member.blocks for member in members)
