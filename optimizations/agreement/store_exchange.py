"""Votes through the store that the process group was made with, over a connection of their own.

A store answers at once whether a key is there, so nobody has to take part at the same time as others, which a
collective would ask for: a rank that never compiles the function is never waited for. It serves every backend of
process groups, and puts nothing on the GPUs.

Note [The interpreter's end]. A thread that comes back from the store, in C++, to an interpreter that is ending would
end the whole process with `terminate called without an active exception`. So the ballot's thread is waited for before.
"""

from __future__ import annotations

import atexit
import threading
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
_current: tuple[Any, Ballot] | None = None


class StoreExchange:
    """`ballot.Exchange` over a `torch.distributed.Store`."""

    def __init__(self, store: Any) -> None:
        self._store = store.clone()  # the program's own connection may be in a wait of minutes
        self._store.set_timeout(LONGEST_ANSWER)

    def post(self, key: str, rank: int, vote: bytes) -> None:
        self._store.set(f"{_PREFIX}{key}/{rank}", vote.decode())
        self._store.add(_NEWS, 1)

    def read(self, key: str, rank: int) -> bytes | None:
        name = f"{_PREFIX}{key}/{rank}"
        if not self._store.check([name]):
            return None
        found: bytes = self._store.get(name)
        return found

    def news(self) -> int:
        return int(self._store.add(_NEWS, 0))


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
        if _current is None or _current[0] is not store:
            if _current is not None:
                _current[1].close("the process group is another one")
            made = _ballot(store, distributed.get_rank())
            if _current is None or _current[0] is not store:
                _current = (store, made)
            else:
                made.close("a finalizer has made another one")
        return _current[1]


def _ballot(store: Any, rank: int) -> Ballot:
    try:
        return Ballot(rank, StoreExchange(store))
    except Exception as error:  # a store that cannot be cloned
        unusable = Ballot(rank, _Nothing(), threaded=False)
        unusable.close(f"{type(error).__name__}: {error}".splitlines()[0])
        return unusable


class _Nothing:
    """An exchange for a ballot that is closed from the beginning."""

    def post(self, key: str, rank: int, vote: bytes) -> None:
        raise RuntimeError("this ballot is closed, and nothing is exchanged for it")

    def read(self, key: str, rank: int) -> bytes | None:
        raise RuntimeError("this ballot is closed, and nothing is exchanged for it")

    def news(self) -> int:
        raise RuntimeError("this ballot is closed, and nothing is exchanged for it")


def close_current(reason: str, wait_s: float = 0.0) -> None:
    """Exchange no more: the process group goes, or the process. Wait so many seconds for the thread to end."""
    global _current
    with _lock:
        current, _current = _current, None
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
