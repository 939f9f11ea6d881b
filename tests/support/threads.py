"""Calls in threads of their own, whose errors and endless waits fail the test."""

from __future__ import annotations

import threading
from collections.abc import Callable

LIMIT_S = 20


def in_threads(*calls: Callable[[], object]) -> list[int]:
    """Run these at the same time and return their threads' identities; raise where one does not end or raises."""
    failed: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LIMIT_S)
    assert not any(one.is_alive() for one in threads), "the threads wait for each other"
    if failed:
        raise failed[0]
    return [one.ident or 0 for one in threads]
