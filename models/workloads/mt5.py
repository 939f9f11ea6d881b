"""Define MTCG-T and MTCG-I: mT5 conditional generation. In training stock graphs copy a zero gradient per output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.losses import own_loss
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch
    from transformers import MT5Config

VARIANT_NOTES = (
    "published: its key-value cache is made before the call and its output layer has its own weights, as in "
    "transformers 4; current: the library's class unchanged, which breaks the graph where it makes the cache and ties "
    "the output layer (172,119,424 parameters)"
)


def _config(size: Size) -> MT5Config:
    from transformers import MT5Config

    if size == "full":
        return MT5Config()
    return MT5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids`, which is passed as `decoder_input_ids` too, and `labels`: [16, 128] int64 (tiny: [2, 16]),
    uniform over the vocabulary; a label is never its last id, as published. No attention mask."""
    import torch

    shape = (16, 128) if size == "full" else (2, 16)
    vocabulary = _config(size).vocab_size
    ids = torch.randint(vocabulary, shape, generator=generator)
    labels = torch.randint(vocabulary - 1, shape, generator=generator)
    return Inputs(kwargs={"input_ids": ids, "decoder_input_ids": ids, "labels": labels})


@register(
    acronym="MTCG-I",
    name="MT5ForConditionalGeneration",
    suite="huggingface",
    task="inference",
    batch=16,
    dtype_policy="bf16",
    sets=("grace",),
    inputs=inputs,
    loss=own_loss,
    variants=("published", "current"),
    parameters=300_176_768,
    notes=VARIANT_NOTES,
)
@register(
    acronym="MTCG-T",
    name="MT5ForConditionalGeneration",
    suite="huggingface",
    task="training",
    batch=16,
    dtype_policy="amp",
    sets=("grace",),
    inputs=inputs,
    loss=own_loss,
    variants=("published", "current"),
    parameters=300_176_768,
    stochastic=True,
    optimizer="adam",
    notes=VARIANT_NOTES,
)
def build(variant: str, size: Size) -> torch.nn.Module:
    if variant == "published":
        from models.networks.mt5 import UntiedMT5

        return UntiedMT5(_config(size))
    from transformers import MT5ForConditionalGeneration

    return MT5ForConditionalGeneration(_config(size))
