"""Define `encore run`: its options, and what it prints. Imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from suite.cli.console import SizeOption, console, say, was_given
from suite.cli.report import write_report
from suite.results.errors import WrongUse
from suite.settings import FULL, format_duration

if TYPE_CHECKING:
    from suite.run.runner import Job

DEFAULTS = FULL.settings


def run(
    context: typer.Context,
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            help="Workloads (see `encore list`), or your own program as module:callable; "
            "the set `grace` if none is named.",
            show_default=False,
        ),
    ] = None,
    workload_set: Annotated[
        str | None, typer.Option("--set", metavar="SET", help="Workloads of a set, such as grace or all.")
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Of these, workloads whose acronym or name matches, such as 'XLNET*'."),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(help="Modes, separated by commas; default: all the device can run but step, callables, by-hand."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Starts of each mode; default: 3 on a GPU, 1 on a CPU.", min=1)
    ] = None,
    blocks: Annotated[int, typer.Option(help="Blocks that each process measures at least.", min=1)] = DEFAULTS.blocks,
    samples: Annotated[int, typer.Option(help="Samples of a block at least.", min=1)] = DEFAULTS.samples,
    measure_s: Annotated[
        float, typer.Option(help="Seconds to go on measuring where blocks do not decide yet, per process.", min=0)
    ] = DEFAULTS.measure_s,
    cold_compile_times: Annotated[
        bool, typer.Option("--cold-compile-times", help="Compile each mode once more, alone and with an empty cache.")
    ] = False,
    input_sets: Annotated[int, typer.Option(help="Sets of inputs to rotate over.", min=2)] = DEFAULTS.input_sets,
    warm_up: Annotated[int, typer.Option(help="Iterations before the first sample.", min=1)] = DEFAULTS.warm_up,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = DEFAULTS.seed,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="Training: measure the optimizer's step too.")
    ] = False,
    warm_cache: Annotated[
        bool,
        typer.Option(
            "--warm-cache",
            help="Keep compiled kernels for later runs; without it each workload compiles and tunes afresh.",
        ),
    ] = False,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Where to run; on a CPU nothing about CUDA graphs is measured.")
    ] = "cuda",
    size: SizeOption = "full",
    variant: Annotated[
        str | None,
        typer.Option(help="Variant of the workloads that have it, or several with commas; default: each one's first."),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            "--tp",
            metavar="N,N",
            help="Split workloads over so many GPUs, one process each; no names: all that can be.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run: few workloads, few samples each.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run what is missing in RUN; `newest`: in the newest run that fits, if any."),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="With --resume: run failed cells again."),
    ] = False,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start no workload that may not end within TIME, such as 9m.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Longest time for one phase of a cell.")] = "10m",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: a new one in results/runs.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show what would be measured, and for how long. Needs no GPU."),
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Afterwards do `encore report` for this run.")] = False,
) -> None:
    """Measure workloads in modes, each in processes of its own, and write rows to results/runs."""
    from models.registry import is_program
    from optimizations.torch_internals import unsupported
    from suite.results.store import describe
    from suite.run.launch import NEWEST, Request, launch, planned_jobs
    from suite.run.matrix import parse_degrees
    from suite.settings import QUICK, QUICK_PROGRAM, RunSettings, parse_duration

    if retry_failed and resume is None:
        raise WrongUse("--retry-failed needs --resume RUN: a new run has nothing to run again")
    if resume not in (None, NEWEST) and out is not None:
        raise WrongUse("--resume RUN goes on in that run's own folder; leave --out out")
    if not dry_run and (reason := unsupported()):
        raise WrongUse(reason)
    programs = [name for name in workloads or () if is_program(name)]
    quick_preset = QUICK_PROGRAM if programs else QUICK
    request = Request(
        preset=quick_preset if quick else FULL,
        given={name: context.params[name] for name in RunSettings.model_fields if was_given(context, name)},
        command_line=("encore", *sys.argv[1:]),
        workloads=workloads or (),
        workload_set=workload_set,
        pattern=filter,
        modes=None if modes is None else [each for name in modes.split(",") if (each := name.strip())],
        resume=resume,
        retry_failed=retry_failed,
        budget_s=parse_duration(budget, "--budget") if budget is not None else None,
        timeout_s=parse_duration(timeout, "--timeout"),
        out=out,
        tp=parse_degrees(tp) if tp is not None else None,
    )
    if dry_run:
        _show_plan(*planned_jobs(request, console(stderr=True)))
        return
    finished = launch(request, console(stderr=True))
    _print_conclusions(finished.path, programs)
    made = write_report([finished.path], finished.path / "report") if report or programs else None
    if made:
        say(f"{describe(made.html)}: {len(made.tables)} tables, {len(made.figures)} figures")
    raise typer.Exit(finished.exit_code)


def _show_plan(jobs: Sequence[Job], modes: Sequence[str], seconds: Mapping[str, float]) -> None:
    """Print the workloads that miss a mode, and how long each may take."""
    from rich.table import Table

    table = Table("workload", "variant", "modes", "about", box=None, pad_edge=False)
    for workload, variant in jobs:
        table.add_row(workload.acronym, variant, ", ".join(modes), format_duration(seconds[workload.acronym]))
    table.add_row("all", "", "", format_duration(sum(seconds.values())))
    console().print(table)


def _print_conclusions(path: Path, programs: Sequence[str]) -> None:
    """Print six lines on each program of the user's own."""
    from suite.report.conclusion import six_lines
    from suite.report.runs import load_run

    if not programs:
        return
    run = load_run(path)
    for name in programs:
        print(name, *(f"  {line}" for line in six_lines(run, name)), sep="\n")
