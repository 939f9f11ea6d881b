"""Define the rating autoencoder of "Training Deep AutoEncoders for Collaborative Filtering" (Kuchaiev and Ginsburg)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class RatingAutoencoder(nn.Module):
    """Map ratings [users, items] to ratings [users, items].

    `widths` are the layers from the items to the code; the decoder mirrors them with its own weights. SELU follows
    every layer, the last one too; dropout of rate 0.8 acts on the code.
    """

    def __init__(self, items: int, widths: Sequence[int]) -> None:
        super().__init__()
        sizes = (items, *widths)
        self.encoder = _selu_layers(sizes)
        self.code_dropout = nn.Dropout(0.8)
        self.decoder = _selu_layers(sizes[::-1])

    def forward(self, ratings: Tensor) -> Tensor:
        return self.decoder(self.code_dropout(self.encoder(ratings)))


def _selu_layers(sizes: Sequence[int]) -> nn.Sequential:
    layers = nn.Sequential()
    for wide, narrow in pairwise(sizes):
        linear = nn.Linear(wide, narrow)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers.extend([linear, nn.SELU()])
    return layers
