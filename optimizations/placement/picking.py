"""Pick some of a call's arguments, always as a tuple, and as fast as Python can."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any


def picker(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the elements at `indices` of a tuple."""
    if not indices:
        return lambda values: ()
    first, last = indices[0], indices[-1]
    if tuple(indices) == tuple(range(first, last + 1)):
        return operator.itemgetter(slice(first, last + 1))
    return operator.itemgetter(*indices)
