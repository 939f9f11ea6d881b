"""Copy the inputs of a call to the placeholders of the graph that is replayed.

An input has a placeholder at a fixed address, and one fused copy for each dtype fills the placeholders before a launch.
Tensors that are the same in every call are read in place. So are inputs whose addresses the host can update in the
graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

import torch

from optimizations import torch_internals
from optimizations.capture.signature import alias_pattern
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.memory import MemoryRanges, each_once, memory_of, overlaps, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.in_place.addresses import AddressTracker, Pointers, TrackedInput


class NotLaunched(RuntimeError):
    """Report that a graph cannot be launched: addresses of inputs cannot be set in it, or its edges are not known."""


class CopiedInputs:
    """Hold placeholders with the inputs' shapes, strides and dtypes, which one fused copy fills.

    `sizes` are the bytes of each, 0 of those without a placeholder.

    An input that is passed twice has one placeholder. If elements of an input overlap (an expanded tensor), its memory
    is copied once, and the elements of the placeholder overlap equally. Inputs at the indices `in_place` have no
    placeholder: the recording runs on them and keeps them alive. Calls are replayed while these inputs do not move.

    If the graph reads an input in place (`follow`), the memory of its placeholder can be freed (`free`). It is
    allocated again for an input that cannot be read in place.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> None:
        first: dict[int, torch.Tensor] = {id(inputs[index]): inputs[index] for index in in_place}
        for tensor in inputs:
            if id(tensor) not in first:
                first[id(tensor)] = _like(tensor)
        self.in_place = sorted(in_place)
        self.sizes = [0 if index in in_place else size_bytes(one) for index, one in enumerate(inputs)]
        self._addresses = [inputs[index].data_ptr() for index in self.in_place]
        self.recording_inputs = [first[id(tensor)] for tensor in inputs]
        copied = [
            index
            for index, first_index in enumerate(alias_pattern(inputs))
            if first_index == index and self.sizes[index] and self.recording_inputs[index] is not inputs[index]
        ]
        self._copied = [(index, overlaps(inputs[index])) for index in copied]
        self._tracker: AddressTracker | None = None
        self._copy_to_placeholders()
        self.bind(inputs)

    def _copy_to_placeholders(self) -> None:
        copied = [(self.recording_inputs[index], once) for index, once in self._copied]
        self._targets = [each_once(one) if once else one.detach() for one, once in copied]
        self.copied_tensors, self.copied_bytes = len(copied), sum(size_bytes(one) for one, _ in copied)

    @property
    def followed(self) -> Sequence[int]:
        """Return the inputs whose addresses are updated in the graph."""
        return () if self._tracker is None else self._tracker.indices

    @property
    def pointer_bytes(self) -> int:
        """Return the bytes written so far to set addresses of inputs in the graph."""
        return self._tracker.pointer_bytes if self._tracker is not None else 0

    def placeholders(self) -> dict[int, torch.Tensor]:
        """Return, by index, the placeholders of inputs that are copied element by element."""
        return {index: self.recording_inputs[index] for index, once in self._copied if not once}

    def follow(self, inputs: Sequence[TrackedInput], pointers: Pointers, owned: Sequence[MemoryRange]) -> None:
        """Let the graph read these inputs in place from now on. `owned`: memory that the graph writes."""
        indices = {one.index for one in inputs}
        recorded = [one.data_ptr() if index in indices else None for index, one in enumerate(self.recording_inputs)]
        self._copied = [one for one in self._copied if one[0] not in indices]
        self._copy_to_placeholders()
        self._tracker = AddressTracker(inputs, recorded, pointers, MemoryRanges(owned), self._fill)

    def free(self) -> None:
        """Free the memory of placeholders that the graph no longer reads and that have no other reference.

        The program may reference one, for example in a list that Encore did not reach.
        """
        alone = have_no_other_reference(self.recording_inputs, as_gradients=False)
        for index in self.followed:
            if alone[index]:
                self.recording_inputs[index].untyped_storage().resize_(0)

    def _fill(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Copy tensors to their placeholders; allocate freed ones. Return the addresses of the placeholders."""
        sources, targets = list(tensors.values()), [self.recording_inputs[index].detach() for index in tensors]
        for target in targets:
            if not (memory := target.untyped_storage()).nbytes():
                memory.resize_(size_bytes(target))
        filled = MemoryRanges(map(memory_of, targets))
        if len(targets) > 1 and any(filled.overlap(one.data_ptr(), one.nbytes) for one in sources):
            sources = [one.clone() for one in sources]
        copy_all(targets, sources)
        return {index: target.data_ptr() for index, target in zip(tensors, targets, strict=True)}

    def moved(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        """Return inputs that are read in place and have moved."""
        return [
            index
            for index, address in zip(self.in_place, self._addresses, strict=True)
            if inputs[index].data_ptr() != address
        ]

    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy inputs that are not read in place. The others must not have `moved`.

        Raises:
            NotLaunched: an address cannot be set in the graph.
        """
        if self._tracker is not None:
            try:
                self._tracker.follow(inputs)
            except CudaCallFailed as error:
                raise NotLaunched(str(error)) from error
        if self._copied:
            sources = [each_once(inputs[index]) if once else inputs[index] for index, once in self._copied]
            copy_all(self._targets, sources)


_SHORT = (torch.bfloat16, torch.float16)
"""Copied as integers: PyTorch's fused copy computes these in float32, which changes the bits of signalling NaNs."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors in as few launches as PyTorch allows."""
    had_grad = torch.is_grad_enabled()
    try:
        torch_internals.set_grad_enabled(False)  # `torch.no_grad` takes ten times as long
        dtypes = [target.dtype for target in targets]
        for dtype in dict.fromkeys(dtypes):
            if dtypes.count(dtype) > 1:
                _copy_together([pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype])
            else:
                place = dtypes.index(dtype)
                targets[place].copy_(sources[place], non_blocking=True)
    finally:
        torch_internals.set_grad_enabled(had_grad)


def _copy_together(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors of one dtype in one launch: PyTorch copies lists of mixed dtypes one by one.

    A tensor whose address is not aligned to its elements is copied alone, because kernels cannot read its elements.
    """
    together: list[tuple[torch.Tensor, torch.Tensor]] = []
    alone: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pair in pairs:
        (together if _is_aligned(*pair) else alone).append(pair)
    for target, source in pairs if len(together) < 2 else alone:
        target.copy_(source, non_blocking=True)
    if len(together) > 1:
        targets, sources = map(list, zip(*together, strict=True))
        if targets[0].dtype in _SHORT:
            targets, sources = [one.view(torch.int16) for one in targets], [one.view(torch.int16) for one in sources]
        torch_internals.foreach_copy_(targets, sources, non_blocking=True)


def _is_aligned(target: torch.Tensor, source: torch.Tensor) -> bool:
    if target.layout is not torch.strided or source.layout is not torch.strided:
        return False
    return not (target.data_ptr() | source.data_ptr()) % target.element_size()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a placeholder. It is an inference tensor only if the input is one.

    Compiled code checks this, and PyTorch counts writes to other tensors.
    """
    with torch.inference_mode(torch.is_inference_mode_enabled() and tensor.is_inference()):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def have_no_other_reference(found: Sequence[torch.Tensor | None], *, as_gradients: bool) -> list[bool]:
    """Return, for each tensor in a list, whether only the list (with `as_gradients` also a `.grad`) references it."""
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = torch.zeros(1, device="cpu")
        known = [parameter.grad]
        if not as_gradients:
            parameter.grad = None
    expected = _holders(known, 0)
    return [found[index] is not None and _holders(found, index) == expected for index in range(len(found))]


def _holders(found: Sequence[torch.Tensor | None], index: int) -> tuple[int, ...] | None:
    """Return the reference counts of a tensor in a list. No variable refers to it here, which would be counted."""
    if not is_plain(found[index]):
        return None
    storage = found[index].untyped_storage()  # type: ignore[union-attr]
    return (
        sys.getrefcount(found[index]),
        weakref.getweakrefcount(found[index]),
        torch_internals.tensor_use_count(found[index]),
        torch_internals.storage_use_count(storage._cdata),
        sys.getrefcount(storage),
    )


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether this is a strided tensor and of no subclass."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
