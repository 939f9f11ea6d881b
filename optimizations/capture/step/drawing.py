"""Tell which operators draw random numbers.

PyTorch marks those that may (`nondeterministic_seeded`), and attention is among them. Its kernels draw for its dropout,
and leave the generator as it is where that is 0. A step that recomputes such a part for its backward, as
`torch.utils.checkpoint` does, has no random numbers to draw again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_PROBABILITY = "dropout_p"
"""The argument that operators of attention have. At 0 they draw nothing."""


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator that is given this may draw random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if (known := _probability(func)) is None:
        return True
    place, usual = known
    given = args[place] if place < len(args) else kwargs.get(_PROBABILITY, usual)
    return not isinstance(given, (int, float)) or given != 0


@functools.cache
def _probability(func: Any) -> tuple[int, Any] | None:
    """Return the place of that argument, and its default; None where an operator has no such argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == _PROBABILITY:
            return place, argument.default_value
    return None
