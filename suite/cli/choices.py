"""Define what options of several commands share: the words they take, --json, and that none is empty."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal, get_type_hints

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


def takes(record: type[Any]) -> Callable[[Callable[[typer.Context, Any], None]], Callable[..., None]]:
    """Decorate a command that takes its options as one record: a dataclass, each field an option as typer reads it."""
    hints = get_type_hints(record, include_extras=True)
    of_context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hints[field.name], default=field.default
        )
        for field in fields(record)
    ]

    def decorate(command: Callable[[typer.Context, Any], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            command(context, record(**values))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([of_context, *parameters])  # type: ignore[attr-defined]
        run.__annotations__ = {"context": typer.Context, **hints}
        return run

    return decorate


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
