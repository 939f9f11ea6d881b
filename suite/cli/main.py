"""Define the command line `encore`, which is also `python -m encore`.

Commands import what they need when they run: `encore --help` must not wait for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suite.cli import draw
from suite.cli import history as cli_history
from suite.cli import micro as cli_micro
from suite.cli import report as cli_report
from suite.cli import run as cli_run
from suite.cli.console import SizeOption, console, refuse_empty, say
from suite.results.errors import (
    EXIT_FINDING,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_WRONG_USE,
    WRONG_PLACE,
    EncoreError,
    WrongUse,
)
from suite.run.supervise import Interrupted, interruptible, kill_children

if TYPE_CHECKING:
    from rich.console import RenderableType

    from models.registry import Workload
    from suite.measure.modes import Mode

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="CUDA graphs under PyTorch 2: run real workloads, measure them, draw what was measured.",
    epilog="Start with: encore list",
)

app.add_typer(cli_micro.app, name="micro")
app.add_typer(draw.app, name="draw")
app.command("compare", epilog="Example: encore compare 20260101-120000-h200 20260102-120000-h200 --threshold 0.05")(
    cli_history.compare
)
app.command("record", epilog="Example: encore record 20260102-120000-h200")(cli_history.record)
app.command("history", epilog="Example: encore history --mode encore --over compile")(cli_history.history)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 fine, 1 a finding or a failed row, 2 wrong use, 3 nothing decided, 130 interrupted."""
    try:
        with interruptible():
            refuse_empty(sys.argv[1:] if arguments is None else arguments)
            app(arguments, prog_name="encore")
    except EncoreError as error:
        say(f"encore: {error}")
        sys.exit(error.exit_code)
    except Interrupted as signal:
        say(f"encore: ended by {signal}")
        kill_children()
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        advice = WRONG_PLACE.get(error.errno or 0)
        where = f"{error.filename}: " if error.filename else ""
        say(f"encore: {where}{error.strerror or error}; {advice or 'what was written before is intact'}")
        sys.exit(EXIT_WRONG_USE if advice else EXIT_FINDING)


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
    """Take the options that stand before the command."""


@app.command("list", epilog="Example: encore list --modes")
def list_command(
    workloads: Annotated[bool, typer.Option("--workloads", help="Only workloads.")] = False,
    modes: Annotated[bool, typer.Option("--modes", help="Only modes.")] = False,
) -> None:
    """List workloads and modes."""
    from models import registry
    from suite.measure.modes import MODES

    both = workloads == modes
    chosen = list(registry.workloads().values()) if workloads or both else []
    chosen_modes = list(MODES.values()) if modes or both else []
    for table in listed_tables(chosen, chosen_modes):
        console().print(table, "")


def listed_tables(workloads: Sequence[Workload], modes: Sequence[Mode]) -> list[RenderableType]:
    """Return what `encore list` prints: a table for each kind, then what is special about some workloads."""
    from rich.table import Table
    from rich.text import Text

    listed: list[RenderableType] = []
    if workloads:
        table = Table("workload", "model", "suite", "task", "batch", "dtypes", "variants", "sets", box=None)
        for workload in workloads:
            several = (", ".join(workload.variants), ", ".join(workload.sets))
            plain = (workload.acronym, workload.name, workload.suite, workload.task, str(workload.batch))
            table.add_row(*plain, workload.dtype_policy, *several)
        listed.append(table)
    if modes:
        table = Table("mode", "what it is", "compared with", box=None)
        for mode in modes:
            table.add_row(mode.name, mode.summary, ", ".join(mode.baselines) or "-")
        listed.append(table)
    notes = [f"{workload.acronym}: {workload.notes}" for workload in workloads if workload.notes]
    split = [f"{each.acronym} (batch {each.sharding.batch})" for each in workloads if each.sharding is not None]
    if split:
        notes.append(f"`encore run --tp N,N` splits over GPUs: {', '.join(split)}")
    return [*listed, Text("\n".join(notes))] if notes else listed


app.command("run", epilog="Example: encore run ALNET EOS --modes compile,graph --processes 3")(cli_run.run)


app.command("report", epilog="Example: encore report 20260102-120000-h200")(cli_report.report)


@app.command(epilog="Example: encore explain XLNET-I (a program of your own: encore explain mymodule:make)")
def explain(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Workloads, or programs as module:callable.", show_default=False)
    ] = None,
    workload_set: Annotated[
        str | None,
        typer.Option("--set", metavar="SET", help="A set in every variant, a line each: grace or all."),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the workloads.")] = None,
    size: SizeOption = "full",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for one JSON file per target.")] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Processor time that one target may take.")] = "15m",
) -> None:
    """Show what keeps a model from CUDA graphs and what each call copies. Needs no GPU."""
    from suite.explain.run import explain_many
    from suite.explain.targets import find_targets
    from suite.explain.text import render, summary
    from suite.settings import parse_duration

    if (workload_set is not None) == bool(targets):
        raise WrongUse("name what to explain (`encore list --workloads` shows the workloads), or give --set")
    timeout_s = parse_duration(timeout, "--timeout")
    wanted = find_targets(targets or (), variant=variant, size=size, workload_set=workload_set)
    explanations = []
    several = "" if len(wanted) == 1 else "s"
    say(f"explaining {len(wanted)} target{several}; each may take minutes, at most {timeout} of processor time")
    try:
        with closing(explain_many(wanted, out=out, timeout_s=timeout_s, say=say)) as explained:
            for number, (target, explanation) in enumerate(explained, start=1):
                explanations.append(explanation)
                if workload_set is not None:
                    print(f"{number} of {len(wanted)}: {target.label}: {summary(explanation)}", flush=True)
                else:
                    console().print(render(explanation))
    except Interrupted:
        say(f"interrupted: {len(explanations)} of {len(wanted)} are explained")
        raise
    raise typer.Exit(EXIT_FINDING if any(explanation.error for explanation in explanations) else EXIT_OK)


@app.command(epilog="Example: encore env --require-gpu")
def env(
    require_gpu: Annotated[
        bool, typer.Option("--require-gpu", help="Only check for a GPU that can be used; exit 2 without one.")
    ] = False,
) -> None:
    """Show what a run records of this machine."""
    from suite.measure import environment, gpu

    if require_gpu:
        print(gpu.find_gpu().info.name)
        return
    here = environment.collect("none", ("encore", *sys.argv[1:]), {})
    print(here.model_dump_json(indent=2, exclude={"packages"}))
