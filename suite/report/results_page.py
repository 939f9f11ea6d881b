"""The generated parts of `docs/results.md`: of each figure and table of the papers, the rows that hold a number."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from suite.report.paper import Made
from suite.report.paper.exhibit import NOTHING
from suite.report.table import Table, to_markdown
from suite.report.units import is_missing

_REASON = "missing"
_KEYS = ("workload", "case", "class", "mode", "inputs", "generated")


def exhibit_part(made: Made) -> str:
    """The exhibit's table as Markdown, without rows and columns that hold nothing; what was left out is named.

    Without a title, which the page has above it, and without saying which row is of which of several runs.
    """
    table = made.table
    keys = [column for column in table.frame.columns if column in _KEYS]
    values = [column for column in table.frame.columns if column not in (*keys, _REASON, "measured")]
    measured = [column for column in values if "published" not in column and column != "prompt"]
    with_values = table.frame[values].map(lambda value: not is_missing(value)).any(axis=1)
    without = table.frame[~with_values]
    frame = table.frame[with_values]
    kept = [column for column in frame.columns if _holds(frame[column])]
    shown = replace(table, frame=frame[kept], summary_rows=0, note=_note(table, without, keys))
    if not any(_holds(frame[column]) for column in measured):
        shown = replace(shown, note=f"Nothing of it is measured yet. {shown.note}")
    _, _, text = to_markdown(shown, replace(made.provenance, runs=())).partition("\n\n")
    return text if made.provenance is not NOTHING else text.partition("\n\n")[2]


def _holds(column: pd.Series) -> bool:
    return any(not is_missing(value) for value in column)


def _note(table: Table, without: pd.DataFrame, keys: list[str]) -> str:
    """The table's note, and the rows that were left out, by reason."""
    if without.empty or _REASON not in without or not keys:
        return table.note
    reasons: dict[str, list[str]] = {}
    for _, row in without.iterrows():
        if not is_missing(row[_REASON]):
            reasons.setdefault(str(row[_REASON]), []).append(str(row[keys[0]]))
    listed = "; ".join(f"{reason}: {', '.join(dict.fromkeys(names))}" for reason, names in reasons.items())
    return f"{table.note} {listed[:1].upper()}{listed[1:]}." if listed else table.note
