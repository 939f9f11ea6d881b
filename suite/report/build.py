"""Build a report from results alone: `report.html`, tables as CSV, figures as PNG."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

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
from suite.report.markdown_pages import generated_names, paper_part, update_page
from suite.report.page import Page, PageFigure, Section, render
from suite.report.paper.costs import read_programs
from suite.report.paper.speedups import read_proof
from suite.report.provenance import Provenance
from suite.report.published import Published, load_published
from suite.report.runs import Run, load_explanations, load_recorded, load_run, load_runs
from suite.report.start import start_table
from suite.report.table import Table, to_csv, to_markdown
from suite.results.errors import WrongUse
from suite.results.schema import Record
from suite.results.store import CannotWrite, make_folder, write_atomically

HEADLINE = "headline"
"""The table of a run that the README has, and the name of its generated part there."""

_FIGURES_WORTH_PROCESSES = 12
"""Fewer figures than this are drawn in this process."""

Announce = Callable[[str], None]


class Report(Record):
    """Hold the files of a report, and data for messages.

    `run_id` names the run, or the runs, separated by commas. `warning` is set for a smoke run or tiny models, and for
    errors in a run's files. `cells` counts those of runs, `failed_cells` those that did not pass, `superseded_cells`
    failures that newer rows replace, `missing_cells` cells not yet run.
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
    """Hold further results for the papers' exhibits.

    These are the files of `encore micro indirection`, `tests/gpu/programs.py` and `tests/gpu/concurrency_proof.py`, and
    the run of nanoGPT before it became workloads of the suite.
    """

    micro: Path | None = None
    nanogpt: Path | None = None
    programs: tuple[Path, ...] = ()
    proofs: tuple[Path, ...] = ()


def build_report(
    runs: Sequence[Path],
    explanations: Path | None,
    out: Path,
    figures_dir: Path | None = None,
    readme: Path | None = None,
    further: Further = Further(),  # a frozen record
    announce: Announce = lambda step: None,
    *,
    all_recorded: bool = False,
) -> Report:
    """Write one report of runs, of explanations, or of both, into the folder `out`.

    Args:
        runs: folders of runs; if several measured a workload, its rows are those of one of them (`join_runs`).
        explanations: folder of `<name>.json` files that `encore explain --out` wrote.
        out: folder for `report.html` and `tables/`; created if needed. Files of the same name are replaced, none is
            removed.
        figures_dir: folder for the figures as PNG; None: they are in the page only.
        readme: a Markdown file whose generated parts are updated: "headline", and those of papers ("grace").
        announce: called with the name of each step that may take seconds, before it begins.
        all_recorded: leave out runs that cannot be read or combined with the newest, with a warning.

    Raises:
        WrongUse: neither a run nor explanations are given, the runs cannot be combined, `out` or
            `figures_dir` cannot be written to, or `readme` has no such parts.
        InvalidResults: a file has wrong fields.
        CannotWrite: the disk is full.
    """
    if not runs and explanations is None:
        raise WrongUse("nothing to report: give a run, or a folder of explanations (`encore explain --all --out DIR`)")
    announce(f"reading {len(runs)} runs")
    published = load_published()
    run = (load_recorded(runs) if all_recorded else load_runs(runs)) if runs else None
    explained = () if explanations is None else load_explanations(explanations)
    names = () if readme is None else _names_to_renew(readme, published, has_run=run is not None)
    announce("comparing modes")
    ratios = compare.Ratios(run) if run else None
    exhibits = _paper_sections(paper.EXHIBITS.values() if run else (), paper_results(ratios, further, published))
    sections = [*(_run_sections(ratios, published) if ratios is not None else ())]
    if explained:
        found, origin = explain_tables.all_tables(explained, published), provenance.of_explanations(explained)
        title = "What stands in the way of CUDA graphs (analysis without a GPU)"
        sections.append(Section("explain", title, origin, (), found))
    sections += [section for _, _, section in exhibits]
    run_names = ", ".join(provenance.run_names(run)) if run else None
    warnings = tuple(dict.fromkeys(each.provenance.warning for each in sections if each.provenance.warning))
    throttled = cell_tables.throttling(run) if run else None
    for folder, option in ((out, "--out"), (out / "tables", "--out"), (figures_dir, "--figures")):
        if folder is not None:
            make_folder(folder, option)
    try:
        figures, written = _draw_all(sections, figures_dir, announce)
        announce("writing tables and the page")
        page = Page(
            title=f"Encore: run{'s' * (len(run.parts) > 1)} {run_names}" if run else "Encore: obstacles to CUDA graphs",
            subject=_subject(run, len(explained)),
            conclusion=conclusion.of_run(ratios, published) if ratios else conclusion.of_explanations(explained),
            warnings=(*warnings, *([throttled] if throttled else ()), *(run.remarks if run else ())),
            sections=tuple(sections),
            figures=figures,
            sources=tuple(published.sources.values()),
            failed=run.failed if run else (),
            environments=tuple(part.environment for part in run.parts or (run,)) if run else (),
        )
        tables = _write_tables(sections, out / "tables")
        html = out / "report.html"
        write_atomically(html, render(page))
        if readme is not None:
            update_page(readme, {name: _page_part(name, sections, exhibits) for name in names})
    except CannotWrite as error:
        message = f"cannot write the report: {error.__cause__}. The results it is made of are intact; make room."
        raise CannotWrite(message) from error
    return Report(
        html=html,
        tables=tables,
        figures=written,
        run_id=run_names,
        explained=len(explained),
        cells=len(run.cells) if run else 0,
        failed_cells=len(run.failed) if run else 0,
        superseded_cells=len(run.superseded) if run else 0,
        missing_cells=len(run.missing) if run else 0,
        warning="; ".join((*warnings, *(run.remarks if run else ()))) or None,
    )


def _subject(run: Run | None, explained: int) -> str:
    texts = []
    if run:
        again = f", {len(run.superseded)} that failed before were measured again" if run.superseded else ""
        texts = [
            f"{run.device}, PyTorch {run.environment.torch}",
            f"{len(run.labels)} workloads in {len(run.modes)} modes: {len(run.cells) - len(run.failed)} cells passed, "
            f"{len(run.failed)} failed, {len(run.missing)} not run{again}",
        ]
    return "; ".join([*texts, *([f"{explained} models analysed without a GPU"] if explained else ())])


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
    ("trust", "Correctness and conditions", None, ("same_program", "correctness", "conditions")),
)
"""Sections of a run: anchor, title, how the names of its figures begin, and its tables."""


def _run_sections(ratios: compare.Ratios, published: Published) -> tuple[Section, ...]:
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
    tables = {table.name: table for table in made}
    return tuple(
        Section(
            anchor,
            title,
            origin,
            tuple(chart for chart in drawn if stem is not None and chart.name.startswith(stem)),
            tuple(tables[name] for name in names),
        )
        for anchor, title, stem, names in _OUTLINE
    )


def _paper_sections(
    exhibits: Iterable[paper.Exhibit], results: paper.Results
) -> list[tuple[paper.Exhibit, paper.Made, Section]]:
    """Make these exhibits, each in a separate section."""
    made = []
    for exhibit in exhibits:
        one = exhibit.make(results)
        title = f"{results.published.sources[exhibit.source].label} {exhibit.number}"
        charts = (one.chart,) if one.chart is not None else ()
        made.append((exhibit, one, Section(exhibit.stem, title, one.provenance, charts, (one.table,))))
    return made


def paper_results(ratios: compare.Ratios | None, further: Further, published: Published) -> paper.Results:
    """Collect the results for the papers' figures and tables.

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
    """Write only some of the papers' figures and tables; return the files, tables first, and the tables as Markdown.

    Runs are read only if an exhibit needs them.

    Args:
        names: of `paper.EXHIBITS`.
        runs, further: see `build_report`; values that are not in them are marked as missing.
        out: folder for `tables/`, and for `figures/` unless `figures_dir` is given.

    Raises:
        WrongUse: a name is unknown, the runs cannot be combined, or have no row and nothing else is given.
        InvalidResults: a file has wrong fields.
        CannotWrite: the disk is full.
    """
    exhibits = paper.find_exhibits(names)
    if not any(exhibit.needs_runs for exhibit in exhibits):
        runs, further = (), Further()
    recorded = load_runs(runs) if runs else None
    if recorded is not None and not recorded.cells and further.micro is None and further.nanogpt is None:
        raise WrongUse(f"nothing to draw: {'; '.join(recorded.remarks)}")
    published = load_published()
    ratios = None if recorded is None else compare.Ratios(recorded)
    made = _paper_sections(exhibits, paper_results(ratios, further, published))
    sections = [section for _, _, section in made]
    figures_dir = figures_dir or out / "figures"
    make_folder(out / "tables", "--out")
    make_folder(figures_dir, "--figures")
    shown = "\n".join(to_markdown(table, each.provenance) for each in sections for table in each.tables)
    return [*_write_tables(sections, out / "tables"), *_draw_all(sections, figures_dir)[1]], shown


def _names_to_renew(readme: Path, published: Published, *, has_run: bool) -> tuple[str, ...]:
    """Return the names of the generated parts of a file that a report of runs updates.

    Raises:
        WrongUse: there is no run, or the file has no such part, or a part twice.
    """
    names = tuple(name for name in generated_names(readme) if name == HEADLINE or name in published.sources)
    if not has_run:
        raise WrongUse(f"--readme {readme}: its tables are made from runs; name a run, or give --recorded")
    if not names:
        known = ", ".join((HEADLINE, *published.sources))
        raise WrongUse(f"--readme {readme} has no generated part; write `<!-- generated: NAME -->`, NAME of: {known}")
    return names


def _page_part(
    name: str, sections: Iterable[Section], exhibits: Iterable[tuple[paper.Exhibit, paper.Made, Section]]
) -> str:
    """Return a generated part of a page: the README's table, or a paper's numbers."""
    if name != HEADLINE:
        return paper_part([(exhibit, made) for exhibit, made, _ in exhibits if exhibit.source == name])
    tables = [(table, each.provenance) for each in sections for table in each.tables if table.name == HEADLINE]
    return headline_part(*tables[0])


def headline_part(table: Table, origin: Provenance) -> str:
    """Return the README's table: with the runs of its rows alone, named below it."""
    return to_markdown(table, origin.among(table.frame["workload"]))


def _draw_all(
    sections: Iterable[Section], folder: Path | None, announce: Announce = lambda step: None
) -> tuple[Mapping[str, PageFigure], list[Path]]:
    """Draw every figure, many of them in one process per core, and write it as PNG if there is a folder.

    Return the page's figures by name, and the paths of the PNG files.
    """
    wanted = [(chart, section.provenance) for section in sections for chart in section.charts]
    draw_one = functools.partial(_draw_one, as_file=folder is not None)
    if len(wanted) < _FIGURES_WORTH_PROCESSES:
        drawn = list(map(draw_one, wanted))
    else:
        drawn = []
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
            for one in pool.map(draw_one, wanted):
                drawn.append(one)
                announce(f"drawing figures, {len(drawn)} of {len(wanted)}")
    written = []
    for (chart, _), (_, png) in zip(wanted, drawn, strict=True):
        if folder is not None and png is not None:
            written.append(folder / f"{chart.name}.png")
            write_atomically(written[-1], png)
    return {chart.name: figure for (chart, _), (figure, _) in zip(wanted, drawn, strict=True)}, written


def _draw_one(
    chart_and_origin: tuple[Chart | LineChart, Provenance], *, as_file: bool
) -> tuple[PageFigure, bytes | None]:
    chart, origin = chart_and_origin
    if isinstance(chart, Chart):
        origin = origin.among(chart.groups)
    figure = draw(chart, origin)
    shown = PageFigure(chart.title, (*chart.caption, f"{origin.caption}."), Markup(to_svg(figure, chart.name)))
    return shown, to_png(figure) if as_file else None


def _write_tables(sections: Iterable[Section], folder: Path) -> list[Path]:
    written = []
    for section in sections:
        for table in section.tables:
            written.append(folder / f"{table.name}.csv")
            write_atomically(written[-1], to_csv(table, section.provenance))
    return written
