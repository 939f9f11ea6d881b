"""Three small programs with the shapes of CPU use that keep published models from being captured."""

from __future__ import annotations

import math

import numpy
import torch
from torch import nn

WIDTH = 8


class MaskedBlocks(nn.Module):
    """A CLIP text tower as DALL-E 2 uses it: a mask kept as a plain attribute, so it stays on the CPU, goes to the
    device in every block; the row index of the last token is made without a device."""

    def __init__(self, tokens: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.mask = torch.full((tokens, tokens), float("-inf")).triu_(1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            mask = self.mask.to(dtype=x.dtype, device=x.device) if self.mask is not None else None
            x = x + torch.softmax(x @ x.transpose(1, 2) + mask, dim=-1) @ block(x)
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)]


class DetectionScalars(nn.Module):
    """What Mask R-CNN does around its convolutions: image statistics as lists, anchors and ratios made anew on the
    CPU, an epsilon tensor in the level mapper, an offset of one for batched suppression."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.image_mean = [0.485, 0.456, 0.406]
        self.image_std = [0.229, 0.224, 0.225]
        self.anchors = [torch.tensor([[-4.0, -2.0, 4.0, 2.0], [-2.0, -4.0, 2.0, 4.0]])]
        self.eps = 1e-6
        self.scale = numpy.float64(16.0)

    def forward(self, image: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.as_tensor(self.image_mean, dtype=image.dtype, device=image.device)
        std = torch.tensor(self.image_std).to(image)
        features = self.convolution((image - mean[:, None, None]) / std[:, None, None])
        ratios = [
            torch.tensor(float(new)) / torch.tensor(float(old))
            for new, old in zip(features.shape[-2:], (10, 10), strict=True)
        ]
        boxes = boxes * torch.stack([ratios[1], ratios[0], ratios[1], ratios[0]]).to(boxes.device)
        boxes = boxes + self.anchors[0].to(boxes.device)[:1]
        area = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).abs()
        levels = torch.floor(torch.log2(area.sqrt() / self.scale) + torch.tensor(self.eps, dtype=area.dtype))
        offsets = levels * (boxes.max() + torch.tensor(1).to(boxes))
        return features, boxes + offsets[:, None]


class TimedDenoiser(nn.Module):
    """A step of a diffusion loop: the scheduler passes a timestep on the CPU, which is embedded by sinusoids there
    and copied to the device; the noise schedule is a CPU table indexed by it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.alphas = torch.linspace(0.99, 0.01, 50)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        half = WIDTH // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half)
        angles = timestep.float().reshape(1, 1) * frequencies[None, :]
        embedding = torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.device)
        alpha = self.alphas[timestep.reshape(1)].to(device=x.device, dtype=x.dtype)
        return (x - (1 - alpha).sqrt() * self.project(x + embedding)) / alpha.sqrt()
