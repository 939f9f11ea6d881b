"""Whose turn it is to call functions of a manager, where a function that runs calls others.

Note [Backwards inside of functions]. Functions of one manager run in turns: whoever calls one holds a lock that the
same thread may take again. An operator of the program's own may run a backward of another compiled function. On a GPU a
thread of the autograd engine's serves that backward, while the caller waits for it and holds the turn: neither would
ever go on. So whoever runs a function lends its turn to the threads that run its backwards. They find that in PyTorch's
thread-local state, which the engine hands on to them and no other thread has.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from optimizations import torch_internals

_TLS_KEY = "encore_lent_turns"


class Lent:
    """A turn that a thread lends while it runs a function. `before`: what it had been lent, or lends, itself."""

    __slots__ = ("before", "thread", "turn")

    def __init__(self, turn: Any, before: Lent | None) -> None:
        self.turn = turn
        self.thread = threading.get_ident()
        self.before = before


LENT: dict[Lent, None] = {}
"""What is lent now, in all threads."""


@contextlib.contextmanager
def lending(turn: Any) -> Iterator[None]:
    """While a function of this turn runs."""
    before = _found()
    made = Lent(turn, before)
    try:  # an interrupt may come right behind any call
        LENT[made] = None
        _stash(made)
        yield
    finally:
        LENT.pop(made, None)
        _stash(before)


def is_lent(turn: Any) -> bool:
    """Whether this thread runs a backward for another one, which holds this turn and waits."""
    if not LENT:
        return False
    one, thread = _found(), threading.get_ident()
    while one is not None:
        if one.turn is turn and one.thread != thread and one in LENT:
            return True
        one = one.before
    return False


def _found() -> Lent | None:
    if not torch_internals.is_key_in_tls(_TLS_KEY):
        return None
    found: Lent | None = torch_internals.get_obj_in_tls(_TLS_KEY)
    return found


def _stash(value: Lent | None) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))  # see `capture.trees.containers`: it takes a reference over
    torch_internals.stash_obj_in_tls(_TLS_KEY, value)
