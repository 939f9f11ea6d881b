"""Define DALLE2: an image out of a text. CLIP's causal mask stays on the CPU; each block moves it in each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Sharding, Size, register

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from models.networks.dalle2 import Dalle2Config


def _config(variant: str, size: Size) -> Dalle2Config:
    from models.networks.clip import ClipConfig
    from models.networks.dalle2 import Dalle2Config
    from models.networks.dalle2_prior import PriorConfig
    from models.networks.dalle2_unet import UnetConfig

    mask_on_cpu = variant == "published"
    if size == "full":
        return Dalle2Config(mask_on_cpu=mask_on_cpu)
    clip = ClipConfig(
        image_side=32,
        patch=16,
        vision_width=32,
        vision_layers=1,
        vision_heads=4,
        text_width=32,
        text_layers=2,
        text_heads=4,
        text_feedforward=64,
        context=12,
        vocabulary=97,
        embedding=32,
    )
    return Dalle2Config(
        mask_on_cpu=mask_on_cpu,
        clip=clip,
        prior=PriorConfig(width=32, depth=1, heads=2, head_width=16, longest_text=16),
        first=UnetConfig(
            width=16,
            multiples=(1, 2),
            embedding=32,
            upscales=False,
            outputs=6,
            side=16,
            context=16,
            longest_text=16,
        ),
        second=UnetConfig(
            width=8, multiples=(1,), embedding=None, upscales=True, outputs=3, side=32, context=16, longest_text=16
        ),
    )


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return text [1, 256] int64 (tiny: [1, 16]), uniform over the vocabulary; CLIP reads 77 (tiny: 12) tokens."""
    import torch

    config = _config(variant, size)
    length = config.prior.longest_text
    return Inputs(args=(torch.randint(config.clip.vocabulary, (1, length), generator=generator),))


def sharded_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return texts [2, 256] int64 (tiny: [2, 16]), uniform over the vocabulary."""
    import torch

    config = _config(variant, size)
    return Inputs(args=(torch.randint(config.clip.vocabulary, (2, config.prior.longest_text), generator=generator),))


def _shard(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    from models.sharding.dalle2 import shard

    shard(module, mesh)


@register(
    acronym="DALLE2",
    name="DALLE2_pytorch",
    suite="torchbench",
    task="inference",
    batch=1,
    dtype_policy="amp",
    sets=("grace", "pygraph"),
    inputs=inputs,
    sharding=Sharding(shard=_shard, batch=2, inputs=sharded_inputs),
    variants=("published", "current"),
    parameters=379_886_354,
    stochastic=True,
    notes="published: causal mask kept on the CPU and moved by each block of the text tower in both of its calls; "
    "current: the mask is a buffer. CLIP's weights are float32 like all others, not the loader's float16; the UNets' "
    "last layers start at random values, not at the published zeros, so that all of the program takes part",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.dalle2 import Dalle2

    return Dalle2(_config(variant, size))
