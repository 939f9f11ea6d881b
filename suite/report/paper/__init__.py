"""The papers' figures and tables, made from results alone: a registry, and one module for each kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from suite.errors import WrongUse
from suite.report.paper import (
    ablation,
    compile_time,
    copied_bytes,
    copy_share,
    coverage,
    graph_gains,
    graphs_served,
    indirection_latency,
    memory,
    nanogpt,
    placement_cost,
    speedups,
    tensor_parallel,
    workload_table,
)
from suite.report.paper.exhibit import Exhibit, Made, Results

_MODULES = (
    speedups, tensor_parallel, ablation, placement_cost, graph_gains, graphs_served, indirection_latency, compile_time,
    workload_table, coverage, copied_bytes, memory, copy_share, nanogpt,
)  # fmt: skip

EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit
    for source in ("grace", "pygraph", "nanogpt")
    for exhibit in sorted(
        (exhibit for module in _MODULES for exhibit in module.EXHIBITS if exhibit.source == source),
        key=lambda exhibit: (not exhibit.number.startswith("Fig"), len(exhibit.number), exhibit.number),
    )
}
"""By name: GraCE's are called as in the paper ("fig10"), the others have the source in front ("pygraph-fig7")."""

STEMS = tuple(exhibit.stem for exhibit in EXHIBITS.values())

__all__ = ["EXHIBITS", "STEMS", "Exhibit", "Made", "Results", "find_exhibits"]


def find_exhibits(names: Iterable[str]) -> tuple[Exhibit, ...]:
    """The exhibits of these names, each once, in the order of the registry.

    Raises:
        WrongUse: a name is unknown; the message lists the nearest ones.
    """
    wanted = [name.lower() for name in names]
    for name in wanted:
        if name not in EXHIBITS:
            near = difflib.get_close_matches(name, EXHIBITS, n=3)
            raise WrongUse(f"--only {name!r}: {_hint(near)}")
    return tuple(exhibit for exhibit in EXHIBITS.values() if exhibit.name in wanted)


def _hint(near: list[str]) -> str:
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(EXHIBITS)}"
