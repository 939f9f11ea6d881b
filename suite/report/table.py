"""Write one table of a report as CSV for programs or Markdown for readers. Same content, same bytes.

CSV has raw values (unit in the column's name, empty where nothing was measured) and the provenance of each row in the
last columns; a cell with several values has a column for each. Markdown has printed values, with the provenance above:
for several runs, with the workloads of each.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from suite.report.provenance import Provenance
from suite.report.units import escape, format_heading, format_value, markdown_table


class Detailed(str):
    """Hold the text of a cell with its raw values: `values` by the suffixes of their columns' names in CSV.

    The column "graph" with a cell of values `speedup` and `low` is "graph_speedup" and "graph_low" there. Without any
    value, the cell is empty there.
    """

    values: Mapping[str, object]

    def __new__(cls, text: str, values: Mapping[str, object] | None = None) -> Detailed:
        made = super().__new__(cls, text)
        made.values = dict(values or {})
        return made


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
    buffer = io.StringIO()
    pd.concat([_raw(table.frame), named], axis=1).to_csv(buffer, index=False, lineterminator="\n")
    return buffer.getvalue()


def _raw(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with each column of `Detailed` cells split into columns of their values."""
    columns: dict[str, list[object]] = {}
    for name in frame.columns:
        cells = list(frame[name])
        ends = list(dict.fromkeys(end for cell in cells if isinstance(cell, Detailed) for end in cell.values))
        if ends:
            for end in ends:
                values = [cell.values.get(end) if isinstance(cell, Detailed) else None for cell in cells]
                columns[f"{name}_{end}"] = values
        else:
            columns[name] = [None if isinstance(cell, Detailed) else cell for cell in cells]
    return pd.DataFrame(columns, index=frame.index, dtype=object)


def to_markdown(table: Table, provenance: Provenance) -> str:
    """Return the table as a Markdown section: title, warning, provenance, rows, note."""
    columns = list(table.frame.columns)
    lines = [f"### {escape(table.title)}", ""]
    if provenance.warning:
        lines += [f"**{escape(provenance.warning)}**", ""]
    lines += [escape(provenance.caption), ""]
    if provenance.runs:
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
