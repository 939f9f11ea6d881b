"""The command line: `encore`, which is also `python -m encore`.

Commands import what they need when they run: `encore --help` must not wait for torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite import cli_compare, cli_decisions, cli_micro, cli_nanogpt
from suite.cli_choices import Device, Size
from suite.console import console
from suite.errors import EXIT_FINDING, EXIT_INTERRUPTED, EXIT_OK, EncoreError, WrongUse
from suite.interrupt import Interrupted, interruptible
from suite.settings import FULL
from suite.supervise import kill_children

if TYPE_CHECKING:
    from suite.report.build import Report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="CUDA graphs under PyTorch 2: run real workloads, measure them, draw what was measured.",
    epilog="Start with: encore list",
)

app.add_typer(cli_micro.app, name="micro")
app.add_typer(cli_decisions.app, name="decisions")
app.command("compare", epilog="Example: encore compare 20260101-120000-h200 20260102-120000-h200 --threshold 5%")(
    cli_compare.compare
)

DEFAULTS = FULL.settings

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 fine, 1 a finding or a failed cell, 2 wrong use, 130 interrupted."""
    try:
        with interruptible():
            app(arguments, prog_name="encore")
    except EncoreError as error:
        _say(f"encore: {error}")
        sys.exit(error.exit_code)
    except Interrupted as signal:
        _say(f"encore: ended by {signal}")
        kill_children()
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        _say(f"encore: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        sys.exit(EXIT_FINDING)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"encore {version('encore')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What stands before the command."""


@app.command("list", epilog="Example: encore list --json")
def list_command(
    workloads: Annotated[bool, typer.Option("--workloads", help="Only workloads.")] = False,
    modes: Annotated[bool, typer.Option("--modes", help="Only modes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List workloads and modes."""
    from models import registry
    from suite import listing
    from suite.modes import MODES

    both = workloads == modes
    chosen = list(registry.workloads().values()) if workloads or both else []
    chosen_modes = list(MODES.values()) if modes or both else []
    if as_json:
        _print_json(listing.as_json(chosen, chosen_modes))
        return
    for table in listing.tables(chosen, chosen_modes):
        console().print(table, "")


@app.command(epilog="Example: encore run ALNET EOS --modes compile,graph --processes 3")
def run(
    context: typer.Context,
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            help="Workloads (see `encore list`), or nanogpt; the set `grace` if none is named.", show_default=False
        ),
    ] = None,
    workload_set: Annotated[
        str | None, typer.Option("--set", metavar="SET", help="Workloads of a set, such as grace or all.")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(help="Modes, separated by commas; default: all the device can run, without step and callables."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Starts of each mode; default: 3 on a GPU, 1 on a CPU.", min=1)
    ] = None,
    most_processes: Annotated[
        int | None,
        typer.Option(
            help="Starts of each mode where they differ much; default: 5 where --processes is 3 or more.", min=1
        ),
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
        Device, typer.Option(help="Where to run; on a CPU nothing about CUDA graphs is measured.")
    ] = Device.cuda,
    size: Annotated[Size, typer.Option(help="Published size, or one small enough for tests.")] = Size.full,
    variant: Annotated[
        str | None, typer.Option(help="Variant of the workloads that have it; default: each one's first.")
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
        bool, typer.Option("--retry-failed", help="With --resume: run failed cells again.")
    ] = False,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Run part I of N of the workloads.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start no workload that may not end within TIME, such as 9m.")
    ] = None,
    budget_used: Annotated[
        str | None, typer.Option(metavar="TIME", help="What an earlier run has taken of the same --budget.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Longest time for one phase of a cell.")] = "10m",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: a new one in results/runs.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Word to add to the run's name.")] = None,
    host_check: Annotated[
        bool, typer.Option("--host-check", help="Warn of what disturbs measurements on this host; stored with the run.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Afterwards do `encore report` for this run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure workloads in modes, each in processes of its own, and write rows to results/runs."""
    from suite.launch import NEWEST, Request, launch
    from suite.matrix import parse_degrees
    from suite.schedule import parse_shard
    from suite.settings import FULL, QUICK, RunSettings, parse_budget, parse_duration
    from suite.store import describe

    if cli_nanogpt.is_wanted(workloads):
        raise typer.Exit(cli_nanogpt.run(context.params, lambda name: _was_given(context, name)))
    if retry_failed and resume is None:
        raise WrongUse("--retry-failed needs --resume RUN: a new run has nothing to run again")
    if resume not in (None, NEWEST) and out is not None:
        raise WrongUse("--resume RUN goes on in that run's own folder; leave --out out")
    request = Request(
        preset=QUICK if quick else FULL,
        given={name: context.params[name] for name in RunSettings.model_fields if _was_given(context, name)},
        command_line=("encore", *sys.argv[1:]),
        workloads=workloads or (),
        workload_set=workload_set,
        modes=[name.strip() for name in modes.split(",") if name.strip()] if modes is not None else None,
        shard=parse_shard(shard) if shard is not None else None,
        resume=resume,
        retry_failed=retry_failed,
        budget_s=parse_budget(budget, budget_used),
        timeout_s=parse_duration(timeout, "--timeout"),
        out=out,
        tag=tag,
        host_check=host_check,
        tp=parse_degrees(tp) if tp is not None else None,
    )
    finished = launch(request, console(stderr=True))
    made = _build_report([finished.path], None, None, None) if report else None
    if made:
        _say(f"{describe(made.html)}: {len(made.tables)} tables, {len(made.figures)} figures")
    if as_json:
        _print_json(finished.summary() | ({"report": describe(made.html)} if made else {}))
    raise typer.Exit(finished.exit_code)


@app.command(epilog="Example: encore merge shard-1 shard-2 --out results/runs/whole")
def merge(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Runs of one environment.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the joined run.")],
    as_json: JsonOption = False,
) -> None:
    """Join runs made in one environment, such as the shards of one."""
    from suite.merge import merge_runs
    from suite.store import describe

    cells = merge_runs(runs, out, ("encore", *sys.argv[1:]))
    if as_json:
        _print_json({"run": describe(out), "cells": cells})
    else:
        print(f"{describe(out)}: {cells} cells of {len(runs)} runs")


@app.command(epilog="Example: encore report 20260102-120000-h200")
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Names or folders of runs made with one GPU model, driver and PyTorch; default: the newest. "
            "Of a workload that several measured, all rows are those of the newest.",
            show_default=False,
        ),
    ] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="All runs in results/recorded; where there are none, explanations alone.")
    ] = False,
    explanations: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What `encore explain --out DIR` wrote.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write; default: `report` in the run; of several: in results."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write figures; default: `figures` in the report's folder."),
    ] = None,
    readme: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Markdown file whose generated tables to renew.")
    ] = None,
    micro: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `encore micro indirection` wrote; --recorded has its own.")
    ] = None,
    nanogpt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `encore run nanogpt` wrote; --recorded has its own.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these figures and tables of the papers, as fig10,pygraph-table2."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Render tables, figures and report.html from results."""
    from suite import cli_report, store

    if recorded and runs:
        raise WrongUse(f"--recorded picks the runs itself; leave it or {', '.join(map(repr, runs))} out")
    if recorded:
        found = store.list_runs(store.RECORDED)
    elif runs:
        found = [store.find_run(name) for name in runs]
    else:
        newest = store.newest_run(store.RUNS, store.RECORDED)
        found = [newest] if newest else []
    micro = micro or (cli_report.recorded_file("indirection.json") if recorded else None)
    nanogpt = nanogpt or (cli_report.recorded_file("nanogpt.json") if recorded else None)
    if only is not None:
        cli_report.report_only(only, found, micro, nanogpt, out, figures, as_json=as_json)
        return
    made = _build_report(found, explanations, out, figures, readme, micro, nanogpt)
    if as_json:
        _print_json(made.model_dump(mode="json"))
    else:
        print(f"{store.describe(made.html)}: {len(made.tables)} tables, {len(made.figures)} figures")


@app.command(epilog="Example: encore explain XLNET-I (a program of your own: encore explain mymodule:make)")
def explain(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Workloads, or programs as module:callable.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every workload in every variant, a line each.")] = False,
    workload_set: Annotated[
        str | None, typer.Option("--set", metavar="SET", help="The same for the workloads of a set, such as grace.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the workloads.")] = None,
    size: Annotated[Size, typer.Option(help="Published size, or one small enough for tests.")] = Size.full,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for one JSON file per target, for `encore report`.")
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Keep what this code has explained in the folder of --out before.")
    ] = False,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Longest time for one target.")] = "15m",
    as_json: JsonOption = False,
) -> None:
    """Show what keeps a model from CUDA graphs and what each call copies. Needs no GPU."""
    from suite.explain.reuse import reusable
    from suite.explain.run import explain_many
    from suite.explain.targets import find_targets
    from suite.explain.text import render, summary
    from suite.progress import AnalysisDisplay
    from suite.settings import parse_duration
    from suite.store import describe

    if (everything or workload_set is not None) == bool(targets):
        raise WrongUse("name what to explain (`encore list --workloads` shows the workloads), or give --all or --set")
    everything = everything or workload_set is not None
    if reuse and out is None:
        raise WrongUse("--reuse needs --out DIR, the folder it may find explanations in")
    timeout_s = parse_duration(timeout, "--timeout")
    wanted = find_targets(targets or (), variant=variant, size=size.value, workload_set=workload_set)
    kept = reusable(wanted, out) if reuse and out else {}
    if kept and out:
        _say(f"{len(kept)} of {len(wanted)} are explained in {describe(out)} already, by this very code")
    explanations = list(kept.values())
    remaining = [target for target in wanted if target not in kept]
    try:
        with (
            AnalysisDisplay(console(stderr=True), timeout_s) as display,
            closing(explain_many(remaining, out=out, timeout_s=timeout_s, watcher=display)) as explained,
        ):
            for each in explained:
                explanations.append(each.explanation)
                with display.paused():
                    if as_json or everything:
                        line = f"{each.done} of {each.total}: {each.target.label}: {summary(each.explanation)}"
                        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)
                    else:
                        console().print(render(each.explanation))
    except Interrupted:
        _say(f"interrupted: {len(explanations)} of {len(wanted)} are explained")
        raise
    finally:
        # What is finished is printed whatever ends this early: it took minutes.
        if as_json and (explanations or not remaining):
            _print_json([explanation.model_dump(mode="json") for explanation in explanations])
    raise typer.Exit(EXIT_FINDING if any(explanation.error for explanation in explanations) else EXIT_OK)


@app.command(epilog="Example: encore env --json")
def env(
    require_gpu: Annotated[
        bool, typer.Option("--require-gpu", help="Only check for a GPU that can be used; exit 2 without one.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a run records of this machine."""
    from suite import environment, gpu, listing

    if require_gpu:
        print(gpu.require_gpu().info.name)
        return
    record = environment.collect("none", ("encore", *sys.argv[1:]), {})
    if as_json:
        _print_json(record.model_dump(mode="json"))
    else:
        console().print(listing.environment_table(record))


def _build_report(
    runs: list[Path],
    explanations: Path | None,
    out: Path | None,
    figures: Path | None,
    readme: Path | None = None,
    micro: Path | None = None,
    nanogpt: Path | None = None,
) -> Report:
    from suite import store
    from suite.report.build import build_report

    made = build_report(
        runs,
        explanations,
        out or (runs[0] if len(runs) == 1 else store.REPOSITORY / "results") / "report",
        figures,
        readme,
        micro,
        nanogpt,
    )
    if made.warning:
        _say(f"encore: {made.warning}")
    return made


def _was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was written on the command line, so that a resumed run's own settings are kept otherwise."""
    source = context.get_parameter_source(name) if name in context.params else None
    return source is not None and source.name == "COMMANDLINE"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
