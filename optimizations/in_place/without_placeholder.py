"""Choose the inputs that a recording reads where the caller has them, without a placeholder in the graph's memory.

Note [Inputs without a placeholder]. Stock copies each ordinary input into a placeholder in the graph's pool. The pool
gives no memory back as long as one graph of it lives, so the placeholder of an input that is read in place would stay
for nothing. A placeholder is therefore not given back, but never made: the function is recorded on the caller's tensor.

* This is done where the generated code names every use of the input, as arguments of Triton kernels. The plan then
  needs no proof, and is carried out right after the recording, before any other call.
* The call that is recorded holds its inputs until the stream of the program waits for the recording.
* An input that cannot be read where it lies in a later call is cloned for that call, in ordinary memory, and the clone
  is read in place (`AddressTracker`). So no call needs a placeholder again.
* If the plan cannot be carried out, the recording serves no call. The function is recorded once more, with placeholders
  for all its inputs, and not on the caller's tensors again.
* All other ordinary inputs of the function must be named too, or be cheap to copy, so that one plan settles them all.
  Small inputs get placeholders: they are worth no risk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from optimizations.graph.memory import MemoryRanges, memory_of, overlaps, size_bytes
from optimizations.graph.plan import ALIGNMENT_BYTES, AUTO_HOST_NODES
from optimizations.in_place.examination import ineligible_reason
from optimizations.in_place.generated import GeneratedCode
from optimizations.selection import CopiedInput, reason_to_copy

LEAST_BYTES = 2**20
"""The placeholder of a smaller input is kept: the allocator reserves memory in steps of 2 MiB."""


def without_placeholder(
    code: GeneratedCode, inputs: Sequence[Any], ordinary: Iterable[int], written: MemoryRanges, *, selects: bool
) -> list[int]:
    """Return the inputs to record on the caller's tensors. Note [Inputs without a placeholder].

    Args:
        code: what is known of the generated function.
        inputs: those of the call that is recorded; `ordinary` are the places of those that stock copies.
        written: memory that the graph writes.
        selects: whether inputs that are cheap to copy are copied.
    """
    if code.collective:
        return []
    eligible = [index for index in ordinary if ineligible_reason(inputs[index]) is None]
    read = []
    for index in eligible:
        uses = code.triton_uses.get(index)
        if index in (code.reused or ()) or uses == 0:  # copied in any case, or not used
            continue
        copied = CopiedInput(size_bytes(inputs[index]), uses or 1, False, moves=1, calls=0, copied_inputs=len(eligible))
        if selects and reason_to_copy(copied) is not None:
            continue
        if uses is None:
            return []
        read.append(index)
    if sum(code.triton_uses[index] for index in read) > AUTO_HOST_NODES:
        return []
    large = [index for index in read if size_bytes(inputs[index]) >= LEAST_BYTES and index not in code.written]
    return [index for index in large if _is_readable(inputs, index, written)]


def _is_readable(inputs: Sequence[Any], index: int, written: MemoryRanges) -> bool:
    """Return whether an input may be read where it lies in the call that is recorded."""
    value = inputs[index]
    address, size = value.data_ptr(), size_bytes(value)
    if address % ALIGNMENT_BYTES or overlaps(value) or written.overlap(address, size):
        return False
    others = (one for place, one in enumerate(inputs) if place != index and isinstance(one, torch.Tensor))
    return not MemoryRanges(memory_of(one) for one in others).overlap(address, size)  # its address is its alone
