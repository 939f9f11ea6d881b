"""The functions of a group: who they are, how all of them are served, and what they say of themselves."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, KeysView, Set
from typing import TYPE_CHECKING, Any

from optimizations.selection import ranks

if TYPE_CHECKING:
    from optimizations.selection.measurement import Counts
    from optimizations.selection.member import Candidate, Followed, Function, Member, Standing
    from optimizations.selection.settings import Settings

CANDIDATES: tuple[Candidate, ...] = ("none", "copy", "indirection")
"""Simplest first."""

UNSELECTED: Candidate = "indirection"
"""How calls are served without selection."""

SEVERAL_THREADS = "several threads call it"

FOR_EVER = 1 << 62
"""Calls without a look, of a group that is off."""


class Members:
    """Held weakly: functions go with the manager of a thread that ends."""

    def __init__(self, first: Member) -> None:
        self._found: dict[int, weakref.ref[Member]] = {first.serial: weakref.ref(first)}

    def __iter__(self) -> Iterator[Member]:
        """Those that are left."""
        for reference in list(self._found.values()):
            member = reference()
            if member is not None and member.function is not None:
                yield member

    def __len__(self) -> int:
        """How many there are, those that are gone included until they are dropped."""
        return len(self._found)

    @property
    def serials(self) -> KeysView[int]:
        """Of all."""
        return self._found.keys()

    @property
    def backwards(self) -> set[int]:
        """The serials of those that are backwards."""
        return {one.serial for one in self if one.direction == "backward"}

    def take_from(self, other: Members) -> None:
        """Take all of the other's, which is empty then."""
        self._found.update(other._found)
        other._found = {}

    def remove(self, member: Member) -> None:
        """It is called no more."""
        self._found.pop(member.serial, None)
        member.pause = FOR_EVER

    @property
    def leading(self) -> frozenset[int]:
        """The serials of those that an iteration may begin with: they read no other's results. Where all do, the first
        one made may."""
        return frozenset(one.serial for one in self if not one.producers & self.serials) or frozenset(
            [min(self.serials)]
        )

    def is_left(self, serial: int) -> bool:
        """Whether this is one of them, and not gone."""
        reference = self._found.get(serial)
        member = reference() if reference is not None else None
        return member is not None and member.function is not None

    def short_of_memory(self) -> str | None:
        """Why calls should not be tried without a graph; None where they may be. Their graphs share one pool."""
        functions = self.functions
        return functions[0].short_of_memory() if functions else None

    def recorded_behind(self) -> list[Followed]:
        """The recordings that follow their graphs and are not theirs.

        A graph goes on from the one before it. Behind a call that is served without one, others' are recorded again.
        """
        functions = self.functions
        own = {id(one) for one in functions}
        seen: set[Any] = set()
        return [
            following
            for one in functions
            for following in one.recorded_behind(seen)
            if id(following.function) not in own
        ]

    def drop_those_gone(self) -> bool:
        """Whether there were any."""
        left = {one.serial: weakref.ref(one) for one in self}
        fewer = len(left) < len(self._found)
        self._found = left
        return fewer

    @property
    def functions(self) -> list[Function]:
        """Of those that are left."""
        return [one.function for one in self if one.function is not None]

    @property
    def settings(self) -> list[Settings]:
        """What is asked for, once for each compilation."""
        found: list[Settings] = []
        for member in self:
            if member.settings not in found:
                found.append(member.settings)
        return found

    @property
    def shared_names(self) -> list[str] | None:
        """What tells them from others on all ranks; None where the source of one cannot be read."""
        names = [one.shared_name for one in self]
        known = [one for one in names if one is not None]
        return known if len(known) == len(names) else None

    def standings(self) -> list[Standing]:
        """Where they stand."""
        return [one.standing() for one in self.functions]

    def counts(self) -> Counts:
        """See `measurement.Counts`."""
        return {one.serial: function.so_far() for one in self if (function := one.function) is not None}

    def serve(self, candidate: Candidate) -> None:
        """Serve the next calls of all by this candidate."""
        for member in self:
            member.plainly = candidate == "none"
            if member.function is not None:
                member.function.serve(candidate)

    def rest(self, calls: int) -> None:
        """Serve this many calls of each without a look."""
        for member in self:
            member.pause = calls


def refusal(standings: Collection[Standing], seen: Set[int]) -> str | None:
    """Why functions that stand so are not selected for, by this rank at least; None where they may be.

    `seen` are the threads that the group has seen, of which it knows that they do not call in turn (`caller`).
    """
    found = next((one.refused for one in standings if one.refused is not None), None)
    if found is None and any(one.threads - seen for one in standings):
        return SEVERAL_THREADS
    return found


def refusal_of_all(standings: Collection[Standing]) -> str | None:
    """Why no rank selects for functions that stand so; None where ranks may, or this one is alone."""
    return ranks.refusal(collectives=any(one.collectives for one in standings))


def candidate(name: str) -> Candidate:
    """The candidate of this name."""
    return next(one for one in CANDIDATES if one == name)
