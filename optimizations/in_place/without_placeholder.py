"""Choose the inputs that are recorded in the caller's memory, without a placeholder in the graph's memory.

Note [Inputs without a placeholder]. Stock copies each ordinary input into a placeholder in the graph's pool. The pool
frees no memory while one of its graphs is alive, so the placeholder of an input that is read in place would waste
memory. So no placeholder is made, and the function is recorded on the caller's tensor.

* This requires that the generated code names every use of the input, as arguments of Triton kernels. The plan then
  needs no second capture, and is applied right after the recording, before any other call.
* The recorded call keeps its inputs alive until the program's stream waits for the recording.
* If a later call's input cannot be read in place, it is cloned for that call in ordinary memory, and the clone is read
  in place (`AddressTracker`). So no call ever needs a placeholder.
* If the plan cannot be applied, the recording is not replayed. The function is recorded once more, with placeholders
  for all its inputs, and never on the caller's tensors again.
* All other ordinary inputs of the function must be named too, or be cheap to copy, so that one plan covers them all.
  Small inputs get placeholders, because omitting them saves little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    code: GeneratedCode,
    inputs: Sequence[Any],
    ordinary: Iterable[int],
    written: Callable[[], MemoryRanges],
    *,
    selects: bool,
) -> list[int]:
    """Return the inputs to record on the caller's tensors. Note [Inputs without a placeholder].

    Args:
        code: the facts from the generated function's source.
        inputs: the inputs of the recorded call; `ordinary` are the positions of those that stock copies.
        written: returns memory that the graph writes; called only if needed, for the allocator takes long to tell.
        selects: whether inputs that are cheap to copy are copied.
    """
    if code.collective:
        return []
    eligible = [index for index in ordinary if ineligible_reason(inputs[index]) is None]
    read = []
    for index in eligible:
        uses = code.triton_uses.get(index)
        if index in (code.reused or ()) or uses == 0:  # always copied, or unused
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
    memory = written() if large else MemoryRanges(())
    return [index for index in large if _is_readable(inputs, index, memory)]


def _is_readable(inputs: Sequence[Any], index: int, written: MemoryRanges) -> bool:
    """Return whether an input may be read in place in the recorded call."""
    value = inputs[index]
    address, size = value.data_ptr(), size_bytes(value)
    if address % ALIGNMENT_BYTES or overlaps(value) or written.overlap(address, size):
        return False
    others = (one for place, one in enumerate(inputs) if place != index and isinstance(one, torch.Tensor))
    return not MemoryRanges(memory_of(one) for one in others).overlap(address, size)  # no other input shares its memory
