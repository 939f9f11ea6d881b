"""Define BERT (Devlin et al., 2018) as a much-used implementation by hand has it.

It has pre-norm, sinusoid positions, heads with log-softmax, and its own layer norm that divides by the unbiased
standard deviation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Hold the dimensions; the defaults are the published ones."""

    vocabulary: int = 20_005
    segments: int = 3
    width: int = 768
    layers: int = 12
    heads: int = 12
    feedforward: int = 3072
    dropout: float = 0.1
    longest: int = 512


class UnbiasedLayerNorm(nn.Module):
    """Compute scale * (x - mean) / (std + 1e-6) + shift, with the unbiased deviation over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.scale * (x - mean) / (std + 1e-6) + self.shift


class Attention(nn.Module):
    """Compute self-attention over [batch, length, width]; `hidden` [batch, 1, length, length] masks where true."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
        weights = self.dropout(scores.masked_fill(hidden, -1e4).softmax(dim=-1))
        return self.output(torch.matmul(weights, value).transpose(1, 2).flatten(2))


class MaskedAttention(nn.Module):
    """Keep its mask as an attribute, which every call replaces: the published program's construct."""

    hidden: Tensor | None

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.hidden = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: without the last call's mask, whose memory a CUDA graph may use again."""
        return {**self.__dict__, "hidden": None}

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.hidden)


class Residual(nn.Module):
    """Compute x + dropout(sublayer(norm(x)))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.norm = UnbiasedLayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: nn.Module) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class Block(nn.Module):
    """Apply attention and feed-forward, each with a residual connection around it, and dropout after both."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.masked_attention = MaskedAttention(config)
        self.feedforward = nn.Sequential(
            nn.Linear(config.width, config.feedforward),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.feedforward, config.width),
        )
        self.around_attention = Residual(config)
        self.around_feedforward = Residual(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        self.masked_attention.hidden = hidden
        x = self.around_attention(x, self.masked_attention)
        return self.dropout(self.around_feedforward(x, self.feedforward))


class Bert(nn.Module):
    """Map tokens and segments (int64 [batch, length] each) to log-probabilities.

    They are of "follows" [batch, 2] and of each token [batch, length, vocabulary]. Token 0 is padding.
    """

    positions: Tensor

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width, padding_idx=0)
        self.segments = nn.Embedding(config.segments, config.width, padding_idx=0)
        self.register_buffer("positions", _sinusoids(config.longest, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.follows = nn.Linear(config.width, 2)
        self.words = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        hidden = (tokens <= 0)[:, None, None, :].expand(-1, 1, length, -1)
        x = self.dropout(self.tokens(tokens) + self.positions[:length] + self.segments(segments))
        for block in self.blocks:
            x = block(x, hidden)
        return self.follows(x[:, 0]).log_softmax(dim=-1), self.words(x).log_softmax(dim=-1)


def _sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines, interleaved: [length, width] float32."""
    frequencies = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angles = torch.arange(length).float()[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
