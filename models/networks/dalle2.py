"""Define DALL-E 2 (Ramesh et al., 2022) as TorchBench runs it: CLIP's text tower, a prior, two UNets, one step each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.networks.clip import ClipConfig, Float32LayerNorm, ImageTower, QuickGelu
from models.networks.dalle2_prior import PriorConfig, PriorNetwork
from models.networks.dalle2_unet import Unet, UnetConfig

PRIOR_SAMPLES = 2
"""Image embeddings drawn for a text, of which the one nearest to it is taken."""


FIRST_UNET = UnetConfig(width=128, multiples=(1, 2, 4, 8), embedding=512, upscales=False, outputs=6, side=128)
SECOND_UNET = UnetConfig(width=16, multiples=(1, 2, 4, 8, 16), embedding=None, upscales=True, outputs=3, side=256)


@dataclass(frozen=True, slots=True)
class Dalle2Config:
    """Hold the dimensions; the defaults are TorchBench's.

    `mask_on_cpu` chooses the published program: CLIP's causal mask is a plain attribute that each block moves to the
    GPU, and the row index of the end tokens is made without a device.
    """

    mask_on_cpu: bool = True
    clip: ClipConfig = field(default_factory=ClipConfig)
    prior: PriorConfig = field(default_factory=PriorConfig)
    first: UnetConfig = field(default_factory=lambda: FIRST_UNET)
    second: UnetConfig = field(default_factory=lambda: SECOND_UNET)


class TextBlock(nn.Module):
    """Apply a pre-norm transformer block over [length, batch, width] that has its own causal mask."""

    mask: Tensor

    def __init__(self, config: ClipConfig, mask: Tensor, *, mask_on_cpu: bool) -> None:
        super().__init__()
        width = config.text_width
        self.attention_norm = Float32LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, config.text_heads)
        self.feedforward_norm = Float32LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, config.text_feedforward), QuickGelu(), nn.Linear(config.text_feedforward, width)
        )
        if mask_on_cpu:
            # A plain attribute, one tensor for all blocks: `module.to(device)` passes it by.
            self.mask = mask
        else:
            self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        mask = self.mask[:length, :length].to(dtype=x.dtype, device=x.device)
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False, attn_mask=mask)[0]
        return x + self.feedforward(self.feedforward_norm(x))


class TextTower(nn.Module):
    """Map token ids [batch, at least context] to embeddings, both float32.

    They are a unit embedding [batch, embedding] and encoded tokens [batch, context, width], zero from the end token on.
    """

    def __init__(self, config: ClipConfig, *, mask_on_cpu: bool) -> None:
        super().__init__()
        self.config = config
        self.rows_on_device = not mask_on_cpu
        self.tokens = nn.Embedding(config.vocabulary, config.text_width)
        self.positions = nn.Parameter(torch.randn(config.context, config.text_width) * 0.01)
        mask = torch.full((config.context, config.context), float("-inf")).triu(1)
        self.blocks = nn.ModuleList(TextBlock(config, mask, mask_on_cpu=mask_on_cpu) for _ in range(config.text_layers))
        self.norm = Float32LayerNorm(config.text_width)
        self.projection = nn.Parameter(torch.randn(config.text_width, config.embedding) * config.text_width**-0.5)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        text = text[:, : self.config.context]
        x = (self.tokens(text) + self.positions).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        encoded = self.norm(x.transpose(0, 1))
        rows = torch.arange(text.shape[0], device=text.device if self.rows_on_device else None)
        embedding = encoded[rows, text.argmax(dim=-1)] @ self.projection
        ended = (text == self.config.vocabulary - 1).cumsum(dim=-1) > 0
        said = functional.pad(~ended, (1, -1), value=True) & (text != 0)
        return functional.normalize(embedding.float(), dim=-1), encoded.masked_fill(~said[..., None], 0.0).float()


class Clip(nn.Module):
    """Hold both towers, as they are loaded together; only the text's is used."""

    def __init__(self, config: ClipConfig, *, mask_on_cpu: bool) -> None:
        super().__init__()
        self.text = TextTower(config, mask_on_cpu=mask_on_cpu)
        self.image = ImageTower(config)


class Schedule(nn.Module):
    """Define the cosine noise schedule with a single step, and its reverse."""

    variance_kept: Tensor
    first_weight: Tensor
    second_weight: Tensor
    least_log_variance: Tensor
    log_beta: Tensor

    def __init__(self) -> None:
        super().__init__()
        beta = torch.tensor([0.999], dtype=torch.float64)  # where the schedule is cut off; one step goes all the way
        kept = 1 - beta
        buffers = {
            "variance_kept": kept,
            "first_weight": beta / (1 - kept),
            "second_weight": torch.zeros_like(beta),
            "least_log_variance": torch.full_like(beta, 1e-20).log(),
            "log_beta": beta.log(),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value.float())

    def start(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """Return `x` as it was before `noise` was added."""
        kept = _at(self.variance_kept, time, x)
        return (1 / kept).sqrt() * x - (1 / kept - 1).sqrt() * noise

    def step_back(self, x: Tensor, time: Tensor, start: Tensor, fraction: Tensor | None) -> Tensor:
        """Take one step from `x` towards `start`, with new noise unless it is the last one.

        `fraction` lies between the logarithms of the noise's least and largest variance, where learned.
        """
        mean = _at(self.first_weight, time, x) * start + _at(self.second_weight, time, x) * x
        log_variance = _at(self.least_log_variance, time, x)
        if fraction is not None:
            fraction = (fraction + 1) * 0.5
            log_variance = fraction * _at(self.log_beta, time, x) + (1 - fraction) * log_variance
        not_last = (time != 0).to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1))
        return mean + not_last * (0.5 * log_variance).exp() * torch.randn_like(x)


class Dalle2(nn.Module):
    """Map text [batch, 256] int64 to images [batch, 3, side, side] float32 in 0 .. 1; one text to [3, side, side].

    Draws noise: for the prior, for each UNet, and for each step back, always in float32.
    """

    def __init__(self, config: Dalle2Config) -> None:
        super().__init__()
        self.config = config
        self.clip = Clip(config.clip, mask_on_cpu=config.mask_on_cpu)
        self.prior = PriorNetwork(config.prior)
        self.unets = nn.ModuleList([Unet(config.first), Unet(config.second)])
        self.schedule = Schedule()

    def forward(self, text: Tensor) -> Tensor:
        embedding = self._imagine(text)
        _, encoded_text = self.clip.text(text)
        first, second = self.unets
        image = self._draw(first, text.shape[0], embedding, encoded_text)
        smaller = functional.interpolate(image, size=self.config.second.side, mode="nearest") * 2 - 1
        image = self._draw(second, text.shape[0], smaller=smaller)
        return image[0] if text.shape[0] == 1 else image

    def _imagine(self, text: Tensor) -> Tensor:
        """Return an image embedding for each text, the best of `PRIOR_SAMPLES`: [batch, width]."""
        repeated = text.repeat_interleave(PRIOR_SAMPLES, dim=0)
        embedding, encoded = self.clip.text(repeated)
        noise = torch.randn(embedding.shape, device=text.device)
        time = torch.zeros(len(repeated), dtype=torch.int64, device=text.device)
        predicted = self.prior(noise, time, embedding, encoded)
        images = self.schedule.step_back(noise, time, predicted, None) / embedding.shape[-1] ** 0.5
        images, texts = (part.unflatten(0, (-1, PRIOR_SAMPLES)) for part in (images, embedding))
        likeness = (functional.normalize(texts, dim=-1) * functional.normalize(images, dim=-1)).sum(dim=-1)
        best = likeness.topk(1).indices[..., None].expand(-1, 1, images.shape[-1])
        return images.gather(1, best)[:, 0]

    def _draw(
        self,
        unet: nn.Module,
        batch: int,
        embedding: Tensor | None = None,
        encoded_text: Tensor | None = None,
        smaller: Tensor | None = None,
    ) -> Tensor:
        """Take one diffusion step from pure noise: [batch, 3, side, side] in 0 .. 1."""
        config: Any = unet.config
        device = self.schedule.log_beta.device
        x = torch.randn(batch, 3, config.side, config.side, device=device)
        time = torch.zeros(batch, dtype=torch.int64, device=device)
        noise, fraction = unet(x, time, embedding, encoded_text, smaller), None
        if config.outputs == 6:
            noise, fraction = noise.chunk(2, dim=1)
        start = self.schedule.start(x, time, noise)
        # Values beyond the 95th percentile are cut off, and all are scaled to -1 .. 1.
        limit = start.flatten(1).abs().quantile(0.95, dim=-1).clamp(min=1.0)[:, None, None, None]
        start = start.clamp(-limit, limit) / limit
        return (self.schedule.step_back(x, time, start, fraction) + 1) * 0.5


def _at(values: Tensor, time: Tensor, like: Tensor) -> Tensor:
    """Return values of a schedule at `time` [batch], to multiply with `like`."""
    return values.gather(0, time).reshape(-1, *(1,) * (like.dim() - 1))
