"""Votes through the store that the process group was made with, over a connection of their own.

A store answers at once whether a key is there, so nobody has to take part at the same time as others, which a
collective would ask for: a rank that never compiles the function is never waited for. It serves every backend of
process groups, and puts nothing on the GPUs.

Note [A store that is let go]. A store ends with its last reference: the server of rank 0 closes its port, a file is
removed. A program that destroys its process group and makes another one at the same address counts on that, or the
new group would find the old one's keys. So a store is referred to weakly, and when it goes, the connection goes.

Note [Looking leaves no trace]. A file store appends whatever is set or added, by nothing too, so that looking for news
once a second would let its file grow for as long as the program runs.

Note [The interpreter's end]. A thread that comes back from the store, in C++, to an interpreter that is ending would
end the whole process with `terminate called without an active exception`. So the ballot's thread is waited for before.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.agreement.ballot import Ballot

LONGEST_ANSWER = timedelta(seconds=5)
"""A store that does not answer within this is taken for gone."""

LAST_WORDS_S = 1.0
"""How long the end of the process waits for an answer of the store that is on its way."""

_PREFIX = "encore/agreement/"
_NEWS = _PREFIX + "news"

_lock = threading.RLock()
"""What a finalizer calls while this thread holds it must not wait for it."""
_current: tuple[weakref.ref[Any], Ballot] | None = None
"""Note [A store that is let go]."""


class StoreExchange:
    """`ballot.Exchange` over a `torch.distributed.Store`, which is connected to by the first that asks or tells."""

    def __init__(self, store: Any) -> None:
        self._programs = weakref.ref(store)
        self._own: Any = None

    def post(self, key: str, rank: int, vote: bytes) -> None:
        store = self._store()
        store.set(f"{_PREFIX}{key}/{rank}", vote.decode())
        store.add(_NEWS, 1)

    def read(self, key: str, rank: int) -> bytes | None:
        return self._get(f"{_PREFIX}{key}/{rank}")

    def news(self) -> int:
        return int(self._get(_NEWS) or 0)  # Note [Looking leaves no trace]

    def _get(self, name: str) -> bytes | None:
        store = self._store()
        if not store.check([name]):
            return None
        found: bytes = store.get(name)
        return found

    def _store(self) -> Any:
        if self._own is None:
            programs = self._programs()
            if programs is None:
                raise RuntimeError("the process group is gone")
            own = programs.clone()  # the program's own connection may be in a wait of minutes
            own.set_timeout(LONGEST_ANSWER)
            self._own = own
        return self._own


def current_ballot() -> Ballot | None:
    """The ballot of the process group there is; None of a process alone, or where votes cannot be exchanged."""
    global _current
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    try:
        store = torch_internals.default_store()
    except (RuntimeError, ValueError):
        return None
    with _lock:
        if _current is None or _current[0]() is not store:
            if _current is not None:
                _current[1].close("the process group is another one")
            made = Ballot(distributed.get_rank(), StoreExchange(store))
            known = weakref.ref(store, lambda store: made.close("the process group was destroyed"))
            if _current is None or _current[0]() is not store:
                _current = (known, made)
            else:
                made.close("a finalizer has made another one")
        return _current[1]


def close_current(reason: str, wait_s: float = 0.0) -> None:
    """Exchange no more: the process group goes, or the process. Wait so many seconds for the thread to end.

    The ballot stays the one of its store: another would give the names of topics that there were to new ones.
    """
    current = _current
    if current is not None:
        current[1].close(reason)
        if wait_s:
            current[1].wait_for_end(wait_s)


@atexit.register
def _at_exit() -> None:
    """Note [The interpreter's end]."""
    close_current("the process ends", LAST_WORDS_S)


def ranks_of(collectives: Sequence[str]) -> tuple[int, ...]:
    """Who takes part in these collectives (`GeneratedCode.collectives`), by the groups they name; all ranks where no
    name is one of a group."""
    found: set[int] = set()
    for text in collectives:
        for name in text.partition("(")[2].rstrip(")").split(", "):
            if name[:1] in "'\"" and len(name) > 2:
                found.update(_members(name[1:-1]))
    return tuple(sorted(found)) or tuple(range(torch.distributed.get_world_size()))


def _members(group: str) -> Sequence[int]:
    try:
        ranks: list[int] = torch.distributed.get_process_group_ranks(torch_internals.resolve_process_group(group))
    except (RuntimeError, ValueError, KeyError):
        return ()
    return ranks
