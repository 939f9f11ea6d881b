"""Compute a fingerprint of a tensor's bits, and a sketch of its values, on the tensor's device.

Copying gigabytes from a GPU to hash them on the host takes longer than the iteration that made them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

CHUNK_WORDS = 2**20
"""Words of 8 bytes that are processed at once, to limit the memory of intermediate results."""

SKETCH = 12
"""Number of sums in a sketch: fewer than one in 100,000 errors is underestimated by a factor of five."""

_GOLDEN, _MIX1, _MIX2, _MIX3 = (
    value - 2**64 if value >= 2**63 else value
    for value in (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x2545F4914F6CDD1D)
)
"""Odd constants of common 64-bit mixers (SplitMix64, MurmurHash3, xorshift64*), as signed numbers."""


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the two sums of a fingerprint, on the tensor's device, without synchronization.

    Each word of 8 bytes is hashed with its index, and the hashes are summed modulo 2**64, with two hash functions.
    Different bytes have the same fingerprint with a probability of about 2**-64; there is no protection against
    deliberate collisions. Shape and dtype are not included.
    """
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    sums[0] = data.numel()
    for start in range(0, data.numel(), 8 * CHUNK_WORDS):
        part = data[start : start + 8 * CHUNK_WORDS]
        if rest := part.numel() % 8:
            part = torch.nn.functional.pad(part, (0, 8 - rest))
        if part.storage_offset() % 8 or part.data_ptr() % 8:
            part = part.clone()
        place = torch.arange(start // 8 + 1, start // 8 + 1 + part.numel() // 8, device=data.device)
        word = _mixed(part.view(torch.int64) ^ (place * _GOLDEN))
        sums += torch.stack((word.sum(), ((word ^ (word >> 17)) * (2 * place + _MIX3)).sum()))
    return sums


def texts(sums: Sequence[torch.Tensor]) -> list[str]:
    """Return fingerprints from the sums of `words`: 128 bits as 32 hexadecimal digits, equal on all devices.

    The host synchronizes once with each device, because this is slow where processes share a GPU.
    """
    found = [""] * len(sums)
    for device in {one.device for one in sums}:
        places = [place for place, one in enumerate(sums) if one.device == device]
        for place, (first, second) in zip(places, torch.stack([sums[each] for each in places]).tolist(), strict=True):
            found[place] = f"{first % 2**64:016x}{second % 2**64:016x}"
    return found


def sketch(tensor: torch.Tensor) -> list[float]:
    """Return `SKETCH` sums of all elements, each with different signs that depend only on the elements' indices.

    `sketched_error` estimates the distance of two tensors from their sketches.
    """
    values = tensor.detach().reshape(-1)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).reshape(-1)
    sums = torch.zeros(SKETCH, dtype=torch.float64, device=values.device)
    for start in range(0, values.numel(), CHUNK_WORDS):
        part = values[start : start + CHUNK_WORDS].to(torch.float64)
        word = _mixed(torch.arange(start + 1, start + 1 + part.numel(), device=values.device) * _GOLDEN)
        for index in range(SKETCH):
            sums[index] += torch.where((word >> (5 * index)) & 1 == 1, part, -part).sum()
    return sums.tolist()


def sketched_error(sketched: Sequence[float], reference: Sequence[float]) -> float:
    """Return the relative error of a tensor in the L2 norm, estimated from sketches (Johnson and Lindenstrauss).

    The true error is hardly ever more than five times as large. NaN if a value is not finite.
    """
    difference = math.sqrt(sum((one - other) ** 2 for one, other in zip(sketched, reference, strict=True)))
    size = math.sqrt(sum(other**2 for other in reference))
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)


def _mixed(word: torch.Tensor) -> torch.Tensor:
    """Hash a word, so that each bit of the result depends on all bits of the word; shifted sign bits do no harm."""
    word = (word ^ (word >> 33)) * _MIX1
    word = (word ^ (word >> 29)) * _MIX2
    return word ^ (word >> 32)
