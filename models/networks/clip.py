"""Define CLIP (Radford et al., 2021) with a ViT-B/32 image tower and a causal text tower.

As in the published program, the text tower runs sequence-first, the image tower batch-first, and layer norms compute
in float32 whatever the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """Hold the dimensions; the defaults are ViT-B/32's."""

    image_side: int = 224
    patch: int = 32
    vision_width: int = 768
    vision_layers: int = 12
    vision_heads: int = 12
    text_width: int = 512
    text_layers: int = 12
    text_heads: int = 8
    text_feedforward: int = 2048
    context: int = 77
    vocabulary: int = 49408
    embedding: int = 512


class Float32LayerNorm(nn.LayerNorm):
    """Compute the layer norm in float32 and return it in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )
        return normed.to(x.dtype)


class QuickGelu(nn.Module):
    """Compute x * sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    """Compute self-attention over x [sequence, batch, width], or batch-first, with an additive float mask."""

    def __init__(self, width: int, heads: int, *, batch_first: bool) -> None:
        super().__init__()
        self.heads = heads
        self.batch_first = batch_first
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.in_proj(x).chunk(3, dim=-1)
        )
        # The mask goes in as data: with the `is_causal` hint instead, the kernel would ignore it.
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        attended = attended.transpose(1, 2).flatten(2)
        if not self.batch_first:
            attended = attended.transpose(0, 1)
        return self.out_proj(attended)


class Block(nn.Module):
    """Apply a pre-norm transformer block."""

    def __init__(self, width: int, heads: int, feedforward: int, *, batch_first: bool) -> None:
        super().__init__()
        self.attention_norm = Float32LayerNorm(width)
        self.attention = Attention(width, heads, batch_first=batch_first)
        self.feedforward_norm = Float32LayerNorm(width)
        self.feedforward = nn.Sequential(nn.Linear(width, feedforward), QuickGelu(), nn.Linear(feedforward, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feedforward(self.feedforward_norm(x))


class ImageTower(nn.Module):
    """Map an image [batch, 3, side, side] to [batch, embedding]."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        width = config.vision_width
        tokens = (config.image_side // config.patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, kernel_size=config.patch, stride=config.patch, bias=False)
        self.class_token = nn.Parameter(torch.randn(width) * width**-0.5)
        self.positions = nn.Parameter(torch.randn(tokens, width) * width**-0.5)
        self.norm_before = Float32LayerNorm(width)
        self.blocks = nn.ModuleList(
            Block(width, config.vision_heads, 4 * width, batch_first=True) for _ in range(config.vision_layers)
        )
        self.norm_after = Float32LayerNorm(width)
        self.projection = nn.Parameter(torch.randn(width, config.embedding) * width**-0.5)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(image.shape[0], 1, -1)
        x = self.norm_before(torch.cat([class_token, patches], dim=1) + self.positions)
        for block in self.blocks:
            x = block(x, None)
        return self.norm_after(x[:, 0]) @ self.projection


class TextTower(nn.Module):
    """Map token ids [batch, context] to [batch, embedding], read at each text's end token (its highest id)."""

    causal_mask: Tensor

    def __init__(self, config: ClipConfig, *, mask_on_cpu: bool) -> None:
        super().__init__()
        width = config.text_width
        self.tokens = nn.Embedding(config.vocabulary, width)
        self.positions = nn.Parameter(torch.empty(config.context, width))
        self.blocks = nn.ModuleList(
            Block(width, config.text_heads, config.text_feedforward, batch_first=False)
            for _ in range(config.text_layers)
        )
        self.norm = Float32LayerNorm(width)
        self.projection = nn.Linear(width, config.embedding, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        mask = torch.full((config.context, config.context), float("-inf")).triu(1)
        if mask_on_cpu:
            # A plain attribute: `module.to(device)` passes it by, so that every call starts with a CPU tensor.
            self.causal_mask = mask
        else:
            self.register_buffer("causal_mask", mask, persistent=False)
        self.rows_on_device = not mask_on_cpu

    def forward(self, text: Tensor) -> Tensor:
        x = (self.tokens(text) + self.positions).transpose(0, 1)
        mask = self.causal_mask.to(x.device).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        rows = torch.arange(text.shape[0], device=text.device if self.rows_on_device else None)
        return self.projection(x[text.argmax(dim=-1), rows])


class Clip(nn.Module):
    """Map an image [n, 3, side, side] and text [m, context] to unit vectors [n, embedding] and [m, embedding].

    `mask_on_cpu` is the published program: its causal mask is a plain CPU attribute, and the row index of the end
    tokens is made without a device.
    """

    def __init__(self, config: ClipConfig, *, mask_on_cpu: bool) -> None:
        super().__init__()
        self.image_tower = ImageTower(config)
        self.text_tower = TextTower(config, mask_on_cpu=mask_on_cpu)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return (
            functional.normalize(self.image_tower(image), dim=-1),
            functional.normalize(self.text_tower(text), dim=-1),
        )
