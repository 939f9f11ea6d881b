"""Functions that are judged together, and how their calls are served while they are and afterwards.

A group is one function of Inductor's, or several whose graphs hand results to one another in graph memory: without the
graph of the first, the second would have its inputs elsewhere. A forward and its backward are a group. All members are
served alike: by the generated function (`none`), by the graph with its inputs copied (`copy`), or by the graph that
reads them in place (`indirection`).

    waiting     graphs are not as they will stay yet, another group is being measured, or other ranks have not voted;
                calls are served as without selection
    measuring   iterations are turns of `Selector` (`measurement`)
    decided     the verdict serves; after `LOOK_EVERY` calls of the leader, and then ever more, it is looked whether it
                still holds (`validity`)
    off         as without selection, for a reason

Note [Doubt]. Every call is served exactly once, by the function that is called here, whatever selection does before and
after. What fails in selection itself switches it off for the group, with the reason, and reaches no program. Exceptions
of the program pass through.

Note [Locks]. How a function is served is changed under its manager's turn, so never in the middle of a call that
another thread makes; the turn comes before the lock of all groups. Nobody holds either while waiting for the device:
what the device waits for may be what another thread has still to launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimizations.selection import ranks, timing
from optimizations.selection.caller import ANOTHER_THREAD
from optimizations.selection.keeping import store
from optimizations.selection.leading import Leading
from optimizations.selection.measurement import Measurement
from optimizations.selection.members import (
    CANDIDATES,
    SEVERAL_THREADS,
    UNSELECTED,
    candidate,
    refusal,
    refusal_of_all,
)
from optimizations.selection.selector import Selector
from optimizations.selection.served import LONGEST_LOOK_EVERY, LOOK_EVERY
from optimizations.selection.validity import ANOTHER_STREAM, READ_IN_PLACE_NOW
from optimizations.selection.verdict import StoredVerdict, compared
from optimizations.selection.voting import NOT_STORED, Voting
from optimizations.selection.way import WAY
from optimizations.weak_registry import WeakRegistry

if TYPE_CHECKING:
    from optimizations.selection.member import Candidate, Member, Standing

GONE = "a function of the group is gone"
TOO_LITTLE = "too little was measured to tell candidates apart"
TRACED = "Python was traced or profiled while it was measured, which makes some candidates slower than others"
INTERRUPTED = "an interrupt came while measuring began or ended"
OUT_OF_MEMORY = "memory: a call without a graph ran out of it"

NOT_LED = "the function that its iterations begin with is not called any more"


class Group(Voting):
    """See the module."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        _GROUPS.add(self)

    # Membership

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
            self._memory.take_over(other._memory)
            self._caller.take_over(other._caller)
            for member in other.members:
                member.group = self
            self.members.take_from(other.members)
            self._together.forget()
            if agreed and off is None:
                self._follow(other)
                self.members.rest(LOOK_EVERY)
                return
            # Either may have found a verdict of another program's. One on all of them may be there, too.
            found = self.stored or other.stored
            self._asks_store = self._asks_store or other._asks_store or found is not None
            self._may_be_stored = tuple(one for one in self._may_be_stored if one in other._may_be_stored)
            self.stored = None
            self._series.take_over(other._series)
            if off is not None:
                self._off(off)
            else:
                self._wait("more graphs belong together than were known")

    # The program's calls

    def call(
        self,
        member: Member,
        recorded: Callable[[list[Any]], Any],
        plain: Callable[[list[Any]], Any],
        inputs: list[Any],
    ) -> Any:
        """A call of the program, served by `recorded`, or without a graph by `plain`. Notes [Doubt], [Locks]."""
        timed: Measurement | None = None
        with member.turn, _LOCK:
            if member.group is self:
                try:
                    timed = self._begin_call(member, inputs)
                except Exception as error:
                    self._defect(error)
        if member.group is not self:  # it was joined by another thread's recording
            return member.group.call(member, recorded, plain, inputs)
        self._give_memory_back(member)
        if timed is not None:
            self._start(member, timed)
        without_graph = member.plainly and not self._retiring
        try:
            outputs = plain(inputs) if without_graph else recorded(inputs)
        except BaseException as error:
            self._call_failed(member, error, without_graph=without_graph)
            raise
        self._retiring = False
        measurement = self._measurement
        if measurement is not None and measurement.ends_here:
            self._end(member, measurement)
        return outputs

    def _give_memory_back(self, member: Member) -> None:
        try:
            if self._memory.due:
                self._memory.give_back()
        except Exception as error:
            with member.turn, _LOCK:
                self._defect(error)

    def _start(self, member: Member, measurement: Measurement) -> None:
        try:
            measurement.start()
        except Exception as error:
            with member.turn, _LOCK:
                self._defect(error)
            self._give_memory_back(member)

    def _end(self, member: Member, measurement: Measurement) -> None:
        try:
            measured = measurement.stop()  # before anything else is done: it would be timed
            with member.turn, _LOCK:
                if self._measurement is measurement:
                    measurement.end(measured, self.members.counts())
        except Exception as error:
            with member.turn, _LOCK:
                self._defect(error)
            self._give_memory_back(member)  # now: the group may not be called again

    def _call_failed(self, member: Member, error: BaseException, *, without_graph: bool) -> None:
        with member.turn, _LOCK:
            try:
                self._lose_turn()
            except Exception as defect:
                self._defect(defect)
        if without_graph and isinstance(error, torch.OutOfMemoryError):
            self.ran_out_of_memory(member)

    def ran_out_of_memory(self, member: Member) -> None:
        """A call without a graph did. With one the program would have gone on, and it does when it calls again."""
        with member.turn, _LOCK:
            try:
                self._off(OUT_OF_MEMORY)
            except Exception as defect:
                self._defect(defect)
        self._give_memory_back(member)

    def _begin_call(self, member: Member, inputs: Sequence[Any]) -> Measurement | None:
        """What begins with this call and is to be timed; None where nothing is."""
        if not timing.may_time():
            self._lose_turn()
            return None
        if self._measurement is not None and timing.is_profiled():
            if not self._is_profiled:  # a group may have hundreds of functions, and each is called
                self._lose_turn()
                self.members.serve(UNSELECTED)
                self._is_profiled = True
            return None
        self._is_profiled = False
        if self.state == "decided":
            self._look(member, inputs)
            return None
        if self.state == "off":
            return None
        if self._asked_store():
            return None
        if self._is_elsewhere(member):
            return None
        if self.state == "measuring" and self._measurement is None:
            self._wait(INTERRUPTED)
        if self.state == "waiting":
            if self._rests(member):
                return None
            self._try_to_begin()
        elif self._measurement is not None:
            return self._measured_call(self._measurement, member, inputs)
        return None

    def _measured_call(self, measurement: Measurement, member: Member, inputs: Sequence[Any]) -> Measurement | None:
        if self._leader is None and self._leading.begins_with(member):
            self._leader = member.serial
        begun = False
        if member.serial == self._leader:
            self._leading.has_begun()
            begun = self._begin_iteration(member, inputs)
        elif not self._leading.may_come(self._leader):
            self._begin_again(NOT_LED)
        if self._measurement is None:
            return None
        if self._leader is not None:
            measurement.called(member.serial)
        return measurement if begun else None

    def _is_elsewhere(self, member: Member) -> bool:
        """Whether this call says nothing, for it is not on the thread of those before. See `caller`."""
        caller = self._caller
        if member.direction == "backward":  # it has a thread of its own, and follows its forward
            return caller.is_elsewhere
        found = caller.note()
        if caller.take_turns:
            self._off(SEVERAL_THREADS)
        elif found == "elsewhere":
            self._lose_turn()
            self._look_at_once()  # at each call: whether it is for good
        elif found == "moved" and self.state == "measuring":
            self._begin_again(ANOTHER_THREAD)
        else:
            return False
        return True

    def _note_missed(self, standings: Sequence[Standing]) -> None:
        """Threads that called while nobody looked called this group, if no other has graphs in its pool."""
        threads = frozenset().union(*(one.threads for one in standings))
        if not threads <= self._caller.seen:
            turns = [one.turn for one in self.members]
            others = (member for group in _GROUPS.alive() if group is not self for member in group.members)
            if not any(other.turn is turn for other in others for turn in turns):
                self._caller.missed(threads)

    # Waiting

    def _try_to_begin(self) -> None:
        self._gave_way = False
        self.members.serve(UNSELECTED)
        members, standings = list(self.members), self.members.standings()
        refused = refusal_of_all(standings)
        if refused is not None:
            self._off(refused, tell=False)
            return
        if self._together.voted is not None:
            self._hear(self._together.voted)
            return
        if ranks.count() == 1 and members[0].settings.mode == "stored":
            self._off(NOT_STORED)
            return
        self._note_missed(standings)
        refused = refusal(standings, self._caller.seen)
        if refused is not None:
            self._off(refused)
            return
        self.reason = next((one.waiting for one in standings if one.waiting is not None), None) or ranks.not_ready()
        if self.reason is None and ranks.count() > 1:
            self._vote_as_stored(members)
            if self.reason is not None or self.state == "off":
                return
        if self.reason is None and not WAY.take(self, self._calls_since_asked):
            self.reason = "another group is being measured"
        if self.reason is not None:
            self._pause()
            return
        refused = self.members.short_of_memory()
        if refused is not None:
            self._off(refused)
            return
        behind_s = self._recorded_behind_s()
        if behind_s is None:
            self.reason = "which graphs follow its own is looked at"
            self._pause()
            return
        in_place = any(one.in_place for one in standings)
        self._begin_measuring(CANDIDATES if in_place else CANDIDATES[:2], members, behind_s)

    def _begin_measuring(self, candidates: Sequence[Candidate], members: Sequence[Member], behind_s: float) -> None:
        if self.members.drop_those_gone():  # while it waited
            self._series.forget_times()
        settings = self.members.settings
        open_ones = [one for one in _GROUPS.alive() if one.state in ("waiting", "measuring")]
        sharing = [one for one in open_ones if any(asked in settings for asked in one.members.settings)]
        selector = self._series.begin(candidates, settings, len(sharing), seed=self.number, behind_s=behind_s)
        if isinstance(selector, str):
            self._off(selector)
            return
        self.state, self.reason = "measuring", None
        self._memory.begin(members[0].device_index)
        self._pauses = 0
        self._leader = None
        self._leading = Leading(self.members)
        timer = timing.timer_for(self._objective, members[0].device_index)
        self._measurement = Measurement(selector, timer, waits=self._objective == "latency")
        self._circumstances.restart()
        self.members.rest(0)

    def _begin_again(self, reason: str) -> None:
        """What was measured is not what there is now. Not for ever: a program may record all the time."""
        if self._series.restart():
            self._wait(reason)
        else:
            self._off(f"measuring began {self._series.restarts} times: {reason}")

    # Measuring

    def _begin_iteration(self, leader: Member, inputs: Sequence[Any]) -> bool:
        """Whether the clock is to be started for it."""
        measurement = self._measurement
        assert measurement is not None
        WAY.used(self)
        self._circumstances.note(inputs, leader.watched)  # each of its calls, as looks do
        if not measurement.begin_iteration(self.members.serials, self._leading.backwards):
            return False
        if measurement.hopeless:
            self._off("its calls never follow one another in one order")
            return False
        if self.members.drop_those_gone():  # an order with all of them would never be learned
            self._begin_again(GONE)
            return False
        if not measurement.knows_order:
            return False
        if measurement.another_order:
            self._begin_again("its calls follow one another in another order now")
            return False
        if measurement.selector.decision is not None:
            self._conclude(measurement.selector)
            return False
        if self._is_refused(self.members.standings()):
            return False
        if self._circumstances.another_stream(leader.device_index):
            measurement.void(ANOTHER_STREAM)
        if measurement.leaves_alone:
            self.members.serve(UNSELECTED)
            return measurement.leave_alone()
        turn = measurement.next_turn()
        if turn is None:
            if measurement.selector.decision is not None:
                self._conclude(measurement.selector)
            else:
                self.members.serve(UNSELECTED)  # until times have come in
            return False
        # What the program itself needs may have grown since measuring began.
        short = self.members.short_of_memory() if turn.candidate == "none" and turn.place == 0 else None
        if short is not None:
            self._off(short)
            return False
        self.members.serve(candidate(turn.candidate))
        measurement.begin(turn, self.members.counts())
        return True

    def _is_refused(self, standings: Sequence[Standing]) -> bool:
        """Whether what is measured cannot go on as it began; the state says why."""
        self._note_missed(standings)
        for_all, for_this = refusal_of_all(standings), refusal(standings, self._caller.seen)
        if for_all is not None:
            self._off(for_all, tell=False)
        elif for_this is not None:
            self._off(for_this)
        elif any(one.waiting is not None for one in standings):
            self._begin_again("its graphs were recorded again while it was measured")
        elif (reason := ranks.not_ready()) is not None:
            self._wait(reason)
        else:
            return False
        return True

    def _conclude(self, selector: Selector) -> None:
        decision = selector.decision
        assert decision is not None
        moving = self._circumstances.conclude()
        self._series.charge()
        if ranks.count() > 1:
            if selector.says_little:
                self._off(TOO_LITTLE)
                return
            self.not_stored = "it suits all ranks, and not this one alone"
            self._vote(decision, selector.candidates, compared(decision), selector.medians[decision.kept])
            return
        traced = self._measurement is not None and self._measurement.traced
        self._take(decision)
        self.not_stored = "storing it was interrupted"
        members = sorted(self.members, key=lambda one: one.serial)
        if traced:
            self.not_stored = TRACED
        elif not selector.is_worth_keeping:
            self.not_stored = TOO_LITTLE
        else:
            self.not_stored = store(members, selector, leader=self._leader, moving=moving)

    # A verdict

    def _look(self, member: Member, inputs: Sequence[Any]) -> None:
        """Whether the verdict still holds. See `validity`."""
        if member.serial != self._leader:
            # Of a stored verdict it may not be known who leads, and the leader may be gone. Ranks come all the same.
            led = self._leader is not None and self.members.is_left(self._leader)
            if led or self._look_at_ranks():
                member.pause = self._look_every
            return
        if self._circumstances.begins_look and not self._look_at_ranks():
            return
        if self._circumstances.another_stream(member.device_index) and self._void(ANOTHER_STREAM):
            return
        if not self._circumstances.look(inputs, member.watched):
            return
        self._look_every = min(2 * self._look_every, LONGEST_LOOK_EVERY)
        member.pause = self._look_every
        changed = self._circumstances.changed()
        if changed is None and not self._compared_in_place and any(one.in_place for one in self.members.standings()):
            changed = READ_IN_PLACE_NOW
        if changed is not None:
            self._void(changed)

    def _void(self, reason: str) -> bool:
        found = self.stored
        # Functions without graphs were never joined, and a verdict on several together holds for none of them alone.
        alike: list[Group] = []
        if found is not None and len(found.group) > 1:
            alike += (one for one in _GROUPS.alive() if one is not self and one.is_served_by(found))
        try:
            if not super()._void(reason):
                return False
            for other in alike:
                other.void_with(reason)
        except BaseException:  # an interrupt, say, behind which the program goes on: all are to be served alike
            for one in (self, *alike):
                one.ask_again(reason)
            raise
        return True

    def _given_up_before(self, found: StoredVerdict) -> tuple[bool, ...] | None:
        """A function may be called for the first time when those before it have gone on to another verdict."""
        others = [one for one in _GROUPS.alive() if one is not self]
        if found.leads or len(found.group) == 1 or any(one.is_served_by(found) for one in others):
            return None
        gave_up = (one for one in others if one._gave_up is not None and one._gave_up.is_with(found))
        return next((one._may_be_stored for one in gave_up), None)


_LOCK = threading.RLock()
"""Of all groups: they are joined, and make way for each other. Not held while a call is served."""

_GROUPS: WeakRegistry[Group] = WeakRegistry()


def settled() -> bool:
    """Whether no group waits for more calls of the program."""
    return all(group.settled for group in _GROUPS.alive())


def leave(member: Member) -> None:
    """The function is never called again, though somebody may hold it."""
    with _LOCK:
        group = member.group
        group.members.remove(member)
        if len(group.members) == 0:
            group.end("its graphs were freed")
        elif group.state == "measuring":
            group.lose(GONE)
