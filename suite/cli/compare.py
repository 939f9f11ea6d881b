"""Define `encore compare`. Imports what it needs when it runs."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from suite.cli.console import console
from suite.results.errors import WrongUse


def parse_share(text: str, option: str) -> float:
    """Return the share that a text such as "0.05" or "5%" stands for.

    Raises:
        WrongUse: it is neither.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip(), re.ASCII)
    if match is None or (share := float(match[1]) / (100 if match[2] else 1)) >= 1:
        raise WrongUse(f"{option} {text!r} is not a share below 100 %; write it as 5% or 0.05")
    return share


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A run, by name or folder; parts separated by commas.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="What to compare with it.")],
    threshold: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="How much slower a row must be to be a regression, as 5% or 0.05; half of it in a mean.",
        ),
    ] = "5%",
) -> None:
    """Decide whether a run is slower than another; exit 1 if it is, 3 if that cannot be decided."""
    from suite.report.runs import load_runs
    from suite.report.two_runs.pairs import compare_runs
    from suite.report.two_runs.text import print_terminal
    from suite.results.store import find_run

    share = parse_share(threshold, "--threshold")
    older, newer = (load_runs([find_run(name) for name in names.split(",")]) for names in (base, new))
    made = compare_runs(older, newer, share)
    print_terminal(made, console())
    raise typer.Exit(made.exit_code)
