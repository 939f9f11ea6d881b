"""Define the command `encore draw`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from suite.cli.console import Progress, SizeOption, say
from suite.results.errors import EXIT_FINDING, EXIT_OK, WrongUse

app = typer.Typer(no_args_is_help=True, help="Draw what a workload's CUDA graphs do.")


@app.callback()
def draw() -> None:
    """Draw what a workload's CUDA graphs do."""


@app.command(
    epilog="Example: encore draw graph MMC --svg mmc.svg --save mmc.json (then: encore draw graph --from mmc.json)"
)
def graph(
    workload: Annotated[
        str | None, typer.Argument(help="A workload, or a program as module:callable.", show_default=False)
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Draw the graphs of a saved file; needs no GPU.")
    ] = None,
    drawing: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Write an SVG; of several graphs, one file each: FILE-2.svg, ..."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the graphs as JSON, for --from.")] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the workload.")] = None,
    size: SizeOption = "full",
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
) -> None:
    """Draw a CUDA graph's branches over time, and name its longest path by kernel and line.

    A workload runs on the GPU, and its kernels are timed. Graphs of a saved file are drawn with the times it has, or by
    numbers of nodes.
    """
    from suite.draw import svg, text
    from suite.draw.records import DrawnGraph, as_json, read_graphs
    from suite.draw.timeline import timeline
    from suite.results.store import describe, write_atomically

    if workload is None and saved is not None:
        if variant is not None:
            raise WrongUse("--variant is for workloads; a saved file has the graphs that were saved")
        graphs: Sequence[DrawnGraph] = read_graphs(saved)
    elif workload is not None and saved is None:
        from suite.draw.measured import measured_graphs

        graphs = measured_graphs(workload, variant=variant, size=size, seed=seed, say=Progress(workload))
    else:
        raise WrongUse("name a workload (`encore list --workloads` shows them), or give --from FILE")
    if save is not None:
        write_atomically(save, as_json(graphs))
        say(f"{describe(save)}: {_count(len(graphs))}")
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


def _count(graphs: int) -> str:
    return "one graph" if graphs == 1 else f"{graphs} graphs"
