"""Words of this process's memory, gathered by NumPy in one call, a nanosecond each.

PyTorch tells one thing about one tensor in each call. Who knows where it keeps that reads it of many at once. Whoever
reads holds the objects whose memory it is, and tries out first whether the words are where it looks for them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy

WORD = 8
"""Bytes."""
_TOP = 1 << 57
"""Bytes of address space that a process may have."""

PART = object.__basicsize__
"""Where an object of PyTorch has the address of its part in C++: behind what all objects of Python have."""


@functools.cache
def takers() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What gathers words, and halves of words, of this process, from the second word on: NumPy takes an array at 0 for
    none. `places_of` says which place an address has.

    The arrays themselves are given to nobody: who prints one would read from its start.
    """
    words: Any = (ctypes.c_int64 * (_TOP // WORD)).from_address(WORD)
    array = numpy.frombuffer(words, dtype=numpy.int64)
    return array.take, array.view(numpy.int32).take


def places_of(addresses: list[int], size: int = WORD) -> Any:
    """The places of these addresses for what gathers words, or parts of words of this size."""
    return numpy.array([(address - WORD) // size for address in addresses], dtype=numpy.intp)
