"""Define errors that a user of the command line can fix, with their exit codes."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Collection

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_WRONG_USE = 2
EXIT_UNDECIDED = 3
"""Two runs do not decide whether one is slower than the other."""
EXIT_INTERRUPTED = 130

WRONG_PLACE = {
    errno.ENOENT: "give one that exists",
    errno.ENOTDIR: "a file is in the way; give a folder",
    errno.EEXIST: "a file is in the way; give a folder",
    errno.EISDIR: "give a file",
    errno.ENAMETOOLONG: "give a shorter name",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a place that may be read and written"),
}
"""Advice for each `OSError` that the choice of a file or folder causes. Others are no wrong use."""


def nearest(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """Return the known names that are most like an unknown one, or all of them, as the end of a message."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=cutoff)
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join([*known][-30:]) or 'none yet'}"


class EncoreError(Exception):
    """Report an error whose message the command line prints before it exits with `exit_code`."""

    exit_code = EXIT_FINDING


class WrongUse(EncoreError):
    """Report that the command was used wrongly: the message names what was wrong, what is allowed, and what to do."""

    exit_code = EXIT_WRONG_USE
