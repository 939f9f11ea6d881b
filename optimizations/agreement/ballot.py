"""The open questions of this process: votes go out and come in on a thread of their own, never in a call.

Note [In the background]. `vote` puts a vote into a list and returns. A daemon thread carries it out, looks for others'
and tells what was decided by calling back. The callback must do no more than note it: the next call of the function
reads the note. Whatever goes wrong in the exchange (the store's process is gone) ends the thread, and what is
undecided stays so. The thread opens the exchange, too: connecting to a store takes as long as the process that serves
it, which may be stopped, in a debugger say, or gone.

Note [Names]. Ranks compile the same program, but not always the same functions at the same time. So a function is
named by the collectives it takes part in, which are the same on all ranks that take part, and by how many functions
with these came before it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from optimizations.agreement.votes import Decision, Question, Topic, Vote, decide, read_vote
from optimizations.one_line import one_line

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0
"""Between two looks at others' votes. It doubles while there is nothing new."""


class Exchange(Protocol):
    """Carries votes between ranks. May take its time; any exception means that it works no more."""

    def post(self, key: str, rank: int, vote: bytes) -> None:
        """This rank's vote, instead of an earlier one."""

    def read(self, key: str, rank: int) -> bytes | None:
        """A rank's vote; None if there is none yet."""

    def news(self) -> int:
        """A number that grows with each vote of any rank."""


class _Nothing:
    """The exchange of a ballot that is closed."""

    def post(self, key: str, rank: int, vote: bytes) -> None:
        raise RuntimeError("this ballot is closed, and nothing is exchanged for it")

    def read(self, key: str, rank: int) -> bytes | None:
        raise RuntimeError("this ballot is closed, and nothing is exchanged for it")

    def news(self) -> int:
        raise RuntimeError("this ballot is closed, and nothing is exchanged for it")


@dataclass(slots=True)
class _Open:
    """A topic this rank has voted on. `posted`: the vote is out."""

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
        self._exchange: Exchange = exchange
        self._threaded = threaded
        self._lock = threading.RLock()  # a finalizer may vote, in a thread that holds it
        self._wake: SimpleQueue[None] = SimpleQueue()  # whose `put` may come in the middle of another
        self._open: dict[Topic, _Open] = {}
        self._names: dict[tuple[Question, tuple[int, ...], str], Iterator[int]] = {}
        self._thread: threading.Thread | None = None
        self._seen = -1
        self._process = os.getpid()
        self.closed: str | None = None
        """Why nothing is exchanged any more; None while it is."""

    def topic(self, question: Question, collectives: Sequence[str], ranks: Sequence[int]) -> Topic:
        """A new topic about a function with these collectives. Note [Names]."""
        digest = hashlib.sha256("\n".join(collectives).encode()).hexdigest()[:16]
        members = tuple(sorted(ranks))
        numbers = self._names.setdefault((question, members, digest), itertools.count())
        return Topic(question, f"{digest}.{next(numbers)}", members)

    def vote(self, topic: Topic, vote: Vote, told: Callable[[Decision], None]) -> None:
        """This rank's vote, instead of an earlier one. `told` is called, on another thread, with what is decided, and
        again should a later vote of some rank change that. Returns at once."""
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
        """What was decided so far; None: undecided. Does not wait."""
        found = self._open.get(topic)
        return found.decision if found is not None else None

    def step(self) -> bool:
        """Post what is to be posted and look for others' votes, once. Whether there was anything new."""
        try:
            return self._step()
        except Exception as error:  # the store's process is gone, the network is, the interpreter is ending
            self.close(one_line(error))
            return False

    def close(self, reason: str) -> None:
        """Exchange no more, and hold no connection; a forked child leaves it to its parent."""
        self.closed = self.closed or reason
        if self._process == os.getpid():
            self._exchange = _Nothing()
        self._wake.put(None)

    def wait_for_end(self, within_s: float) -> None:
        """Wait for the thread of a closed ballot, so long and no longer."""
        if self._thread is not None:
            self._thread.join(within_s)

    def _step(self) -> bool:
        with self._lock:
            waiting = dict(self._open)
        fresh = False
        for topic, one in waiting.items():
            if not one.posted:
                self._exchange.post(topic.key, self._rank, one.vote.encode())
                one.votes[self._rank] = one.vote
                one.posted = fresh = True
        news = self._exchange.news()
        if news == self._seen and not fresh:
            return False
        for topic, one in waiting.items():
            for rank in topic.ranks:
                if rank != self._rank and (text := self._exchange.read(topic.key, rank)) is not None:
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
