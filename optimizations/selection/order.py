"""The order of a group's calls in one iteration of the program, learned from the calls themselves."""

from __future__ import annotations

from collections.abc import Collection

PATIENCE = 400
"""Iterations in a row that are not as they were learned, before an order is given up."""


CHANGED = 32
"""Iterations in a row that are all alike and not as they were learned, before the program is taken to have changed."""


class Order:
    """Calls by the number of the function, from one call of the first function to the next.

    An order is learned when two iterations in a row were the same, with every function in them.
    """

    def __init__(self) -> None:
        self.learned: tuple[int, ...] | None = None
        self._calls: list[int] = []
        self._as_learned = 0
        self._before: tuple[int, ...] | None = None
        self._others = 0
        self._alike = 0
        self._whole = False

    def begin(self, members: Collection[int]) -> None:
        """An iteration begins: the one before is over."""
        calls, self._calls = tuple(self._calls), []
        self._as_learned = 0
        if not calls:
            return
        self._whole = set(calls) == set(members)
        self._alike = self._alike + 1 if calls == self._before else 0
        if self.learned is None and self._alike and self._whole:
            self.learned = calls
        self._before = calls
        self._others = 0 if calls == self.learned else self._others + 1

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
        return self.learned is not None and self._whole and self._others > CHANGED <= self._alike

    @property
    def hopeless(self) -> bool:
        return self._others > PATIENCE
