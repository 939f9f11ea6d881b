"""Words of this process's memory, compared by compiled code or NumPy, a nanosecond each.

PyTorch tells one thing about one tensor in each call. Who knows where it keeps that reads it of many at once. Whoever
reads holds the objects whose memory it is, and tries out first whether the words are where it looks for them. Compiled
code (`host_code`) compares them where there is some; NumPy does else, and whenever they are to be known.

Note [In one go]. What is read may lead to what is read next: an object in Python to its part in C++, and that to its
storage. If another thread ran in between, it could exchange that part and free it, and memory of nobody would be read.
So all is one call of C, which ends at the first word that is not as expected: no line of Python runs in between, so the
lock of Python is not given away. `numpy.take` gives it away, and so does an array as an index where it is longer than
`AT_ONCE`. That is how NumPy is written, and no promise of it: so it is tried out once. Nothing is allocated that could
set off a collection of garbage. Where Python has no such lock, or NumPy gives it away, nothing may be read.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any

import numpy

from optimizations import host_code

WORD = 8
"""Bytes."""
_TOP = 1 << 57
"""Bytes of address space that a process may have."""
_LOWEST = 1 << 16
"""No program has memory below this. A smaller number, or one that is no multiple of `WORD`, is not an address."""

AT_ONCE = 500
"""Words up to which NumPy keeps the lock of Python while it gathers them (2.4.6, measured): the bound of
`NPY_BEGIN_THREADS_THRESHOLDED`."""

PART = object.__basicsize__
"""Where an object of PyTorch has the address of its part in C++: behind what all objects of Python have."""


_TO_BYTES: Any = numpy.ndarray.tobytes
_CALL: Any = operator.call

_TRIALS = 16
"""Gathers in each of which another thread could have run."""


def no_lock() -> str:
    """Why other threads of Python may run while words are read, empty if they wait. Note [In one go]."""
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if sys.implementation.name != "cpython" or not enabled():
        return "Python has no lock"
    return "" if _is_kept(AT_ONCE) else f"NumPy {numpy.__version__} gives Python's lock away"


def can_be_read(are_found: Callable[[], bool]) -> bool:
    """Whether words may be read, and are where `are_found` has looked for them. Another build may have others there, or
    let that raise anything: then whoever wants to know asks otherwise."""
    try:
        return not no_lock() and are_found()
    except Exception:
        return False


@functools.cache
def _is_kept(count: int) -> bool:
    """Whether no other thread of Python runs while NumPy gathers so many words.

    One that counts waits for the lock meanwhile. Each word lies in a page that was not touched before: so a gather
    takes long enough for that thread to wake up, also on one core.
    """
    size = count * mmap.PAGESIZE
    memory = mmap.mmap(-1, size * _TRIALS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    words: Any = numpy.frombuffer(memory, dtype=numpy.int64)
    pages = numpy.arange(count * _TRIALS, dtype=numpy.intp).reshape(_TRIALS, count) * (mmap.PAGESIZE // WORD)
    rounds, runs, over = [0], threading.Event(), threading.Event()

    def run() -> None:
        runs.set()
        while not over.is_set():
            rounds[0] += 1

    other = threading.Thread(target=run, daemon=True)
    other.start()
    runs.wait()
    get, look = operator.getitem, ([rounds], [0])
    gathers = map(_TO_BYTES, map(get, repeat(words), list(pages)))
    found: list[Any] = list(chain(map(get, *look), gathers, map(get, *look)))  # one call of C, as those below
    over.set()
    other.join()
    return bool(found[0] == found[-1])


@functools.cache
def _memory() -> dict[int, Any]:
    """All of it from the second word on, as words and as halves: NumPy takes an array at 0 for none.

    It is given to nobody: who prints it would read from its start.
    """
    words: Any = (ctypes.c_int64 * (_TOP // WORD)).from_address(WORD)
    array = numpy.frombuffer(words, dtype=numpy.int64)
    return {WORD: array, WORD // 2: array.view(numpy.int32)}


def _places_of(addresses: Sequence[int], size: int = WORD) -> list[Any]:
    """The places of these addresses in memory of parts of this size, so many together as can be gathered at once."""
    places = numpy.array([(address - WORD) // size for address in addresses], dtype=numpy.intp)
    return [places[start : start + AT_ONCE] for start in range(0, len(places), AT_ONCE)]


def word(address: int) -> int:
    """The word there.

    Raises:
        ValueError: the number cannot be an address, and nothing was read.
    """
    if not _LOWEST <= address < _TOP - WORD or address % WORD:
        raise ValueError(f"{address} cannot be the address of a word")
    return int(_memory()[WORD][(address - WORD) // WORD])


class Words:
    """The words, or parts of this size, at these addresses, and what they should be."""

    def __init__(self, addresses: Sequence[int], values: Any, size: int = WORD) -> None:
        expected = numpy.array(values, dtype=numpy.int64 if size == WORD else numpy.int32)
        self.addresses, self.values, self.size = addresses, expected, size

    @functools.cached_property
    def places(self) -> list[Any]:
        """Where NumPy gathers them, so many together as can be at once."""
        return _places_of(self.addresses, self.size)

    @functools.cached_property
    def then(self) -> list[bytes]:
        """What is to stand in each of these."""
        return [self.values[start : start + AT_ONCE].tobytes() for start in range(0, len(self.values), AT_ONCE)]

    def as_bytes(self) -> tuple[bytes, bytes, int]:
        """As `host_code` takes them: addresses and values, 64 bits each, and how many bytes of a word count."""
        addresses = numpy.array(self.addresses, dtype=numpy.int64)
        return addresses.tobytes(), self.values.astype(numpy.int64).tobytes(), self.size


def side_by_side(*stages: Sequence[Words]) -> list[Words]:
    """Several series of stages as one: the first of each together, then the second, and so on.

    What is read of one series depends on none of the others. Each gather takes a third of a microsecond, however few
    words it has.
    """
    together = ([one for one in some if one is not None] for some in zip_longest(*stages))
    return [
        Words([*chain.from_iterable(one.addresses for one in some)], numpy.concatenate([one.values for one in some]))
        for some in together
    ]


def as_expected(*stages: Words, reads: object = None) -> Callable[[], bool]:
    """Tells whether all words are as they should be. Those of a stage are read if the stages before are so.

    The function that is returned holds `reads`, which is to be the objects whose memory it reads.
    """
    if (compiled := host_code.looks()) is not None:
        found: Callable[[], bool] = compiled.Words(reads, tuple([one.as_bytes() for one in stages]))
        return found
    memories = [_memory()[stage.size] for stage in stages for _ in stage.places]
    places = [one for stage in stages for one in stage.places]
    then = [one for stage in stages for one in stage.then]
    same, get, to_bytes = operator.eq, operator.getitem, _TO_BYTES

    def holds() -> bool:
        return all(map(same, map(to_bytes, map(get, memories, places)), then))

    vars(holds)["reads"] = reads
    return holds


def read_behind(stages: Sequence[Words], addresses: Sequence[int], size: int = WORD) -> Callable[[], Any]:
    """Gives the words, or parts of this size, at these addresses, in an array; None where the stages are not as they
    should be, and then it does not read there."""
    get, same, call = operator.getitem, operator.eq, _CALL
    compared = [one for stage in stages for one in stage.places]
    wanted = _places_of(addresses, size)
    memories = [_memory()[WORD]] * len(compared) + [_memory()[size]] * len(wanted)
    places = [*compared, *wanted]
    compare = [_TO_BYTES] * len(compared)
    then = [*[one for stage in stages for one in stage.then], *[None] * len(wanted)]  # None is what `append` gives
    none = numpy.zeros(0, dtype=numpy.int64)
    count = len(wanted)

    def read() -> Any:
        found: list[Any] = []
        take = chain(compare, repeat(found.append, count))
        if not all(map(same, map(call, take, map(get, memories, places)), then)):
            return None
        return found[0] if count == 1 else numpy.concatenate(found) if count else none

    return read
