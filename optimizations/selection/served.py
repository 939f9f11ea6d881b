"""How a group is served: its state, the verdict behind it, and the report of both.

Here are the changes from one state to another; what brings them about is in `group`.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import TYPE_CHECKING

from optimizations.one_line import one_line
from optimizations.report.recordings import Direction
from optimizations.report.selection import SelectionReport, State
from optimizations.selection import ranks
from optimizations.selection.budget import total_s
from optimizations.selection.caller import Caller
from optimizations.selection.decide import Decision
from optimizations.selection.description import describe
from optimizations.selection.keeping import EITHER, stored_for, stored_together
from optimizations.selection.leading import Leading
from optimizations.selection.measurement import Measurement
from optimizations.selection.members import CANDIDATES, FOR_EVER, UNSELECTED, Members, candidate
from optimizations.selection.memory import Borrowed
from optimizations.selection.selector import Selector
from optimizations.selection.series import Series
from optimizations.selection.validity import MOVES_NOW, RESTS_NOW, Circumstances
from optimizations.selection.verdict import StoredVerdict
from optimizations.selection.way import WAY

if TYPE_CHECKING:
    from optimizations.selection.member import Followed, Member

LOOK_EVERY = 128
"""Calls of the leader from the verdict to the first look at the circumstances. After each look it is twice as long."""

LONGEST_LOOK_EVERY = 1024
"""Calls of the leader from one look to the next at most."""

LONGEST_PAUSE = 64
"""Calls between two looks of a group that waits."""

_MAY_BE_STORED = {MOVES_NOW: (True,), RESTS_NOW: (False,)}
"""Values of `Circumstances.moving` that verdicts may have, after one was given up for this reason; else none."""


class Served:
    """Attributes:
    number: tells groups apart in reports.
    members: its functions.
    state, reason: see `report.selection.SelectionReport`.
    decision: the verdict; None while there is none.
    stored: the stored verdict that it is, or that this rank voted by.
    not_stored: why the verdict is not stored.
    """

    def __init__(self, member: Member) -> None:
        self.number = next(_NUMBERS)
        self._objective = member.settings.objective
        self.members = Members(member)
        self.state: State = "waiting"
        self.reason: str | None = "no graph was recorded yet"
        self.decision: Decision | None = None
        self.stored: StoredVerdict | None = None
        self.not_stored: str | None = None
        self._measurement: Measurement | None = None
        self._leader: int | None = None
        self._leading = Leading(self.members)
        self._circumstances = Circumstances()
        self._series = Series()
        self._memory = Borrowed()
        self._together = ranks.Together()
        self._may_be_stored: tuple[bool, ...] = EITHER  # what may hold, by whether inputs move
        self._asks_store = False
        self._gave_up: StoredVerdict | None = None  # the last one
        self._pauses = self._resting = 0
        self._rested: Counter[int] = Counter()
        self._followed: weakref.WeakKeyDictionary[Followed, int] | None = None
        self._look_every = LOOK_EVERY
        self._retiring = False
        self._gave_way = self._is_profiled = False
        self._caller = Caller()
        self._look_in_store(member)

    def _pause(self) -> None:
        self._pauses = min(2 * self._pauses + 1, LONGEST_PAUSE)
        self._resting = sum(1 for _ in self.members)
        self._rested.clear()
        self.members.rest(self._pauses)

    def _look_at_once(self) -> None:
        self._pauses = self._resting = 0
        self._rested.clear()
        self.members.rest(0)

    def _rests(self, member: Member) -> bool:
        """Whether it is too soon to look again whether measuring may begin: a look is one at all members. It comes
        when pauses were over as often as there are members. One may be called a hundred times in an iteration."""
        self._rested[member.serial] += 1
        if self._resting <= 1:
            return False
        self._resting -= 1
        member.pause = self._pauses
        return True

    def _recorded_behind_s(self) -> float | None:
        """How long recording took what would be recorded again behind calls without a graph; None where it is not
        known yet. Only what was replayed since it was last asked is in use. Other groups may have left recordings in
        the tree that never come again."""
        before, self._followed = self._followed, None
        found = self.members.recorded_behind()
        if before is None and found:
            self._followed = weakref.WeakKeyDictionary({one: one.replays for one in found})
            return None
        return sum(one.recording_s for one in found if before is not None and one.replays > before.get(one, 0))

    @property
    def _calls_since_asked(self) -> int:
        """Of the member that was called most, since it was last looked whether measuring may begin."""
        return (self._pauses + 1) * max(self._rested.values(), default=1)

    def _take(self, decision: Decision) -> None:
        self.decision = decision
        self.state, self.reason = "decided", None
        self._measurement = None
        self._together.voted = None
        self._circumstances.restart()
        WAY.leave(self)
        # Where nothing could be read in place both are served alike, and later recordings are looked at all the same.
        left_open = decision.kept == "copy" and not self._compared_in_place
        self.members.serve(UNSELECTED if left_open else candidate(decision.kept))
        if decision.kept == "none":
            self._retiring = True  # the manager is to see the next call: it frees what is not needed any more
            for one in self.members.functions:
                one.retire()
            self._memory.keep()
        else:
            self._memory.end()
        self._look_every = LOOK_EVERY
        self.members.rest(LOOK_EVERY)

    @property
    def _compared_in_place(self) -> bool:
        """Whether the verdict was chosen from a graph that reads inputs in place, too. Ranks go by what they agreed."""
        if ranks.count() > 1:
            return True
        measured = self.selector.candidates if self.selector is not None else CANDIDATES
        return UNSELECTED in (measured if self.stored is None else self.stored.candidates)

    def _look_in_store(self, member: Member) -> None:
        found = stored_for(member, CANDIDATES) if ranks.count() == 1 else None
        given_up = self._given_up_before(found) if found is not None else None
        if given_up is not None:
            self._may_be_stored = given_up
            found = stored_for(member, CANDIDATES, self._moving)
        if found is not None:
            self._take_stored(member, found)

    def _take_stored(self, member: Member, found: StoredVerdict) -> None:
        """A verdict that was stored for this member, and for the others."""
        self.stored, self.not_stored = found, None
        if found.leads:  # of others it is not known whether their inputs moved
            self._circumstances.moving = found.circumstances.moving
            self._leader = member.serial
        self._take(Decision(found.kept, found.outcome, (), frozenset()))

    @property
    def _moving(self) -> list[bool]:
        """Values of `Circumstances.moving` for which the store is asked. What was seen last comes first."""
        return sorted(self._may_be_stored, key=lambda one: one is not self._circumstances.moving)

    def _asked_store(self) -> bool:
        """Whether the store, if it is to be asked before this group is measured, has a verdict, which serves now."""
        asks, self._asks_store = self._asks_store, False
        found = stored_together(self.members, CANDIDATES, self._moving) if asks and ranks.count() == 1 else None
        if found is not None:
            self._take_stored(*found)
        return found is not None

    def _follow(self, other: Served) -> None:
        """Look where the other group looked, if an iteration begins there. Both are served by one stored verdict."""
        if other.stored is not None and other.stored.leads:
            self.stored, self._leader, self._circumstances = other.stored, other._leader, other._circumstances

    def _given_up_before(self, found: StoredVerdict) -> tuple[bool, ...] | None:
        """Where functions that were judged together with this one had this verdict and gave it up: values of
        `Circumstances.moving` that may hold now. Who groups are is known in `group`."""
        return None

    def is_served_by(self, stored: StoredVerdict) -> bool:
        """Whether this verdict, which was stored for functions together, serves here."""
        return self.state == "decided" and self.stored is not None and self.stored.is_with(stored)

    def void_with(self, reason: str) -> None:
        """The stored verdict does not hold for functions that are not here. As `give_way`."""
        self._series.void(reason)
        self.ask_again(reason)

    def ask_again(self, reason: str) -> None:
        """No verdict serves any more: take the one that is stored for what there is now, or measure. As `give_way`."""
        self._gave_up, self.stored = self.stored or self._gave_up, None
        self._may_be_stored, self._asks_store = _MAY_BE_STORED.get(reason, ()), True
        self._stop_measuring(reason)

    def _void(self, reason: str) -> bool:
        """Give the verdict up; False where it stands. Where inputs move or rest now, one for that may be stored."""
        was_measured = self.stored is None and self.selector is not None
        if not self._series.void(reason):
            return False
        self._gave_up, self.stored = self.stored or self._gave_up, None
        self._may_be_stored = _MAY_BE_STORED.get(reason, ())
        other = stored_together(self.members, CANDIDATES, self._moving)
        if other is not None and ranks.count() == 1:
            self._take_stored(*other)
        elif other is None and not was_measured and self.members.settings[0].mode == "stored":
            self._off(f"the stored verdict does not hold: {reason}")
        else:
            self._wait(reason)
        return True

    def _lose_turn(self) -> None:
        if self._measurement is not None:
            self._measurement.lose_turn()

    # States

    def _wait(self, reason: str) -> None:
        self._stop_measuring(reason)
        self.members.serve(UNSELECTED)

    def _stop_measuring(self, reason: str) -> None:
        self._lose_turn()
        self._series.charge()
        WAY.leave(self)
        self.decision = self._together.voted = self._measurement = None
        self.state, self.reason = "waiting", reason
        self._memory.end()
        self._followed = None
        self._look_at_once()

    def _off(self, reason: str, *, tell: bool = True) -> None:
        """`tell`: other ranks, which then select nothing either."""
        self._wait(reason)
        self.state = "off"
        self.members.rest(FOR_EVER)
        names = self.members.shared_names if tell and ranks.count() > 1 else None
        if names is not None:
            self._together.refuse(names, reason)

    def _defect(self, error: Exception) -> None:
        """Note [Doubt]."""
        reason = f"selection failed: {one_line(error)}"
        self.state, self.reason, self.decision, self._measurement = "off", reason, None, None
        self._memory.end()
        WAY.leave(self)
        self.members.rest(FOR_EVER)
        self.members.serve(UNSELECTED)

    # What others read

    @property
    def selector(self) -> Selector | None:
        """What measures; None where nothing was measured that counts."""
        return self._series.selector

    @property
    def is_gone(self) -> bool:
        """See `way.Measured`."""
        return not any(True for _ in self.members)

    def give_way(self) -> None:
        """See `way.Measured`. Note [Locks] in `group`: another group's call, so the next own one changes who serves."""
        self._stop_measuring("it was not called while it was to be measured")
        self._gave_way = True

    def wake(self) -> None:
        """See `way.Measured`."""
        if self.state == "waiting":
            self._look_at_once()

    def lose(self, reason: str) -> None:
        """A function that was measured with the others is left out. As `give_way`."""
        self._series.forget_times()
        self._stop_measuring(reason)

    def end(self, reason: str) -> None:
        """No function is left. What was decided stays what is reported."""
        if self.state != "decided":
            self._stop_measuring(reason)
            self.state = "off"
        WAY.leave(self)

    def describe(self, direction: Direction) -> SelectionReport:
        """The report of a member whose graphs run in this direction."""
        return describe(
            direction,
            self.state,
            self.reason,
            self.number,
            len(self.members),
            self._objective,
            self.selector,
            self._series.spent,
            self._series.voided,
            self.decision,
            self.stored,
            self.not_stored,
            total_s(self.members.settings),
        )

    @property
    def settled(self) -> bool:
        """Whether more calls would change nothing. What was never recorded waits for nothing, and a vote for ranks; nor
        does what was not called for so long that it gave way: the program may never call it again."""
        if self.state in ("decided", "off") or self._together.voted is not None or self._gave_way:
            return True
        standings = self.members.standings()
        return not standings or any(not one.recordings for one in standings)


_NUMBERS = itertools.count(1)
