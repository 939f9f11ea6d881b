"""Copy small inputs to their placeholders by one kernel of a graph.

Note [One kernel for many copies]. A batch of many small tensors, such as the targets of a detector or what a tokenizer
gives, takes one call of the driver for each of them where each has a node of its own: 92 us for twelve on an H200,
through its bindings. So those of one type are copied in the capture by PyTorch's kernel for lists
(`torch_internals.list_copies`), which is one node, and the addresses of all of them are words in its argument. The host
sets these when inputs moved: one call of the driver for all in one node. They count as inputs that the kernel reads
where they lie (`in_place.addresses`). It takes any address that elements may lie at. In a call where one lies
elsewhere, or in memory that the graph writes, the placeholder is filled before the launch, and the kernel copies it to
itself.

Only what the kernel was launched with tells where the words are. Its argument is a structure that PyTorch does not
fill, and the rest may hold the same addresses from an earlier copy of the same tensors. So nothing is searched for: the
structure has to be the one that PyTorch's header describes, with the sources, the placeholders and the sizes in their
places. The rest of it tells nothing of what the graph reads (Note [What an operator was given] in `step.launches`). So
these nodes are left out when the graph's words are searched for addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from optimizations.capture.copy_nodes import NotCarried
from optimizations.graph.plan import Choice, PlannedNode
from optimizations.graph.pointers import PointerUse
from optimizations.graph.records import CapturedGraph, KernelNode
from optimizations.in_place.addresses import TrackedInput
from optimizations.torch_internals.list_copies import (
    MOST_BLOCKS,
    MOST_TENSORS,
    WHOLE_NUMBERS,
    blocks_of,
    copy_lists,
    places_of_sources,
)

MOST_BYTES = 1 << 20
"""A larger input has a node of its own. The kernel gives each 65,536 elements to one block, so of a large one few parts
of the GPU would copy much each, and the step would wait for them; of these bytes it is a few microseconds, about what a
call of the driver takes. A node that copies memory uses all of the GPU."""


@dataclass(frozen=True, slots=True)
class FusedCopy:
    """Hold inputs, by their indices, that one kernel copies from `sources` to `targets`."""

    indices: tuple[int, ...]
    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]

    def copy(self) -> None:
        """Copy now, or in the capture that is under way."""
        copy_lists(self.targets, self.sources)

    def tracked(self) -> list[TrackedInput]:
        """Return the inputs as ones that the kernel reads where they lie."""
        return [
            TrackedInput(index, source.element_size(), target.data_ptr(), size_bytes=source.nbytes)
            for index, source, target in zip(self.indices, self.sources, self.targets, strict=True)
        ]

    def uses(self, node: int, kernel: KernelNode) -> tuple[PointerUse, ...] | None:
        """Return where a node has the sources' addresses; None where it is not the one that copies them."""
        sources, targets = ([one.data_ptr() for one in tensors] for tensors in (self.sources, self.targets))
        elements = [one.numel() for one in self.sources]
        places = None
        if kernel.parameters:
            places = places_of_sources(kernel.parameters[0].data, sources, targets, elements)
        if places is None:
            return None
        return tuple(PointerUse((node,), 0, at, index, 0) for at, index in zip(places, self.indices, strict=True))


def fused_copies(copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> list[FusedCopy]:
    """Return those of these copies of contiguous tensors, by input, that few kernels make. One alone is left out."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, (given, _) in copies.items():
        fits = given.nbytes <= MOST_BYTES and given.dtype in WHOLE_NUMBERS
        if fits and not given.data_ptr() % given.element_size():
            alike[given.device, given.dtype].append(index)
    return [
        FusedCopy(tuple(some), tuple(copies[index][0] for index in some), tuple(copies[index][1] for index in some))
        for indices in alike.values()
        for some in _of_one_launch({index: blocks_of(copies[index][0].numel()) for index in indices})
        if len(some) > 1
    ]


def _of_one_launch(blocks: Mapping[int, int]) -> list[list[int]]:
    """Return these inputs, of so many blocks each, in lists that are one launch each."""
    found: list[list[int]] = [[]]
    room = MOST_BLOCKS
    for index, needed in blocks.items():
        if needed > room or len(found[-1]) == MOST_TENSORS:
            found.append([])
            room = MOST_BLOCKS
        found[-1].append(index)
        room -= needed
    return found


def find_fused(graph: CapturedGraph, own: Sequence[int], copies: Sequence[FusedCopy], others: int) -> list[PlannedNode]:
    """Return the node of each of these copies in a captured graph, among the nodes `own` that copy inputs.

    Args:
        others: how many inputs have a node of their own there.

    Raises:
        NotCarried: there is not one for each, or more than these.
    """
    if len(own) != len(copies) + others:
        raise NotCarried(f"{len(own)} nodes copy inputs, where there should be {len(copies) + others}")
    kernels = {index: node for index in own if isinstance(node := graph.nodes[index], KernelNode)}
    found = []
    for copy in copies:
        uses = [some for index, node in kernels.items() if (some := copy.uses(index, node)) is not None]
        if len(uses) != 1:
            raise NotCarried(f"{len(uses)} kernels copy {len(copy.indices)} inputs of one type")
        found.append(PlannedNode(uses[0][0].node, Choice.HOST, uses[0]))
    return found
