"""Define LP: the actor of LearningToPaint, one of PyGraph's further workloads; trained on the mean of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return states [16, 9, 128, 128] (tiny: [2, 9, 128, 128]), uniform in 0 .. 1."""
    import torch

    return Inputs(args=(torch.rand(16 if size == "full" else 2, 9, 128, 128, generator=generator),))


@register(
    acronym="LP",
    name="LearningToPaint",
    suite="torchbench",
    task="training",
    batch=16,
    dtype_policy="amp",
    sets=("pygraph",),
    inputs=inputs,
    parameters=11_209_857,
    optimizer="sgd",
    notes="the published state holds canvas, target, step and coordinates; here all nine channels are random",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.painter import Painter

    # With 4 channels, what PyTorch 2.11 compiles for a CPU in float32 damages its heap in training.
    return Painter(width=64 if size == "full" else 16)
