"""Rows of a workload that is not through, on disk as they would be if the run ended now.

Note [Unfinished]: rows are final when their workload is through, which takes minutes. What was measured until then is
written every few seconds, behind the blocks of each process and behind metrics, to a file of its own that is replaced
as a whole. So not even SIGKILL loses more than the blocks of those seconds, or metrics that are being taken; Ctrl-C
and errors do not lose these either. Each row says that it is unfinished (`suite.schema.Shortage`). `--resume` measures
such a workload again from the beginning: its modes are alive together, and blocks of another start do not join them.
Unfinished rows stay until the new ones are final, or hold more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from suite.run_writer import RunWriter
from suite.schema import Cell

EVERY_S = 10.0
"""Seconds from one write to the next while blocks are measured: writing disturbs the host."""


class UnfinishedRows:
    """The rows of the workload that is being measured, group by group, and the run that they are written to."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._groups: list[Callable[[], Sequence[Cell]]] = []
        self._written = time.monotonic()

    def add(self, rows: Callable[[], Sequence[Cell]]) -> None:
        """`rows` gives those of one more group as they are when it is called: of modes that no other group has."""
        self._groups.append(rows)

    def now_and_then(self) -> None:
        """To be called between blocks."""
        if time.monotonic() >= self._written + EVERY_S:
            self.keep()

    def keep(self, *, last: bool = False) -> tuple[Sequence[Cell], bool]:
        """Writes them; returns the rows, and whether they, or older ones that hold more, are on disk. `last`: the run
        ends with this."""
        rows = [row for group in self._groups for row in group()]
        kept = bool(rows) and self._writer.keep_unfinished(rows, last=last)
        self._written = time.monotonic()
        return rows, kept
