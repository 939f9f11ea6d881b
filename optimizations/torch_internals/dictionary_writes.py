"""Count writes to dictionaries, so that nothing is compared while none was written.

Python 3.12 and later call a function before each write to a dictionary that is watched: `PyDict_AddWatcher` and
`PyDict_Watch` (https://docs.python.org/3/c-api/dict.html#c.PyDict_Watch) are public functions of its C API, which
`ctypes` reaches. PyTorch's own guards use them too. Older versions have no such function.

Note [The function that is called]. It is `itertools.repeat(0, n).__next__`: each call decrements the remaining count,
which `__length_hint__` returns and returns 0, as a watcher must. A Python function could be interrupted or let another
thread run, between its call and the write. One number counts the writes to all watched dictionaries. A reader stores
the number, compares, and needs no further comparison until the number changes.

Note [How long a dictionary is watched]. A dictionary is watched only while an object keeps it alive to compare it. So
the watcher is never called for a dictionary that is being freed: that can happen while an exception propagates, when
nothing may be called.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

Dictionary = dict[Any, Any]

_counter = itertools.repeat(0, sys.maxsize)

writes_left: Callable[[], int] = _counter.__length_hint__
"""Return a number that changes with each write to a watched dictionary."""

_watched_for: Counter[int] = Counter()
"""The number of `Watched` objects that each dictionary is watched for, by its address."""

_changing = threading.Lock()
_to_be_left: deque[Sequence[Dictionary]] = deque()
_stopped = False


NEVER = -1


def can_be_watched() -> bool:
    """Return whether this Python reports writes to dictionaries."""
    return not _stopped and _watcher() is not None


def have_versions() -> bool:
    """Return whether a dictionary's version in C++ changes with every write.

    Since Python 3.12 C++ computes versions by watching dictionaries, and 3.13.0 does not report all writes.
    """
    return sys.version_info < (3, 12) or can_be_watched()


class ComparedAfterWrites:
    """Compare dictionaries only after one of them was written if Python reports writes, else each time.

    Attributes:
        seen: `writes_left()` before the last comparison that found no difference. While the number is unchanged nothing
            differs, and `holds` need not be called.
    """

    __slots__ = ("_compare", "_dictionaries", "_watched", "seen")

    def __init__(self, compare: Callable[[tuple[Dictionary, ...]], bool], dictionaries: tuple[Dictionary, ...]) -> None:
        self.seen = NEVER
        self._compare = compare
        self._dictionaries = dictionaries
        self._watched = Watched(dictionaries) if can_be_watched() else None

    def holds(self) -> bool:
        """Compare all dictionaries."""
        left = writes_left()
        same = self._compare(self._dictionaries)
        self.seen = left if same and self._watched is not None and can_be_watched() else NEVER
        return same


class Watched:
    """Keep dictionaries whose writes are counted for as long as this object lives."""

    def __init__(self, dictionaries: Sequence[Dictionary]) -> None:
        """Begin to watch these dictionaries. The caller has checked `can_be_watched`."""
        watcher = _watcher()
        assert watcher is not None
        with _changing:
            for dictionary in dictionaries:
                _watched_for[id(dictionary)] += 1
                _call("PyDict_Watch", watcher, dictionary)
        _leave()
        weakref.finalize(self, _leave, dictionaries).atexit = False


def _leave(*watched: Sequence[Dictionary]) -> None:
    """Stop watching these, each for one `Watched`, and those that wait for it.

    A garbage collection may call it while this thread holds the lock: then these wait.
    """
    _to_be_left.extend(watched)
    while _to_be_left and _changing.acquire(blocking=False):
        try:
            if not _to_be_left:
                return
            for dictionary in _to_be_left.popleft():
                _watched_for[id(dictionary)] -= 1
                if not _watched_for[id(dictionary)]:
                    del _watched_for[id(dictionary)]
                    if (watcher := _watcher()) is not None and not _stopped:
                        _call("PyDict_Unwatch", watcher, dictionary)
        finally:
            _changing.release()


@functools.cache
def _watcher() -> int | None:
    """Register with Python, and return the watcher's number; None if that is impossible or does not work."""
    if sys.version_info < (3, 12) or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    # The four parameters of a watcher are passed in registers, which a function without parameters ignores.
    called = ctypes.PYFUNCTYPE(ctypes.c_int)(_counter.__next__)
    try:
        watcher: int = ctypes.pythonapi.PyDict_AddWatcher(called)
    except (AttributeError, RuntimeError):  # another Python, or all of its eight watchers are taken
        return None
    _kept_alive.append(called)
    if not _works(watcher):
        _call("PyDict_ClearWatcher", watcher)
        return None
    atexit.register(_stop, watcher)
    return watcher


_kept_alive: list[Any] = []


def _stop(watcher: int) -> None:
    global _stopped
    _stopped = True
    next(_counter)  # what was compared until now counts as written
    _call("PyDict_ClearWatcher", watcher)


def _call(function: str, watcher: int, *dictionary: Dictionary) -> None:
    getattr(ctypes.pythonapi, function)(ctypes.c_int(watcher), *map(ctypes.py_object, dictionary))


def _works(watcher: int) -> bool:
    """Return whether each kind of write to the attributes of an object is reported: not by Python 3.13.0."""

    class Object:
        pass

    one = Object()
    attributes, reported = one.__dict__, []
    _call("PyDict_Watch", watcher, attributes)
    for write in (
        functools.partial(setattr, one, "kept", 1),
        functools.partial(setattr, one, "kept", 2),
        functools.partial(delattr, one, "kept"),
        functools.partial(attributes.update, kept=3),
        attributes.clear,
    ):
        before = writes_left()
        write()
        reported.append(writes_left() != before)
    _call("PyDict_Unwatch", watcher, attributes)
    return all(reported)
