"""Predict the attention kernel that `scaled_dot_product_attention` uses on a GPU, without a GPU.

PyTorch selects it in C++ by properties of the device, and without a device falls back to plain matrix products, which
no GPU user would get. This module follows the documented order (flash attention, else memory-efficient attention, else
plain operations) and PyTorch's documented conditions on dtype, shape, strides and mask. cuDNN's kernel, which a GPU may
prefer, counts the same: one kernel instead of many.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from optimizations import torch_internals

Kernel = Literal["flash", "efficient", "math"]

SHORTCUT = (
    "attention kernels are assumed from PyTorch's documented conditions (flash, else memory-efficient, else plain "
    "operations); a GPU may choose cuDNN's instead. Either counts as one kernel"
)
FLASH_HEAD_LIMIT = 256
FLASH_HEAD_MULTIPLE = 8
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
        kernel = choose(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        if kernel == "math":
            return torch_internals.attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        note(SHORTCUT)
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)

    with overridden("AutogradCUDA", {"scaled_dot_product_attention": attend}):
        yield


def choose(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool
) -> Kernel:
    """Return the kernel for query [batch, heads, queries, width], key and value [batch, heads, keys, width]."""
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 or tensor.size(-2) == 0 for tensor in tensors):
        return "math"
    if mask is not None and mask.stride(-1) != 1:
        return "math"
    half = query.dtype in (torch.float16, torch.bfloat16)
    same_width = query.size(-1) == key.size(-1) == value.size(-1)
    square = query.size(-2) == key.size(-2)
    if half and mask is None and same_width and query.size(-1) <= FLASH_HEAD_LIMIT and (square or not is_causal):
        return "flash"
    aligned = all(tensor.size(-1) * tensor.element_size() % LOAD_BYTES == 0 for tensor in tensors)
    if (half or query.dtype == torch.float32) and aligned and not enable_gqa:
        return "efficient"
    return "math"


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None) -> Tensor:
    width = query.size(-1)
    padding = -width % FLASH_HEAD_MULTIPLE
    if padding:
        query, key, value = (torch.nn.functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
    chosen_scale = width**-0.5 if scale is None else scale
    output = torch_internals.flash_attention(query, key, value, dropout, is_causal, scale=chosen_scale)[0]
    return output[..., :width] if padding else output


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    keeps_statistics = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
    bias = None if mask is None else _bias(mask, query, key)
    output: Tensor = torch_internals.efficient_attention(
        query, key, value, bias, keeps_statistics, dropout, is_causal, scale=scale
    )[0]
    return output


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
