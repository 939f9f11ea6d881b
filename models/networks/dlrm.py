"""Define the deep learning recommendation model (Naumov et al., 2019) with dot-product interaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DlrmConfig:
    """Hold the dimensions; the defaults are TorchBench's.

    `bottom` and `top` are the widths of the two perceptrons, the first of `bottom` being the dense features; the first
    of `top` follows from the interaction and is not given.
    """

    tables: int = 8
    rows: int = 1_000_000
    width: int = 64
    bottom: tuple[int, ...] = (512, 512, 64)
    top: tuple[int, ...] = (1024, 1024, 1024, 1)


class Dlrm(nn.Module):
    """Map (dense [batch, features], offsets [tables, batch] int64, for each table indices [n] int64) to [batch, 1].

    Every layer ends in a ReLU, the last one too, as in the published benchmark.
    """

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        vectors = config.tables + 1
        pairs = vectors * (vectors - 1) // 2
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(config.rows, config.width, mode="sum", sparse=True) for _ in range(config.tables)
        )
        self.bottom = _perceptron(config.bottom)
        self.top = _perceptron((pairs + config.width, *config.top))
        for table in self.tables:
            bound = config.rows**-0.5
            nn.init.uniform_(table.get_parameter("weight"), -bound, bound)

    def forward(self, dense: Tensor, offsets: Tensor, indices: Sequence[Tensor]) -> Tensor:
        bottom = self.bottom(dense)
        looked_up = [
            table(index, offsets[row]) for row, (table, index) in enumerate(zip(self.tables, indices, strict=True))
        ]
        vectors = torch.stack([bottom, *looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        count = vectors.shape[1]
        # Made in every call, on the device, as published: Inductor turns the two lists into constants of the graph.
        rows = torch.tensor([row for row in range(count) for _ in range(row)], device=dense.device)
        columns = torch.tensor([column for row in range(count) for column in range(row)], device=dense.device)
        return self.top(torch.cat([bottom, products[:, rows, columns]], dim=1))


def _perceptron(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers with ReLU, initialised as the published program does: normal, weights by their fans."""
    layers = nn.Sequential()
    for wide, narrow in pairwise(widths):
        linear = nn.Linear(wide, narrow)
        nn.init.normal_(linear.weight, std=(2 / (wide + narrow)) ** 0.5)
        nn.init.normal_(linear.bias, std=(1 / narrow) ** 0.5)
        layers.extend([linear, nn.ReLU()])
    return layers
