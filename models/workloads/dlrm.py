"""Define DLRM: click-through rates out of eight embedding tables, whose index lists make up most of the input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

    from models.networks.dlrm import DlrmConfig

BATCH = {"full": 2048, "tiny": 4}
LOOKUPS = {"full": 100, "tiny": 5}
"""Rows of a table that are summed up for each sample."""


def _config(size: Size) -> DlrmConfig:
    from models.networks.dlrm import DlrmConfig

    if size == "full":
        return DlrmConfig()
    return DlrmConfig(tables=3, rows=50, width=8, bottom=(16, 16, 8), top=(16, 16, 1))


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return dense features [2048, 512] uniform in 0 .. 1; offsets [8, 2048] int64; for each of 8 tables indices
    [204800] int64, 100 different ones per sample in rising order (tiny: [4, 16], [3, 4], 3 of [20])."""
    import torch

    config, batch, lookups = _config(size), BATCH[size], LOOKUPS[size]
    dense = torch.rand(batch, config.bottom[0], generator=generator)
    offsets = torch.arange(0, batch * lookups, lookups).repeat(config.tables, 1)
    # Sorted draws from a range that is shorter by what is then added, place by place: all are different.
    drawn = torch.randint(config.rows - lookups + 1, (config.tables, batch, lookups), generator=generator)
    indices = drawn.sort(dim=-1).values + torch.arange(lookups)
    return Inputs(args=(dense, offsets, [table.flatten().clone() for table in indices]))


@register(
    acronym="DLRM",
    name="dlrm",
    suite="torchbench",
    task="inference",
    batch=2048,
    dtype_policy="bf16",
    sets=("grace", "pygraph"),
    inputs=inputs,
    parameters=514_499_137,
    notes="the published lists lack the few indices that were drawn twice for a sample (about 10 in 204,800); here "
    "all lists of all input sets have one length",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.dlrm import Dlrm

    return Dlrm(_config(size))
