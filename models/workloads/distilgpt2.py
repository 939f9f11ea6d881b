"""Define DGPT2: DistilGPT2 language modelling, trained with the model's own shifted cross-entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.losses import own_loss
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch
    from transformers import GPT2Config


def _config(size: Size) -> GPT2Config:
    from transformers import GPT2Config

    if size == "full":
        return GPT2Config(n_layer=6)  # the only difference from the default configuration
    return GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=32, vocab_size=101, bos_token_id=0, eos_token_id=0)


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [16, 512] int64 (tiny: [2, 16]), uniform over the vocabulary; no mask."""
    import torch

    shape = (16, 512) if size == "full" else (2, 16)
    vocabulary = _config(size).vocab_size
    return Inputs(
        kwargs={name: torch.randint(vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}
    )


@register(
    acronym="DGPT2",
    name="DistillGPT2",
    suite="huggingface",
    task="training",
    batch=16,
    dtype_policy="amp",
    sets=("grace", "pygraph"),
    inputs=inputs,
    loss=own_loss,
    parameters=81_912_576,
    stochastic=True,
    optimizer="adam",
    notes="the loss is named on the model: published, the program breaks in front of it, and copies the last hidden "
    "states into a graph of the loss (24 MiB)",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(_config(size))
    # The library does not infer the loss of this class and logs instead, which breaks the graph; the configuration's
    # field of the same name is not read.
    model.loss_type = "ForCausalLM"
    return model
