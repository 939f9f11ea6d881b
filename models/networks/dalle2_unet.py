"""Define the UNets of DALL-E 2 (Ramesh et al., 2022): residual blocks that attend to condition tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.networks.dalle2_attention import CrossAttention, SelfAttention, Sinusoids

TIME_TOKENS = 2
IMAGE_TOKENS = 4
GROUPS = 8
BLOCKS = 2
"""Residual blocks of a level, besides its first one."""


@dataclass(frozen=True, slots=True)
class UnetConfig:
    """Hold the dimensions of one UNet.

    Attributes:
        width: channels of the first level; `multiples` of it are those of the levels.
        context: width of the condition tokens.
        embedding: width of CLIP's image and text embeddings if they are conditions; None: the time alone is.
        upscales: whether a smaller image is a condition, which is concatenated with the noisy one.
        outputs: channels of the result.
        side: of the image it makes.
    """

    width: int
    multiples: tuple[int, ...]
    embedding: int | None
    upscales: bool
    outputs: int
    side: int
    context: int = 128
    longest_text: int = 256


class Norm(nn.Module):
    """Apply convolution, group norm, scale and shift by the time, and SiLU."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, outputs)

    def forward(self, x: Tensor, scale_shift: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.norm(self.project(x))
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return functional.silu(x)


class ResidualBlock(nn.Module):
    """Map [batch, channels, side, side] to [batch, outputs, side, side]; `context` None: it does not attend."""

    def __init__(self, channels: int, outputs: int, time: int, context: int | None = None) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, 2 * outputs))
        self.attention = CrossAttention(outputs, context) if context is not None else None
        self.first = Norm(channels, outputs)
        self.second = Norm(outputs, outputs)
        self.shortcut = nn.Conv2d(channels, outputs, 1) if channels != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor, tokens: Tensor | None = None) -> Tensor:
        scale, shift = self.time(time)[..., None, None].chunk(2, dim=1)
        hidden = self.first(x, (scale, shift))
        if self.attention is not None:
            rows = hidden.flatten(2).transpose(1, 2)
            rows = self.attention(rows, tokens) + rows
            hidden = rows.transpose(1, 2).unflatten(2, hidden.shape[2:])
        return self.second(hidden) + self.shortcut(x)


class SpatialAttention(nn.Module):
    """Attend among all places of a feature map, with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = SelfAttention(channels, heads=16, head_width=32)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        return (self.attention(rows) + rows).transpose(1, 2).unflatten(2, x.shape[2:])


class Stem(nn.Module):
    """Apply convolutions of three sizes side by side, the smallest with half of the channels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        shares = (width // 2, width // 4, width - width // 2 - width // 4)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, share, kernel, padding=kernel // 2)
            for kernel, share in zip((3, 7, 15), shares, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([convolution(x) for convolution in self.convolutions], dim=1)


def _downsample(channels: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * channels, outputs, 1))


def _upsample(channels: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, 4 * outputs, 1)
    quarter = torch.empty(outputs, channels, 1, 1)
    nn.init.kaiming_uniform_(quarter)
    with torch.no_grad():
        convolution.weight.copy_(quarter.repeat_interleave(4, dim=0))
    nn.init.zeros_(convolution.get_parameter("bias"))
    return nn.Sequential(convolution, nn.SiLU(), nn.PixelShuffle(2))


def _level(
    channels: int, outputs: int, time: int, context: int | None, first_context: int | None, leave: nn.Module
) -> nn.ModuleDict:
    """Return the residual blocks of one level, on the way down or up, and what leads to the next one."""
    blocks = nn.ModuleList(ResidualBlock(channels, outputs, time, context) for _ in range(BLOCKS))
    first = ResidualBlock(channels, outputs, time, first_context)
    return nn.ModuleDict({"first": first, "blocks": blocks, "leave": leave})


class Unet(nn.Module):
    """Map a noisy image [batch, 3, side, side] at time [batch] int64 to [batch, outputs, side, side].

    Image embedding, encoded text, and a smaller image enlarged to this side may each be None.
    """

    def __init__(self, config: UnetConfig) -> None:
        super().__init__()
        self.config = config
        width, context, time = config.width, config.context, 4 * config.width
        self.stem = Stem(6 if config.upscales else 3, width)
        self.time = nn.Sequential(Sinusoids(width), nn.Linear(width, time), nn.GELU())
        self.time_tokens = nn.Linear(time, TIME_TOKENS * context)
        self.time_condition = nn.Linear(time, time)
        self.image_tokens = nn.Linear(config.embedding, IMAGE_TOKENS * context) if config.embedding else None
        self.image_condition = nn.Sequential(nn.Linear(config.embedding, time), nn.GELU()) if config.embedding else None
        self.text_tokens = nn.Linear(config.embedding, context) if config.embedding else None
        self.no_image_tokens = nn.Parameter(torch.randn(1, IMAGE_TOKENS, context))
        self.no_image_condition = nn.Parameter(torch.randn(1, time))
        self.no_text_tokens = nn.Parameter(torch.randn(1, config.longest_text, context))
        self.norm_context = nn.LayerNorm(context)
        self.norm_middle_context = nn.LayerNorm(context)

        steps = list(pairwise((width, *(width * multiple for multiple in config.multiples))))
        last = len(steps) - 1
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        for level, (narrow, wide) in enumerate(steps):
            leave: nn.Module = _downsample(narrow, wide) if level < last else nn.Conv2d(narrow, wide, 1)
            self.down.append(_level(narrow, narrow, time, context if level else None, None, leave))
        for level, (narrow, wide) in reversed(list(enumerate(steps))):
            leave = _upsample(wide, narrow) if level else nn.Identity()
            attends = context if level else None
            self.up.append(_level(wide + narrow, wide, time, attends, attends, leave))
        middle = steps[-1][1]
        self.middle = nn.ModuleList(ResidualBlock(middle, middle, time, context) for _ in range(2))
        self.middle_attention = SpatialAttention(middle)
        self.last = ResidualBlock(2 * width, width, time)
        self.output = nn.Conv2d(width + (3 if config.upscales else 0), config.outputs, 1)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        image: Tensor | None = None,
        encoded_text: Tensor | None = None,
        smaller: Tensor | None = None,
    ) -> Tensor:
        if smaller is not None:
            x = torch.cat([x, smaller], dim=1)
        x = self.stem(x)
        stem = x.clone()
        hidden_time = self.time(time.to(x.dtype))
        tokens = self.time_tokens(hidden_time).unflatten(-1, (TIME_TOKENS, -1))
        condition = self.time_condition(hidden_time)
        # As published, conditions that are dropped for guidance are chosen by masks, which drop none here.
        keep = torch.ones(x.shape[0], 1, dtype=torch.bool, device=x.device)
        if self.image_tokens is not None and self.image_condition is not None:
            condition = condition + torch.where(keep, self.image_condition(image), self.no_image_condition)
            image_tokens = self.image_tokens(image).unflatten(-1, (IMAGE_TOKENS, -1))
            tokens = torch.cat([tokens, torch.where(keep[..., None], image_tokens, self.no_image_tokens)], dim=1)
        middle_tokens = tokens
        if self.text_tokens is not None and encoded_text is not None:
            middle_tokens = torch.cat([tokens, self._text(encoded_text, keep)], dim=1)
        tokens, middle_tokens = self.norm_context(tokens), self.norm_middle_context(middle_tokens)

        skipped: list[Tensor] = []
        down: Any = self.down
        for level in down:
            x = level["first"](x, condition)
            for block in level["blocks"]:
                x = block(x, condition, tokens)
                skipped.append(x)
            skipped.append(x)
            x = level["leave"](x)
        x = self.middle[0](x, condition, middle_tokens)
        x = self.middle_attention(x)
        x = self.middle[1](x, condition, middle_tokens)
        up: Any = self.up
        for level in up:
            x = level["first"](torch.cat([x, skipped.pop()], dim=1), condition, tokens)
            for block in level["blocks"]:
                x = block(torch.cat([x, skipped.pop()], dim=1), condition, tokens)
            x = level["leave"](x)
        x = self.last(torch.cat([x, stem], dim=1), condition)
        if smaller is not None:
            x = torch.cat([x, smaller], dim=1)
        return self.output(x)

    def _text(self, encoded_text: Tensor, keep: Tensor) -> Tensor:
        """Return condition tokens of a text, learned ones where it is padding: [batch, longest text, context]."""
        assert self.text_tokens is not None
        padding = self.config.longest_text - encoded_text.shape[1]
        said = functional.pad((encoded_text != 0).any(dim=-1), (0, padding)) & keep
        tokens = functional.pad(self.text_tokens(encoded_text), (0, 0, 0, padding))
        return torch.where(said[..., None], tokens, self.no_text_tokens)
