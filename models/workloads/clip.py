"""Define MMC: CLIP ViT-B/32 on one image and 32 prompts. Its causal mask stays on the CPU in the published program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

    from models.networks.clip import ClipConfig


def _config(size: Size) -> ClipConfig:
    from models.networks.clip import ClipConfig

    if size == "full":
        return ClipConfig()
    return ClipConfig(
        image_side=32,
        patch=16,
        vision_width=32,
        vision_layers=2,
        vision_heads=4,
        text_width=16,
        text_layers=2,
        text_heads=2,
        text_feedforward=64,
        context=12,
        vocabulary=97,
        embedding=8,
    )


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return one image [1, 3, 224, 224] and text [32, 77] int64 (tiny: [1, 3, 32, 32], [4, 12]).

    The text is two one-word prompts in turn: start token, word, end token, zeros. Start and end are the vocabulary's
    two highest ids, as in CLIP's tokenizer.
    """
    import torch

    config = _config(size)
    prompts = 32 if size == "full" else 4
    end = config.vocabulary - 1
    words = torch.randint(1, end - 1, (2,), generator=generator)
    text = torch.zeros(prompts, config.context, dtype=torch.int64)
    text[:, 0] = end - 1
    text[:, 1] = words.repeat(prompts // 2)
    text[:, 2] = end
    image = torch.randn(1, 3, config.image_side, config.image_side, generator=generator)
    return Inputs(args=(image, text))


@register(
    acronym="MMC",
    name="torch_multimodal_clip",
    suite="torchbench",
    task="inference",
    batch=1,
    dtype_policy="bf16",
    sets=("grace", "pygraph"),
    inputs=inputs,
    variants=("published", "current"),
    parameters=151_277_312,
    notes="published: causal mask kept on the CPU and moved in every call; current: the mask is a buffer of the module",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.clip import Clip

    return Clip(_config(size), mask_on_cpu=variant == "published")
