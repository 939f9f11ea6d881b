"""Define STCLM: Speech2Text2's decoder as a language model. Before each layer the host draws a number and branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.losses import own_loss
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch
    from transformers import TrOCRConfig


def _config(size: Size) -> TrOCRConfig:
    """Return Speech2Text2's default dimensions, in the terms of the class that stands in for it."""
    from transformers import TrOCRConfig

    common: dict[str, Any] = {
        "activation_function": "relu",
        "scale_embedding": True,
        "use_learned_position_embeddings": False,
        "layernorm_embedding": False,
    }
    if size == "full":
        return TrOCRConfig(
            vocab_size=10_000,
            d_model=256,
            decoder_layers=6,
            decoder_attention_heads=4,
            decoder_ffn_dim=2048,
            max_position_embeddings=1024,
            **common,
        )
    return TrOCRConfig(
        vocab_size=101,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
        **common,
    )


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [256, 128] int64 (tiny: [2, 16]), uniform over the vocabulary; no mask."""
    import torch

    shape = (256, 128) if size == "full" else (2, 16)
    vocabulary = _config(size).vocab_size
    return Inputs(
        kwargs={name: torch.randint(vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}
    )


@register(
    acronym="STCLM",
    name="Speech2Text2ForCausalLM",
    suite="huggingface",
    task="training",
    batch=256,
    dtype_policy="amp",
    sets=("grace",),
    inputs=inputs,
    loss=own_loss,
    parameters=12_295_168,
    stochastic=True,
    host_draws_unused=True,
    optimizer="sgd",
    notes="transformers 5 has no Speech2Text2; its TrOCR decoder in the same dimensions has the same parameters and "
    "LayerDrop (a CPU tensor of rank 0 drawn and branched on before each layer). The loss is the class's own, not "
    "shifted in transformers 5.17, as in Speech2Text2 of transformers 4: each position is compared with its own label. "
    "The sinusoid table is a frozen parameter, as in Speech2Text2",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from torch import nn
    from transformers import TrOCRForCausalLM

    model = TrOCRForCausalLM(_config(size))
    # TrOCR keeps its table as a plain attribute, which stays on the CPU and is then indexed by a GPU tensor: an error.
    positions = model.model.decoder.embed_positions
    positions.weights = nn.Parameter(positions.weights, requires_grad=False)
    return model
