"""Write an error in one line, for reasons in reports and warnings."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return the first line of an error, after its name."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
