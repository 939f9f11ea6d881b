"""Count the kernels of an iteration, and compare those of two modes.

Inductor times several configurations of a kernel and selects the fastest; cuDNN does so with algorithms where a program
enables it. Two processes may select different ones, and then a ratio of their times compares results of tuning, not
modes. A kernel is identified by its name and launch configuration: Triton's number of warps determines the block, its
tile the grid, and a vendor's tile is part of the name.
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
"""Kernels that are not tuned, and whose number may differ between modes: copies into placeholders, Encore's kernels
(they write the pointers of moved inputs), and fills. A CUDA graph sets and copies memory by kernels, some of them
called `memcpy128` or `memcpy32_post`; outside of a graph it is a memset or a memcpy."""

_SOURCE = "#"
"""Text between a generated kernel's name and the digest of its source."""

_MOVER = "mover:"
"""Beginning of the keys of these."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Hold the kernels in which two modes differ, without copies and fills.

    Attributes:
        retuned: generated kernels whose launch configurations differ, and kernels of libraries that one side lacks.
        generated: generated kernels that one side lacks, or launches less often: the modes' programs differ there.
    """

    retuned: tuple[str, ...]
    generated: tuple[str, ...]


def kernel_key(
    name: str, grid: Sequence[int], block: Sequence[int], sources: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the key of a launch: "triton_poi_fused_add_3" in 8 blocks of 128 threads gives
    "triton_poi_fused_add#1f09ab 8x1x1 128x1x1".

    Inductor numbers the kernels of a program, and an additional one at its beginning would rename all others. So the
    number is replaced by the digest of the kernel's source, if `sources` has its name. A generated kernel with "copy"
    in its name computes, and is compared.
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
    """Return the count of each kernel in one of `iterations`, by key in order; None if the iterations differ."""
    counts = Counter(keys)
    if any(count % iterations for count in counts.values()):
        return None
    return {key: count // iterations for key, count in sorted(counts.items())}


def difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> Difference:
    """Compare two results of `count_kernels`.

    A kernel is identified by its source, or in older rows, which lack sources, by its name.
    """
    unsourced = {_name(key) for side in (ours, theirs) for key in side if _SOURCE not in _name(key)}
    mine, yours = (_computing(side, unsourced) for side in (ours, theirs))
    more, fewer = mine - yours, yours - mine
    on_both = {_name(key) for key in more} & {_name(key) for key in fewer}
    unlike = {*more, *fewer}
    generated = {key for key in unlike if key.startswith(_TRITON) and _name(key) not in on_both}
    return Difference(tuple(sorted(unlike - generated)), tuple(sorted(generated)))


def _computing(side: Mapping[str, int], unsourced: Collection[str]) -> Counter[str]:
    """Return the counts without copies and fills, and without the sources of kernels with these names."""
    counts: Counter[str] = Counter()
    for key, count in side.items():
        name, _, launched = key.partition(" ")
        plain = name.partition(_SOURCE)[0]
        if not only_moves(key):
            counts[f"{plain} {launched}" if plain in unsourced else key] += count
    return counts


@functools.lru_cache(maxsize=2**14)  # a report calls this hundreds of times for each key
def only_moves(key: str) -> bool:
    """Return whether this is the key of a kernel that computes nothing and that `difference` leaves out.

    Older rows lack the mark of some kinds of kernels."""
    return key.startswith(_MOVER) or (not key.startswith(_TRITON) and bool(_MOVES_ONLY.search(_name(key))))


def _name(key: str) -> str:
    return key.split(" ", 1)[0]
