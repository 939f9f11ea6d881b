"""Define `encore compare`, `encore record` and `encore history`. Imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.console import console
from suite.results.errors import WrongUse


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A run, by name or folder; parts separated by commas.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="What to compare with it.")],
    threshold: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="How much slower a row must be to be a regression: 0.05 is 5 %; half of it in a mean."
        ),
    ] = 0.05,
) -> None:
    """Decide whether a run is slower than another; exit 1 if it is, 3 if that cannot be decided."""
    from suite.report.runs import load_runs
    from suite.report.two_runs.pairs import compare_runs
    from suite.report.two_runs.text import print_terminal
    from suite.results.store import find_run

    older, newer = (load_runs([find_run(name) for name in names.split(",")]) for names in (base, new))
    made = compare_runs(older, newer, threshold)
    print_terminal(made, console())
    raise typer.Exit(made.exit_code)


def record(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Finished runs; none: only renew the table.", show_default=False),
    ] = None,
) -> None:
    """Pack runs into results/recorded, add their rows to results/history.csv, and renew the table there."""
    from suite.report import frame
    from suite.report.history.recording import record_run, renew_page
    from suite.results import store

    packed = [store.describe(record_run(store.find_run(name), store.RECORDED, frame.HISTORY)) for name in runs or ()]
    renew_page(store.RECORDED)
    for where in packed:
        print(f"{where}: recorded")


def history(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs of your own, after the recorded ones.", show_default=False),
    ] = None,
    mode: Annotated[str, typer.Option(metavar="MODE", help="The mode whose speed-up is shown.")] = "encore",
    over: Annotated[str, typer.Option(metavar="MODE", help="Over which mode: graph or compile.")] = "graph",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Part of a device's name; default: that of the newest run.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, metavar="N", help="How many commits to show.")] = 10,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a figure of it, as PNG.")] = None,
) -> None:
    """Show a line for each workload: its speed-up in one recorded run after another."""
    import pandas as pd

    from suite.report import frame
    from suite.report.chart import to_png
    from suite.report.history.lines import draw_history, lines_of, to_table
    from suite.report.runs import load_run
    from suite.results import store

    if figure is not None and figure.is_dir():
        raise WrongUse(f"--figure {figure}: it is a folder; give the name of a PNG file")
    own = (frame.rows_frame(load_run(store.find_run(name))) for name in runs or ())
    found = lines_of(pd.concat([frame.read_history(frame.HISTORY), *own]), mode, over, device, last)
    if figure is not None:
        store.write_atomically(figure, to_png(draw_history(found)))
    console().print(to_table(found))
    if figure is not None:
        print(store.describe(figure))
