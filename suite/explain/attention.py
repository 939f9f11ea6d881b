"""Predict the attention kernel that `scaled_dot_product_attention` uses on a GPU, without a GPU.

PyTorch selects it in C++ by properties of the device, and without a device falls back to plain matrix products, which
no GPU user would get. This module follows PyTorch's documented conditions on dtype, shape, strides and mask for a fused
kernel. Memory-efficient attention stands for all of them: flash attention and cuDNN's kernel count the same, one kernel
instead of many.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from optimizations import torch_internals

SHORTCUT = (
    "attention kernels are assumed from PyTorch's documented conditions (a fused kernel, else plain operations); which "
    "fused kernel a GPU chooses is not known. Each counts as one"
)
FLASH_HEAD_LIMIT = 256
MASK_MULTIPLE = 16
"""Alignment in elements of each row of a mask in memory-efficient attention; other masks are padded."""
LOAD_BYTES = 16
"""Memory-efficient attention loads head vectors in pieces of this size."""


@contextlib.contextmanager
def chosen_offline(note: Callable[[str], None]) -> Iterator[None]:
    """Resolve attention on CUDA tensors by this module while the block runs; `note` is called when it happens."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not is_fused(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa):
            return torch_internals.attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        note(SHORTCUT)
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        output: Tensor = torch_internals.efficient_attention(
            query, key, value, bias, False, dropout_p, is_causal, scale=scale
        )[0]
        return output

    with overridden("AutogradCUDA", {"scaled_dot_product_attention": attend}):
        yield


def is_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool
) -> bool:
    """Return whether there is one kernel for query [batch, heads, queries, width], key and value [..., keys, width]."""
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 or tensor.size(-2) == 0 for tensor in tensors):
        return False
    if mask is not None and mask.stride(-1) != 1:
        return False
    half = query.dtype in (torch.float16, torch.bfloat16)
    same_width = query.size(-1) == key.size(-1) == value.size(-1)
    square = query.size(-2) == key.size(-2)
    if half and mask is None and same_width and query.size(-1) <= FLASH_HEAD_LIMIT and (square or not is_causal):
        return True
    aligned = all(tensor.size(-1) * tensor.element_size() % LOAD_BYTES == 0 for tensor in tensors)
    return (half or query.dtype == torch.float32) and aligned and not enable_gqa


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask in the kernel's form: additive, with aligned rows, [batch, heads, queries, keys]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    width = mask.size(-1)
    if any(stride % MASK_MULTIPLE for stride in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, -width % MASK_MULTIPLE))[..., :width]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


@contextlib.contextmanager
def overridden(dispatch_key: str, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Run these functions as operators of the `aten` namespace where `dispatch_key` handles them."""
    with torch_internals.scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verriding a previously registered kernel.*")
        for operator, function in functions.items():
            library.impl(operator, function, dispatch_key)
        yield
