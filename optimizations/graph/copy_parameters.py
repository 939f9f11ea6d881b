"""Where the parameters of a copy, as `cuda.bindings` keeps them for the driver, have the addresses of its two ends."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from optimizations.graph.records import WORD_BYTES

SOURCE, DESTINATION = "srcDevice", "dstDevice"

_PLACES = {SOURCE: 48, DESTINATION: 136}
"""Of the fields of `CUDA_MEMCPY3D` in `cuda.h`, since CUDA 3.2."""


def place_of(parameters: Any, field: str) -> int | None:
    """Where the word of a field is in memory, for as long as `parameters` lives; None where that is not known.

    Args:
        parameters: a `CUDA_MEMCPY3D` of `cuda.bindings.driver`.
    """
    structure: Any = type(parameters)
    return int(parameters.getPtr()) + _PLACES[field] if _are_there(structure) else None


@functools.cache
def _are_there(structure: Any) -> bool:
    """Whether the words are where they are looked for, tried out with numbers that nothing else there has."""
    try:
        tried = structure()
        for number, (field, place) in enumerate(_PLACES.items(), start=0x7E57_0001_2345):
            setattr(tried, field, number)
            word = int.from_bytes(ctypes.string_at(int(tried.getPtr()) + place, WORD_BYTES), "little")
            if word != number:
                return False
    except (AttributeError, TypeError, ValueError):  # another version of the bindings
        return False
    return True
