"""The consoles that commands print to. Outside of a terminal, tables keep their full width."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000
"""Columns of what is not a terminal: rich would cut tables to 80, and a file or a pipe has no edge."""


def console(*, stderr: bool = False) -> Console:
    """The console of stdout, for tables, or of stderr, for remarks.

    Lines of remarks are never wrapped, for they hold commands to copy. COLUMNS, where it is set, is the width of both.
    Brackets in a text are no markup: a folder may have any name.
    """
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=stderr)
    if not made.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=stderr, width=UNLIMITED)
    return made
