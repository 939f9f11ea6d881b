"""One group of the process is measured at a time.

Another that changes how it is served would change what this one's inputs are, and how busy the device is.
"""

from __future__ import annotations

import weakref
from typing import Protocol

PATIENCE = 400
"""Calls of one other group after which a group that is not called meanwhile makes way."""


class Measured(Protocol):
    """A group, for those that wait for it."""

    @property
    def is_gone(self) -> bool:
        """Whether none of its functions exists any more."""

    def give_way(self) -> None:
        """To be told when another takes its turn."""

    def wake(self) -> None:
        """To be told when it may ask again, and need not wait until it would have."""


class Way:
    """Who is being measured."""

    def __init__(self) -> None:
        self._holder: weakref.ref[Measured] | None = None
        self._waited: dict[int, int] = {}
        self._waiting: dict[int, weakref.ref[Measured]] = {}

    def _held_by(self) -> Measured | None:
        return self._holder() if self._holder is not None else None

    def take(self, group: Measured, calls: int = 1) -> bool:
        """Whether this group, which was called so often since it last asked, may be measured from now on."""
        holder = self._held_by()
        if holder is not None and holder is not group and not holder.is_gone:
            waited = self._waited[id(group)] = self._waited.get(id(group), 0) + calls
            if waited < PATIENCE:
                known = self._waiting.get(id(group))
                if known is None or known() is not group:
                    self._waiting[id(group)] = weakref.ref(group)
                return False
            holder.give_way()
        self._holder = weakref.ref(group)
        self._waited.clear()
        self._waiting.pop(id(group), None)
        return True

    def used(self, group: Measured) -> None:
        """To be told of each iteration of the group that is measured."""
        if self._held_by() is group:
            self._waited.clear()

    def leave(self, group: Measured) -> None:
        """The group is not measured any more, if it was. Who has waited the longest may ask.

        Groups ask seldom. Of hundreds, one after another would be measured in half of the program's calls.
        """
        self._waiting.pop(id(group), None)
        if self._held_by() is not group:
            return
        self._holder = None
        while self._waiting:
            following = self._waiting.pop(next(iter(self._waiting)))()
            if following is not None and not following.is_gone:
                following.wake()
                return


WAY = Way()
