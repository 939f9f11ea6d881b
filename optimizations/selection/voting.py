"""How a group is served where several processes compute together: its votes, and what follows from those of all.

What is told and how it is counted is in `ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optimizations.selection import ranks
from optimizations.selection.decide import Decision
from optimizations.selection.keeping import stored_together
from optimizations.selection.members import CANDIDATES
from optimizations.selection.served import Served
from optimizations.selection.verdict import Compared

if TYPE_CHECKING:
    from optimizations.selection.member import Member

NOT_STORED = "there is no stored verdict for it"


class Voting(Served):
    """See the module."""

    def _vote_as_stored(self, members: Sequence[Member]) -> None:
        """Vote for what this rank found when it was alone, if there is such a verdict. With the option "stored" a rank
        without one selects nothing."""
        known = stored_together(members, CANDIDATES, self._moving, exactly=True)
        if known is not None:
            member, self.stored = known
            found = self.stored
            self._leader = member.serial  # it looks at the ranks, too
            self._circumstances.moving = found.circumstances.moving if found.leads else None
            decision = Decision(found.kept, found.outcome, (), frozenset())
            self._vote(decision, found.candidates, found.compared, found.median_s[found.kept])
        elif members[0].settings.mode == "stored":
            self._off(NOT_STORED)

    def _vote(
        self, decision: Decision, candidates: Sequence[str], comparisons: Sequence[Compared], median_s: float
    ) -> None:
        """Let all ranks decide, of which this one would decide so."""
        names = self.members.shared_names
        if names is None:
            self._off(ranks.NO_NAME)
            return
        self._wait(ranks.NOT_YET)
        self._together.vote(names, decision, candidates, comparisons, median_s)

    def _hear(self, own: Decision) -> None:
        """Take what ranks agreed on, if they did."""
        if not self._together.holds:
            self._together.forget()
            if ranks.count() == 1:
                self._take(own)
            return
        agreed = self._together.outcome(CANDIDATES)
        if agreed is None:
            self.reason = ranks.NOT_YET
            self._pause()
        elif agreed.kept is None:
            self._off(agreed.reason, tell=False)
        else:
            self._take(agreed.decision(own, CANDIDATES))
            self.reason = agreed.reason

    def _look_at_ranks(self) -> bool:
        """Whether the verdict is still one of all ranks; if not, it is given up, or what they agreed on is taken."""
        assert self.decision is not None
        if ranks.count() == 1:
            return True
        if not self._together.holds:
            self.stored = None
            self._series.forget_times()
            self._wait("ranks compute together now, and decide together")
            return False
        agreed = self._together.outcome(CANDIDATES)
        if agreed is None or agreed.kept == self.decision.kept:
            return True
        self._hear(self.decision)
        return False
