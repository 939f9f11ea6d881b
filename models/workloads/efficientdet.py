"""Define TEFD: EfficientDet-D1 with its losses; stochastic depth draws numbers, batch norms change their statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

    from models.networks.efficientdet import DetectorConfig

OBJECTS = 0.002
"""Share of the anchors that have an object."""


def _config(size: Size) -> DetectorConfig:
    from models.networks.efficientdet import DetectorConfig

    if size == "full":
        return DetectorConfig()
    return DetectorConfig(backbone="test_efficientnet", width=8, cells=1, head_layers=1, classes=5, image_side=256)


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return image [1, 3, 640, 640] (tiny: 256) normal; for each level, of sides 80, 40, 20, 10 and 5 (tiny: 32 to 2),
    class labels [1, side, side, 9] and box labels [1, side, side, 36]; number of anchors with an object [1, 1]. All
    float32."""
    import torch

    from models.networks.efficientdet import ANCHORS

    config = _config(size)
    image = torch.randn(1, 3, config.image_side, config.image_side, generator=generator)
    classes, boxes = [], []
    for side in config.sides:
        shape = (1, side, side, ANCHORS)
        has_object = torch.rand(shape, generator=generator) < OBJECTS
        classes.append(torch.where(has_object, torch.randint(config.classes, shape, generator=generator), -1).float())
        boxes.append((torch.randn(*shape, 4, generator=generator) * has_object[..., None]).flatten(3))
    positives = torch.stack([(each >= 0).sum() for each in classes]).sum().float().reshape(1, 1)
    return Inputs(args=(image, classes, boxes, positives))


@register(
    acronym="TEFD",
    name="timm_efficientdet",
    suite="torchbench",
    task="training",
    batch=1,
    dtype_policy="amp",
    sets=("grace",),
    inputs=inputs,
    parameters=6_625_898,
    stochastic=True,
    tried_deterministic=True,
    optimizer="sgd",
    notes="labels are random, not those of COCO pictures",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.efficientdet import Detector

    return Detector(_config(size))
