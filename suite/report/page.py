"""Render the report as one HTML file that loads nothing: style, script and figures are in it. Tables link to CSV files.

The page has the conclusion, then the tables, then the provenance. Content of results files is plain text: the template
escapes it, and the page's security policy allows only the script that sorts and filters tables.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from suite.measure.modes import MODES
from suite.report.chart import Chart, LineChart
from suite.report.provenance import Provenance, facts
from suite.report.published import Source
from suite.report.runs import Run, cell_label, load_notes
from suite.report.table import Table, printed_rows
from suite.report.units import NOTHING, format_heading, is_missing
from suite.results import stats
from suite.results.schema import BAD_STATUSES, Cell, Environment

_PAGE = Path(__file__).parent / "page"
LONG_TABLE = 260
SHOWN_OF_LONG = 50
"""Number of rows in the page, enough for 25 workloads in ten modes. The CSV has all rows of longer tables."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")
_RATIO = re.compile(r"\d\S* \[.*\]")
_SHORT = 44
"""Texts up to this length are not wrapped."""

OWN_MODES = frozenset(name for name, mode in MODES.items() if mode.is_encores)
"""Encore's modes, which the page highlights."""


@dataclass(frozen=True, slots=True)
class Section:
    """Hold a part of a report: figures, then tables, all of one origin."""

    anchor: str
    title: str
    provenance: Provenance
    charts: tuple[Chart | LineChart, ...]
    tables: tuple[Table, ...]


def render(
    run: Run,
    sections: Sequence[Section],
    figures: Mapping[str, Mapping[str, Any]],
    sources: Iterable[Source],
    **texts: Any,
) -> str:
    """Return the page as HTML. The same arguments give the same text.

    Args:
        figures: of the sections' charts, by name: title, caption, and the `<svg>` element of `to_svg`.
        sources: of published values.
        texts: title, subject and conclusion of the page, its `warnings`, and those of them that a tab's title shows, as
            the numbers have no meaning for performance: `smoke`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    script = (_PAGE / "report.js").read_text(encoding="utf-8")
    embedded = f"\n{script}"  # exactly the text between the tags, for the digest below
    origins = dict.fromkeys(section.provenance for section in sections)
    return environment.get_template("report.html.j2").render(
        **texts,
        figures=figures,
        headline=next((name for name in figures if name.startswith("over_")), None),
        origins=[*(line for one in origins for line in (one.caption, *one.rows_by_run)), *load_notes(run)],
        logs=[(f"{cell_label(cell)}, {cell.mode}: {cell.status.value}", _log(cell)) for cell in run.failed],
        sections=[(section, [_shown(table) for table in section.tables]) for section in sections],
        environments=[environment_facts(one.environment) for one in run.parts or (run,)],
        sources=sources,
        style=Markup((_PAGE / "report.css").read_text(encoding="utf-8")),
        script=Markup(embedded),
        script_digest=base64.b64encode(hashlib.sha256(embedded.encode()).digest()).decode(),
        margin_percent=100 * stats.MARGIN,
        minimum_processes=stats.MINIMUM_PROCESSES,
        minimum_blocks=stats.MINIMUM_BLOCKS,
        nothing=NOTHING,
    )


def _log(cell: Cell) -> str:
    return "\n\n".join(text for text in (cell.error, cell.log_tail) if text) or "No error was recorded."


def environment_facts(environment: Environment) -> dict[str, str]:
    """Return the environment of a run by name, without packages."""
    run = {"run": f"{environment.run_id}, {environment.created_at}", "command": " ".join(environment.command_line)}
    settings = {
        f"setting {name}": NOTHING if value is None else str(value) for name, value in environment.settings.items()
    }
    return run | facts(environment) | settings


def _shown(table: Table) -> dict[str, Any]:
    """Return a table for the template: each row has classes and cells."""
    names = list(table.frame.columns)
    order = sorted(range(len(names)), key=lambda place: _rank(names[place], place))
    body = len(table.frame) - table.summary_rows
    shown = body if body <= LONG_TABLE else SHOWN_OF_LONG
    rows = []
    for place, (values, texts) in enumerate(
        zip(table.frame.itertuples(index=False, name=None), printed_rows(table), strict=True)
    ):
        if not shown <= place < body:
            cells = [_cell(names[column], values[column], texts[column]) for column in order]
            rows.append((" ".join(_row_classes(dict(zip(names, values, strict=True)))), cells))
    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "cut": f"The first {shown} of {body} rows; the CSV file has all." if shown < body else "",
        "headings": [(format_heading(names[column]), names[column] in OWN_MODES) for column in order],
        "rows": rows[:shown],
        "summary": rows[shown:],
    }


def _rank(column: str, place: int) -> tuple[int, int]:
    """Move Encore's columns after the first one, latest mode first, so that they are visible in a narrow page."""
    if place == 0:
        return (0, 0)
    return (1, -list(MODES).index(column)) if column in OWN_MODES else (2, place)


def _row_classes(values: Mapping[str, object]) -> Iterator[str]:
    if values.get("status") in BAD_STATUSES or values.get("passed") is False:
        yield "failed"
    if values.get("mode") in OWN_MODES:
        yield "own"


def _cell(column: str, value: object, text: str) -> dict[str, Any]:
    """Return a cell for the template."""
    missing = is_missing(value)
    is_text, is_ratio = isinstance(value, str | bool) or missing, _RATIO.match(text) is not None
    verdict = next((word for word in text.replace(",", " ").split() if word in stats.Verdict.__members__), None)
    failure = column != "error" and text.rpartition(": ")[2] in BAD_STATUSES
    classes = {
        "number": not is_text,
        "short": is_text and len(text) <= _SHORT,
        "own": column in OWN_MODES,
        f"verdict-{verdict}": verdict is not None,
        "failure": failure and verdict is None,
        "undecided": is_ratio and verdict is None and " of " not in text,
    }
    return {
        "text": text,
        "sort": sort_key(value),
        "missing": missing,
        "classes": " ".join(name for name, holds in classes.items() if holds),
    }


def sort_key(value: object) -> str | None:
    """Return the number by which the page sorts a cell, rounded: its value, or the number at the start of its text.

    Return None for other text.
    """
    if is_missing(value) or isinstance(value, bool):
        return None
    if isinstance(value, str):
        leading = _NUMBER.match(value)
        value = float(leading.group().replace(",", "")) if leading else None
    return f"{value:.7g}" if isinstance(value, int | float) else None
