"""Define the command `encore micro`, which measures one mechanism alone over sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli.choices import Device, Size, takes
from suite.cli.console import console
from suite.results.errors import WrongUse

if TYPE_CHECKING:
    from suite.micro.records import MicroRun
    from suite.results.schema import Record

app = typer.Typer(help="Measure one mechanism alone, over sizes that no single workload has.")

RESULTS = "indirection.json"
FIGURE = "indirection"
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


def _begun(benchmark: str, out: Path | None, file: str, settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the file to write results to, made before anything is measured, and the fields that all results share.

    The file is in `out`, or in a new folder named by time and benchmark.

    Raises:
        WrongUse: nothing can be written there, or it holds results already.
    """
    from suite.measure import environment
    from suite.micro.records import MICRO_SCHEMA_VERSION
    from suite.results.store import RUNS, make_folder, new_folder

    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-micro-{benchmark}"
    path = (new_folder(RUNS, name, "--out") if out is None else make_folder(out, "--out")) / file
    if path.exists():
        raise WrongUse(f"--out {path.parent} holds results already ({file}); name another folder")
    here = environment.collect(name, ("encore", *sys.argv[1:]), settings)
    return path, {"micro_schema_version": MICRO_SCHEMA_VERSION, "environment": here}


def _keep(path: Path, run: Record) -> None:
    """Renew the file after each point, so that an interrupt costs one."""
    from suite.results.store import write_atomically

    write_atomically(path, run.model_dump_json(indent=1) + "\n")


Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder in results/runs.")]


@dataclass(frozen=True, slots=True)
class IndirectionOptions:
    """Hold the options of `encore micro indirection`."""

    samples: Annotated[int, typer.Option(help="Samples per series.", min=1)] = 100
    rounds: Annotated[int, typer.Option(help="Alternating rounds the samples are spread over.", min=1)] = 5
    quick: Annotated[bool, typer.Option("--quick", help="Every third point, 20 samples.")] = False
    out: Out = None
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing; draw the figure of FILE again.")
    ] = None


@app.command(epilog="Example: encore micro indirection --quick")
@takes(IndirectionOptions)
def indirection(context: typer.Context, options: IndirectionOptions) -> None:
    """Time replays with copied inputs and with inputs read in place, over inputs, bytes and nodes. Needs a GPU."""
    from suite.micro.records import read_micro_run

    if options.draw is not None:
        _draw(read_micro_run(options.draw), options.out or options.draw.parent)
    elif options.rounds > options.samples:
        raise WrongUse(
            f"--rounds {options.rounds} is more than --samples {options.samples}: each round needs at least one sample"
        )
    else:
        measure_indirection(options)


def measure_indirection(options: IndirectionOptions) -> None:
    """Measure and draw."""
    from suite.measure.gpu import require_gpu
    from suite.micro.records import MicroRun, points
    from suite.results.store import describe

    require_gpu()
    from suite.micro.indirection import Bench

    settings = {
        "samples": 20 if options.quick else options.samples,
        "rounds": options.rounds,
        "quick": options.quick,
    }
    path, shared = _begun("indirection", options.out, RESULTS, settings)
    run = MicroRun(**shared, points=[])
    wanted = points(quick=options.quick)
    bench = Bench(0, samples=settings["samples"], rounds=options.rounds)
    try:
        for number, point in enumerate(wanted, start=1):
            run = run.model_copy(update={"points": [*run.points, bench.measure(point)]})
            _keep(path, run)
            print(f"{number} of {len(wanted)}: {point.sweep}, {point.x}", file=sys.stderr, flush=True)
    finally:
        bench.close()
    print(f"{describe(path)}: {len(run.points)} points")
    _draw(run, path.parent)


def _draw(run: MicroRun, folder: Path) -> None:
    from suite.report import micro_figure
    from suite.report.chart import to_pdf, to_png
    from suite.results.store import describe, write_atomically

    drawn = micro_figure.draw(run)
    write_atomically(folder / f"{FIGURE}.png", to_png(drawn))
    write_atomically(folder / f"{FIGURE}.pdf", to_pdf(drawn))
    print(f"{describe(folder / FIGURE)}.png and .pdf")


@dataclass(frozen=True, slots=True)
class FeedsOptions:
    """Hold the options of `encore micro feeds`."""

    out: Out = None


@app.command(epilog="Example: encore micro feeds")
@takes(FeedsOptions)
def feeds(context: typer.Context, options: FeedsOptions) -> None:
    """Measure the host time that placement adds to a call in which nothing changed. Needs no GPU."""
    measure_feeds(options)


def measure_feeds(options: FeedsOptions) -> None:
    """Measure, print and write `feeds.json`."""
    from suite.micro.feeds import FeedRun, measure, table
    from suite.results.store import describe

    path, shared = _begun("feeds", options.out, "feeds.json", {})
    run = FeedRun(**shared, costs=list(measure()))
    _keep(path, run)
    console().print(table(run))
    print(describe(path))


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Hold the options of `encore micro host`."""

    programs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]...",
            help="Workloads; default: modules with 0, 100 and 1,114 parameters.",
            show_default=False,
        ),
    ] = None
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.")] = DEFAULT_HOST_MODES
    calls: Annotated[int, typer.Option(help="Calls that count, of each kind.", min=2)] = 200
    device: Annotated[
        Device,
        typer.Option(help="Where to run; on a CPU there are no CUDA graphs, and what is before them is measured."),
    ] = Device.cuda
    size: Annotated[Size, typer.Option(help="Published size of workloads, or one small enough for tests.")] = Size.full
    out: Out = None


@app.command(epilog="Example: encore micro host MBERT EOS --modes graph,indirection")
@takes(HostOptions)
def host(context: typer.Context, options: HostOptions) -> None:
    """Show where the host's time goes in a call: issue, whole, the graphs alone, and each layer; Encore's modes with
    `lean` and without."""
    measure_host(options)


def measure_host(options: HostOptions) -> None:
    """Measure, print and write `host.json`, which is renewed after each program and mode."""
    from suite.measure.gpu import require_gpu
    from suite.measure.modes import select_modes
    from suite.micro.host import PARAMETERS, cases, measure, require_program, synthetic
    from suite.micro.host_cost import HostRun, table
    from suite.results.store import describe

    device, size = options.device.value, options.size.literal
    chosen = select_modes([name.strip() for name in options.modes.split(",") if name.strip()])
    named = options.programs or [synthetic(number) for number in PARAMETERS]
    for name in named:
        require_program(name)
    if device == "cuda":
        require_gpu()
    settings = {"programs": named, "modes": [mode.name for mode in chosen], "calls": options.calls, "size": size}
    path, shared = _begun("host", options.out, "host.json", settings)
    run = HostRun(**shared, device=device, size=size, costs=[])
    wanted = cases(named, list(chosen), device=device, size=size, calls=options.calls)
    for number, case in enumerate(wanted, start=1):
        run = run.model_copy(update={"costs": [*run.costs, measure(case)]})
        _keep(path, run)
        print(f"{number} of {len(wanted)}: {case}", file=sys.stderr, flush=True)
    console().print(table(run))
    print(describe(path))


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Hold the options of `encore micro step`."""

    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="Training workloads; default: all of them.", show_default=False),
    ] = None
    ways: Annotated[
        list[str] | None,
        typer.Option(
            "--way",
            metavar="WAY",
            help="Only this way to run the step; several may be given. Default: all; a wrong one lists them.",
        ),
    ] = None
    samples: Annotated[int, typer.Option(help="Iterations that are timed, of each kind.", min=1)] = 60
    profile: Annotated[
        bool, typer.Option("--profile", help="Afterwards count and time the kernels of each way; compiles again.")
    ] = False
    size: Annotated[Size, typer.Option(help="Published size of workloads, or one small enough for tests.")] = Size.full
    out: Out = None


@app.command(epilog="Example: encore micro step DGPT2 DCGAN")
@takes(StepOptions)
def step(context: typer.Context, options: StepOptions) -> None:
    """Time training iterations with graphs of the compiled module, of the module as a callable, and of the whole step,
    and a whole step captured by hand; each with the optimizer and without. Needs a GPU."""
    measure_step(options)


def measure_step(options: StepOptions) -> None:
    """Measure, print and write `step.json`, which is renewed after each way."""
    from suite.measure.gpu import require_gpu
    from suite.micro.step import StepRun, chosen_ways, measure, table, training_workloads
    from suite.results.store import describe

    named, size, samples = training_workloads(options.workloads), options.size.literal, options.samples
    chosen = chosen_ways(options.ways)
    require_gpu()
    settings = {"workloads": named, "ways": chosen, "samples": samples, "size": size}
    path, shared = _begun("step", options.out, "step.json", settings)
    run = StepRun(**shared, size=size, costs=[])
    costs: dict[tuple[str, str, bool], Any] = {}
    for workload in named:
        for cost in measure(workload, size=size, samples=samples, ways=chosen, profiled=options.profile):
            costs[workload, cost.way, cost.with_optimizer] = cost
            run = run.model_copy(update={"costs": list(costs.values())})
            _keep(path, run)
            loop = f"{workload} with optimizer" if cost.with_optimizer else workload
            print(f"{loop}, {cost.way}: {cost.refused or cost.median_us}", file=sys.stderr, flush=True)
    console().print(table(run))
    print(describe(path))


def _host_anywhere(out: Path | None) -> None:
    """Measure host times on the GPU, or without one on the CPU."""
    import torch

    measure_host(HostOptions(out=out, device=Device.cuda if torch.cuda.is_available() else Device.cpu))


EVERYTHING: Mapping[str, Callable[..., None]] = {
    "feeds": lambda out: measure_feeds(FeedsOptions(out=out)),
    "host": _host_anywhere,
    "indirection": lambda out: measure_indirection(IndirectionOptions(out=out)),
    "step": lambda out: measure_step(StepOptions(out=out)),
}
"""Microbenchmarks that `--all` runs, by their commands' names: functions that take `out`, the folder to write to."""
