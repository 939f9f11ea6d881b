"""Copy the inputs of a call to the placeholders of the graph that is replayed.

An input has a placeholder at a fixed address, and one fused copy for each dtype fills the placeholders before a launch.
A callable reads results of the one before in place (`share_io=True`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch

from optimizations import torch_internals
from optimizations.capture.signature import alias_pattern
from optimizations.graph.memory import each_once, overlaps, size_bytes


class CopiedInputs:
    """Hold placeholders with the inputs' shapes, strides and dtypes, which one fused copy fills.

    An input that is passed twice has one placeholder. If elements of an input overlap (an expanded tensor), its memory
    is copied once, and the elements of the placeholder overlap equally. Inputs at the indices `in_place` have no
    placeholder: the recording runs on them and keeps them alive. Calls are replayed while these inputs do not move.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> None:
        first: dict[int, torch.Tensor] = {id(inputs[index]): inputs[index] for index in in_place}
        for tensor in inputs:
            if id(tensor) not in first:
                first[id(tensor)] = _like(tensor)
        self.in_place = sorted(in_place)
        self._addresses = [inputs[index].data_ptr() for index in self.in_place]
        self.recording_inputs = [first[id(tensor)] for tensor in inputs]
        copied = [
            index
            for index, first_index in enumerate(alias_pattern(inputs))
            if first_index == index and size_bytes(inputs[index]) and self.recording_inputs[index] is not inputs[index]
        ]
        self._copied = [(index, overlaps(inputs[index])) for index in copied]
        pairs = [(self.recording_inputs[index], once) for index, once in self._copied]
        self._targets = [each_once(one) if once else one.detach() for one, once in pairs]
        self.copied_tensors, self.copied_bytes = len(pairs), sum(size_bytes(one) for one, _ in pairs)
        self.bind(inputs)

    def moved(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether an input that is read in place has moved."""
        return [inputs[index].data_ptr() for index in self.in_place] != self._addresses

    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy inputs that are not read in place. The others must not have `moved`."""
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
    return not (target.data_ptr() | source.data_ptr()) % target.element_size()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a placeholder. It is an inference tensor only if the input is one.

    Compiled code checks this, and PyTorch counts writes to other tensors.
    """
    with torch.inference_mode(torch.is_inference_mode_enabled() and tensor.is_inference()):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether this is a strided tensor and of no subclass."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
