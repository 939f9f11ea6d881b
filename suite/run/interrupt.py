"""Ctrl-C, SIGTERM and a closed terminal as one exception, so that each `finally` on the way out runs, once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user, or the system, asked the program to end. Not an `Exception`: no handler of errors may swallow it."""


@contextmanager
def interruptible(*, to_the_end: bool = False) -> Iterator[None]:
    """Turns the first of `SIGNALS` into `Interrupted`; later ones are ignored, since ending the workers must not be
    cut short. A signal that was ignored from the start (nohup) stays ignored.

    `to_the_end`: if one has come, later ones are ignored until the program has ended, whose exit code says so.
    """
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    before = {each: old for each in SIGNALS if (old := signal.getsignal(each)) is not signal.SIG_IGN}
    try:
        for each in before:
            signal.signal(each, interrupt)
        yield
    finally:
        for each, handler in before.items():
            if not (came and to_the_end):
                signal.signal(each, handler)
