"""Detect tensors whose flag says that they are the conjugate or negative of their memory's values.

Generated code, and whatever knows of a tensor where it lies and its geometry only, does not see that flag.
"""

from __future__ import annotations

import torch


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Return whether it is the conjugate or negative of its memory's values."""
    return tensor.is_conj() or tensor.is_neg()
