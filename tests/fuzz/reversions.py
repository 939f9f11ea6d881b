"""Put earlier defects of placement back, one by one, and count the programs until the fuzzer finds each.

A defect is put back by replacing the piece of code that is its remedy, while the programs run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from optimizations.placement import guards, plan, rewrite, staging

from .compare import fuzz


def _copies_become_aliases() -> AbstractContextManager[Any]:
    """A copy to the GPU that the program writes, or returns, is the kept value itself."""
    return _together(
        mock.patch.object(plan._Planner, "_must_stay_a_copy", lambda self, node: False),
        mock.patch.object(rewrite._Surgery, "protect", lambda self, after: None),
    )


def _attributes_are_trusted() -> AbstractContextManager[Any]:
    """Attributes are taken for unchanged while they are where they were."""
    return mock.patch.object(guards.Checks, "fail", lambda self, arguments: False)


def _pinned_arguments_are_read_by_the_host() -> AbstractContextManager[Any]:
    """A pinned argument is packed by the host although a copy into it is in flight."""
    stock = staging._Area.send
    return mock.patch.object(staging._Area, "send", lambda self, tensors, *_: stock(self, tensors))


def _limits_hold_for_single_values() -> AbstractContextManager[Any]:
    """Each kept or staged value is within the limits; all together are not."""
    stock = plan._Planner._how

    def one_by_one(planner: Any, wanted: Any) -> dict[str, str]:
        return {value: how for each in wanted for value, how in stock(planner, [each]).items()}

    return mock.patch.object(plan._Planner, "_how", one_by_one)


@contextlib.contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "copies-become-aliases": _copies_become_aliases,
    "attributes-are-trusted": _attributes_are_trusted,
    "pinned-arguments-are-read-by-the-host": _pinned_arguments_are_read_by_the_host,
    "limits-hold-for-single-values": _limits_hold_for_single_values,
}


def found_after(name: str, *, seed: int, count: int) -> int | None:
    """Return how many programs it takes to find the defect; None if `count` do not."""
    with DEFECTS[name]():
        for number in range(count):
            if fuzz(seed, range(number, number + 1)).failures:
                return number + 1
    return None
