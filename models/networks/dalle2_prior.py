"""Define the prior of DALL-E 2 (Ramesh et al., 2022): a causal transformer from text to image embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.networks.dalle2_attention import GainNorm, Rotary, SelfAttention, Sinusoids


@dataclass(frozen=True, slots=True)
class PriorConfig:
    """Hold the dimensions; the defaults are TorchBench's. `longest_text` is what texts are padded to."""

    width: int = 512
    depth: int = 6
    heads: int = 8
    head_width: int = 64
    longest_text: int = 256


class RelativeBias(nn.Module):
    """Compute T5's bias for attention scores by distance, in 32 buckets up to 128: [heads, queries, keys]."""

    buckets = 32
    farthest = 128

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Embedding(self.buckets, heads)

    def forward(self, queries: int, keys: int, device: torch.device) -> Tensor:
        distance = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
        distance = distance.clamp(min=0)
        exact = self.buckets // 2
        growth = torch.log(distance.float() / exact) / math.log(self.farthest / exact) * (self.buckets - exact)
        far = (exact + growth.long()).clamp(max=self.buckets - 1)
        return self.bias(torch.where(distance < exact, distance, far)).permute(2, 0, 1)


class GatedSilu(nn.Module):
    """Multiply the first half of the features with the SiLU of the second."""

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = x.chunk(2, dim=-1)
        return kept * functional.silu(gate)


class PriorNetwork(nn.Module):
    """Predict the image embedding [batch, width].

    Takes an image embedding [batch, width], time [batch], text embedding [batch, width] and encoded text [batch,
    length, width] with zeros for padding.
    """

    def __init__(self, config: PriorConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.time = nn.Sequential(
            Sinusoids(width),
            nn.Linear(width, 2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, 2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, width),
        )
        self.query = nn.Parameter(torch.randn(width))
        self.no_text = nn.Parameter(torch.randn(1, config.longest_text, width))
        self.no_text_embedding = nn.Parameter(torch.randn(1, 1, width))
        self.no_image_embedding = nn.Parameter(torch.randn(1, 1, width))
        self.relative_bias = RelativeBias(config.heads)
        rotary = Rotary(min(32, config.head_width))
        self.attentions = nn.ModuleList(
            SelfAttention(width, config.heads, config.head_width, rotary) for _ in range(config.depth)
        )
        self.feedforwards = nn.ModuleList(
            nn.Sequential(
                GainNorm(width),
                nn.Linear(width, 8 * width, bias=False),
                GatedSilu(),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(config.depth)
        )
        self.norm = GainNorm(width, stable=True)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, image: Tensor, time: Tensor, text: Tensor, encoded_text: Tensor) -> Tensor:
        batch = image.shape[0]
        # As published, texts and images that are dropped for guidance are chosen by masks, which drop none here.
        keep = torch.ones(batch, 1, 1, dtype=torch.bool, device=image.device)
        padding = self.config.longest_text - encoded_text.shape[1]
        said = functional.pad((encoded_text != 0).any(dim=-1), (0, padding))[..., None]
        encoded = torch.where(said & keep, functional.pad(encoded_text, (0, 0, 0, padding)), self.no_text)
        tokens = torch.cat(
            [
                encoded,
                torch.where(keep, text[:, None], self.no_text_embedding),
                self.time(time.to(image.dtype))[:, None],
                torch.where(keep, image[:, None], self.no_image_embedding),
                self.query.expand(batch, 1, -1),
            ],
            dim=1,
        )
        length = tokens.shape[1]
        bias = self.relative_bias(length, length + 1, tokens.device)
        for attention, feedforward in zip(self.attentions, self.feedforwards, strict=True):
            tokens = attention(tokens, bias) + tokens
            tokens = feedforward(tokens) + tokens
        return self.output(self.norm(tokens))[:, -1]
