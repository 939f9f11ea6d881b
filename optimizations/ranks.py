"""Let ranks decide alike about functions with collectives, without waiting for each other.

A rank that has recorded a function with collectives, or could not, puts its vote into the store that the process group
was made with, over a connection and on a thread of its own. One NO decides for all. A store says at once whether a key
is there, so a rank that never compiles the function is never waited for, and nothing is put on the GPUs.

Note [Undecided]. None is an answer: stock's behaviour goes on. No rank ever waits for another's vote, so a rank that is
slow, that never votes or that is gone costs the others nothing. Ranks hear of a decision at different times, a few
calls apart. So the only question is whether a function runs with its graph. The answer may differ between ranks for a
while, because the function takes part in the same collectives either way, in the same order.

Note [In the background]. `vote` puts a vote into a list and returns. A daemon thread carries it out, looks for others'
and tells what was decided by calling back. The callback must do no more than note it: the next call of the function
reads the note. Whatever goes wrong in the exchange (the store's process is gone) ends the thread, and what is
undecided stays so. The thread opens the exchange, too: connecting to a store takes as long as the process that serves
it, which may be stopped, in a debugger say, or gone.

Note [Names]. Ranks compile the same program, but not always the same functions at the same time. So a function is
named by the collectives it takes part in, which are the same on all ranks that take part, and by how many functions
with these came before it.

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
import hashlib
import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from optimizations import torch_internals
from optimizations.one_line import one_line

YES, NO = "yes", "no"
LONGEST_REASON = 500
"""Characters of a reason that go to other ranks."""


@dataclass(frozen=True, slots=True)
class Topic:
    """Hold the subject of a vote: one function, which ranks that work together name alike.

    Attributes:
        name: of the function; the same on all ranks (see `Ballot.topic`).
        ranks: who votes, in rising order.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{'-'.join(map(str, self.ranks))}/{self.name}"


@dataclass(frozen=True, slots=True)
class Vote:
    """Hold the vote of one rank, YES or NO, and its reason."""

    choice: str = YES
    reason: str = ""

    def encode(self) -> bytes:
        """Return the vote as JSON."""
        return json.dumps({"choice": self.choice, "reason": self.reason[:LONGEST_REASON]}).encode()


@dataclass(frozen=True, slots=True)
class Decision:
    """Hold the decision for all ranks. `by` is the rank whose vote decided, if it was one rank's."""

    choice: str
    reason: str = ""
    by: int | None = None


def read_vote(text: bytes) -> Vote | None:
    """Return the vote that was encoded; None where these bytes are not a vote, as if none had been given."""
    try:
        fields: Any = json.loads(text)
        choice, reason = fields["choice"], fields["reason"]
    except (ValueError, TypeError, KeyError):
        return None
    if choice not in (YES, NO) or not isinstance(reason, str):
        return None
    return Vote(choice, reason)


def decide(topic: Topic, votes: Mapping[int, Vote]) -> Decision | None:
    """Return what follows from the votes there are, by rank. Note [Undecided].

    All ranks with the same votes decide the same, whatever order these came in. More votes can turn None into a
    decision, and a later NO turns YES into NO; nothing else changes.
    """
    valid = {rank: votes[rank] for rank in topic.ranks if rank in votes}
    against = [rank for rank, vote in sorted(valid.items()) if vote.choice == NO]
    if against:
        return Decision(NO, valid[against[0]].reason, against[0])
    if len(valid) < len(topic.ranks):
        return None
    return Decision(YES)


SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0
"""Between two looks at others' votes. It doubles while there is nothing new."""


class Exchange(Protocol):
    """Carry votes between ranks. May take its time; any exception means that it works no more."""

    def post(self, key: str, rank: int, vote: bytes) -> None:
        """Post this rank's vote, in place of an earlier one."""

    def read(self, key: str, rank: int) -> bytes | None:
        """Return a rank's vote; None if there is none yet."""

    def news(self) -> int:
        """Return a number that grows with each vote of any rank."""


@dataclass(slots=True)
class _Open:
    """Hold a topic this rank has voted on. `posted`: the vote is out."""

    vote: Vote
    told: Callable[[Decision], None]
    posted: bool = False
    decision: Decision | None = None
    votes: dict[int, Vote] = field(default_factory=dict)


class Ballot:
    """See the module.

    Args:
        rank: of this process.
        exchange: carries the votes.
        threaded: whether to begin a thread; without, `step` is the caller's to call.
    """

    def __init__(self, rank: int, exchange: Exchange, *, threaded: bool = True) -> None:
        self._rank = rank
        self._exchange: Exchange | None = exchange
        self._threaded = threaded
        self._lock = threading.RLock()  # a finalizer may vote, in a thread that holds it
        self._wake: SimpleQueue[None] = SimpleQueue()  # whose `put` may come in the middle of another
        self._open: dict[Topic, _Open] = {}
        self._names: dict[tuple[tuple[int, ...], str], Iterator[int]] = {}
        self._thread: threading.Thread | None = None
        self._seen = -1
        self._process = os.getpid()
        self.closed: str | None = None
        """Why nothing is exchanged any more; None while it is."""

    def topic(self, collectives: Sequence[str], ranks: Sequence[int]) -> Topic:
        """Return a new topic about a function with these collectives. Note [Names]."""
        digest = hashlib.sha256("\n".join(collectives).encode()).hexdigest()[:16]
        members = tuple(sorted(ranks))
        numbers = self._names.setdefault((members, digest), itertools.count())
        return Topic(f"{digest}.{next(numbers)}", members)

    def vote(self, topic: Topic, vote: Vote, told: Callable[[Decision], None]) -> None:
        """Cast this rank's vote, in place of an earlier one. Returns at once.

        `told` is called on another thread with the decision, and again if a later vote of some rank changes it.
        """
        if self.closed is not None or self._process != os.getpid():
            return
        with self._lock:
            before = self._open.get(topic)
            self._open[topic] = _Open(vote, told, decision=before.decision if before else None)
        self._wake.put(None)
        if self._threaded and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="encore-agreement", daemon=True)
            self._thread.start()

    def decision(self, topic: Topic) -> Decision | None:
        """Return what was decided so far; None: undecided. Does not wait."""
        found = self._open.get(topic)
        return found.decision if found is not None else None

    def step(self) -> bool:
        """Post what is to be posted and check for others' votes, once. Return whether there was anything new."""
        try:
            return self._step()
        except Exception as error:  # the store's process is gone, the network is, the interpreter is ending
            self.close(one_line(error))
            return False

    def close(self, reason: str) -> None:
        """Exchange no more, and hold no connection; a forked child leaves it to its parent."""
        self.closed = self.closed or reason
        if self._process == os.getpid():
            self._exchange = None
        self._wake.put(None)

    def wait_for_end(self, within_s: float) -> None:
        """Wait for the thread of a closed ballot, so long and no longer."""
        if self._thread is not None:
            self._thread.join(within_s)

    def _step(self) -> bool:
        exchange = self._exchange
        if exchange is None:
            return False
        with self._lock:
            waiting = dict(self._open)
        fresh = False
        for topic, one in waiting.items():
            if not one.posted:
                exchange.post(topic.key, self._rank, one.vote.encode())
                one.votes[self._rank] = one.vote
                one.posted = fresh = True
        news = exchange.news()
        if news == self._seen and not fresh:
            return False
        for topic, one in waiting.items():
            for rank in topic.ranks:
                if rank != self._rank and (text := exchange.read(topic.key, rank)) is not None:
                    vote = read_vote(text)
                    if vote is not None:
                        one.votes[rank] = vote
            self._tell(topic, one)
        self._seen = news
        return True

    def _tell(self, topic: Topic, one: _Open) -> None:
        found = decide(topic, one.votes)
        if found is None or found == one.decision or self.closed is not None:
            return
        one.decision = found
        one.told(found)

    def _run(self) -> None:
        pause = SHORTEST_PAUSE_S
        while self.closed is None:
            pause = SHORTEST_PAUSE_S if self.step() else min(2 * pause, LONGEST_PAUSE_S)
            with suppress(Empty):
                self._wake.get(timeout=pause)
                pause = SHORTEST_PAUSE_S
                while not self._wake.empty():
                    self._wake.get_nowait()


LONGEST_ANSWER = timedelta(seconds=5)
"""A store that does not answer within this is taken for gone."""

LAST_WORDS_S = 1.0
"""How long the end of the process waits for an answer of the store that is on its way."""

_PREFIX = "encore/agreement/"
_NEWS = _PREFIX + "news"

_lock = threading.RLock()
"""Reentrant, because a finalizer may call this module in a thread that holds it."""
_current: tuple[weakref.ref[Any], Ballot] | None = None
"""Note [A store that is let go]."""


class StoreExchange:
    """Exchange votes over a `torch.distributed.Store`. The first that reads or posts connects to it."""

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
    """Return the ballot of the process group there is; None of a process alone, or where votes cannot be exchanged."""
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
    """Handle the end of the interpreter. Note [The interpreter's end]."""
    close_current("the process ends", LAST_WORDS_S)


def ranks_of(collectives: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks in the groups of these collectives (`GeneratedCode.collectives`), or all if none is named."""
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
