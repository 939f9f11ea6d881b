"""Copy the inputs of a call to the placeholders of the graph that is replayed.

An input has a placeholder at a fixed address, and one fused copy for each dtype fills the placeholders before a launch.
A callable reads results of the one before in place (`share_io=True`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch

from optimizations import torch_internals
from optimizations.graph.memory import each_once, overlaps, size_bytes


class CopiedInputs:
    """Hold placeholders with the inputs' shapes, strides and dtypes, which one fused copy fills.

    An input that is passed twice has one placeholder. If elements of an input overlap (an expanded tensor), its memory
    is copied once, and the elements of the placeholder overlap equally. Inputs at the indices `in_place` have no
    placeholder: the recording runs on them and keeps them alive. Calls are replayed while these inputs do not move.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> None:
        stand_ins = {id(inputs[index]): inputs[index] for index in in_place}
        self.in_place = sorted(in_place)
        self._addresses = [inputs[index].data_ptr() for index in self.in_place]
        self._copied: list[tuple[int, bool]] = []
        self._targets: list[torch.Tensor] = []
        for index, tensor in enumerate(inputs):
            if id(tensor) in stand_ins:
                continue
            # Compiled code checks whether it is an inference tensor. PyTorch counts writes to other tensors only.
            with torch.inference_mode(torch.is_inference_mode_enabled() and tensor.is_inference()):
                placeholder = stand_ins[id(tensor)] = tensor.new_empty_strided(tensor.shape, tensor.stride())
            if size_bytes(tensor):
                self._copied.append((index, once := overlaps(tensor)))
                self._targets.append(each_once(placeholder) if once else placeholder.detach())
        self.recording_inputs = [stand_ins[id(tensor)] for tensor in inputs]
        self.copied_tensors = len(self._copied)
        self.copied_bytes = sum(size_bytes(inputs[index]) for index, _ in self._copied)
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
    """Copy tensors in as few launches as PyTorch allows: one for each dtype, as it copies lists of several one by one.

    Kernels cannot read elements at an address that is not aligned to them: then all of that dtype are copied alone.
    """
    if len(targets) == 1 and not (targets[0].requires_grad or sources[0].requires_grad):
        # Grouping and switching gradients off take as long as one copy.
        targets[0].copy_(sources[0], non_blocking=True)
        return
    groups: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        groups.setdefault(target.dtype, []).append((target, source))
    had_grad = torch.is_grad_enabled()
    try:
        torch_internals.set_grad_enabled(False)  # `torch.no_grad` takes ten times as long
        for dtype, pairs in groups.items():
            if pairs[1:] and not any((to.data_ptr() | of.data_ptr()) % dtype.itemsize for to, of in pairs):
                lists = [list(one) for one in zip(*pairs, strict=True)]
                if dtype in _SHORT:
                    lists = [[one.view(torch.int16) for one in tensors] for tensors in lists]
                torch_internals.foreach_copy_(*lists, non_blocking=True)
            else:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
    finally:
        torch_internals.set_grad_enabled(had_grad)


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether this is a strided tensor and of no subclass."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
