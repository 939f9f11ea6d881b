"""Tensors that stand for conjugates or negatives of what lies in their memory, as a flag of theirs says.

Generated code, and whatever knows of a tensor where it lies and its geometry only, does not see that flag.
"""

from __future__ import annotations

import torch


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether it stands for conjugates or negatives of what lies in its memory."""
    return tensor.is_conj() or tensor.is_neg()
