"""Picks some of a call's arguments, always as a tuple."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any


def selector(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the elements at `indices` (`operator.itemgetter`, which for one of them gives no tuple)."""
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        (index,) = indices
        return lambda values: (values[index],)
    picked: Callable[[Sequence[Any]], tuple[Any, ...]] = operator.itemgetter(*indices)
    return picked
