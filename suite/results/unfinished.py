"""Rows of a workload that is not through, on disk as they would be if the run ended now.

Note [Unfinished]: rows are final when their workload is through, which takes minutes. What was measured until then is
written every few seconds, behind the blocks of each process and behind metrics, to a file of its own that is replaced
as a whole. So not even SIGKILL loses more than the blocks of those seconds, or metrics that are being taken; Ctrl-C and
errors do not lose these either; if nothing was left to measure, they leave final rows. Each row says that it is
unfinished (`suite.results.schema.Shortage`); a mode that has failed has one, too, which says why. `--resume` measures
such a workload again from the beginning: its modes are alive together, and blocks of another start do not join them.
Unfinished rows stay until the new ones of these modes are final, or hold more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from suite.results.run_writer import RunWriter
from suite.results.schema import Cell

EVERY_S = 10.0
"""Seconds from one write to the next while blocks are measured: writing disturbs the host."""


class Rows(Protocol):
    """Modes that are measured together: `suite.run.measured_group`."""

    through: bool

    def final(self) -> Mapping[str, Cell]: ...

    def unfinished(self) -> Sequence[Cell]: ...


class UnfinishedRows:
    """The rows of the workload that is being measured, group by group, and the run that they are written to."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._groups: list[Rows] = []
        self._written = time.monotonic()

    def add(self, group: Rows) -> None:
        """One more group: of modes that no other group has rows of."""
        self._groups.append(group)

    def now_and_then(self, first: Callable[[], None] = lambda: None) -> None:
        """To be called between blocks. `first` is called where rows are written, before that."""
        if time.monotonic() >= self._written + EVERY_S:
            first()
            self.keep()

    def keep(self, *, last: bool = False) -> tuple[Sequence[Cell], bool]:
        """Writes them; returns the rows, and whether they, or older ones that hold more, are on disk. `last`: the run
        ends with this."""
        rows = [row for group in self._groups for row in group.unfinished()]
        kept = bool(rows) and self._writer.keep_unfinished(rows, last=last)
        self._written = time.monotonic()
        return rows, kept

    def final(self) -> dict[str, Cell]:
        """Rows by mode, of groups that are through."""
        return {name: row for group in self._groups if group.through for name, row in group.final().items()}
