"""The order of a group's calls in one iteration of the program, learned from the calls themselves."""

from __future__ import annotations

from collections.abc import Collection

PATIENCE = 400
"""Iterations in a row that are not as they were learned, before an order is given up."""


class Order:
    """Calls by the number of the function, from one call of the first function to the next.

    An order is learned when two iterations in a row were the same, with every function in them.
    """

    def __init__(self) -> None:
        self.learned: tuple[int, ...] | None = None
        self._calls: list[int] = []
        self._before: tuple[int, ...] | None = None
        self._others = 0

    def begin(self, members: Collection[int]) -> None:
        """An iteration begins: the one before is over."""
        calls, self._calls = tuple(self._calls), []
        if not calls:
            return
        if self.learned is None and calls == self._before and set(calls) == set(members):
            self.learned = calls
        self._before = calls
        self._others = 0 if calls == self.learned else self._others + 1

    def called(self, member: int) -> None:
        self._calls.append(member)

    @property
    def complete(self) -> bool:
        """Whether the calls of this iteration are exactly the learned ones so far."""
        return self.learned is not None and tuple(self._calls) == self.learned

    @property
    def hopeless(self) -> bool:
        return self._others > PATIENCE
