"""Do all ranks have the same results? Compared by digests, and where bits differ by the norms of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from suite.measure.results import Results


def norms(results: Sequence[Results]) -> dict[str, float]:
    """The L2 norm of every tensor that is compared, by input set and name."""
    return {
        f"{place} {name}": float(torch.linalg.vector_norm(tensor.detach().to(torch.float64)))
        for place, one in enumerate(results)
        for name, tensor in one.tensors.items()
    }


def largest_spread(by_rank: Sequence[Mapping[str, float]]) -> float:
    """The largest relative difference of a norm on two ranks; infinite where a tensor is missing on one, or where one
    has a number and another has none."""
    if any(own.keys() != by_rank[0].keys() for own in by_rank):
        return math.inf
    return max((_spread([own[name] for own in by_rank]) for name in by_rank[0]), default=0.0)


def _spread(values: Sequence[float]) -> float:
    if all(value == values[0] or (math.isnan(value) and math.isnan(values[0])) for value in values):
        return 0.0
    if not all(math.isfinite(value) for value in values):
        return math.inf
    return (max(values) - min(values)) / max(values)
