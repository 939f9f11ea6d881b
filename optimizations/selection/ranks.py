"""Where several processes compute together: each measures by itself, and all keep what suits the slowest of them.

Note [Together or not at all]. Ranks wait for one another, so the fastest way is the one whose slowest rank is the
fastest. A rank that has measured votes with what each candidate costs it, and serves calls as without selection until
all have voted (`agreement`; nobody waits). While ranks hear of the decision, some serve by it and some do not yet. That
is harmless only where the function holds no collectives: with them it is not selected at all.

Note [What a rank says of its noise]. A candidate that is not told apart from a simpler one must not win by chance. So
what is told are not the medians, but the time of the candidate that the rank keeps, and for the others the end of their
interval that speaks for the one that is kept. Of two that are both less simple than it, the less simple one counts as
slower than the other too, unless their intervals lie apart.

Note [The same function on other ranks]. Generated code names its device. A question is put by the code without that.
Code that differs otherwise makes another question, which is never answered; calls are then served as without selection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from optimizations.agreement.ballot import Ballot
from optimizations.agreement.store_exchange import current_ballot
from optimizations.agreement.votes import NO, YES, Question, Topic, Vote
from optimizations.selection.decide import Decision
from optimizations.selection.verdict import Compared

NO_NAME = "its source cannot be read, by which ranks tell functions apart"
NOT_YET = "other ranks have not said yet which way is the fastest for them"

_DEVICE = re.compile(r"(cuda:|stream|Guard\(|set_device\(|raw_stream\(|index=)\d+")


def without_device(code: str) -> str:
    """Generated code that is the same on all ranks. Note [The same function on other ranks]."""
    return _DEVICE.sub(r"\1N", code)


def count() -> int:
    """How many processes compute together; 1 where this one is alone."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


def refusal(*, collectives: bool) -> str | None:
    """Why ranks cannot decide together about functions; None where they can, or where there is only one."""
    ranks = count()
    if ranks < 2:
        return None
    if collectives:
        return f"{ranks} ranks compute together in it, and none can measure for itself how long its collectives take"
    ballot = current_ballot()
    if ballot is None or ballot.closed is not None:
        why = f" ({ballot.closed})" if ballot is not None else ""
        return f"{ranks} ranks compute together, and they cannot exchange votes{why}"
    return None


def not_ready() -> str | None:
    """Why it is not known yet whether ranks can decide together; None where it is, or where there is only one."""
    ranks = count()
    ballot = current_ballot() if ranks > 1 else None
    if ballot is None or ballot.works or ballot.closed is not None:
        return None
    return f"{ranks} ranks compute together, and are not known yet to be able to exchange votes"


def costs_us(kept: str, candidates: Sequence[str], compared: Sequence[Compared], median_s: float) -> dict[str, float]:
    """What each of the candidates (simplest first) costs this rank, in microseconds. Note [What a rank says of its
    noise]. `compared` are ratios to the one that is kept, `median_s` is its time."""
    found = {kept: median_s * 1e6}
    place = candidates.index(kept)
    ordered = sorted(compared, key=lambda one: candidates.index(one.candidate))
    for number, one in enumerate(ordered):
        simpler = candidates.index(one.candidate) < place
        bound = one.low if simpler else one.high
        ratio = one.ratio if bound is None else bound
        # Of equal ones the first by name is taken; a hair more keeps that from being the less simple one.
        found[one.candidate] = median_s * 1e6 * max(ratio, 1.0 if simpler else math.nextafter(1.0, 2.0))
        for other in ordered[:number]:
            apart = one.high is not None and other.low is not None and one.high < other.low
            if not apart and candidates.index(other.candidate) > place:
                least = math.nextafter(found[other.candidate], math.inf)
                found[one.candidate] = max(found[one.candidate], least)
    return found


class Agreed:
    """What ranks agreed on: a candidate, or with None that nothing is selected; and why."""

    def __init__(self, kept: str | None, reason: str) -> None:
        self.kept = kept
        self.reason = reason

    def decision(self, own: Decision, candidates: Sequence[str]) -> Decision:
        """As a decision of this rank's, which had decided `own` for itself."""
        assert self.kept is not None
        if self.kept == own.kept:
            return own
        return Decision(self.kept, "same" if self.kept == candidates[0] else "faster", (), own.dropped)


class Together:
    """What one group of functions and its like on other ranks tell one another.

    Attributes:
        voted: what this rank decided for itself, while it is open what all do; None where it has not voted.
    """

    def __init__(self) -> None:
        self.voted: Decision | None = None
        self._ballot: Ballot | None = None
        self._topic: Topic | None = None

    def forget(self) -> None:
        """The group is another one now: what it was asked about is not it."""
        self.voted = self._ballot = self._topic = None

    @property
    def holds(self) -> bool:
        """Whether this rank has voted, and the others are those that there were."""
        return self._ballot is not None and current_ballot() is self._ballot and self._ballot.closed is None

    def vote(
        self,
        names: Sequence[str],
        decision: Decision,
        candidates: Sequence[str],
        comparisons: Sequence[Compared],
        median_s: float,
    ) -> None:
        """What each candidate costs this rank, which decided so for itself. `names` tell the functions of the group
        from others, and are the same on all ranks. Does not wait."""
        self._say(names, Vote(YES, "", costs_us(decision.kept, candidates, comparisons, median_s)))
        self.voted = decision

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """This rank serves calls as without selection, and so must all. Does not wait."""
        self._say(names, Vote(NO, reason))

    def outcome(self, candidates: Sequence[str]) -> Agreed | None:
        """What was agreed on; None while it is open."""
        found = self._ballot.decision(self._topic) if self._ballot is not None and self._topic is not None else None
        if found is None:
            return None
        if found.choice == NO:
            return Agreed(None, f"rank {found.by} does not select: {found.reason}")
        if found.choice not in candidates:
            return Agreed(None, f"ranks agreed on {found.choice!r}, which this one does not have")
        return Agreed(found.choice, f"{count()} ranks agreed on it: {found.reason}")

    def _say(self, names: Sequence[str], vote: Vote) -> None:
        if not self.holds:
            self._ballot = current_ballot()
            if self._ballot is None:
                return
            self._topic = self._ballot.topic(Question.FASTEST, sorted(names), range(count()))
        assert self._ballot is not None and self._topic is not None
        self._ballot.vote(self._topic, vote, lambda decision: None)
