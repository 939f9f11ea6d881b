"""The report as one HTML file that loads nothing: style, script and figures are in it.

Whatever comes from a results file is text to the page: the template escapes it, and the page's own policy lets no
script run but the one that sorts tables.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from suite import stats
from suite.report.provenance import Provenance
from suite.report.published import Source
from suite.report.table import Table, printed_rows
from suite.report.units import NOTHING, format_bytes, format_heading, is_missing, sort_key
from suite.schema import Environment, Status

_PAGE = Path(__file__).parent / "page"
_SHORT = 44
"""Texts up to this length are not wrapped."""
_BAD_STATUSES = frozenset(status.value for status in Status if status is not Status.PASS)


@dataclass(frozen=True, slots=True)
class PageFigure:
    """A figure of the page: its title, and the `<svg>` element that `draw.to_svg` made."""

    title: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: figures, then tables, all of one origin."""

    anchor: str
    title: str
    provenance: Provenance
    figures: tuple[PageFigure, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Log:
    """The end of a failed cell's log, with its error."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page says. `warnings` stand at the top, in the title and in the head; one environment per run."""

    title: str
    subtitles: tuple[str, ...]
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]
    sources: tuple[Source, ...]
    published: Table
    logs: tuple[Log, ...] = ()
    environments: tuple[Environment, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Cell:
    text: str
    sort: float | None
    missing: bool
    classes: str


@dataclass(frozen=True, slots=True)
class _ShownTable:
    name: str
    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[tuple[_Cell, ...], ...]
    summary: tuple[tuple[_Cell, ...], ...]


def render(page: Page) -> str:
    """The page as HTML. The same page gives the same text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    script = (_PAGE / "report.js").read_text(encoding="utf-8")
    embedded = f"\n{script}"  # as it stands between the tags: the digest below is of exactly this
    return environment.get_template("report.html.j2").render(
        page=page,
        sections=[(section, [_shown(table) for table in section.tables]) for section in page.sections],
        published=_shown(page.published),
        environments=[(environment_facts(one), sorted(one.packages.items())) for one in page.environments],
        style=Markup((_PAGE / "report.css").read_text(encoding="utf-8")),
        script=Markup(embedded),
        script_digest=base64.b64encode(hashlib.sha256(embedded.encode()).digest()).decode(),
        minimum_floor_percent=100 * stats.MINIMUM_FLOOR,
        maximum_same_percent=100 * stats.MAXIMUM_SAME,
        minimum_blocks=stats.MINIMUM_BLOCKS,
        nothing=NOTHING,
    )


def environment_facts(environment: Environment) -> list[tuple[str, str]]:
    """(name, value) of what a reader needs to judge a run, packages left out."""
    gpu, cpu = environment.gpu, environment.cpu
    known: list[tuple[str, object]] = [
        ("Run", f"{environment.run_id}, {environment.created_at}"),
        ("GPU", _gpu_text(environment)),
        ("GPU memory", None if gpu is None else format_bytes(gpu.memory_bytes)),
        ("Driver", environment.driver),
        ("PyTorch", environment.torch),
        ("CUDA", environment.torch_cuda),
        ("cuDNN", environment.cudnn),
        ("CPU", f"{cpu.model}, {cpu.physical_cores or '?'} cores, {cpu.logical_cores} logical"),
        ("CPU governor", cpu.governor),
        ("SMT", None if cpu.smt is None else ("on" if cpu.smt else "off")),
        ("NUMA nodes", cpu.numa_nodes),
        ("Host memory", format_bytes(cpu.memory_bytes)),
        ("Platform", environment.platform),
        ("Python", environment.python),
        ("Commit", _commit_text(environment)),
        ("Command", " ".join(environment.command_line)),
        *((f"Setting {name}", value) for name, value in environment.settings.items()),
    ]
    return [(name, NOTHING if value is None else str(value)) for name, value in known]


def _gpu_text(environment: Environment) -> str | None:
    gpu = environment.gpu
    if gpu is None:
        return None
    count = f"{environment.gpu_count} x " if environment.gpu_count > 1 else ""
    return f"{count}{gpu.name}, compute capability {gpu.compute_capability}, {gpu.multiprocessors} multiprocessors"


def _commit_text(environment: Environment) -> str | None:
    if environment.git_commit is None:
        return None
    return environment.git_commit + (", with uncommitted changes" if environment.git_dirty else "")


def _shown(table: Table) -> _ShownTable:
    columns = list(table.frame.columns)
    rows = tuple(
        tuple(_cell(column, value, text) for column, value, text in zip(columns, values, texts, strict=True))
        for values, texts in zip(table.frame.itertuples(index=False, name=None), printed_rows(table), strict=True)
    )
    body = len(rows) - table.summary_rows
    headings = tuple(format_heading(column) for column in columns)
    return _ShownTable(table.name, table.title, table.note, headings, rows[:body], rows[body:])


def _cell(column: str, value: object, text: str) -> _Cell:
    missing = is_missing(value)
    is_text = isinstance(value, str | bool) or missing
    classes = [] if is_text else ["number"]
    if is_text and len(text) <= _SHORT:
        classes.append("short")
    if verdict := next((word for word in _words(text) if word in stats.Verdict.__members__), None):
        classes.append(f"verdict-{verdict}")
    elif column != "error" and text.rpartition(": ")[2] in _BAD_STATUSES:
        classes.append("failure")
    return _Cell(text, None if isinstance(value, bool) else sort_key(value), missing, " ".join(classes))


def _words(text: str) -> Sequence[str]:
    return text.replace(",", " ").split()
