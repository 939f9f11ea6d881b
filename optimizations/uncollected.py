"""Disable Python's garbage collection in a block.

Note [No collection while capturing]. A graph that is collected as garbage frees memory by calls that invalidate any
active capture. So nothing is collected during a capture.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block, and restore its previous state afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
