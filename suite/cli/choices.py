"""Define what options of several commands share: the words they take, --json, and that no path is empty."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
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


PATHS = {"DIR": "a folder, such as results/runs/mine, or . for the working directory", "FILE": "a file", "RUN": "a run"}
"""Help of what an option takes, by its metavar. No empty string: pathlib takes it for the working directory."""


def refuse_empty_paths(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Refuse options of `PATHS` that are given as `--out ''` or `--out=`, of all commands in one place.

    Read from the functions of the commands: what typer makes of them changes with its versions.

    Raises:
        WrongUse: there is one; the message says what it takes.
    """
    if not any(argument == "" or argument.endswith("=") for argument in arguments):
        return
    for option, metavar in path_options(app):
        if f"{option}=" in arguments or (option, "") in pairwise(arguments):
            raise WrongUse(f"{option} '' names nothing: give {PATHS[metavar]}")


def path_options(app: typer.Typer) -> Iterator[tuple[str, str]]:
    """Return the options of all commands that take what is in `PATHS`, with their metavars."""
    for function in _functions(app):
        for name, hint in get_type_hints(function, include_extras=True).items():
            for option in getattr(hint, "__metadata__", ()):
                if isinstance(option, typer.models.OptionInfo) and option.metavar in PATHS:
                    written = [each for each in option.param_decls or () if each.startswith("--")]
                    yield from ((each, option.metavar) for each in written or [f"--{name.replace('_', '-')}"])


def _functions(app: typer.Typer) -> Iterator[Callable[..., Any]]:
    for command in (app.registered_callback, *app.registered_commands):
        if command is not None and command.callback is not None:
            yield command.callback
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _functions(group.typer_instance)
