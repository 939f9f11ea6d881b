"""Define `encore report`: its options, and what it writes and prints. Imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from suite.cli.console import say
from suite.results.errors import EXIT_FINDING, EXIT_OK, WrongUse

if TYPE_CHECKING:
    from suite.report.build import Report


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Names or folders of runs made with one GPU model, driver and PyTorch; default: the newest. "
            "Of a workload that several measured, all rows are of one: the newest, or one in which it was alone.",
            show_default=False,
        ),
    ] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="All runs in results/recorded.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write; default: `report` in the run; of several: in results."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write figures as PNG there, too; without it the page has them."),
    ] = None,
    readme: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Markdown file whose generated tables to renew.")
    ] = None,
    micro: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `encore micro indirection` wrote; --recorded has its own.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these figures and tables of the papers, as fig10,pygraph-table2."),
    ] = None,
    check_fresh: Annotated[
        bool,
        typer.Option(
            "--check-fresh",
            help="Write nothing; exit 1 if rows of the README (or of --readme) are of another version than this tree, "
            "or many commits old.",
        ),
    ] = False,
) -> None:
    """Render tables, figures and report.html from results; exit 1 if the runs have no row."""
    from suite.results import store

    if check_fresh:
        _check_fresh(readme or store.REPOSITORY / "README.md")
    if recorded and runs:
        raise WrongUse(f"--recorded picks the runs itself; leave it or {', '.join(map(repr, runs))} out")
    if recorded:
        found = store.list_runs(store.RECORDED)
    elif runs:
        found = [store.find_run(name) for name in runs]
    else:
        newest = store.newest_run(store.RUNS, store.RECORDED)
        found = [newest] if newest else []
    folder = out or (found[0] if len(found) == 1 else store.REPOSITORY / "results") / "report"
    if only is not None:
        _report_only(only, found, micro, folder, figures, recorded=recorded)
        return
    if recorded and not found:
        say(f"nothing is recorded in {store.describe(store.RECORDED)}, so there is no report")
        return
    made = write_report(found, folder, figures, readme, micro, recorded=recorded)
    print(f"{store.describe(made.html)}: {len(made.tables)} tables, {made.drawn} figures")
    # What is missing is in the report; a program that goes on by the exit code must not take it for results.
    raise typer.Exit(EXIT_OK if made.cells else EXIT_FINDING)


def _check_fresh(readme: Path) -> NoReturn:
    """Print what is stale in a page's table, and exit with 1 if anything is."""
    from suite.report.markdown_pages import stale_rows
    from suite.results import store

    stale = stale_rows(readme, store.RECORDED, store.REPOSITORY)
    for text in stale:
        say(f"encore: {text}")
    advice = "measure GraCE's workloads again (`encore run --set grace`), record the run, and renew the page"
    print(f"{store.describe(readme)}: {f'{len(stale)} findings; {advice}' if stale else 'the rows are fresh'}")
    raise typer.Exit(EXIT_FINDING if stale else EXIT_OK)


def write_report(
    runs: Sequence[Path],
    folder: Path,
    figures: Path | None = None,
    readme: Path | None = None,
    micro: Path | None = None,
    *,
    recorded: bool = False,
) -> Report:
    """Write a report, and print its steps and its warning; see `suite.report.build.build_report`."""
    from suite.cli.console import Progress
    from suite.report.build import build_report

    made = build_report(runs, folder, figures, readme, micro, Progress("report"), recorded=recorded)
    if made.warning:
        say(f"encore: {made.warning}")
    return made


def _report_only(
    names: str, runs: list[Path], micro: Path | None, out: Path, figures: Path | None, *, recorded: bool
) -> None:
    """Write the figures and tables of these names, separated by commas, and print the tables as Markdown."""
    from suite.report.build import build_exhibits
    from suite.report.paper import EXHIBITS
    from suite.results import store

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise WrongUse(f"--only names nothing; known: {', '.join(EXHIBITS)}")
    files, tables = build_exhibits(wanted, runs, out, figures, micro, recorded=recorded)
    print(tables)
    for path in files:
        print(store.describe(path))
