"""Define BERT: one written by hand, trained on the mean of its two log-probabilities; its texts are mostly padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

    from models.networks.bert import BertConfig

SPECIAL_TOKENS = 5
"""Padding 0, unknown 1, end of sentence 2, start of text 3, mask 4; words follow."""

LONGEST_SENTENCE = 3


def _config(size: Size) -> BertConfig:
    from models.networks.bert import BertConfig

    if size == "full":
        return BertConfig()
    return BertConfig(vocabulary=101, width=32, layers=2, heads=4, feedforward=64)


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return tokens and segments [16, 128] int64 (tiny: [3, 16]): start, a sentence of 1 to 3 words, end, another one,
    end; segments 1 and 2; after them zeros."""
    import torch

    rows, length = (16, 128) if size == "full" else (3, 16)
    words = torch.randint(SPECIAL_TOKENS, _config(size).vocabulary, (rows, length), generator=generator)
    lengths = torch.randint(1, LONGEST_SENTENCE + 1, (2, rows, 1), generator=generator)
    places = torch.arange(length)
    first_end = 1 + lengths[0]
    second_end = first_end + 1 + lengths[1]
    tokens = words.masked_fill((places == first_end) | (places == second_end), 2).masked_fill(places == 0, 3)
    segments = 1 + (places > first_end).long()
    return Inputs(args=(tokens.masked_fill(places > second_end, 0), segments.masked_fill(places > second_end, 0)))


@register(
    acronym="BERT",
    name="BERT_pytorch",
    suite="torchbench",
    task="training",
    batch=16,
    dtype_policy="amp",
    sets=("grace",),
    inputs=inputs,
    parameters=115_805_991,
    stochastic=True,
    optimizer="sgd",
    notes="the published corpus is random too; its masked words are plain words here",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.bert import Bert

    return Bert(_config(size))
