"""Report to the waiting process what the one that explains a target does: a line of text per step. No torch here."""

from __future__ import annotations

import os
from contextlib import suppress

_descriptor: int | None = None


def announce_to(descriptor: int) -> None:
    """Have `announce` write to this pipe from now on. Processes that are started do not inherit it."""
    global _descriptor
    os.set_inheritable(descriptor, False)
    _descriptor = descriptor


def announce(step: str) -> None:
    """Tell the listener, if there is one, what begins now, such as "lowering FX graph 2"."""
    if _descriptor is not None:
        with suppress(BrokenPipeError):
            os.write(_descriptor, " ".join(step.split())[:500].encode() + b"\n")
