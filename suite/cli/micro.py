"""Define the command `encore micro indirection`, which measures one mechanism alone over sizes."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from suite.results.errors import WrongUse

app = typer.Typer(no_args_is_help=True, help="Measure one mechanism alone, over sizes that no single workload has.")

RESULTS = "indirection.json"


@app.callback()
def micro() -> None:
    """Measure one mechanism alone, over sizes that no single workload has."""


@app.command(epilog="Example: encore micro indirection --samples 20")
def indirection(
    samples: Annotated[int, typer.Option(help="Samples per series.", min=1)] = 100,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder in results/runs.")
    ] = None,
) -> None:
    """Time replays with copied inputs and with inputs read in place, by their number. Needs a GPU."""
    from suite.measure import environment
    from suite.measure.gpu import find_gpu
    from suite.micro.records import COUNTS, MICRO_SCHEMA_VERSION, MicroRun
    from suite.results.store import RUNS, describe, make_folder, new_folder, write_atomically

    find_gpu()
    from suite.micro.indirection import Bench

    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-micro-indirection"
    path = (new_folder(RUNS, name) if out is None else make_folder(out)) / RESULTS
    if path.exists():
        raise WrongUse(f"--out {path.parent} holds results already ({RESULTS}); name another folder")
    here = environment.collect(name, ("encore", *sys.argv[1:]), {"samples": samples})
    run = MicroRun(micro_schema_version=MICRO_SCHEMA_VERSION, environment=here, points=[])
    bench = Bench(0, samples=samples)
    try:  # the file is renewed after each point, so that an interrupt costs one
        for number, count in enumerate(COUNTS, start=1):
            run = run.model_copy(update={"points": [*run.points, bench.measure(count)]})
            write_atomically(path, run.model_dump_json(indent=1) + "\n")
            print(f"{number} of {len(COUNTS)}: {count} inputs", file=sys.stderr, flush=True)
    finally:
        bench.close()
    print(
        f"{describe(path)}: {len(run.points)} points; `encore report --only fig9 --micro {describe(path)}` draws them"
    )
