"""Identify the random number generator that a Python object stands for. Checked on PyTorch 2.11."""

from __future__ import annotations

import torch


def identity(generator: torch.Generator) -> int:
    """Return the same number for all objects of one generator: operators get another object than the program has."""
    found: int = generator._cdata  # type: ignore[attr-defined]
    return found
