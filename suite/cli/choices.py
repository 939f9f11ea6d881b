"""Define what options of several commands share: the words they take, --json, and that none is empty."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal

import typer

from suite.results.errors import WrongUse

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Device(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


class Size(StrEnum):
    full = "full"
    tiny = "tiny"

    @property
    def literal(self) -> Literal["full", "tiny"]:
        """Return the word as functions of workloads take it."""
        return "tiny" if self is Size.tiny else "full"


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
