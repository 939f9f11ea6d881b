"""Define XLNET-I and XLNET-T: XLNet language modelling with the library's default configuration; XLNET-I-8 with
PyGraph's batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.losses import own_loss
from models.registry import Inputs, Sharding, Size, register

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import XLNetConfig

VARIANT_NOTES = "published: sinusoid table built on the CPU in every call; current: the library's class unchanged"


def _config(size: Size) -> XLNetConfig:
    from transformers import XLNetConfig

    if size == "full":
        return XLNetConfig()
    return XLNetConfig(vocab_size=101, d_model=32, n_layer=2, n_head=2, d_inner=64)


def inference_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [1, 512] int64 (tiny: [1, 16]), uniform over the vocabulary; no mask."""
    return _tokens((1, 512) if size == "full" else (1, 16), size, generator)


def training_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [8, 512] int64 (tiny: [2, 16]), uniform over the vocabulary; no mask."""
    return _tokens((8, 512) if size == "full" else (2, 16), size, generator)


def large_inference_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [8, 512] int64 (tiny: [3, 16]), uniform over the vocabulary; no mask."""
    return _tokens((8, 512) if size == "full" else (3, 16), size, generator)


def sharded_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return `input_ids` and `labels` [128, 512] int64 (tiny: [3, 16]), uniform over the vocabulary; no mask."""
    return _tokens((128, 512) if size == "full" else (3, 16), size, generator)


def some_of_the_logits(output: Any) -> dict[str, torch.Tensor]:
    """Return the loss, the logits of every 32nd text, and norms of all texts' logits [batch]: of 4.2 GB some 130 MB."""
    import torch

    norms = torch.linalg.vector_norm(output.logits, dim=(1, 2), dtype=torch.float32)
    return {"loss": output.loss, "logits": output.logits[::32], "norms": norms}


def _shard(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    from models.sharding.xlnet import shard

    shard(module, mesh)


SHARDING = Sharding(shard=_shard, batch=128, inputs=sharded_inputs, kept=some_of_the_logits)
"""Batch and number of all-reduces are GraCE's (Fig. 12)."""


def _tokens(shape: tuple[int, int], size: Size, generator: torch.Generator) -> Inputs:
    import torch

    vocabulary = _config(size).vocab_size
    return Inputs(
        kwargs={name: torch.randint(vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}
    )


@register(
    acronym="XLNET-I",
    name="XLNetLMHeadModel",
    suite="huggingface",
    task="inference",
    batch=1,
    dtype_policy="bf16",
    sets=("grace",),
    inputs=inference_inputs,
    loss=own_loss,
    sharding=SHARDING,
    variants=("published", "current"),
    parameters=360_300_800,
    notes=VARIANT_NOTES,
)
@register(
    acronym="XLNET-I-8",
    name="XLNetLMHeadModel",
    suite="huggingface",
    task="inference",
    batch=8,
    dtype_policy="bf16",
    sets=("pygraph",),
    inputs=large_inference_inputs,
    loss=own_loss,
    variants=("published", "current"),
    parameters=360_300_800,
    notes=f"XLNET-I with PyGraph's batch; {VARIANT_NOTES}",
)
@register(
    acronym="XLNET-T",
    name="XLNetLMHeadModel",
    suite="huggingface",
    task="training",
    batch=8,
    dtype_policy="amp",
    sets=("grace", "pygraph"),
    inputs=training_inputs,
    loss=own_loss,
    variants=("published", "current"),
    parameters=360_300_800,
    stochastic=True,
    optimizer="adam",
    notes=VARIANT_NOTES,
)
def build(variant: str, size: Size) -> torch.nn.Module:
    if variant == "published":
        from models.networks.xlnet import CpuTableXLNetLMHeadModel

        return CpuTableXLNetLMHeadModel(_config(size))
    from transformers import XLNetLMHeadModel

    return XLNetLMHeadModel(_config(size))
