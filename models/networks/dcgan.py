"""Define the discriminator of DCGAN (Radford et al., 2015) for 64 x 64 images."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Discriminator(nn.Module):
    """Map an image [batch, 3, 64, 64] to a probability [batch, 1, 1, 1].

    Four strided convolutions that double the width from `width` on, batch norm on all but the first, none with bias,
    and a fifth that reduces the last 4 x 4 to one value.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=2, padding=1, bias=False), nn.LeakyReLU(0.2)]
        for channels in (width, 2 * width, 4 * width):
            stages += [
                nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(2 * channels),
                nn.LeakyReLU(0.2),
            ]
        stages += [nn.Conv2d(8 * width, 1, 4, bias=False), nn.Sigmoid()]
        self.stages = nn.Sequential(*stages)
        self.apply(_initialise)

    def forward(self, image: Tensor) -> Tensor:
        return self.stages(image)


@torch.no_grad()
def _initialise(module: nn.Module) -> None:
    """Initialise as the paper does: normal with deviation 0.02, batch-norm scales around 1."""
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
