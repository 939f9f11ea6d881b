"""Define EfficientDet (Tan et al., 2020) with its training loss, on a backbone of timm.

As in the weights that were converted from TensorFlow: padding as there, batch norms with its epsilon and momentum, and
biases before batch norms. The loss takes labels by anchor, which the data loader makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.layers import create_pool2d
from torch import Tensor, nn
from torch.nn import functional

LEVELS = 5
ANCHORS = 9
"""Per place: three scales in three aspect ratios."""

FUSED_FROM = ((3, 4), (2, 5), (1, 6), (0, 7), (1, 7, 8), (2, 6, 9), (3, 5, 10), (4, 11))
"""The nodes of a fusion cell and what each is made of: 0 to 4 are the levels, finest first, 5 and on earlier nodes. The
last five nodes are the levels again."""

FUSED_AT = (3, 2, 1, 0, 1, 2, 3, 4)
"""The level that each node has the size of."""

IGNORED = -2
"""Label of an anchor that does not count; background is -1."""


@dataclass(frozen=True, slots=True)
class DetectorConfig:
    """Hold the dimensions; the defaults are those of tf_efficientdet_d1. `backbone` is a name of timm's."""

    backbone: str = "tf_efficientnet_b1"
    drop_path: float = 0.2
    width: int = 88
    cells: int = 4
    head_layers: int = 3
    classes: int = 90
    image_side: int = 640

    @property
    def sides(self) -> tuple[int, ...]:
        """Return places along a side of each level."""
        return tuple(self.image_side >> (3 + level) for level in range(LEVELS))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


def _separable(channels: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False), nn.Conv2d(channels, outputs, 1)
    )


def _resample(channels: int, outputs: int, step: int) -> nn.Sequential:
    """Resample to `outputs` channels, and down (`step` 1) or up (-1) by a factor of 2."""
    layers = nn.Sequential()
    if channels != outputs:
        layers.extend([nn.Conv2d(channels, outputs, 1), _norm(outputs)])
    if step > 0:
        layers.append(create_pool2d("max", kernel_size=3, stride=2, padding="same"))
    elif step < 0:
        layers.append(nn.UpsamplingNearest2d(scale_factor=2))
    return layers


class FusionNode(nn.Module):
    """Compute the weighted mean of resampled feature maps, then SiLU, separable convolution, and norm."""

    def __init__(self, channels: Sequence[int], steps: Sequence[int], width: int) -> None:
        super().__init__()
        self.resample = nn.ModuleList(_resample(each, width, step) for each, step in zip(channels, steps, strict=True))
        self.weights = nn.Parameter(torch.ones(len(channels)))
        self.after = nn.Sequential(nn.SiLU(), _separable(width, width), _norm(width))

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        weights = self.weights.to(maps[0].dtype).relu()
        total = weights.sum() + 1e-4
        resampled = [layer(each) for layer, each in zip(self.resample, maps, strict=True)]
        weighted = [each * weights[index] / total for index, each in enumerate(resampled)]
        return self.after(torch.stack(weighted, dim=-1).sum(dim=-1))


class FusionCell(nn.Module):
    """Map five levels to five levels, each of `width` channels, by `FUSED_FROM`."""

    def __init__(self, channels: Sequence[int], width: int) -> None:
        super().__init__()
        channels = [*channels, *[width] * len(FUSED_FROM)]
        levels = [*range(LEVELS), *FUSED_AT]
        self.nodes = nn.ModuleList(
            FusionNode([channels[source] for source in sources], [at - levels[source] for source in sources], width)
            for sources, at in zip(FUSED_FROM, FUSED_AT, strict=True)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        known = list(maps)
        for node, sources in zip(self.nodes, FUSED_FROM, strict=True):
            known.append(node([known[source] for source in sources]))
        return known[-LEVELS:]


class Head(nn.Module):
    """Predict for every anchor: convolutions that all levels share, with norms of each level's own."""

    def __init__(self, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(_separable(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.ModuleList(_norm(width) for _ in range(LEVELS)) for _ in range(layers))
        self.predict = _separable(width, outputs * ANCHORS)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return for each level [batch, outputs * anchors, side, side]."""
        predicted = []
        for level, x in enumerate(maps):
            for convolution, norms in zip(self.convolutions, self.norms, strict=True):
                x = functional.silu(norms[level](convolution(x)))  # type: ignore[index]
            predicted.append(self.predict(x))
        return predicted


def focal_loss(logits: Tensor, wanted: Tensor, alpha: float = 0.25, gamma: float = 1.5) -> Tensor:
    """Return the focal loss of each logit (Lin et al., 2017); `wanted` is 0 or 1."""
    probability = logits.sigmoid()
    right = wanted * probability + (1 - wanted) * (1 - probability)
    weight = wanted * alpha + (1 - wanted) * (1 - alpha)
    entropy = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return weight * (1 - right) ** gamma * entropy


def _at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, as a loss under autocast is, or in float64 where a reference runs in it."""
    return x if x.dtype == torch.float64 else x.float()


def detection_loss(
    classes: Sequence[Tensor],
    boxes: Sequence[Tensor],
    class_labels: Sequence[Tensor],
    box_labels: Sequence[Tensor],
    positives: Tensor,
    count: int,
) -> dict[str, Tensor]:
    """Return the loss and its two parts, each a scalar; see `Detector.forward` for shapes. `count`: of classes."""
    total = positives.sum() + 1.0
    class_loss, box_loss = [], []
    for logits, deltas, label, wanted_deltas in zip(classes, boxes, class_labels, box_labels, strict=True):
        label = label.long()[..., None]
        is_object = label >= 0
        wanted = functional.one_hot((label * is_object).squeeze(-1), count) * is_object
        logits = _at_least_float32(logits.permute(0, 2, 3, 1).unflatten(-1, (ANCHORS, count)))
        class_loss.append((focal_loss(logits, wanted.to(logits.dtype)) / total * (label != IGNORED)).sum())
        deltas = _at_least_float32(deltas.permute(0, 2, 3, 1))
        huber = functional.huber_loss(deltas, wanted_deltas, reduction="none", delta=0.1)
        box_loss.append((huber * (wanted_deltas != 0)).sum() / (total * 4.0))
    class_total, box_total = torch.stack(class_loss).sum(), torch.stack(box_loss).sum()
    return {"loss": class_total + 50.0 * box_total, "class_loss": class_total, "box_loss": box_total}


class Detector(nn.Module):
    """Compute the network and its loss."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        backbone: Any = timm.create_model(
            config.backbone,
            features_only=True,
            out_indices=(2, 3, 4),
            pretrained=False,
            drop_path_rate=config.drop_path,
        )
        self.backbone = backbone
        channels = backbone.feature_info.channels()
        self.coarser = nn.ModuleList(
            [_resample(channels[-1], config.width, 1), _resample(config.width, config.width, 1)]
        )
        channels = [*channels, config.width, config.width]
        widths = [channels, *[[config.width] * LEVELS] * (config.cells - 1)]
        self.cells = nn.ModuleList(FusionCell(each, config.width) for each in widths)
        self.classes = Head(config.width, config.head_layers, config.classes)
        self.boxes = Head(config.width, config.head_layers, 4)
        # Nearly all anchors are background: without this the first losses are in the thousands.
        nn.init.constant_(self.classes.predict[1].bias, -4.6)  # type: ignore[arg-type]

    def forward(
        self, image: Tensor, class_labels: Sequence[Tensor], box_labels: Sequence[Tensor], positives: Tensor
    ) -> dict[str, Tensor]:
        """Return losses by name, each a scalar.

        Args:
            image: [batch, 3, side, side].
            class_labels: for each level [batch, side, side, anchors], class numbers, -1 for background, `IGNORED`.
            box_labels: for each level [batch, side, side, 4 * anchors], zero where there is no object.
            positives: anchors with an object: [batch, 1].
        """
        maps = self.backbone(image)
        for layer in self.coarser:
            maps.append(layer(maps[-1]))
        for cell in self.cells:
            maps = cell(maps)
        return detection_loss(
            self.classes(maps), self.boxes(maps), class_labels, box_labels, positives, self.config.classes
        )
