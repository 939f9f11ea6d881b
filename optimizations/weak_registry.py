"""List objects for as long as they have other references: from any thread, and from finalizers.

A `weakref.WeakSet` is iterated by Python code. If another thread, or the body of the loop, adds to it meanwhile, the
loop ends with `RuntimeError: Set changed size during iteration`. A lock does not help. A garbage collection may begin
while this thread has it, and run a finalizer that lists or adds: with a plain lock the thread waits for itself, and a
reentrant one lets the finalizer in.

So there is no lock. Single calls into C change a set of weak references, and make a list of it. They allocate, and so
let finalizers run, only before they access the set. After that they run no Python code and keep the interpreter's lock.
(In Python without that lock each set has its own lock.)
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

Member = TypeVar("Member")


class WeakRegistry(Generic[Member]):
    """Hold members by weak references. Members must have `__eq__` and `__hash__` of `object`: others would run as
    Python code in the set."""

    def __init__(self) -> None:
        self._references: set[weakref.ref[Member]] = set()

    def add(self, member: Member) -> None:
        """List the member from now on, until it is collected."""
        # The callback is the set's own method: what is written in Python can be interrupted.
        self._references.add(weakref.ref(member, self._references.discard))

    def alive(self) -> list[Member]:
        """Return the live members, in no order. A member that is added meanwhile may be missing."""
        references = list(self._references)  # the loop below may be interrupted, and this call may not
        return [member for reference in references if (member := reference()) is not None]
