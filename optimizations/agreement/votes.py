"""Votes of ranks on one question, and what follows from them. Pure: records in, a decision or None out.

Note [Undecided]. None is an answer: stock's behaviour goes on. No rank ever waits for another's vote, so a rank that is
slow, that never votes or that is gone costs the others nothing. Ranks hear of a decision at different times, a few
calls apart. So only questions are asked whose answers may differ between ranks for a while. Whether a function runs
with its graph or without is such a question: either way it takes part in the same collectives, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Question(StrEnum):
    """What can be asked.

    RECORDED: is there a graph of this function? One rank that has none decides for all.
    """

    RECORDED = "recorded"


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
    """The vote of one rank, YES or NO, and its reason."""

    choice: str = YES
    reason: str = ""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps({"choice": self.choice, "reason": self.reason[:LONGEST_REASON]}).encode()


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
        choice, reason = fields["choice"], fields["reason"]
    except (ValueError, TypeError, KeyError):
        return None
    if choice not in (YES, NO) or not isinstance(reason, str):
        return None
    return Vote(choice, reason)


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
    return Decision(YES)
