"""Votes of ranks on one question, and what follows from them. Pure: records in, a decision or None out.

Note [Undecided]. None is an answer: stock's behaviour goes on. No rank ever waits for another's vote, so a rank that is
slow, that never votes or that is gone costs the others nothing. Ranks hear of a decision at different times, a few
calls apart. So only questions are asked whose answers may differ between ranks for a while. Whether a function runs
with its graph or without is such a question: either way it takes part in the same collectives, in the same order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Question(StrEnum):
    """What can be asked.

    RECORDED: is there a graph of this function? One rank that has none decides for all.
    FASTEST: which of several ways is the fastest on the slowest rank? Needs all votes.
    """

    RECORDED = "recorded"
    FASTEST = "fastest"


YES, NO = "yes", "no"
LONGEST_REASON = 500
"""Characters of a reason that go to other ranks."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A question about one function. Ranks that work together name it alike.

    Attributes:
        question: what is asked.
        name: of the function; the same on all ranks (see `ballot.Ballot.topic`).
        ranks: who votes, in rising order.
    """

    question: Question
    name: str
    ranks: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.question}/{'-'.join(map(str, self.ranks))}/{self.name}"


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says. `choice`: YES or NO. `costs`: microseconds by way, of the question FASTEST."""

    choice: str = YES
    reason: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As JSON."""
        fields = {"choice": self.choice, "reason": self.reason[:LONGEST_REASON], "costs": dict(self.costs)}
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do. `by` is the rank whose vote decided, if it was one's."""

    choice: str
    reason: str = ""
    by: int | None = None


def read_vote(text: bytes) -> Vote | None:
    """The vote that was encoded; None where these bytes are not a vote, as if none had been given."""
    try:
        fields: Any = json.loads(text)
        choice, reason, costs = fields["choice"], fields["reason"], fields["costs"]
        numbers = {str(way): float(cost) for way, cost in costs.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if choice not in (YES, NO) or not isinstance(reason, str) or not all(map(math.isfinite, numbers.values())):
        return None
    return Vote(choice, reason, numbers)


def decide(topic: Topic, votes: Mapping[int, Vote]) -> Decision | None:
    """What follows from the votes there are, by rank. Note [Undecided].

    All ranks with the same votes decide the same, whatever order these came in. More votes can turn None into a
    decision, and a later NO turns YES into NO; nothing else changes.
    """
    valid = {rank: votes[rank] for rank in topic.ranks if rank in votes}
    against = [rank for rank, vote in sorted(valid.items()) if vote.choice == NO]
    if against:
        return Decision(NO, valid[against[0]].reason, against[0])
    if len(valid) < len(topic.ranks):
        return None
    if topic.question is Question.RECORDED:
        return Decision(YES)
    return _fastest([vote.costs for _, vote in sorted(valid.items())])


def _fastest(costs: Sequence[Mapping[str, float]]) -> Decision | None:
    """The way whose largest cost is the least, of those that every rank has; of equal ones the first by name."""
    common = set.intersection(*(set(own) for own in costs)) if costs else set()
    if not common:
        return None
    slowest = {way: max(own[way] for own in costs) for way in common}
    best = min(sorted(slowest), key=lambda way: slowest[way])
    return Decision(best, f"{slowest[best]:.1f} us on the slowest rank")
