"""Build a report from results alone: `report.html`, tables as CSV, figures as PNG."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from suite.explain.records import Explanation
from suite.measure.metrics import metrics
from suite.micro.records import read_micro_run
from suite.report import (
    cell_tables,
    charts,
    compare,
    conclusion,
    explain_tables,
    paper,
    provenance,
    speedup_tables,
)
from suite.report.chart import Chart, LineChart, draw, to_png, to_svg
from suite.report.conclusion import Conclusion
from suite.report.markdown_pages import check_page, generated_names, paper_part, update_page
from suite.report.page import Log, Page, PageFigure, Section, render
from suite.report.paper.concurrency import read_proof
from suite.report.paper.costs import read_programs
from suite.report.provenance import Provenance
from suite.report.published import Published, load_published
from suite.report.runs import Run, cell_label, load_explanations, load_recorded, load_run, load_runs
from suite.report.start import start_table
from suite.report.table import Table, to_csv, to_markdown
from suite.results.errors import WrongUse
from suite.results.schema import Cell, Record
from suite.results.store import REPOSITORY, CannotWrite, make_folder, write_atomically

HEADLINE = "headline"
"""The table of a run that the README has, and the name of its generated part there."""

WRITTEN = ".report-files"
"""File in a report's folder: the paths that the report wrote, one a line, so that the next one removes leftovers."""

_FIGURES_WORTH_PROCESSES = 12
"""Fewer figures are drawn in this process."""

FIGURES = REPOSITORY / "figures"
"""The repository's own figures. Smoke runs are not drawn here: their numbers mean nothing, and would replace others."""


class Report(Record):
    """Hold what was written, and what a caller may want to say of it.

    `run_id` names the run, or the runs, separated by commas. `warning` is set for a smoke run or tiny models, and for
    what is wrong with a run's files. `cells` counts those of runs, `failed_cells` of them that did not pass,
    `superseded_cells` failures that newer rows stand for, `missing_cells` cells not yet run.
    """

    html: Path
    tables: list[Path]
    figures: list[Path]
    run_id: str | None
    explained: int
    cells: int
    failed_cells: int
    superseded_cells: int
    missing_cells: int
    warning: str | None


@dataclass(frozen=True, slots=True)
class Further:
    """Hold results next to runs, for the papers' exhibits: what `encore micro indirection`, `tests/gpu/programs.py` and
    `tests/gpu/concurrency_proof.py` wrote, and the run of nanoGPT from before it was workloads of the suite."""

    micro: Path | None = None
    nanogpt: Path | None = None
    programs: tuple[Path, ...] = ()
    proofs: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """Hold a section's content before anything is written."""

    anchor: str
    title: str
    provenance: Provenance
    charts: tuple[Chart | LineChart, ...]
    tables: tuple[Table, ...]


def build_report(
    runs: Sequence[Path],
    explanations: Path | None,
    out: Path,
    figures_dir: Path | None = None,
    readme: Path | None = None,
    further: Further = Further(),  # a frozen record
    announce: Callable[[str], None] = lambda step: None,
    *,
    all_recorded: bool = False,
) -> Report:
    """Write one report of runs, of explanations, or of both, into the folder `out`.

    Args:
        runs: folders of runs; of a workload that several of them measured, one has its rows (`join_runs`).
        explanations: folder of `<name>.json` files that `encore explain --out` wrote.
        out: gets `report.html` and `tables/`; made if it is not there. What an earlier report wrote there and this one
            does not have is removed, other files stay.
        figures_dir: gets the figures as PNG; None: they are in the page only. Figures of the same name are
            replaced, nothing is removed. `out/figures` takes what is not to go to `FIGURES`.
        readme: a Markdown file whose generated parts are renewed: "headline", and those of papers ("grace").
        announce: called with the name of each step that may take seconds, before it begins.
        all_recorded: leave out runs that cannot be read or do not fit to the newest, with a warning.

    Raises:
        WrongUse: neither a run nor explanations are given, the runs do not belong into one report, `out` or
            `figures_dir` cannot be written to, or `readme` has no such parts.
        InvalidResults: a file has wrong fields.
        CannotWrite: the disk is full.
    """
    if not runs and explanations is None:
        raise WrongUse("nothing to report: give a run, or a folder of explanations (`encore explain --all --out DIR`)")
    announce(f"reading {len(runs)} runs")
    published = load_published()
    recorded = (load_recorded(runs) if all_recorded else load_runs(runs)) if runs else None
    explained = () if explanations is None else load_explanations(explanations)
    names = () if readme is None else _names_to_renew(readme, published, has_run=recorded is not None)
    if readme is not None:
        check_page(readme, names)
    announce("comparing modes")
    ratios = compare.compare(recorded) if recorded else None
    results = paper_results(ratios, further, published)
    exhibits = [(exhibit, exhibit.make(exhibit, results)) for exhibit in paper.EXHIBITS.values()] if recorded else []
    parts = [
        *(_run_parts(ratios, published) if ratios is not None else ()),
        *(_explain_parts(explained, published) if explained else ()),
        *_paper_parts(exhibits, published),
    ]
    concluded = conclusion.of_explanations(explained)
    if ratios is not None:
        concluded = conclusion.of_run(ratios, published)
    warnings = tuple(dict.fromkeys(part.provenance.warning for part in parts if part.provenance.warning))
    if figures_dir is not None and warnings and figures_dir.resolve() == FIGURES:
        figures_dir = out / "figures"
    for folder, option in ((out, "--out"), (out / "tables", "--out"), (figures_dir, "--figures")):
        if folder is not None:
            make_folder(folder, option)
    try:
        sections, figures = _write_figures(parts, figures_dir, announce)
        announce("writing tables and the page")
        tables = _write_tables(parts, out / "tables")
        html = out / "report.html"
        write_atomically(html, render(_page(recorded, explained, sections, published, concluded)))
        _remove_what_is_old(out, [html, *tables, *figures])
        if readme is not None:
            update_page(readme, {name: _page_part(name, parts, exhibits) for name in names})
    except CannotWrite as error:
        message = f"cannot write the report: {error.__cause__}. The results it is made of are intact; make room."
        raise CannotWrite(message) from error
    remarks = recorded.remarks if recorded else ()
    return Report(
        html=html,
        tables=tables,
        figures=figures,
        run_id=", ".join(provenance.run_names(recorded)) if recorded else None,
        explained=len(explained),
        cells=len(recorded.cells) if recorded else 0,
        failed_cells=len(recorded.failed) if recorded else 0,
        superseded_cells=len(recorded.superseded) if recorded else 0,
        missing_cells=len(recorded.missing) if recorded else 0,
        warning="; ".join((*warnings, *remarks)) or None,
    )


_OUTLINE = (
    ("speedup", "Speed-up", "over_", (HEADLINE, "overview", "over_graphs", "speedups")),
    ("times", "Where the time goes", "time_split", ("times",)),
    ("coverage", "Coverage", None, ("coverage", "not_captured")),
    ("copies", "Copies", None, ("copies",)),
    ("selection", "Selection", None, ("selection",)),
    ("memory", "Memory", None, ("memory",)),
    ("compile", "Compile time", None, ("compile_times",)),
    ("start", "Start", None, ("start",)),
    *((metric.name, metric.title, None, (metric.name,)) for metric in metrics()),
    ("failed", "Cells without a result", None, ("failed", "superseded", "shortages")),
    ("trust", "Correctness and conditions", None, ("same_program", "correctness", "later_processes", "conditions")),
)
"""Sections of a run: anchor, title, how the names of its figures begin, and its tables."""


def _run_parts(ratios: compare.Ratios, published: Published) -> tuple[_Part, ...]:
    """Make the sections of a run: each figure with the tables that belong to it."""
    run = ratios.run
    origin = provenance.of_run(run)
    drawn = charts.of_run(ratios, published)
    made = (
        *speedup_tables.all_tables(ratios, published),
        *cell_tables.all_tables(run),
        speedup_tables.same_program(ratios),
        start_table(run),
    )
    tables = {table.name: table for table in made if table is not None}
    return tuple(
        _Part(
            anchor,
            title,
            origin,
            tuple(chart for chart in drawn if stem is not None and chart.name.startswith(stem)),
            tuple(tables[name] for name in names if name in tables),
        )
        for anchor, title, stem, names in _OUTLINE
    )


def _paper_parts(exhibits: Iterable[tuple[paper.Exhibit, paper.Made]], published: Published) -> list[_Part]:
    """Return a section for each figure and table of the papers."""
    return [
        _Part(
            exhibit.stem,
            f"{published.sources[exhibit.source].label} {exhibit.number}",
            made.provenance,
            (made.chart,) if made.chart is not None else (),
            (made.table,),
        )
        for exhibit, made in exhibits
    ]


def paper_results(ratios: compare.Ratios | None, further: Further, published: Published) -> paper.Results:
    """Collect what the papers' figures and tables are made of.

    Raises:
        WrongUse: a file cannot be read, or is not of its kind.
    """
    return paper.Results(
        published,
        ratios,
        None if further.micro is None else read_micro_run(further.micro),
        None if further.nanogpt is None else load_run(further.nanogpt),
        dict(map(read_programs, further.programs)),
        {label: found for path in further.proofs for label, found in read_proof(path).items()},
    )


def build_exhibits(
    names: Sequence[str],
    runs: Sequence[Path],
    out: Path,
    figures_dir: Path | None = None,
    further: Further = Further(),  # a frozen record
) -> tuple[list[Path], str]:
    """Write some of the papers' figures and tables, and nothing else; return the files, tables first, and the tables as
    Markdown.

    Runs are read only where an exhibit needs them.

    Args:
        names: of `paper.EXHIBITS`.
        runs, further: see `build_report`; what they do not hold is marked as missing.
        out: gets `tables/`, and `figures/` unless `figures_dir` is given.

    Raises:
        WrongUse: a name is unknown, the runs do not belong into one report, or have no row and nothing else is given.
        InvalidResults: a file has wrong fields.
        CannotWrite: the disk is full.
    """
    exhibits = paper.find_exhibits(names)
    recorded = load_runs(runs) if runs and any(exhibit.needs_runs for exhibit in exhibits) else None
    if recorded is not None and not recorded.cells and further.micro is None and further.nanogpt is None:
        raise WrongUse(f"nothing to draw: {'; '.join(recorded.remarks)}")
    published = load_published()
    ratios = None if recorded is None else compare.Ratios(recorded)
    results = paper_results(ratios, further, published)
    parts = _paper_parts([(exhibit, exhibit.make(exhibit, results)) for exhibit in exhibits], published)
    if figures_dir is None or (figures_dir.resolve() == FIGURES and any(part.provenance.warning for part in parts)):
        figures_dir = out / "figures"
    make_folder(out / "tables", "--out")
    make_folder(figures_dir, "--figures")
    shown = "\n".join(to_markdown(table, part.provenance) for part in parts for table in part.tables)
    return [*_write_tables(parts, out / "tables"), *_write_figures(parts, figures_dir)[1]], shown


def _explain_parts(explanations: tuple[Explanation, ...], published: Published) -> tuple[_Part, ...]:
    return (
        _Part(
            "explain",
            "What stands in the way of CUDA graphs (analysis without a GPU)",
            provenance.of_explanations(explanations),
            charts.of_explanations(explanations, published),
            explain_tables.all_tables(explanations, published),
        ),
    )


def _names_to_renew(readme: Path, published: Published, *, has_run: bool) -> tuple[str, ...]:
    """Return the names of the generated parts of a file that a report of runs renews.

    Raises:
        WrongUse: there is no run, or the file has no such part.
    """
    names = tuple(name for name in generated_names(readme) if name == HEADLINE or name in published.sources)
    if not has_run:
        raise WrongUse(f"--readme {readme}: its tables are made from runs; name a run, or give --recorded")
    if not names:
        known = ", ".join((HEADLINE, *published.sources))
        raise WrongUse(f"--readme {readme} has no generated part; write `<!-- generated: NAME -->`, NAME of: {known}")
    return names


def _page_part(name: str, parts: Iterable[_Part], exhibits: Iterable[tuple[paper.Exhibit, paper.Made]]) -> str:
    """Return a generated part of a page: the README's table, or a paper's numbers."""
    if name != HEADLINE:
        return paper_part([(exhibit, made) for exhibit, made in exhibits if exhibit.source == name])
    tables = [(table, part.provenance) for part in parts for table in part.tables if table.name == HEADLINE]
    return headline_part(*tables[0])


def headline_part(table: Table, origin: Provenance) -> str:
    """Return the README's table: with the runs of its rows alone, named below it."""
    return to_markdown(table, origin.among(table.frame["workload"]))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Hold a figure as the page has it, and as PNG where it is written."""

    page: PageFigure
    png: bytes | None


def _write_figures(
    parts: Sequence[_Part], folder: Path | None, announce: Callable[[str], None] = lambda step: None
) -> tuple[list[Section], list[Path]]:
    """Draw every figure, and write it as PNG where there is a folder; return the sections, and the paths."""
    drawn = _draw_all([(chart, part.provenance) for part in parts for chart in part.charts], folder, announce)
    written = []
    for one in drawn:
        if folder is not None and one.png is not None:
            written.append(folder / f"{one.page.name}.png")
            write_atomically(written[-1], one.png)
    pages = iter(one.page for one in drawn)
    sections = [
        Section(part.anchor, part.title, part.provenance, tuple(next(pages) for _ in part.charts), part.tables)
        for part in parts
    ]
    return sections, written


def _draw_all(
    wanted: Sequence[tuple[Chart | LineChart, Provenance]], folder: Path | None, announce: Callable[[str], None]
) -> list[_Drawn]:
    """Draw figures, many of them in as many processes as there are cores."""
    draw_one = functools.partial(_draw_one, as_file=folder is not None)
    if len(wanted) < _FIGURES_WORTH_PROCESSES:
        return list(map(draw_one, wanted))
    drawn = []
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        for one in pool.map(draw_one, wanted):
            drawn.append(one)
            announce(f"drawing figures, {len(drawn)} of {len(wanted)}")
    return drawn


def _draw_one(chart_and_origin: tuple[Chart | LineChart, Provenance], *, as_file: bool) -> _Drawn:
    chart, origin = chart_and_origin
    if isinstance(chart, Chart):
        origin = origin.among(chart.groups)
    figure = draw(chart, origin)
    caption = (*chart.caption, f"{origin.caption}.")
    return _Drawn(
        PageFigure(chart.name, chart.title, caption, Markup(to_svg(figure, chart.name))),
        to_png(figure) if as_file else None,
    )


def _remove_what_is_old(out: Path, written: Sequence[Path]) -> None:
    """Remove what an earlier report wrote into `out` and this one did not; only files its own list names."""
    new = {str(path.relative_to(out)) for path in written if path.is_relative_to(out)}
    listing = out / WRITTEN
    before = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    for name in before:
        path = Path(name)
        if name not in new and not path.is_absolute() and ".." not in path.parts:
            (out / path).unlink(missing_ok=True)
    write_atomically(listing, "".join(f"{name}\n" for name in sorted(new)))


def _write_tables(parts: Iterable[_Part], folder: Path) -> list[Path]:
    written = []
    for part in parts:
        for table in part.tables:
            written.append(folder / f"{table.name}.csv")
            write_atomically(written[-1], to_csv(table, part.provenance))
    return written


def _page(
    run: Run | None,
    explanations: Sequence[Explanation],
    sections: Sequence[Section],
    published: Published,
    concluded: Conclusion,
) -> Page:
    origins = dict.fromkeys(section.provenance for section in sections)
    names = provenance.run_names(run) if run else ()
    title = f"Encore: run{'s' * (len(names) > 1)} {', '.join(names)}" if run else "Encore: obstacles to CUDA graphs"
    counts = []
    if run:
        again = f", {len(run.superseded)} that failed before were measured again" if run.superseded else ""
        counts.append(
            f"{len(run.labels)} workloads in {len(run.modes)} modes: {len(run.cells) - len(run.failed)} cells passed, "
            f"{len(run.failed)} failed, {len(run.missing)} not run{again}"
        )
    if explanations:
        counts.append(f"{len(explanations)} models analysed without a GPU")
    subject = [f"{run.device}, PyTorch {run.environment.torch}"] if run else []
    return Page(
        title=title,
        subject="; ".join([*subject, *counts]),
        conclusion=concluded,
        origins=tuple(line for origin in origins for line in (origin.caption, *origin.rows_by_run)),
        warnings=tuple(
            warning
            for warning in (*(origin.warning for origin in origins), cell_tables.throttling(run) if run else None)
            if warning
        ),
        sections=tuple(sections),
        sources=tuple(published.sources.values()),
        logs=tuple(_log(cell) for cell in run.failed) if run else (),
        environments=tuple(part.environment for part in run.parts or (run,)) if run else (),
    )


def _log(cell: Cell) -> Log:
    title = f"{cell_label(cell)}, {cell.mode}: {cell.status.value}"
    return Log(title, "\n\n".join(text for text in (cell.error, cell.log_tail) if text) or "No error was recorded.")
