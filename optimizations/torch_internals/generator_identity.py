"""Which generator of random numbers an object of Python stands for. Checked on PyTorch 2.11."""

from __future__ import annotations

import torch


def identity(generator: torch.Generator) -> int:
    """The same for all objects of one generator: an operator is given another object than the program has."""
    found: int = generator._cdata  # type: ignore[attr-defined]
    return found
