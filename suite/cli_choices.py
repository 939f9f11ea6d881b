"""What options of several commands have in common: the words they take, and --json."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Device(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


class Size(StrEnum):
    full = "full"
    tiny = "tiny"
