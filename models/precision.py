"""Restore the precision of float32 products and convolutions, whatever changed it by either of PyTorch's interfaces.

`torch.set_float32_matmul_precision` and `allow_tf32` are the older one. Reading them raises where the newer one
(`fp32_precision`) has set what they cannot say, in a program that a user brings, for example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def precision_places() -> tuple[Any, ...]:
    """Return what has `fp32_precision`, the newer interface, the outermost first."""
    import torch

    cudnn: Any = torch.backends.cudnn
    return torch.backends, torch.backends.cuda.matmul, cudnn, cudnn.conv, cudnn.rnn


@contextlib.contextmanager
def precision_kept() -> Iterator[None]:
    """Restore the precision after the block, whatever the block sets."""
    import torch

    cudnn: Any = torch.backends.cudnn
    places = precision_places()
    newer = [place.fp32_precision for place in places]
    matmul = convolution = None
    with contextlib.suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
    with contextlib.suppress(RuntimeError):
        convolution = cudnn.allow_tf32
    try:
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if convolution is not None:
            cudnn.allow_tf32 = convolution
        for place, value in zip(places, newer, strict=True):
            place.fp32_precision = value
