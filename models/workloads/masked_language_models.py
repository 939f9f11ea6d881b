"""Define CBERT, DBMLM and GFNET: PyGraph's further masked language models, each one graph without an obstacle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from models.losses import own_loss
from models.registry import InputMaker, Inputs, Size, register

if TYPE_CHECKING:
    import torch


def _camembert_config(size: Size) -> Any:
    """Return the configuration of `camembert-base`, which differs from the library's default."""
    from transformers import CamembertConfig

    base: dict[str, Any] = {"max_position_embeddings": 514, "type_vocab_size": 1}
    if size == "full":
        return CamembertConfig(vocab_size=32_005, **base)
    return CamembertConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **base
    )


def _distilbert_config(size: Size) -> Any:
    from transformers import DistilBertConfig

    if size == "full":
        return DistilBertConfig()
    return DistilBertConfig(vocab_size=101, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32)


def _fnet_config(size: Size) -> Any:
    """Return the configuration of `google/fnet-base`, which is the library's default."""
    from transformers import FNetConfig

    if size == "full":
        return FNetConfig()
    return FNetConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=32
    )


def _tokens(config: Callable[[Size], Any], batch: int, length: int) -> InputMaker:
    def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
        """Return `input_ids` and `labels` [batch, length] int64 (tiny: [2, 16]), uniform over the ids; no mask."""
        import torch

        shape = (batch, length) if size == "full" else (2, 16)
        vocabulary = config(size).vocab_size
        return Inputs(
            kwargs={name: torch.randint(vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}
        )

    return inputs


@register(
    acronym="CBERT",
    name="CamemBert",
    suite="huggingface",
    task="training",
    batch=64,
    dtype_policy="amp",
    sets=("pygraph",),
    inputs=_tokens(_camembert_config, 64, 512),
    loss=own_loss,
    parameters=110_655_493,
    stochastic=True,
    optimizer="sgd",
)
def build_camembert(variant: str, size: Size) -> torch.nn.Module:
    from transformers import CamembertForMaskedLM

    return CamembertForMaskedLM(_camembert_config(size))


@register(
    acronym="DBMLM",
    name="DistilBertForMaskedLM",
    suite="huggingface",
    task="training",
    batch=128,
    dtype_policy="amp",
    sets=("pygraph",),
    inputs=_tokens(_distilbert_config, 128, 128),
    loss=own_loss,
    parameters=66_985_530,
    stochastic=True,
    optimizer="sgd",
)
def build_distilbert(variant: str, size: Size) -> torch.nn.Module:
    from transformers import DistilBertForMaskedLM

    return DistilBertForMaskedLM(_distilbert_config(size))


@register(
    acronym="GFNET",
    name="GoogleFnet",
    suite="huggingface",
    task="training",
    batch=16,
    dtype_policy="fp32",
    sets=("pygraph",),
    inputs=_tokens(_fnet_config, 16, 512),
    loss=own_loss,
    parameters=83_485_184,
    stochastic=True,
    optimizer="sgd",
    notes="mixes tokens by a Fourier transform, and is float32 throughout, as published",
)
def build_fnet(variant: str, size: Size) -> torch.nn.Module:
    from transformers import FNetForMaskedLM

    return FNetForMaskedLM(_fnet_config(size))
