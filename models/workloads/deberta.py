"""Define DBV2, DMLM and DMLM-16: DeBERTa question answering and masked language modelling, in the library's default
configurations, which have no relative attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.losses import own_loss
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch
    from transformers import DebertaConfig, DebertaV2Config

MASKED_LM_NOTES = (
    "published: also returns its 13 hidden states, for which the published runs show incoming gradients; current: "
    "loss and logits alone, the library's default. The library's attention cannot run under autocast; an equal one "
    "stands in its place"
)

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def _question_answering_config(size: Size) -> DebertaV2Config:
    from transformers import DebertaV2Config

    return DebertaV2Config() if size == "full" else DebertaV2Config(**TINY)


def _masked_lm_config(size: Size) -> DebertaConfig:
    from transformers import DebertaConfig

    return DebertaConfig() if size == "full" else DebertaConfig(**TINY)


def question_answering_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` [1, 512] (tiny: [1, 16]) uniform over the vocabulary, `start_positions` and `end_positions`
    [1] within the sequence; all int64."""
    import torch

    length = 512 if size == "full" else 16
    vocabulary = _question_answering_config(size).vocab_size
    return Inputs(
        kwargs={
            "input_ids": torch.randint(vocabulary, (1, length), generator=generator),
            "start_positions": torch.randint(length, (1,), generator=generator),
            "end_positions": torch.randint(length, (1,), generator=generator),
        }
    )


def masked_lm_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [8, 512] int64 (tiny: [2, 16]), uniform over the vocabulary; no mask."""
    return _tokens(8, size, generator)


def large_masked_lm_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [16, 512] int64 (tiny: [3, 16]), uniform over the vocabulary; no mask."""
    return _tokens(16, size, generator)


def _tokens(batch: int, size: Size, generator: torch.Generator) -> Inputs:
    import torch

    shape = (batch, 512) if size == "full" else (2 if batch == 8 else 3, 16)
    vocabulary = _masked_lm_config(size).vocab_size
    return Inputs(
        kwargs={name: torch.randint(vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}
    )


@register(
    acronym="DBV2",
    name="DebertaV2ForQuestionAnswering",
    suite="huggingface",
    task="inference",
    batch=1,
    dtype_policy="bf16",
    sets=("grace",),
    inputs=question_answering_inputs,
    loss=own_loss,
    parameters=877_510_658,
    notes="each layer makes a CPU tensor of rank 0 out of its head size; Inductor folds it into a constant",
)
def build_question_answering(variant: str, size: Size) -> torch.nn.Module:
    from transformers import DebertaV2ForQuestionAnswering

    return DebertaV2ForQuestionAnswering(_question_answering_config(size))


@register(
    acronym="DMLM",
    name="DebertaForMaskedLM",
    suite="huggingface",
    task="training",
    batch=8,
    dtype_policy="amp",
    sets=("grace",),
    inputs=masked_lm_inputs,
    loss=own_loss,
    variants=("published", "current"),
    parameters=124_685_913,
    stochastic=True,
    optimizer="adam",
    notes=MASKED_LM_NOTES,
)
@register(
    acronym="DMLM-16",
    name="DebertaForMaskedLM",
    suite="huggingface",
    task="training",
    batch=16,
    dtype_policy="amp",
    sets=("pygraph",),
    inputs=large_masked_lm_inputs,
    loss=own_loss,
    variants=("published", "current"),
    parameters=124_685_913,
    stochastic=True,
    optimizer="adam",
    notes=f"DMLM with PyGraph's batch; {MASKED_LM_NOTES}",
)
def build_masked_lm(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.deberta import AutocastDebertaForMaskedLM

    config = _masked_lm_config(size)
    config.output_hidden_states = variant == "published"
    return AutocastDebertaForMaskedLM(config)
