"""Make the papers' figures and tables from results alone: a registry, and one module for each kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from suite.report.paper import (
    concurrency,
    copies,
    costs,
    graphs,
    nanogpt,
    speedups,
    workload_table,
)
from suite.report.paper.exhibit import Exhibit, Made, Point, Results
from suite.results.errors import WrongUse

_MODULES = (speedups, copies, costs, graphs, nanogpt, workload_table, concurrency)
_KINDS = ("Fig", "Table", "first", "second", "section")
"""Figures stand first, then tables, then what has neither number."""


def _place(exhibit: Exhibit) -> tuple[int, int, str]:
    kind = next((place for place, word in enumerate(_KINDS) if exhibit.number.startswith(word)), len(_KINDS))
    return kind, len(exhibit.number.rstrip("ab")), exhibit.number


EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit
    for source in ("grace", "pygraph", "nanogpt")
    for exhibit in sorted(
        (exhibit for module in _MODULES for exhibit in module.EXHIBITS if exhibit.source == source),
        key=_place,
    )
}
"""Exhibits by name: GraCE's are called as in the paper ("fig10"), others have the source in front ("pygraph-fig7")."""

__all__ = ["EXHIBITS", "Exhibit", "Made", "Point", "Results", "find_exhibits"]


def find_exhibits(names: Iterable[str]) -> tuple[Exhibit, ...]:
    """Return the exhibits of these names, each once, in the order of the registry.

    Raises:
        WrongUse: a name is unknown; the message lists the nearest ones.
    """
    wanted = [name.lower() for name in names]
    for name in wanted:
        if name not in EXHIBITS:
            near = difflib.get_close_matches(name, EXHIBITS, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(EXHIBITS)}"
            raise WrongUse(f"--only {name!r}: {hint}")
    return tuple(exhibit for exhibit in EXHIBITS.values() if exhibit.name in wanted)
