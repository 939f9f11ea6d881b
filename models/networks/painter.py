"""Define the actor of LearningToPaint (Huang et al., 2019): a ResNet-18 that halves the image in every stage."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock

CHANNELS = 9
"""Canvas and target image, step number, and the two coordinates of each pixel."""

STROKE_PARAMETERS = 65
"""Five strokes of 13 numbers each."""


class Painter(nn.Module):
    """Map a state [batch, 9, 128, 128] to stroke parameters [batch, 65] in 0 .. 1. `width` is the first stage's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [
            nn.Conv2d(CHANNELS, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        wide = width
        for stage in range(4):
            narrow, wide = wide, width << stage
            shortcut = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride=2, bias=False), nn.BatchNorm2d(wide))
            stages += [BasicBlock(narrow, wide, stride=2, downsample=shortcut), BasicBlock(wide, wide)]
        self.stages = nn.Sequential(*stages)
        self.strokes = nn.Linear(wide, STROKE_PARAMETERS)

    def forward(self, state: Tensor) -> Tensor:
        features = functional.avg_pool2d(self.stages(state), 4).flatten(1)
        return self.strokes(features).sigmoid()
