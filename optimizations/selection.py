"""Decide by rules which functions run without a CUDA graph, and which inputs a graph reads in place.

Every rule is a pure function of numbers that are known when it is called. Nothing is timed, and no decision changes.

1. `without_graph`: an inference function of at most `MOST_TINY_KERNELS` kernels gets no graph. This is decided from the
   generated code, before the first recording. It keeps its graph where a later partition of the same program reads its
   results and these are large: outside of graph memory, the later partition would have to copy them.
2. `copies_cost_more`: an inference function whose graph would copy its inputs for longer than the graph saves gets no
   graph. This is decided once it is known which inputs the graph reads in place.
3. `reason_to_copy`: a graph reads an input in place if copying it takes longer than setting its address. An address is
   set only in calls in which the input has moved, so the cost counts by the share of calls in which it moves.

The option `selection="off"` switches the rules off, and `selection="measure"` times the alternatives instead
(`trees.graphed_function`).

Note [Constants]. The constants come from `encore micro indirection` on an H200 (results/recorded/micro-indirection) and
from its recorded runs. They are the same on every machine, so that every rank decides the same.

* A copy moves 1.8 TB/s on its own; inside workloads, 0.6 (DR-T-4096), 0.9 (TKE) and 1.5 (DR-I).
* The fused copy of all inputs takes 6.5 us more than a replay without one.
* Setting a node's parameters takes 1 us (256 nodes) to 3.6 us (one node). A pointer table takes 7 us, however many
  nodes read it: 4 to write it and 3 for the kernel that distributes it.
* A launch outside of a graph takes the CPU 5 to 25 us. `LAUNCH_US` is the least of these, because a launch costs
  nothing while the GPU is busy with the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Selection = Literal["rule", "measure", "off"]
"""The values of the option `selection`."""

Decision = Literal["no graph", "copies", "in place"]
"""How a function runs: without a graph, by one that copies its inputs, or by one that reads inputs in place."""

MOST_TINY_KERNELS = 2
"""An inference function of at most so many kernels runs without a graph."""

LARGE_RESULT_BYTES = 2**20
"""Results of this size are worth a graph to a later partition, which would otherwise copy them."""

UNKNOWN_OPERATOR_KERNELS = 3
"""An operator whose kernels are not known counts as this many."""

COPY_BYTES_PER_US = 1e6
"""Bytes that a copy on the GPU moves in a microsecond: 1 TB/s. Note [Constants]."""

COPY_LAUNCH_US = 6.5
"""The cost of the launch that copies all inputs of a replay."""

NODE_UPDATE_US = 2.3
"""The cost of setting the parameters of one node of a graph."""

TABLE_US = 7.0
"""The cost of writing the pointer table and distributing it."""

LAUNCH_US = 5.0
"""The CPU time that a graph saves for each kernel."""


@dataclass(frozen=True, slots=True)
class CopiedInput:
    """Describe an input that a graph copies as stock does, and could read in place.

    Attributes:
        data_bytes: size of its data.
        updates: nodes that the CPU sets when the input has moved; 1 at least where they are not known yet.
        through_table: whether some of its nodes read its address from the pointer table.
        moves: calls in which its address differed from that in the call before.
        calls: calls in which its address was compared.
        copied_inputs: inputs that one launch copies together, this one included.
    """

    data_bytes: int
    updates: int
    through_table: bool
    moves: int
    calls: int
    copied_inputs: int

    @property
    def copy_us(self) -> float:
        """Return the cost of copying it in each call: its data, and its share of the launch."""
        return self.data_bytes / COPY_BYTES_PER_US + COPY_LAUNCH_US / self.copied_inputs

    @property
    def in_place_us(self) -> float:
        """Return the cost of reading it in place, per call."""
        table_us = TABLE_US / self.copied_inputs if self.through_table else 0.0
        return self.moved_share * (self.updates * NODE_UPDATE_US + table_us)

    @property
    def moved_share(self) -> float:
        """Return the share of calls in which it moves, by Laplace's rule: after no call it is a half."""
        return (self.moves + 1) / (self.calls + 2)


def without_graph(kernels: int | None, result_bytes: int = 0) -> str | None:
    """Return why an inference function runs without a graph from its first call on; None where it may be recorded.

    Args:
        kernels: how many kernels it launches at least; None where its source cannot be read.
        result_bytes: size of the results that a later partition of the same program may read; 0 where there is none.
    """
    if kernels is None or kernels > MOST_TINY_KERNELS or result_bytes >= LARGE_RESULT_BYTES:
        return None
    return f"launching a graph costs more than launching its kernels ({kernels})"


def copies_cost_more(copied_bytes: int, kernels: int | None, result_bytes: int = 0) -> str | None:
    """Return why an inference function runs without its graph now that its copies are known; None where it keeps it.

    Args:
        copied_bytes: data that each replay copies into placeholders.
        kernels, result_bytes: as for `without_graph`.
    """
    if kernels is None or result_bytes >= LARGE_RESULT_BYTES:
        return None
    copies_us, saved_us = copied_bytes / COPY_BYTES_PER_US, kernels * LAUNCH_US
    if copies_us <= saved_us:
        return None
    return f"copying its inputs would take {copies_us:.0f} us, and the graph saves {saved_us:.0f} us of launches"


def reason_to_copy(candidate: CopiedInput) -> str | None:
    """Return why a graph copies an input that it could read in place; None where it reads it in place."""
    copy_us, in_place_us = candidate.copy_us, candidate.in_place_us
    if copy_us > in_place_us:
        return None
    moved = f"it moved in {candidate.moves} of {candidate.calls} calls"
    return f"copying it takes {copy_us:.1f} us, and setting its address {in_place_us:.1f} us per call: {moved}"
