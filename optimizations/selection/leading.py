"""With which of a group's calls its iterations begin, while it is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimizations.selection.members import Members

if TYPE_CHECKING:
    from optimizations.selection.member import Member

MOST_PASSED_OVER = 64
"""Calls of functions that may lead, none of them behind a backward, until any of them is taken for the first."""

MOST_NOT_BEGUN, MOST_NOT_BEGUN_EACH = 8192, 400
"""Calls in a row with which no iteration begins, in all and for each function of the group, until none is expected any
more. A prompt may be followed by thousands of tokens."""


class Leading:
    """Functions that may lead as they are when it is made: measuring begins again where others join or one is gone.

    Attributes:
        backwards: the serials of those that are backwards.
    """

    def __init__(self, members: Members) -> None:
        self.backwards = members.backwards
        self._members = members
        self._may_lead = members.leading
        self._behind_a_backward, self._passed_over, self._not_begun = False, 0, 0

    def begins_with(self, member: Member) -> bool:
        """Whether an iteration is taken to begin with this call.

        Measuring begins anywhere in one. In training it is over with a backward. A forward in its midst may read no
        other's results either, where something else than a graph was done to them. If no function that leads comes
        behind a backward, any that leads has to do.
        """
        behind_a_backward, self._behind_a_backward = self._behind_a_backward, member.direction == "backward"
        if member.serial not in self._may_lead:
            return False
        if not self.backwards or len(self.backwards) == len(self._members):
            return True
        self._passed_over += 1
        return (behind_a_backward and member.serial not in self.backwards) or self._passed_over > MOST_PASSED_OVER

    def has_begun(self) -> None:
        """To be told where an iteration may begin: the leader is called."""
        self._not_begun = 0

    def may_come(self, leader: int | None) -> bool:
        """After a call of another than the leader: whether an iteration may still begin. None: it is not found yet."""
        self._not_begun += 1
        left = self._members.is_left
        if not (left(leader) if leader is not None else any(left(one) for one in self._may_lead)):
            return False
        return self._not_begun < max(MOST_NOT_BEGUN, MOST_NOT_BEGUN_EACH * len(self._members))
