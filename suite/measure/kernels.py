"""Tell which kernels an iteration ran, and whether two modes ran the same ones.

Inductor times several configurations of a kernel and keeps the fastest; cuDNN does so with algorithms where a program
lets it. Two processes may come to different results, and then a ratio of their times compares draws, not modes. A
kernel is known by its name and launch configuration: Triton's number of warps is in the block, its tile in the grid, a
vendor's tile in the name.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

SHOWN_CHARACTERS = 60
"""Characters of a name; a longer one is its beginning and a digest of all of it."""

_TRITON = "triton_"
_NUMBER = re.compile(r"_\d+$")
_MOVES_ONLY = re.compile(r"copy|memcpy|fill|memset|encore_", re.IGNORECASE)
"""Kernels that are not tuned, and of which one mode may have more than another: copies into placeholders, Encore's own
(they write pointers where an input moved), and fills. A CUDA graph sets and copies memory by kernels, some of them
called `memcpy128` or `memcpy32_post`; outside of one it is a memset or a memcpy."""

_SOURCE = "#"
"""Text between a generated kernel's name and the digest of its source."""

_MOVER = "mover:"
"""Beginning of the keys of these."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Hold which kernels two modes ran differently. Copies and fills are left out.

    Attributes:
        retuned: generated kernels that each side launches in another way than the other, and kernels of libraries that
            one side lacks.
        generated: generated kernels that one side lacks, or launches less often: the modes' programs differ there.
    """

    retuned: tuple[str, ...]
    generated: tuple[str, ...]


def kernel_key(
    name: str, grid: Sequence[int], block: Sequence[int], sources: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the key of a launch: "triton_poi_fused_add_3" in 8 blocks of 128 threads gives
    "triton_poi_fused_add#1f09ab 8x1x1 128x1x1".

    Inductor numbers the kernels of a program, and one more at its beginning would rename all others; the number goes.
    In its place is the digest of the kernel's source, where `sources` has it by the name. A generated kernel may have
    "copy" in its name as well; it computes, and is compared.
    """
    source = sources.get(name)
    if name.startswith(_TRITON):
        name = _NUMBER.sub("", name)
    elif _MOVES_ONLY.search(name):
        name = _MOVER + name
    if len(name) > SHOWN_CHARACTERS:
        name = f"{name[:SHOWN_CHARACTERS]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    if source is not None:
        name += _SOURCE + source
    return " ".join((name.replace(" ", "_"), "x".join(map(str, grid)), "x".join(map(str, block))))


def count_kernels(keys: Iterable[str], iterations: int) -> dict[str, int] | None:
    """Return how often each ran in one of `iterations`, by key in order; None if the iterations were not alike."""
    counts = Counter(keys)
    if any(count % iterations for count in counts.values()):
        return None
    return {key: count // iterations for key, count in sorted(counts.items())}


def difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> Difference:
    """Compare two results of `count_kernels`.

    A kernel is known by its source, or where a row lacks one of its name, as older rows do, by its name.
    """
    unsourced = {_name(key) for side in (ours, theirs) for key in side if _SOURCE not in _name(key)}
    mine, yours = (_computing(side, unsourced) for side in (ours, theirs))
    more, fewer = mine - yours, yours - mine
    on_both = {_name(key) for key in more} & {_name(key) for key in fewer}
    unlike = {*more, *fewer}
    generated = {key for key in unlike if key.startswith(_TRITON) and _name(key) not in on_both}
    return Difference(tuple(sorted(unlike - generated)), tuple(sorted(generated)))


def _computing(side: Mapping[str, int], unsourced: Collection[str]) -> Counter[str]:
    """Return the counts without what only moves, and without the sources of kernels with these names."""
    counts: Counter[str] = Counter()
    for key, count in side.items():
        name, _, launched = key.partition(" ")
        plain = name.partition(_SOURCE)[0]
        if not only_moves(key):
            counts[f"{plain} {launched}" if plain in unsourced else key] += count
    return counts


@functools.lru_cache(maxsize=2**14)  # a report asks for each key hundreds of times
def only_moves(key: str) -> bool:
    """Return whether this is the key of a kernel that computes nothing and that `difference` leaves out.

    Rows from before a kind of kernel was marked have it without the mark."""
    return key.startswith(_MOVER) or (not key.startswith(_TRITON) and bool(_MOVES_ONLY.search(_name(key))))


def _name(key: str) -> str:
    return key.split(" ", 1)[0]
