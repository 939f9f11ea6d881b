"""The command `encore micro`: one mechanism alone, measured over sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suite.errors import WrongUse

if TYPE_CHECKING:
    from suite.micro.records import MicroRun

app = typer.Typer(no_args_is_help=True, help="Measure one mechanism alone, over sizes that no single workload has.")

RESULTS = "indirection.json"
FIGURE = "indirection"


@app.callback()
def micro() -> None:
    """Measure one mechanism alone, over sizes that no single workload has."""


@app.command(epilog="Example: encore micro indirection --quick")
def indirection(
    samples: Annotated[int, typer.Option(help="Samples per series.", min=1)] = 100,
    rounds: Annotated[int, typer.Option(help="Alternating rounds the samples are spread over.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Every third point, 20 samples.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder in results/runs.")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing; draw the figure of FILE again.")
    ] = None,
) -> None:
    """Time per replay for copied inputs and for inputs read in place, over inputs, bytes and nodes. Needs a GPU."""
    from suite.micro.records import read_micro_run
    from suite.store import describe, write_atomically

    if draw is not None:
        _draw(read_micro_run(draw), out or draw.parent)
        return
    folder, run = _measure(samples=20 if quick else samples, rounds=rounds, quick=quick, out=out)
    write_atomically(folder / RESULTS, run.model_dump_json(indent=1) + "\n")
    print(f"{describe(folder / RESULTS)}: {len(run.points)} points")
    _draw(run, folder)


def _measure(*, samples: int, rounds: int, quick: bool, out: Path | None) -> tuple[Path, MicroRun]:
    from datetime import UTC, datetime

    from suite import environment
    from suite.gpu import require_gpu
    from suite.micro.records import MICRO_SCHEMA_VERSION, MicroRun
    from suite.micro.sweeps import points
    from suite.store import RUNS

    if rounds > samples:
        raise WrongUse(f"--rounds {rounds} is more than --samples {samples}: each round needs at least one sample")
    require_gpu()
    from suite.micro.indirection import Bench

    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-micro-indirection"
    settings = {"samples": samples, "rounds": rounds, "quick": quick}
    here = environment.collect(name, ("encore", *sys.argv[1:]), settings)
    wanted = points(quick=quick)
    bench = Bench(0, samples=samples, rounds=rounds)
    measured = []
    try:
        for number, point in enumerate(wanted, start=1):
            measured.append(bench.measure(point))
            print(f"{number} of {len(wanted)}: {point.sweep}, {point.x}", file=sys.stderr, flush=True)
    finally:
        bench.close()
    run = MicroRun(micro_schema_version=MICRO_SCHEMA_VERSION, environment=here, points=measured)
    return out or RUNS / name, run


def _draw(run: MicroRun, folder: Path) -> None:
    from suite.micro import figure
    from suite.store import describe, write_atomically

    drawn = figure.draw(run)
    for form in ("png", "pdf"):
        write_atomically(folder / f"{FIGURE}.{form}", figure.render(drawn, form))
    print(f"{describe(folder / FIGURE)}.png and .pdf")
