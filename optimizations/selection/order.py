"""The order of a group's calls in one iteration of the program, learned from the calls themselves.

An iteration begins with the first function, the leader. It may call it again: two forwards, then their backwards. So
what is learned is a *period* of stretches from one call of the leader to the next, a single one where that repeats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

PATIENCE = 400
"""Iterations in a row that are not as they were learned, before an order is given up."""


CHANGED = 32
"""Iterations in a row that are all alike and not as they were learned, before the program is taken to have changed."""


MOST_STRETCHES = 8
"""From one call of the leader to the next, in one iteration."""


class Order:
    """Calls by the number of the function.

    An order is learned when two iterations in a row were the same, with every function in them.

    Attributes:
        learned: the calls of an iteration; None until they are known.
    """

    def __init__(self) -> None:
        self.learned: tuple[int, ...] | None = None
        self._calls: list[int] = []
        self._as_learned = 0
        self._stretch = 0
        self._stretches: deque[tuple[int, ...]] = deque(maxlen=2 * MOST_STRETCHES)
        self._others = 0
        self._other: list[int] | None = None
        self._alike = 0

    def begin(self, members: Collection[int], backwards: Collection[int] = ()) -> bool:
        """The leader is about to be called. Whether an iteration begins with that, and the one before is over.

        Where there are `backwards` an iteration ends with one: in between, a forward waits for its own.
        """
        self._end_stretch()
        if self._goes_on:
            return False
        calls, self._calls = tuple(self._calls), []
        self._as_learned = self._stretch = 0
        if not calls:
            return True
        if calls == self.learned:
            self._others = self._alike = 0
            return True
        self._others += 1
        found = self._period(members, backwards)
        if self.learned is None:
            self.learned = found
        elif found is not None:
            # Where nothing says with which stretch it begins, each of them has its turn at that.
            self._alike = self._alike + 1 if sorted(found) == self._other else 0
            self._other = sorted(found)
        return True

    def called(self, member: int) -> None:
        place = len(self._calls)
        self._calls.append(member)
        learned = self.learned
        if learned is not None and self._as_learned == place < len(learned) and learned[place] == member:
            self._as_learned = place + 1

    @property
    def complete(self) -> bool:
        """Whether the calls of this iteration are exactly the learned ones so far."""
        return self.learned is not None and self._as_learned == len(self._calls) == len(self.learned)

    @property
    def changed(self) -> bool:
        """Whether the calls of an iteration follow one another in another order now, which could be learned."""
        return self.learned is not None and self._others > CHANGED <= self._alike

    @property
    def hopeless(self) -> bool:
        return self._others > PATIENCE

    @property
    def _goes_on(self) -> bool:
        """Whether the leader is what comes next in an iteration that was as learned so far."""
        learned, place = self.learned, len(self._calls)
        return learned is not None and 0 < self._as_learned == place < len(learned) and learned[place] == learned[0]

    def _end_stretch(self) -> None:
        if len(self._calls) > self._stretch:
            self._stretches.append(tuple(self._calls[self._stretch :]))
            self._stretch = len(self._calls)

    def _period(self, members: Collection[int], backwards: Collection[int]) -> tuple[int, ...] | None:
        """The calls of the last stretches that repeat those before them, the fewest; None where there are none."""
        seen = list(self._stretches)
        if backwards and (not seen or seen[-1][-1] not in backwards):
            return None
        for count in range(1, len(seen) // 2 + 1):
            if seen[-count:] == seen[-2 * count : -count]:
                calls = tuple(call for stretch in seen[-count:] for call in stretch)
                if set(calls) == set(members):
                    return calls
        return None
