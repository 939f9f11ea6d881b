"""Define MBERT: MobileBERT question answering in inference; the loss is computed too, because positions are passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.losses import own_loss
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch
    from transformers import MobileBertConfig


def _config(size: Size) -> MobileBertConfig:
    from transformers import MobileBertConfig

    if size == "full":
        return MobileBertConfig()
    return MobileBertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        intra_bottleneck_size=16,
        embedding_size=16,
        num_feedforward_networks=2,
        vocab_size=101,
    )


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` [128, 128] (tiny: [2, 16]) uniform over the vocabulary, `start_positions` and `end_positions`
    [128] within the sequence; all int64."""
    import torch

    batch, length = (128, 128) if size == "full" else (2, 16)
    return Inputs(
        kwargs={
            "input_ids": torch.randint(_config(size).vocab_size, (batch, length), generator=generator),
            "start_positions": torch.randint(length, (batch,), generator=generator),
            "end_positions": torch.randint(length, (batch,), generator=generator),
        }
    )


@register(
    acronym="MBERT",
    name="MobileBertForQuestionAnswering",
    suite="huggingface",
    task="inference",
    batch=128,
    dtype_policy="bf16",
    sets=("grace",),
    inputs=inputs,
    loss=own_loss,
    parameters=24_582_914,
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from transformers import MobileBertForQuestionAnswering

    return MobileBertForQuestionAnswering(_config(size))
