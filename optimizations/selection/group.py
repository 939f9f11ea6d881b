"""Functions that are judged together, and how their calls are served while they are and afterwards.

A group is one function of Inductor's, or several whose graphs hand results to one another in graph memory: without the
graph of the first, the second would have its inputs elsewhere. A forward and its backward are a group. All members are
served alike: by the generated function (`none`), by the graph with its inputs copied (`copy`), or by the graph that
reads them in place (`indirection`).

What is timed is an *iteration*: from the call of the first member (the leader) to the end of the last one, what the
program does in between included. An iteration counts if its calls were those that were learned before measuring began,
and each was served as it was to be.

    waiting     graphs are not as they will stay yet, or another group is being measured; calls are served as without
                selection
    measuring   the order of calls in an iteration is learned; then each iteration is a turn of `Selector`
    decided     the verdict serves; every `LOOK_EVERY` calls of the leader it is looked whether it still holds
    off         as without selection, for a reason

Note [Doubt]. Every call is served exactly once, by the function that is called here, whatever selection does before and
after. What fails in selection itself switches it off for the group, with the reason, and reaches no program. Exceptions
of the program pass through.

Note [What makes a verdict void]. Inputs whose addresses moved from call to call and do not any more, or the other way
round: reading in place may pay off now. Another stream. A new shape is another function, with a verdict of its own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimizations import torch_internals
from optimizations.report.recordings import Direction
from optimizations.report.selection import SelectionReport, State
from optimizations.selection import timing
from optimizations.selection.decide import Decision
from optimizations.selection.description import describe
from optimizations.selection.keeping import store, stored_for
from optimizations.selection.movement import Movement
from optimizations.selection.order import Order
from optimizations.selection.schedule import Turn
from optimizations.selection.selector import Selector, Spent
from optimizations.selection.settings import BUDGET_SHARE, refused_for_ranks
from optimizations.selection.verdict import StoredVerdict
from optimizations.selection.way import WAY

if TYPE_CHECKING:
    from optimizations.selection.member import Candidate, Member

CANDIDATES: tuple[Candidate, ...] = ("none", "copy", "indirection")
"""Simplest first."""

UNSELECTED: Candidate = "indirection"
"""How calls are served without selection."""

LOOK_EVERY = 128
"""Calls of the leader from one look at the circumstances to the next."""

WINDOW = 9
"""Consecutive calls of one look."""

MOST_RESTARTS = 8
"""Times that measuring begins again because graphs changed; then the group is left as it is."""

LONGEST_PAUSE = 64
"""Calls between two looks of a group that waits."""


class Group:
    """See the module."""

    def __init__(self, member: Member) -> None:
        self.number = next(_NUMBERS)
        self._objective = member.settings.objective
        self.members: dict[int, weakref.ref[Member]] = {member.serial: weakref.ref(member)}
        self.state: State = "waiting"
        self.reason: str | None = "no graph was recorded yet"
        self.selector: Selector | None = None
        self.decision: Decision | None = None
        self.stored: StoredVerdict | None = None
        self.not_stored: str | None = None
        self._timer: timing.Timer | None = None
        self._leader: int | None = None
        self._order = Order()
        self._turn: Turn | None = None
        self._timed: tuple[Turn, timing.Timing] | None = None
        self._before: dict[int, tuple[int, int]] = {}
        self._under_way: deque[tuple[Turn, timing.Timing]] = deque()
        self._serving: Candidate = UNSELECTED
        self._pauses = 0
        self._movement = Movement()
        self._window = 0
        self._stream: int | None = None
        self._moving = False
        self._earlier = Spent()
        self._restarts = 0
        self._voided: tuple[str, ...] = ()
        _GROUPS.add(self)
        self._look_in_store(member)

    # Membership

    def _alive(self) -> Iterator[Member]:
        for reference in list(self.members.values()):
            member = reference()
            if member is not None and member.function is not None:
                yield member

    def join(self, other: Group) -> None:
        """Take the other group's members in. What was measured of either alone says nothing of both."""
        if other is self:
            return
        with _LOCK:
            agreed = (
                self.stored is not None and other.stored is not None and self.stored.kept == other.stored.kept
            ) or "off" in (self.state, other.state)
            off = self.reason if self.state == "off" else other.reason if other.state == "off" else None
            WAY.leave(other)
            for member in other._alive():
                member.group = self
            self.members.update(other.members)
            other.members = {}
            if agreed and off is None:
                self._rest(LOOK_EVERY)
                return
            self.stored = None
            self._forget_times()
            if off is not None:
                self._off(off)
            else:
                self._wait("more graphs belong together than were known")

    # The program's calls

    def call(self, member: Member, recorded: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """A call of the program, served by `recorded`. Note [Doubt]."""
        with _LOCK:
            try:
                self._begin_call(member, inputs)
            except Exception as error:
                self._defect(error)
        try:
            outputs = recorded(inputs)
        except BaseException:
            with _LOCK:
                self._lose_turn()
            raise
        with _LOCK:
            try:
                self._end_call(member)
            except Exception as error:
                self._defect(error)
        return outputs

    def _begin_call(self, member: Member, inputs: Sequence[Any]) -> None:
        if not timing.may_time():
            self._lose_turn()
            return
        if self.state == "decided":
            self._look(member, inputs)
        elif self.state == "waiting":
            self._try_to_begin()
        elif self.state == "measuring":
            if self._leader is None and not member.producers & self.members.keys():
                self._leader = member.serial
            if self._leader is None:
                return
            if member.serial == self._leader:
                self._begin_iteration(member, inputs)
            self._order.called(member.serial)

    def _end_call(self, member: Member) -> None:
        if self._turn is None or self.state != "measuring" or not self._order.complete:
            return
        assert self._timer is not None and self.selector is not None
        turn, self._turn = self._turn, None
        measured = self._timer.end()
        if self._was_served_as_asked(turn):
            self._timed = turn, measured  # it counts if no more calls follow in this iteration
        else:
            self.selector.lost(turn)

    # Waiting

    def _try_to_begin(self) -> None:
        self._serve(UNSELECTED)
        members = list(self._alive())
        settings = members[0].settings
        if settings.mode == "stored":
            self._off("there is no stored verdict for it")
            return
        refusal = refused_for_ranks()
        if refusal is not None:
            self._off(refusal)
            return
        standings = [one.function.standing() for one in members if one.function is not None]
        refusal = next((one.refused for one in standings if one.refused is not None), None)
        if refusal is None and any(one.threads > 1 for one in standings):
            refusal = "several threads call it"
        if refusal is not None:
            self._off(refusal)
            return
        self.reason = next((one.waiting for one in standings if one.waiting is not None), None)
        if self.reason is None and not WAY.take(self):
            self.reason = "another group is being measured"
        if self.reason is not None:
            self._pauses = min(2 * self._pauses + 1, LONGEST_PAUSE)
            self._rest(self._pauses)
            return
        refusal = next((short for one in members if one.function and (short := one.function.short_of_memory())), None)
        if refusal is not None:
            self._off(refusal)
            return
        in_place = any(one.in_place for one in standings)
        self._begin_measuring(CANDIDATES if in_place else CANDIDATES[:2], members)

    def _begin_measuring(self, candidates: Sequence[Candidate], members: Sequence[Member]) -> None:
        compile_s = sum({id(one.settings): one.settings.compile_s for one in members}.values())
        settings = members[0].settings
        if self.selector is None or self.selector.candidates != tuple(candidates) or self.selector.decision is not None:
            self._forget_times()
            self.selector = Selector(
                candidates,
                settings.rules,
                budget_s=BUDGET_SHARE * compile_s if compile_s else None,
                seed=self.number,
                earlier=self._earlier,
                voided=self._voided,
            )
        self.state, self.reason = "measuring", None
        self._pauses = 0
        self._leader = None
        self._order = Order()
        self._movement.restart()
        self._timer = timing.timer_for(settings.objective, members[0].device_index)
        for member in members:
            member.pause = 0

    def _begin_again(self, reason: str) -> None:
        """What was measured is not what there is now. Not for ever: a program may record all the time."""
        self._forget_times()
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            self._off(f"measuring began {self._restarts} times: {reason}")
        else:
            self._wait(reason)

    def _forget_times(self) -> None:
        """What was measured does not count any more; what it cost does."""
        if self.selector is not None:
            self._earlier, self._voided = self.selector.spent, tuple(self.selector.voided)
            self.selector = None

    # Measuring

    def _begin_iteration(self, leader: Member, inputs: Sequence[Any]) -> None:
        assert self.selector is not None
        WAY.used(self)
        if self._timed is not None and self._order.complete:
            self._under_way.append(self._timed)
            self._timed = None
        self._lose_turn()
        self._order.begin(self.members)
        if self._order.hopeless:
            self._off("its calls never follow one another in one order")
            return
        if self._order.learned is None:
            return
        self._collect()
        self._conclude()
        if self.state != "measuring":
            return
        members = list(self._alive())
        if len(members) != len(self.members):
            self.members = {one.serial: weakref.ref(one) for one in members}
            self._begin_again("a function of the group is gone")
            return
        refusal = refused_for_ranks()
        if refusal is not None:
            self._off(refusal)
            return
        standings = [one.function.standing() for one in members if one.function is not None]
        if any(one.waiting is not None for one in standings):
            self._begin_again("its graphs were recorded again while it was measured")
            return
        stream = torch_internals.current_raw_stream(leader.device_index)
        if self._stream not in (None, stream):
            self.selector.void("the program went on to another stream")
        self._stream = stream
        self._note_addresses(leader, inputs)
        turn = self.selector.next_turn()
        if turn is None:
            self._conclude()
            return
        self._serve(_candidate(turn.candidate))
        self._before = {one.serial: self._counts(one) for one in members}
        self._turn = turn
        assert self._timer is not None
        self._timer.begin()

    def _counts(self, member: Member) -> tuple[int, int]:
        assert member.function is not None
        standing = member.function.standing()
        return standing.uncaptured, standing.recordings

    def _was_served_as_asked(self, turn: Turn) -> bool:
        assert self._order.learned is not None
        for member in self._alive():
            uncaptured, recordings = self._counts(member)
            before = self._before[member.serial]
            wanted = self._order.learned.count(member.serial) if turn.candidate == "none" else 0
            if (uncaptured - before[0], recordings - before[1]) != (wanted, 0):
                return False
        return True

    def _lose_turn(self) -> None:
        lost = [one for one in (self._turn, self._timed[0] if self._timed else None) if one is not None]
        self._turn = self._timed = None
        for turn in lost:
            if self.selector is not None:
                self.selector.lost(turn)

    def _collect(self) -> None:
        """Times that have come in."""
        assert self.selector is not None
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

    def _conclude(self) -> None:
        if self.selector is None or self.selector.decision is None:
            return
        self._moving = self._movement.moves(self._moving)
        self._take(self.selector.decision)
        members = sorted(self._alive(), key=lambda one: one.serial)
        self.not_stored = store(members, self.selector, moving=self._moving)

    # A verdict

    def _take(self, decision: Decision) -> None:
        self.decision = decision
        self.state, self.reason = "decided", None
        self._turn = self._timed = None
        self._under_way.clear()
        self._timer = None
        self._movement.restart()
        self._window = 0
        WAY.leave(self)
        self._serve(_candidate(decision.kept))
        self._rest(LOOK_EVERY)

    def _look_in_store(self, member: Member) -> None:
        found = stored_for(member, CANDIDATES)
        if found is None:
            return
        self.stored = found
        self._moving = found.moving
        self._leader = member.serial
        self._take(Decision(found.kept, found.outcome, (), frozenset()))

    # Note [What makes a verdict void]

    def _look(self, member: Member, inputs: Sequence[Any]) -> None:
        if member.serial != self._leader:
            member.pause = LOOK_EVERY
            return
        if self._window == 0:
            self._movement.restart()
            refusal = refused_for_ranks()
            if refusal is not None:
                self._off(refusal)
                return
            stream = torch_internals.current_raw_stream(member.device_index)
            changed = self._stream not in (None, stream)
            self._stream = stream
            if changed and self._void("the program went on to another stream"):
                return
        self._note_addresses(member, inputs)
        self._window += 1
        if self._window < WINDOW:
            return
        self._window = 0
        member.pause = LOOK_EVERY
        moving = self._movement.moves(self._moving)
        if moving != self._moving:
            self._moving = moving
            self._void(
                "inputs move from call to call now" if moving else "inputs do not move from call to call any more"
            )

    def _note_addresses(self, leader: Member, inputs: Sequence[Any]) -> None:
        watched = (inputs[index] for index in leader.watched)
        self._movement.note([value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in watched])

    def _void(self, reason: str) -> bool:
        """Give the verdict up; False where it stands."""
        if self.stored is None and self.selector is not None:
            if not self.selector.void(reason):
                return False
        elif next(self._alive()).settings.mode == "stored":
            self._off(f"the stored verdict does not hold: {reason}")
            return True
        self.stored = None
        self._wait(reason)
        return True

    # States

    def _wait(self, reason: str) -> None:
        self._lose_turn()
        WAY.leave(self)
        self.decision = None
        self._under_way.clear()
        self.state, self.reason = "waiting", reason
        self._serve(UNSELECTED)
        self._rest(0)

    def _off(self, reason: str) -> None:
        self._wait(reason)
        self.state = "off"
        self._rest(_FOR_EVER)

    def _defect(self, error: Exception) -> None:
        """Note [Doubt]."""
        self._turn = self._timed = None
        reason = f"selection failed: {type(error).__name__}: {error}".splitlines()[0]
        self.state, self.reason, self.decision = "off", reason, None
        WAY.leave(self)
        for member in self._alive():
            member.pause = _FOR_EVER
            if member.function is not None:
                member.function.serve(UNSELECTED)

    def _rest(self, calls: int) -> None:
        """Serve this many calls of each member without a look."""
        for member in self._alive():
            member.pause = calls

    def _serve(self, candidate: Candidate) -> None:
        self._serving = candidate
        for member in self._alive():
            if member.function is not None:
                member.function.serve(candidate)

    # What others read

    @property
    def is_gone(self) -> bool:
        """See `way.Measured`."""
        return not any(True for _ in self._alive())

    def give_way(self) -> None:
        """See `way.Measured`."""
        self._wait("it was not called while it was to be measured")

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
            self.decision,
            self.stored,
            self.not_stored,
        )

    @property
    def settled(self) -> bool:
        """Whether more calls would change nothing. What was never recorded waits for nothing."""
        if self.state in ("decided", "off"):
            return True
        standings = [one.function.standing() for one in self._alive() if one.function is not None]
        return not standings or any(not one.recordings for one in standings)


_NUMBERS = itertools.count(1)
_FOR_EVER = 1 << 62
_LOCK = threading.RLock()
"""Of all groups: they are joined, and make way for each other. Not held while a call is served."""

_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()


def settled() -> bool:
    """Whether no group waits for more calls of the program."""
    return all(group.settled for group in list(_GROUPS))


def _candidate(name: str) -> Candidate:
    return next(one for one in CANDIDATES if one == name)
