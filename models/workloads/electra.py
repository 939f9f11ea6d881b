"""Define ECML: ELECTRA as a causal language model, one of PyGraph's further workloads; its logits are 2 GB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.losses import own_loss
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch
    from transformers import ElectraConfig


def _config(size: Size) -> ElectraConfig:
    from transformers import ElectraConfig

    if size == "full":
        return ElectraConfig()
    return ElectraConfig(
        vocab_size=101,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [64, 512] int64 (tiny: [2, 16]), uniform over the vocabulary; no mask."""
    import torch

    shape = (64, 512) if size == "full" else (2, 16)
    vocabulary = _config(size).vocab_size
    return Inputs(
        kwargs={name: torch.randint(vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}
    )


@register(
    acronym="ECML",
    name="ElectraForCausalLM",
    suite="huggingface",
    task="training",
    batch=64,
    dtype_policy="amp",
    sets=("pygraph",),
    inputs=inputs,
    loss=own_loss,
    parameters=13_546_682,
    stochastic=True,
    optimizer="sgd",
    notes="the published runner does not ask for a decoder, so attention looks both ways",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from transformers import ElectraForCausalLM

    return ElectraForCausalLM(_config(size))
