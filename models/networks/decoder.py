"""Define a plain decoder-only transformer of today: RMS norms, rotary positions, gated feed-forward.

After Llama (Touvron et al., 2023), with random weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Hold the dimensions; the defaults are Llama 3.2 1B's without shared keys and values, at half its layers."""

    vocabulary: int = 32_000
    width: int = 2048
    layers: int = 8
    heads: int = 32
    feedforward: int = 8192
    longest: int = 512

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    """Compute causal self-attention: [batch, time, width] and the positions' cosines and sines -> like the first."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            _turned(query, cos, sin), _turned(key, cos, sin), value, is_causal=True
        )
        return self.output(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.feedforward, bias=False)
        self.up = nn.Linear(config.width, config.feedforward, bias=False)
        self.down = nn.Linear(config.feedforward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feedforward_norm = nn.RMSNorm(config.width)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feedforward(self.feedforward_norm(x))


class Decoder(nn.Module):
    """Map tokens [batch, time] int64 to logits [batch, time, vocabulary]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        frequencies = 10_000.0 ** -(torch.arange(0, config.head_width, 2).float() / config.head_width)
        angles = torch.arange(config.longest).float()[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [batch, heads, time, head width] with rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
