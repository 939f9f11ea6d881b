"""Define BSCG: BlenderbotSmall conditional generation. Before each layer the host draws a number and branches on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.losses import own_loss
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch
    from transformers import BlenderbotSmallConfig


def _config(size: Size) -> BlenderbotSmallConfig:
    from transformers import BlenderbotSmallConfig

    if size == "full":
        return BlenderbotSmallConfig()
    return BlenderbotSmallConfig(
        vocab_size=101,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    )


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids`, which is passed as `decoder_input_ids` too, and `labels`: [64, 128] int64 (tiny: [2, 16]),
    uniform over the vocabulary; a label is never its last id, as published. No attention mask."""
    import torch

    shape = (64, 128) if size == "full" else (2, 16)
    vocabulary = _config(size).vocab_size
    ids = torch.randint(vocabulary, shape, generator=generator)
    labels = torch.randint(vocabulary - 1, shape, generator=generator)
    return Inputs(kwargs={"input_ids": ids, "decoder_input_ids": ids, "labels": labels})


@register(
    acronym="BSCG",
    name="BlenderbotSmallForConditionalGeneration",
    suite="huggingface",
    task="training",
    batch=64,
    dtype_policy="amp",
    sets=("grace",),
    inputs=inputs,
    loss=own_loss,
    parameters=85_113_344,
    stochastic=True,
    host_draws_unused=True,
    optimizer="sgd",
    notes="LayerDrop, at rate 0: in training each layer draws a CPU tensor of rank 0 and branches on it, which breaks "
    "the graph; PyTorch 2.11 compiles one graph for all layers of a kind, so there are fewer than the published 30",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from transformers import BlenderbotSmallForConditionalGeneration

    return BlenderbotSmallForConditionalGeneration(_config(size))
