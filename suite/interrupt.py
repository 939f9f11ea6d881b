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
def interruptible() -> Iterator[None]:
    """Turns the first of `SIGNALS` into `Interrupted`; later ones are ignored, since ending the workers must not be
    cut short. A signal that was ignored from the start (nohup) stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
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
            signal.signal(each, handler)
