"""Define the model: four pre-norm transformer layers of width 32, fused query-key-value projections, a static cache."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from models.nanogpt.configurations import Shape


class CachedAttention(nn.Module):
    """Compute causal attention over a cache [1, heads, context, width / heads] of keys and of values.

    All of the cache is attended to, what is not filled yet being masked, so that shapes are the same in every step.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width)
        cache = (1, shape.heads, shape.context, shape.width // shape.heads)
        self.register_buffer("keys", torch.zeros(cache), persistent=False)
        self.register_buffer("values", torch.zeros(cache), persistent=False)
        self.register_buffer("slots", torch.arange(shape.context), persistent=False)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Run `x` [1, tokens, width] at positions from `start` on: the published eager path, with Python positions."""
        tokens = x.shape[1]
        query, key, value = self._split(x)
        self.keys[:, :, start : start + tokens] = key
        self.values[:, :, start : start + tokens] = value
        places = torch.arange(start, start + tokens, device=x.device)
        context = torch.arange(self.keys.shape[2], device=x.device)
        return self._attend(query, context[None] <= places[:, None])

    def decode(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Run `x` [1, 1, width] at `position` (int64 [1] on the device): no shape or address changes, nothing waits."""
        query, key, value = self._split(x)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        return self._attend(query, (self.slots <= position)[None])

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, tokens, width = x.shape
        return tuple(
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )

    def _attend(self, query: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Attend: `query` [1, heads, tokens, width / heads], `seen` bool [tokens, context] -> [1, tokens, width]."""
        scores = (query @ self.keys.transpose(-2, -1)) * query.shape[-1] ** -0.5
        weights = functional.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        joined: torch.Tensor = (weights @ self.values).transpose(1, 2).flatten(2)
        return self.out(joined)


class Layer(nn.Module):
    """Apply attention and a feed-forward network of four times the width, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = CachedAttention(shape)
        self.feed_forward = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.ReLU(), nn.Linear(4 * shape.width, shape.width)
        )
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), start)
        return x + self.feed_forward(self.norm_2(x))

    def decode(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = x + self.attention.decode(self.norm_1(x), position)
        return x + self.feed_forward(self.norm_2(x))


class NanoGPT(nn.Module):
    """Hold the model with the published program's weights: normal with deviation 0.02, biases zero."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Map `tokens` int64 [1, count] at positions from `start` to logits [1, count, vocabulary]. Fills the cache."""
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(places)
        for layer in self.layers:
            x = layer(x, start)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def decode(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Map `token` int64 [1, 1] at `position` int64 [1] to logits [1, 1, vocabulary]. Fills one cache slot."""
        x = self.token_embedding(token) + self.position_embedding(position)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = layer.decode(x, position)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def clear_cache(self) -> None:
        """Clear the cache in place, for graphs hold its address."""
        for module in self.modules():
            if isinstance(module, CachedAttention):
                module.keys.zero_()
                module.values.zero_()
