"""Blocks in which Python does not look for garbage.

Note [No collection while capturing]. A graph that is collected as garbage frees memory by calls that end the capture of
whoever is capturing. So nothing is collected during one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the block, nor behind it where nothing was collected before it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
