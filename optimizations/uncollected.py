"""Keep Python from collecting garbage in a block.

Note [No collection while capturing]. A graph that is collected as garbage frees memory by calls that end any capture
under way. So nothing is collected during one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the block, nor after it where nothing was collected before it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
