"""Define the command `encore draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.console import Progress, SizeOption, say
from suite.results.errors import EXIT_FINDING, EXIT_OK

app = typer.Typer(no_args_is_help=True, help="Draw what a workload's CUDA graphs do.")


@app.callback()
def draw() -> None:
    """Draw what a workload's CUDA graphs do."""


@app.command(epilog="Example: encore draw graph MMC --svg mmc.svg")
def graph(
    workload: Annotated[str, typer.Argument(help="A workload, or a program as module:callable.")],
    drawing: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Write an SVG; of several graphs, one file each: FILE-2.svg, ..."),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the workload.")] = None,
    size: SizeOption = "full",
) -> None:
    """Draw a CUDA graph's branches over time, and name its longest path by kernel and line.

    It runs on the GPU, and its kernels are timed.
    """
    from suite.draw import measured, svg, text
    from suite.draw.timeline import timeline
    from suite.results.store import describe, write_atomically

    graphs = measured.measured_graphs(workload, variant=variant, size=size, say=Progress(workload))
    lines = [timeline(one) for one in graphs]
    for place, (one, line) in enumerate(zip(graphs, lines, strict=True), start=1):
        if drawing is not None:
            several = drawing.with_name(f"{drawing.stem}-{place}{drawing.suffix}")
            path = drawing if len(graphs) == 1 else several
            write_atomically(path, svg.render(one, line))
            say(f"{describe(path)}: {one.title}")
        print(text.render(one, line), end="\n\n" if place < len(graphs) else "\n")
    if not graphs:
        say("encore: no CUDA graph was recorded")
    raise typer.Exit(EXIT_OK if any(one.concurrency.order for one in graphs) else EXIT_FINDING)
