"""One stretch of measuring a group: which of the program's calls is whose turn, and which times count.

What is timed is an *iteration*: from the call of the first member (the leader) to the end of the last one, what the
program does in between included. An iteration counts if its calls were those that were learned before measuring began,
and each was served as it was to be.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping

from optimizations.selection import timing
from optimizations.selection.order import Order
from optimizations.selection.overlap import Overlap
from optimizations.selection.schedule import Turn
from optimizations.selection.selector import Selector
from optimizations.selection.timing import Timer, Timing

MOST_UNDER_WAY = 192
"""Times that may be outstanding where nobody waits for the device. More turns are not given until some came in: what is
not known yet can end no candidate that is slow, and counts in no budget."""

Counts = Mapping[int, tuple[int, int]]
"""Of each member: calls without a graph, and recordings, so far."""


class Measurement:
    """See the module.

    Args:
        waits: whether the timer waits for the device.

    Attributes:
        selector: whose turns are served.
        leader: the member that begins an iteration; None until it is known.
        traced: whether something followed what Python did in an iteration that was measured.
    """

    def __init__(self, selector: Selector, timer: Timer, *, waits: bool = False) -> None:
        self.selector = selector
        self.leader: int | None = None
        self.traced = False
        self._timer = timer
        self._order = Order()
        self._turn: Turn | None = None
        self._timed: tuple[Turn, Timing] | None = None
        self._before: Counts = {}
        self._under_way: deque[tuple[Turn, Timing]] = deque()
        self._overlap = Overlap() if waits else None
        self._began = 0.0

    # An iteration

    def begin_iteration(self, members: Collection[int], backwards: Collection[int] = ()) -> bool:
        """The leader is about to be called: the iteration before is over, if its calls are. Whether they are."""
        now = time.perf_counter()
        complete = self._order.complete
        if not self._order.begin(members, backwards):
            return False
        if self._timed is not None and complete:
            self._under_way.append(self._timed)
            self._note_overlap(self._timed[0], now - self._began)
            self._timed = None
        elif self._overlap is not None and not complete:
            self._overlap.disturbed()
        if self._overlap is not None:
            self._overlap.begins(now)
        self._began = now
        self.lose_turn()
        self._collect()
        return True

    def called(self, member: int) -> None:
        """To be told of each call, after `begin_iteration` where it is the leader's."""
        self._order.called(member)

    @property
    def knows_order(self) -> bool:
        """Whether it is known which calls make an iteration."""
        return self._order.learned is not None

    @property
    def another_order(self) -> bool:
        """Whether iterations are other calls now than those that were measured."""
        return self._order.changed

    @property
    def hopeless(self) -> bool:
        """Whether calls never follow one another in one order."""
        return self._order.hopeless

    # What waiting costs

    @property
    def leaves_alone(self) -> bool:
        """Whether this iteration is to be nobody's turn, because what waiting costs is found out."""
        return self._overlap is not None and self._overlap.leaves_alone and self.selector.at_block_start

    def leave_alone(self) -> bool:
        """This iteration is such a one. Whether `start` follows."""
        assert self._overlap is not None
        self.selector.passed()
        return self._overlap.iteration_left_alone()

    def _note_overlap(self, turn: Turn, seconds: float) -> None:
        if self._overlap is None:
            return
        self._overlap.iteration_measured()
        # Iterations served as those that were left alone; the first of a block follows others.
        if turn.candidate == self.selector.candidates[-1] and turn.place:
            self._overlap.measured(seconds)
            self.selector.lost_by_waiting(self._overlap.lost_s)

    # A turn

    def next_turn(self) -> Turn | None:
        """Whose turn this iteration is; None where it is nobody's, or all is decided."""
        if len(self._under_way) >= MOST_UNDER_WAY and self.selector.at_block_start:
            self.selector.passed()
            return None
        return self.selector.next_turn()

    def begin(self, turn: Turn, counts: Counts) -> None:
        """This iteration is this turn; `start` follows."""
        self._before = counts
        self._turn = turn

    def start(self) -> None:
        """Right before the leader's call. May wait for the device."""
        self.traced = self.traced or timing.is_traced()
        self._timer.begin()
        if self._overlap is not None:
            self._overlap.waited(time.perf_counter())

    @property
    def ends_here(self) -> bool:
        """Whether the call that just returned was the last of an iteration that is timed."""
        return self._turn is not None and self._order.complete

    def stop(self) -> Timing:
        """To be called where it `ends_here`, right after the call. May wait for the device."""
        return self._timer.end()

    def end(self, measured: Timing, counts: Counts) -> None:
        """What `stop` gave."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        if self._was_served_as_asked(turn, counts):
            self._timed = turn, measured  # it counts if no more calls follow in this iteration
        else:
            self.selector.lost(turn)

    def lose_turn(self) -> None:
        """The iteration that is timed, if one is, does not count."""
        lost = [one for one in (self._turn, self._timed[0] if self._timed else None) if one is not None]
        self._turn = self._timed = None
        for turn in lost:
            self.selector.lost(turn)

    def void(self, reason: str) -> bool:
        """See `Selector.void`. Times that are under way are of before, and count no more."""
        if not self.selector.void(reason):
            return False
        self._turn = self._timed = None
        self._under_way.clear()
        return True

    def _was_served_as_asked(self, turn: Turn, counts: Counts) -> bool:
        assert self._order.learned is not None
        called = Counter(self._order.learned)
        for member, (uncaptured, recordings) in counts.items():
            before = self._before[member]
            wanted = called[member] if turn.candidate == "none" else 0
            if (uncaptured - before[0], recordings - before[1]) != (wanted, 0):
                return False
        return True

    def _collect(self) -> None:
        """Times that have come in."""
        while self._under_way:
            turn, measured = self._under_way[0]
            seconds = measured.seconds()
            if seconds is None:
                return
            self._under_way.popleft()
            if seconds > 0:
                self.selector.record(turn, seconds)
            else:
                self.selector.lost(turn)
