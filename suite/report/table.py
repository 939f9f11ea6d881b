"""Write one table of a report as CSV for programs or Markdown for readers. Same content, same bytes.

CSV has raw values (unit in the column's name, empty where nothing was measured; a ratio with its interval is text) and
the provenance of each row in the last columns. Markdown has printed values, with the provenance above: for several
runs, with the workloads of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from suite.report.provenance import Provenance
from suite.report.units import escape, format_heading, format_value, markdown_table


@dataclass(frozen=True, slots=True)
class Table:
    """Hold columns and rows with notes and provenance.

    The last `summary_rows` of `frame` summarize those above and stay at the end when the table is sorted.
    """

    name: str
    title: str
    note: str
    frame: pd.DataFrame
    summary_rows: int = 0


Row = Mapping[str, object]


def make_table(
    name: str, title: str, note: str, rows: Iterable[Row], summary: Iterable[Row] = (), columns: Iterable[str] = ()
) -> Table:
    """Return a table with the columns that its rows have, in the order of their first appearance.

    Args:
        summary: rows that sum up the others, below them.
        columns: these stand first, whether a row has them or not.
    """
    body, end = list(rows), list(summary)
    names = list(dict.fromkeys([*columns, *(column for row in (*body, *end) for column in row)])) or ["workload"]
    values = [[row.get(column) for column in names] for row in (*body, *end)]
    # dtype object: pandas would turn a count in a column with a None into a float
    return Table(name, title, note, pd.DataFrame(values, columns=names, dtype=object), len(end))


def to_csv(table: Table, provenance: Provenance) -> str:
    """Return the table as CSV (RFC 4180 quoting, "\n" line ends)."""
    labels = table.frame["workload"] if "workload" in table.frame else [None] * len(table.frame)
    origins = [provenance.of_row(label) for label in labels]
    named = pd.DataFrame(
        [[origin.run_id, origin.device, origin.commit, origin.warning] for origin in origins],
        columns=["source", "device", "commit", "warning"],
        dtype=object,
    )
    return pd.concat([table.frame, named], axis=1).to_csv(index=False, lineterminator="\n")


def to_markdown(table: Table, provenance: Provenance) -> str:
    """Return the table as a Markdown section: title, warning, provenance, rows, note."""
    columns = list(table.frame.columns)
    lines = [f"### {escape(table.title)}", ""]
    if provenance.warning:
        lines += [f"**{escape(provenance.warning)}**", ""]
    lines += [escape(provenance.caption), ""]
    if provenance.rows_by_run:
        lines += [*(f"- {escape(line)}" for line in provenance.rows_by_run), ""]
    lines += markdown_table([format_heading(column) for column in columns], printed_rows(table))
    if table.note:
        lines += ["", escape(table.note)]
    return "\n".join(lines) + "\n"


def printed_rows(table: Table) -> list[list[str]]:
    """Return the rows as they are printed."""
    columns = list(table.frame.columns)
    return [
        [format_value(column, value) for column, value in zip(columns, values, strict=True)]
        for values in table.frame.itertuples(index=False, name=None)
    ]
