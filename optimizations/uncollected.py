"""Disable Python's garbage collection in a block.

Note [No collection while capturing]. A graph that is collected as garbage frees memory by calls that invalidate any
active capture. So nothing is collected during a capture.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_changing = threading.RLock()  # a finalizer may capture in a thread that holds it
_blocks: set[object] = set()
_enabled_before = True


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block. The last block of all threads restores its previous state."""
    global _enabled_before
    block = object()
    try:  # an interrupt may come right after any call
        with _changing:
            if not _blocks:
                _enabled_before = gc.isenabled()
            _blocks.add(block)
            gc.disable()
        yield
    finally:
        with _changing:
            try:
                _blocks.discard(block)
            finally:
                if not _blocks and _enabled_before:
                    gc.enable()
