"""PyGraph Table 4: of all CUDA graphs, how many serve calls, how many of them read inputs in place, how many do not."""

from __future__ import annotations

from suite.modes import DEFAULT_MODE
from suite.report.paper.exhibit import Exhibit, Made, Results, labels_of
from suite.report.selected import selected_functions
from suite.report.table import make_table

_COUNTS = ("total", "enabled", "indirected", "disabled", "undecided")
_DIFFERS = (
    f"Counted are functions that graphs can be recorded of, in mode {DEFAULT_MODE}: enabled are those whose calls a "
    "graph serves, indirected those of them that read inputs in place, disabled those that are faster without (or no "
    "slower, which is simpler), undecided those that are served as without selection. excess: what measuring took "
    "beyond the fastest way. The published total is over all applications of the paper."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """A row per published workload, and the sums."""
    rows: list[dict[str, object]] = []
    sums = dict.fromkeys(_COUNTS, 0)
    seconds = 0.0
    for label in labels_of(results, exhibit.source):
        cell = results.passed(label, DEFAULT_MODE)
        found = [function.selection for function in selected_functions(cell)] if cell is not None else []
        if not found:
            missing = results.state(label, DEFAULT_MODE) or "no graph was recorded"
            rows.append({"workload": label, "missing": missing})
            continue
        kept = [one.kept for one in found]
        counts = {
            "total": len(found),
            "enabled": sum(one in ("copy", "indirection") for one in kept),
            "indirected": kept.count("indirection"),
            "disabled": kept.count("none"),
            "undecided": kept.count(None),
        }
        excess_s = sum({one.group: one.excess_s for one in found}.values())
        rows.append({"workload": label, **counts, "excess_s": excess_s})
        sums = {name: sums[name] + counts[name] for name in _COUNTS}
        seconds += excess_s
    headline = results.published.headline[exhibit.source]
    summary: list[dict[str, object]] = [{"workload": "all", **sums, "excess_s": seconds}] if sums["total"] else []
    summary.append({"workload": "published", "total": headline.get("graphs")})
    columns = ["workload", *_COUNTS, "excess_s", "missing"]
    title, note = exhibit.title(results.published), exhibit.note(results)
    return Made(make_table(exhibit.stem, title, note, columns, rows, summary), None, results.provenance())


EXHIBITS = (
    Exhibit("pygraph-table4", "pygraph", "Table 4", "graphs that serve calls, and those that do not", _DIFFERS, make),
)
