"""Define norms and attention that the prior and the UNets of DALL-E 2 share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class GainNorm(nn.Module):
    """Apply layer norm over the last dimension with a gain, no shift; `stable` divides by the largest value first."""

    def __init__(self, width: int, *, stable: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.stable = stable

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-5 if x.dtype == torch.float32 else 1e-3
        if self.stable:
            x = x / x.amax(dim=-1, keepdim=True).detach()
        variance, mean = torch.var_mean(x, dim=-1, unbiased=False, keepdim=True)
        return (x - mean) * (variance + eps).rsqrt() * self.gain


class Rotary(nn.Module):
    """Turn the first `turned` features of queries and keys [..., length, features] by their position."""

    def __init__(self, turned: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** -(torch.arange(0, turned, 2).float() / turned)
        self.frequencies = nn.Parameter(frequencies, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * self.frequencies
        turned, kept = x[..., : 2 * angles.shape[-1]], x[..., 2 * angles.shape[-1] :]
        even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), kept], dim=-1)


class SelfAttention(nn.Module):
    """Attend from many queries to one head of keys and values, and to a learned null key and value before them.

    `rotary` makes it the prior's attention: causal, of unit vectors, and with positions; without, it is the UNets'.
    """

    def __init__(self, width: int, heads: int, head_width: int, rotary: Rotary | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.scale = 16.0 if rotary is not None else head_width**-0.5
        self.norm = GainNorm(width)
        self.null = nn.Parameter(torch.randn(2, head_width))
        self.to_query = nn.Linear(width, heads * head_width, bias=False)
        self.to_key_value = nn.Linear(width, 2 * head_width, bias=False)
        self.output = nn.Sequential(nn.Linear(heads * head_width, width, bias=False), GainNorm(width))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend: `x` [batch, length, width], `bias` [heads, length, length + 1] -> like `x`."""
        x = self.norm(x)
        query = self.to_query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) * self.scale
        key, value = self.to_key_value(x).chunk(2, dim=-1)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        null_key, null_value = (vector.expand(x.shape[0], 1, -1) for vector in self.null.unbind())
        key, value = torch.cat([null_key, key], dim=1), torch.cat([null_value, value], dim=1)
        if self.rotary is not None:
            query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
        root = math.sqrt(self.scale)
        scores = torch.einsum("bhid,bjd->bhij", query * root, key * root)
        if bias is not None:
            scores = scores + bias
        if self.rotary is not None:
            queries, keys = scores.shape[-2:]
            future = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
            scores = scores.masked_fill(future, -torch.finfo(scores.dtype).max)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
        attended = torch.einsum("bhij,bjd->bhid", weights, value)
        return self.output(attended.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attend from `x` [batch, length, width] to a context [batch, tokens, context width] and a learned null token."""

    def __init__(self, width: int, context_width: int, heads: int = 8, head_width: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.scale = head_width**-0.5
        self.norm = GainNorm(width)
        self.null = nn.Parameter(torch.randn(2, head_width))
        self.to_query = nn.Linear(width, heads * head_width, bias=False)
        self.to_key_value = nn.Linear(context_width, 2 * heads * head_width, bias=False)
        self.output = nn.Sequential(nn.Linear(heads * head_width, width, bias=False), GainNorm(width))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query = self._by_head(self.to_query(self.norm(x)))
        key, value = (self._by_head(part) for part in self.to_key_value(context).chunk(2, dim=-1))
        null_key, null_value = (vector.expand(x.shape[0], self.heads, 1, -1) for vector in self.null.unbind())
        key, value = torch.cat([null_key, key], dim=2), torch.cat([null_value, value], dim=2)
        root = math.sqrt(self.scale)
        scores = torch.einsum("bhid,bhjd->bhij", query * root, key * root)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
        return self.output(torch.einsum("bhij,bhjd->bhid", weights, value).transpose(1, 2).flatten(2))

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Sinusoids(nn.Module):
    """Map numbers [n] of a floating dtype to sines, then cosines [n, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, numbers: Tensor) -> Tensor:
        half = self.width // 2
        steps = torch.arange(half, device=numbers.device, dtype=numbers.dtype)
        angles = numbers[:, None] * torch.exp(steps * (-math.log(10000) / (half - 1)))
        return torch.cat([angles.sin(), angles.cos()], dim=-1)
