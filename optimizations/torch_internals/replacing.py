"""Replace names of PyTorch's while a thread is inside of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from optimizations import torch_internals


class Replacing:
    """Replace entries of `torch_internals.NAMES` from the first block of any thread until the end of the last.

    Threads that ended in another order than they began would otherwise put each other's back.

    Args:
        made: by name: takes what stands there, and returns what shall stand there in the blocks.
    """

    def __init__(self, made: Mapping[str, Callable[[Any], Any]]) -> None:
        self._made = made
        # A finalizer may record in a thread that holds it. What it replaces it puts back before the thread goes on.
        self._lock = threading.RLock()
        self._blocks = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._replaced = [_replaced(name, make) for name, make in self._made.items()]
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks:
                return
            for owner, attribute, value, stock in self._replaced:
                # Someone may have put a wrapper of their own around the value; it then stays, and passes on.
                if getattr(owner, attribute) is value:
                    setattr(owner, attribute, stock)
            self._replaced = []


def _replaced(name: str, make: Callable[[Any], Any]) -> tuple[Any, str, Any, Any]:
    """Replace one: owner, attribute, what stands there now, and what stood there before."""
    owner, attribute = torch_internals.holder_of(name)
    stock = getattr(owner, attribute)
    value = make(stock)
    setattr(owner, attribute, value)
    return owner, attribute, value, stock
