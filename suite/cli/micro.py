"""The command `encore micro`: one mechanism alone, measured over sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from suite.cli.choices import Device, Size
from suite.cli.console import console
from suite.results.errors import WrongUse

if TYPE_CHECKING:
    from suite.micro.records import MicroRun

app = typer.Typer(help="Measure one mechanism alone, over sizes that no single workload has.")

RESULTS = "indirection.json"
FIGURE = "indirection"
DEFAULT_SAMPLES, DEFAULT_ROUNDS = 100, 5
DEFAULT_HOST_MODES = "compile,graph,indirection"


@app.callback(invoke_without_command=True)
def micro(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Every microbenchmark, with its defaults.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --all: a folder for each goes in here.", show_default=False)
    ] = None,
) -> None:
    """Measure one mechanism alone, over sizes that no single workload has."""
    if everything == (context.invoked_subcommand is not None) or (out is not None and not everything):
        raise WrongUse(
            "name a microbenchmark (`encore micro --help` lists them), or give --all, with --out DIR or without"
        )
    if everything:
        for name, benchmark in EVERYTHING.items():
            benchmark(out=out / name if out is not None else None)


def _new_results(out: Path | None, name: str, file: str) -> Path:
    """The file to write results to, in `out` or a new folder of this name, made before anything is measured.

    Raises:
        WrongUse: nothing can be written there, or it holds results already.
    """
    from suite.results.store import RUNS, make_folder, new_folder

    path = (new_folder(RUNS, name, "--out") if out is None else make_folder(out, "--out")) / file
    if path.exists():
        raise WrongUse(f"--out {path.parent} holds results already ({file}); name another folder")
    return path


@app.command(epilog="Example: encore micro indirection --quick")
def indirection(
    samples: Annotated[int, typer.Option(help="Samples per series.", min=1)] = DEFAULT_SAMPLES,
    rounds: Annotated[
        int, typer.Option(help="Alternating rounds the samples are spread over.", min=1)
    ] = DEFAULT_ROUNDS,
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

    if draw is not None:
        _draw(read_micro_run(draw), out or draw.parent)
    elif rounds > samples:
        raise WrongUse(f"--rounds {rounds} is more than --samples {samples}: each round needs at least one sample")
    else:
        measure_indirection(samples=20 if quick else samples, rounds=rounds, quick=quick, out=out)


def measure_indirection(
    *, samples: int = DEFAULT_SAMPLES, rounds: int = DEFAULT_ROUNDS, quick: bool = False, out: Path | None = None
) -> None:
    """Measure and draw. The file is renewed after each point, so that an interrupt costs one."""
    from datetime import UTC, datetime

    from suite.measure import environment
    from suite.measure.gpu import require_gpu
    from suite.micro.records import MICRO_SCHEMA_VERSION, MicroRun
    from suite.micro.sweeps import points
    from suite.results.store import describe, write_atomically

    require_gpu()
    from suite.micro.indirection import Bench

    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-micro-indirection"
    folder = _new_results(out, name, RESULTS).parent
    settings = {"samples": samples, "rounds": rounds, "quick": quick}
    here = environment.collect(name, ("encore", *sys.argv[1:]), settings)
    run = MicroRun(micro_schema_version=MICRO_SCHEMA_VERSION, environment=here, points=[])
    wanted = points(quick=quick)
    bench = Bench(0, samples=samples, rounds=rounds)
    try:
        for number, point in enumerate(wanted, start=1):
            run = run.model_copy(update={"points": [*run.points, bench.measure(point)]})
            write_atomically(folder / RESULTS, run.model_dump_json(indent=1) + "\n")
            print(f"{number} of {len(wanted)}: {point.sweep}, {point.x}", file=sys.stderr, flush=True)
    finally:
        bench.close()
    print(f"{describe(folder / RESULTS)}: {len(run.points)} points")
    _draw(run, folder)


def _draw(run: MicroRun, folder: Path) -> None:
    from suite.report import micro_figure
    from suite.report.chart import to_pdf, to_png
    from suite.results.store import describe, write_atomically

    drawn = micro_figure.draw(run)
    write_atomically(folder / f"{FIGURE}.png", to_png(drawn))
    write_atomically(folder / f"{FIGURE}.pdf", to_pdf(drawn))
    print(f"{describe(folder / FIGURE)}.png and .pdf")


@app.command(epilog="Example: encore micro feeds")
def feeds(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder in results/runs.")
    ] = None,
) -> None:
    """Host time that placement adds to a call in which nothing changed. Needs no GPU."""
    measure_feeds(out=out)


def measure_feeds(*, out: Path | None = None) -> None:
    """Measure, print and write `feeds.json`."""
    from datetime import UTC, datetime

    from suite.measure import environment
    from suite.micro.feeds import FeedRun, measure, table
    from suite.micro.records import MICRO_SCHEMA_VERSION
    from suite.results.store import describe, write_atomically

    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-micro-feeds"
    path = _new_results(out, name, "feeds.json")
    here = environment.collect(name, ("encore", *sys.argv[1:]), {})
    run = FeedRun(micro_schema_version=MICRO_SCHEMA_VERSION, environment=here, costs=list(measure()))
    write_atomically(path, run.model_dump_json(indent=1) + "\n")
    console().print(table(run))
    print(describe(path))


@app.command(epilog="Example: encore micro host MBERT EOS --modes graph,indirection")
def host(
    programs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]...",
            help="Workloads; default: modules with 0, 100 and 1,114 parameters.",
            show_default=False,
        ),
    ] = None,
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.")] = DEFAULT_HOST_MODES,
    calls: Annotated[int, typer.Option(help="Calls that count, of each kind.", min=2)] = 200,
    device: Annotated[
        Device,
        typer.Option(help="Where to run; on a CPU there are no CUDA graphs, and what is before them is measured."),
    ] = Device.cuda,
    size: Annotated[Size, typer.Option(help="Published size of workloads, or one small enough for tests.")] = Size.full,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder in results/runs.")
    ] = None,
) -> None:
    """Where the host's time goes in a call: issue, whole, the graphs alone, and each layer; Encore's modes with `lean`
    and without."""
    wanted = [name.strip() for name in modes.split(",") if name.strip()]
    measure_host(programs=programs, modes=wanted, calls=calls, device=device.value, size=size.value, out=out)


def measure_host(
    *,
    programs: list[str] | None = None,
    modes: list[str] | None = None,
    calls: int = 200,
    device: str | None = None,
    size: str = "full",
    out: Path | None = None,
) -> None:
    """Measure, print and write `host.json`, which is renewed after each program and mode."""
    from datetime import UTC, datetime

    import torch

    from suite.measure import environment
    from suite.measure.gpu import require_gpu
    from suite.measure.modes import select_modes
    from suite.micro.host import PARAMETERS, cases, measure, require_program, synthetic
    from suite.micro.host_cost import HostRun, table
    from suite.micro.records import MICRO_SCHEMA_VERSION
    from suite.results.store import describe, write_atomically

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = select_modes(modes or DEFAULT_HOST_MODES.split(","))
    named = programs or [synthetic(number) for number in PARAMETERS]
    for name in named:
        require_program(name)
    if device == "cuda":
        require_gpu()
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-micro-host"
    path = _new_results(out, name, "host.json")
    settings: dict[str, Any] = {
        "programs": named,
        "modes": [mode.name for mode in chosen],
        "calls": calls,
        "size": size,
    }
    here = environment.collect(name, ("encore", *sys.argv[1:]), settings)
    run = HostRun(micro_schema_version=MICRO_SCHEMA_VERSION, environment=here, device=device, size=size, costs=[])
    wanted = cases(named, list(chosen), device=device, size="tiny" if size == "tiny" else "full", calls=calls)
    for number, case in enumerate(wanted, start=1):
        run = run.model_copy(update={"costs": [*run.costs, measure(case)]})
        write_atomically(path, run.model_dump_json(indent=1) + "\n")
        print(f"{number} of {len(wanted)}: {case}", file=sys.stderr, flush=True)
    console().print(table(run))
    print(describe(path))


@app.command(epilog="Example: encore micro step DGPT2 DCGAN")
def step(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="Training workloads; default: all of them.", show_default=False),
    ] = None,
    ways: Annotated[
        list[str] | None,
        typer.Option(
            "--way",
            metavar="WAY",
            help="Only this way to run the step; several may be given. Default: all; a wrong one lists them.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Iterations that are timed, of each kind.", min=1)] = 60,
    profile: Annotated[
        bool, typer.Option("--profile", help="Afterwards count and time the kernels of each way; compiles again.")
    ] = False,
    size: Annotated[Size, typer.Option(help="Published size of workloads, or one small enough for tests.")] = Size.full,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder in results/runs.")
    ] = None,
) -> None:
    """Training iterations with graphs of the compiled module, of the module as a callable, and of the whole step,
    and a whole step captured by hand; each with the optimizer and without. Needs a GPU."""
    measure_step(workloads=workloads, ways=ways, samples=samples, profile=profile, size=size.value, out=out)


def measure_step(
    *,
    workloads: list[str] | None = None,
    ways: list[str] | None = None,
    samples: int = 60,
    profile: bool = False,
    size: str = "full",
    out: Path | None = None,
) -> None:
    """Measure, print and write `step.json`, which is renewed after each way."""
    from datetime import UTC, datetime

    from suite.measure import environment
    from suite.measure.gpu import require_gpu
    from suite.micro.records import MICRO_SCHEMA_VERSION
    from suite.micro.step import StepRun, chosen_ways, measure, table, training_workloads
    from suite.results.store import describe, write_atomically

    named = training_workloads(workloads)
    chosen = chosen_ways(ways)
    require_gpu()
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-micro-step"
    path = _new_results(out, name, "step.json")
    settings: dict[str, Any] = {"workloads": named, "ways": chosen, "samples": samples, "size": size}
    here = environment.collect(name, ("encore", *sys.argv[1:]), settings)
    run = StepRun(micro_schema_version=MICRO_SCHEMA_VERSION, environment=here, size=size, costs=[])
    costs: dict[tuple[str, str, bool], Any] = {}
    tiny: Literal["tiny", "full"] = "tiny" if size == "tiny" else "full"
    for workload in named:
        for cost in measure(workload, size=tiny, samples=samples, ways=chosen, profiled=profile):
            costs[workload, cost.way, cost.with_optimizer] = cost
            run = run.model_copy(update={"costs": list(costs.values())})
            write_atomically(path, run.model_dump_json(indent=1) + "\n")
            loop = f"{workload} with optimizer" if cost.with_optimizer else workload
            print(f"{loop}, {cost.way}: {cost.refused or cost.median_us}", file=sys.stderr, flush=True)
    console().print(table(run))
    print(describe(path))


EVERYTHING: Mapping[str, Callable[..., None]] = {
    "feeds": measure_feeds,
    "host": measure_host,
    "indirection": measure_indirection,
    "step": measure_step,
}
"""What `--all` runs, by the name of its command: functions that take `out`, the folder to write to."""
