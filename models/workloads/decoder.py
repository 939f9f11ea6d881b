"""Define DECODER: a plain transformer of today on four prompts, to be run on one GPU or split over several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Sharding, Size, register

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from models.networks.decoder import DecoderConfig


def _config(size: Size) -> DecoderConfig:
    from models.networks.decoder import DecoderConfig

    if size == "full":
        return DecoderConfig()
    return DecoderConfig(vocabulary=101, width=32, layers=2, heads=4, feedforward=64, longest=16)


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return tokens [4, 512] int64 (tiny: [2, 16]), uniform over the vocabulary."""
    import torch

    shape = (4, 512) if size == "full" else (2, 16)
    return Inputs(args=(torch.randint(_config(size).vocabulary, shape, generator=generator),))


def _shard(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    from models.sharding.decoder import shard

    shard(module, mesh)


@register(
    acronym="DECODER",
    name="decoder",
    suite="encore",
    task="inference",
    batch=4,
    dtype_policy="bf16",
    inputs=inputs,
    sharding=Sharding(shard=_shard, batch=4, inputs=inputs),
    parameters=667_977_728,
    notes="a plain decoder-only transformer, of no paper; where it is split over GPUs, by PyTorch's parallelize_module",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.decoder import Decoder

    return Decoder(_config(size))
