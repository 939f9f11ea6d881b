"""Build a report from results alone: `report.html`, tables as CSV, figures as PNG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from suite.measure.metrics import metrics
from suite.micro.records import read_micro_run
from suite.report import cell_tables, charts, conclusion, paper, provenance, speedup_tables
from suite.report.chart import Chart, draw, to_png, to_svg
from suite.report.markdown_pages import paper_part, update_page
from suite.report.page import Section, render
from suite.report.paper.costs import read_programs
from suite.report.paper.speedups import read_proof
from suite.report.provenance import Provenance
from suite.report.published import Published, load_published
from suite.report.runs import Run, load_run, load_runs
from suite.report.start import start_table
from suite.report.table import Table, to_csv, to_markdown
from suite.results import store
from suite.results.errors import WrongUse
from suite.results.store import make_folder, write_atomically

HEADLINE = "headline"
"""The table of a run that the README has, and the name of its generated part there."""

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """Hold the files of a report, and the number of its rows.

    `figures` are PNG files, `drawn` is the number of figures in the page. `warning` is set for a smoke run, and for
    errors in a run's files.
    """

    html: Path
    tables: list[Path]
    figures: list[Path]
    drawn: int
    cells: int
    warning: str | None


def build_report(
    runs: Sequence[Path],
    out: Path,
    figures_dir: Path | None = None,
    readme: Path | None = None,
    micro: Path | None = None,
    announce: Announce = lambda step: None,
    *,
    recorded: bool = False,
) -> Report:
    """Write one report of runs into the folder `out`.

    Args:
        runs: folders of runs; if several measured a workload, its rows are those of one of them (`join_runs`).
        out: folder for `report.html` and `tables/`; created if needed. Files of the same name are replaced, none is
            removed.
        figures_dir: folder for the figures as PNG; None: they are in the page only.
        readme: a Markdown file whose generated parts are updated: "headline", and those of papers ("grace").
        micro, recorded: see `read_results`. With `recorded`, runs that cannot be read or combined with the newest are
            left out, with a warning.
        announce: called with the name of each step that may take seconds, before it begins.

    Raises:
        WrongUse: no run is given, the runs cannot be combined, or `readme` has no such parts.
        InvalidResults: a file has wrong fields.
        OSError: a file cannot be written.
    """
    if not runs:
        raise WrongUse("nothing to report: no run is measured yet; `encore run --quick` makes one")
    announce(f"reading {len(runs)} runs")
    published = load_published()
    run = load_runs(runs, leave_out=recorded)
    announce("comparing modes")
    results = read_results(run, micro, recorded=recorded)
    made = [(exhibit, exhibit.make(results)) for exhibit in paper.EXHIBITS.values()]
    sections = [*_run_sections(results, run), *(_paper_section(exhibit, one, published) for exhibit, one in made)]
    if readme is not None:
        headlines = [headline_part(one, s.provenance) for s in sections for one in s.tables if one.name == HEADLINE]
        papers = {name: paper_part([pair for pair in made if pair[0].source == name]) for name in published.sources}
        update_page(readme, {HEADLINE: headlines[0], **papers})
    for folder in (out, out / "tables", figures_dir):
        if folder is not None:
            make_folder(folder)
    smoke = tuple(dict.fromkeys(each.provenance.warning for each in sections if each.provenance.warning))
    throttled, run_id = cell_tables.throttling(run), ", ".join(provenance.run_names(run))
    warnings = [*smoke, *([throttled] if throttled else ()), *run.remarks]
    figures, written = _draw_all(sections, figures_dir, announce)
    announce("writing tables and the page")
    page = render(
        run,
        sections,
        figures,
        published.sources.values(),
        title=f"Encore: run{'s' * (len(run.parts) > 1)} {run_id}",
        subject=f"{run.device}, PyTorch {run.environment.torch}; {_counts(results, run)}",
        conclusion=conclusion.of_run(results.ratios, published),
        warnings=warnings,
        smoke=smoke,
    )
    tables = _write_tables(sections, out / "tables")
    html = out / "report.html"
    write_atomically(html, page)
    return Report(html, tables, written, len(figures), len(run.cells), "; ".join((*smoke, *run.remarks)) or None)


def _counts(results: paper.Results, run: Run) -> str:
    failed, missing = len(run.failed), len(run.missing)
    return (
        f"{len(run.labels)} workloads in {len(results.ratios.modes)} modes: {len(run.cells) - failed} cells passed, "
        f"{failed} failed, {missing} not run"
    )


_OUTLINE = (
    ("speedup", "Speed-up", (HEADLINE, "overview", "over_graphs", "speedups")),
    ("times", "Where the time goes", ("times",)),
    ("coverage", "Coverage", ("coverage", "not_captured")),
    ("copies", "Copies", ("copies",)),
    ("memory", "Memory", ("memory",)),
    ("compile", "Compile time", ("compile_times",)),
    ("start", "Start", ("start",)),
    *((metric.name, metric.title, (metric.name,)) for metric in metrics()),
    ("failed", "Cells without a result", ("failed",)),
    ("trust", "Correctness", ("same_program", "correctness")),
)
"""Sections of a run: anchor, title, and tables. The first has the figures."""


def _run_sections(results: paper.Results, run: Run) -> list[Section]:
    origin = provenance.of_run(run)
    made = (
        *speedup_tables.all_tables(results.ratios, results.published),
        *cell_tables.all_tables(run),
        start_table(results.ratios),
    )
    tables, drawn = {table.name: table for table in made}, charts.of_run(results)
    return [
        Section(anchor, title, origin, () if place else drawn, tuple(tables[name] for name in names))
        for place, (anchor, title, names) in enumerate(_OUTLINE)
    ]


def _paper_section(exhibit: paper.Exhibit, made: paper.Made, published: Published) -> Section:
    title = f"{published.sources[exhibit.source].label} {exhibit.number}"
    drawn = (made.chart,) if made.chart is not None else ()
    return Section(exhibit.stem, title, made.provenance, drawn, (made.table,))


def read_results(run: Run | None, micro: Path | None = None, *, recorded: bool = False) -> paper.Results:
    """Collect the results for the papers' figures and tables.

    Args:
        micro: a file of `encore micro indirection`.
        recorded: take what `results/recorded` has of that, unless it is given, of `tests/gpu/programs.py` and
            `tests/gpu/concurrency_proof.py`, and of nanoGPT before it became workloads of the suite.

    Raises:
        WrongUse: a file cannot be read, or is not of its kind.
    """

    def files(pattern: str) -> list[Path]:
        return sorted(store.RECORDED.glob(pattern)) if recorded else []

    newest = [micro] if micro is not None else files("*/indirection.json*")[-1:]
    nanogpt = files(f"nanogpt-*/*/{store.ENVIRONMENT}")[-1:]
    return paper.Results(
        load_published(),
        run,
        read_micro_run(newest[0]) if newest else None,
        load_run(nanogpt[0].parent) if nanogpt else None,
        dict(map(read_programs, files("programs-*/*.jsonl.gz"))),
        {label: found for path in files("concurrency-*/*.jsonl.gz") for label, found in read_proof(path).items()},
    )


def build_exhibits(
    names: Sequence[str],
    runs: Sequence[Path],
    out: Path,
    figures_dir: Path | None = None,
    micro: Path | None = None,
    *,
    recorded: bool = False,
) -> tuple[list[Path], str]:
    """Write only some of the papers' figures and tables; return the files, tables first, and the tables as Markdown.

    Runs are read only if an exhibit needs them.

    Args:
        names: of `paper.EXHIBITS`.
        runs, micro, recorded: see `build_report`; values that are not in them are marked as missing.
        out: folder for `tables/`, and for `figures/` unless `figures_dir` is given.

    Raises:
        WrongUse: a name is unknown, the runs cannot be combined, or have no row and nothing else is given.
        InvalidResults: a file has wrong fields.
        OSError: a file cannot be written.
    """
    exhibits = paper.find_exhibits(names)
    results = paper.Results(load_published())
    if any(exhibit.needs_runs for exhibit in exhibits):
        run = load_runs(runs, leave_out=recorded) if runs else None
        results = read_results(run, micro, recorded=recorded)
        if run is not None and not run.cells and results.micro is None and results.nanogpt is None:
            raise WrongUse(f"nothing to draw: {'; '.join(run.remarks)}")
    sections = [_paper_section(exhibit, exhibit.make(results), results.published) for exhibit in exhibits]
    figures_dir = figures_dir or out / "figures"
    make_folder(out / "tables")
    make_folder(figures_dir)
    shown = "\n".join(to_markdown(table, each.provenance) for each in sections for table in each.tables)
    return [*_write_tables(sections, out / "tables"), *_draw_all(sections, figures_dir)[1]], shown


def headline_part(table: Table, origin: Provenance) -> str:
    """Return the README's table: with the runs of its rows alone, named below it."""
    return to_markdown(table, origin.among(table.frame["workload"]))


def _draw_all(
    sections: Iterable[Section], folder: Path | None, announce: Announce = lambda step: None
) -> tuple[Mapping[str, Mapping[str, object]], list[Path]]:
    """Draw every figure, and write it as PNG if there is a folder; return the page's figures, and the PNG files."""
    wanted = [(chart, section.provenance) for section in sections for chart in section.charts]
    figures: dict[str, dict[str, object]] = {}
    written = []
    for number, (chart, whole) in enumerate(wanted, start=1):
        announce(f"drawing figures, {number} of {len(wanted)}")
        origin = whole.among(chart.groups) if isinstance(chart, Chart) else whole
        figure = draw(chart, origin)
        caption, svg = (*chart.caption, f"{origin.caption}."), Markup(to_svg(figure, chart.name))
        figures[chart.name] = {"title": chart.title, "caption": caption, "svg": svg}
        if folder is not None:
            written.append(folder / f"{chart.name}.png")
            write_atomically(written[-1], to_png(figure))
    return figures, written


def _write_tables(sections: Iterable[Section], folder: Path) -> list[Path]:
    written = []
    for section in sections:
        for table in section.tables:
            written.append(folder / f"{table.name}.csv")
            write_atomically(written[-1], to_csv(table, section.provenance))
    return written
