"""Define what commands share: options, remarks, and tables, which keep their full width outside of a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from suite.results.errors import WrongUse

if TYPE_CHECKING:
    from rich.console import Console

SizeOption = Annotated[Literal["full", "tiny"], typer.Option(help="Published size, or one small enough for tests.")]

UNLIMITED = 100_000
"""Columns of what is not a terminal: rich would cut tables to 80, and a file or a pipe has no edge."""


def console(*, stderr: bool = False) -> Console:
    """Return the console of stdout, for tables, or of stderr, for remarks.

    Lines of remarks are never wrapped, for they hold commands to copy. COLUMNS, where it is set, is the width of both.
    Brackets in a text are no markup: a folder may have any name.
    """
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=stderr)
    if not made.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=stderr, width=UNLIMITED)
    return made


class Progress:
    """Print the steps of a command on stderr, with the time since the beginning.

    What follows a comma says how far a step is: that is printed every two seconds.
    """

    def __init__(self, command: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._command = command
        self._clock = clock
        self._begun = self._printed_at = clock()
        self._printed = ""

    def __call__(self, step: str) -> None:
        now, name = self._clock(), step.partition(",")[0]
        if name != self._printed or now - self._printed_at >= 2.0:
            self._printed, self._printed_at = name, now
            say(f"{self._command}: {step} ({now - self._begun:.0f} s)")


def say(text: str) -> None:
    """Print a remark or an error, a line on stderr."""
    print(text, file=sys.stderr)


def was_given(context: typer.Context, name: str) -> bool:
    """Return whether an option was written on the command line: a resumed run's own settings are kept otherwise."""
    source = context.get_parameter_source(name) if name in context.params else None
    return source is not None and source.name == "COMMANDLINE"


def refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse options that are given as `--out ''` or `--out=`: pathlib takes no name for the working directory.

    Raises:
        WrongUse: there is one.
    """
    for before, argument in pairwise(["encore", *arguments]):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            named = argument.rstrip("=") or before
            raise WrongUse(f"{named} '' names nothing; give it a value (. is the working directory), or leave it out")
