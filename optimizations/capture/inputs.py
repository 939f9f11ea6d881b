"""Copy the inputs of a call to the placeholders of the graph that is replayed.

An input has a placeholder at a fixed address, and one fused copy of each dtype brings all of them up to date before a
launch. What is the same tensor in each call is read where it lies, and so are inputs whose addresses the host can set
in the graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

import torch

from optimizations import torch_internals
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.memory import MemoryRanges, each_once, memory_of, overlaps, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.in_place.addresses import AddressTracker, Pointers, TrackedInput


class NotLaunched(RuntimeError):
    """Report that a graph cannot be launched: addresses of inputs cannot be set in it, or its edges are not known."""


class CopiedInputs:
    """Hold placeholders of the inputs' shapes, strides and dtypes, which one fused copy fills.

    An input that is passed twice has one placeholder. Of inputs whose elements overlap (expanded ones) what lies in
    memory is copied once, so that placeholders overlap in the same way. Inputs at the indices `in_place` have none: the
    recording runs on them, they are kept alive, and calls are served while inputs lie where they lay.

    Where the graph reads an input itself (`follow`), its placeholder need have no memory (`free`), and gets some again
    for an input that cannot be read where it lies.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> None:
        first: dict[int, torch.Tensor] = {id(inputs[index]): inputs[index] for index in in_place}
        for tensor in inputs:
            if id(tensor) not in first:
                first[id(tensor)] = _like(tensor)
        self.in_place = sorted(in_place)
        self._addresses = [inputs[index].data_ptr() for index in self.in_place]
        self.recording_inputs = [first[id(tensor)] for tensor in inputs]
        seen: set[int] = set()
        self._copied = [
            index
            for index, tensor in enumerate(inputs)
            if size_bytes(tensor)
            and self.recording_inputs[index] is not tensor
            and not (id(tensor) in seen or seen.add(id(tensor)))  # type: ignore[func-returns-value]
        ]
        self._once = [overlaps(inputs[index]) for index in self._copied]
        self._targets = [
            each_once(self.recording_inputs[index]) if once else self.recording_inputs[index].detach()
            for index, once in zip(self._copied, self._once, strict=True)
        ]
        self._tracker: AddressTracker | None = None
        self._count_copies()
        self.bind(inputs)

    def _count_copies(self) -> None:
        copied = [self.recording_inputs[index] for index in self._copied]
        self.copied_tensors, self.copied_bytes = len(copied), sum(map(size_bytes, copied))

    @property
    def followed(self) -> Sequence[int]:
        """Return the inputs that the graph reads wherever they lie."""
        return () if self._tracker is None else self._tracker.indices

    @property
    def pointer_bytes(self) -> int:
        """Return the bytes written so far to set addresses of inputs in the graph."""
        return self._tracker.pointer_bytes if self._tracker is not None else 0

    def placeholders(self) -> dict[int, torch.Tensor]:
        """Return, by index, the placeholders of inputs that are copied as the elements they are."""
        pairs = zip(self._copied, self._once, strict=True)
        return {index: self.recording_inputs[index] for index, once in pairs if not once}

    def follow(self, inputs: Sequence[TrackedInput], pointers: Pointers, owned: Sequence[MemoryRange]) -> None:
        """Let the graph read these inputs where they lie from now on. `owned`: memory that the graph writes."""
        indices = {one.index for one in inputs}
        recorded = [one.data_ptr() if index in indices else None for index, one in enumerate(self.recording_inputs)]
        rest = [place for place, index in enumerate(self._copied) if index not in indices]
        self._copied = [self._copied[place] for place in rest]
        self._once = [self._once[place] for place in rest]
        self._targets = [self._targets[place] for place in rest]
        self._tracker = AddressTracker(inputs, recorded, pointers, MemoryRanges(owned), self._fill)
        self._count_copies()

    def free(self) -> None:
        """Free the memory of placeholders that the graph reads no more, and that nothing else holds.

        A list of the program's that was not seen may hold one. The step may have kept them until the capture was over.
        """
        alone = have_no_other_reference(self.recording_inputs, as_gradients=False)
        for index in self.followed:
            if alone[index]:
                self.recording_inputs[index].untyped_storage().resize_(0)

    def _fill(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Copy them into their placeholders, which get memory if they have none. Return where these lie."""
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
        """Return inputs that are read in place and do not lie there."""
        return [
            index
            for index, address in zip(self.in_place, self._addresses, strict=True)
            if inputs[index].data_ptr() != address
        ]

    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy what is not read in place. Inputs that are read in place must not have `moved`.

        Raises:
            NotLaunched: an address cannot be set in the graph.
        """
        if self._tracker is not None:
            try:
                self._tracker.follow(inputs)
            except CudaCallFailed as error:
                raise NotLaunched(str(error)) from error
        if self._copied:
            pairs = zip(self._copied, self._once, strict=True)
            copy_all(self._targets, [each_once(inputs[index]) if once else inputs[index] for index, once in pairs])

    def give_back(self, inputs: Sequence[torch.Tensor], written: Sequence[int]) -> None:
        """Copy what the graph wrote into its placeholders of these inputs to the caller's tensors."""
        copied = [index for index in written if inputs[index] is not self.recording_inputs[index]]
        copied = [index for index in copied if index not in self.in_place]
        copy_all([inputs[index] for index in copied], [self.recording_inputs[index] for index in copied])
        torch.autograd.graph.increment_version([inputs[index] for index in written if index in self.in_place])


def with_classes_of(inputs: Sequence[torch.Tensor], placeholders: Sequence[torch.Tensor]) -> None:
    """Let placeholders of parameters be parameters: code may ask for the class."""
    for tensor, placeholder in zip(inputs, placeholders, strict=True):
        if type(tensor) is torch.nn.Parameter and placeholder is not tensor:
            placeholder.__class__ = torch.nn.Parameter


_SHORT = (torch.bfloat16, torch.float16)
"""Copied as integers: PyTorch's fused copy computes these in float32, which changes the bits of signalling NaNs."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, in as few launches as PyTorch can make of it."""
    with torch.no_grad():
        if len(targets) == 1:
            targets[0].copy_(sources[0], non_blocking=True)
        elif targets:
            for some_targets, some_sources in _together(targets, sources):
                if len(some_targets) == 1:
                    some_targets[0].copy_(some_sources[0], non_blocking=True)
                else:
                    if some_targets[0].dtype in _SHORT:
                        some_targets = [one.view(torch.int16) for one in some_targets]
                        some_sources = [one.view(torch.int16) for one in some_sources]
                    torch_internals.foreach_copy_(some_targets, some_sources, non_blocking=True)


def _together(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return copies that can be one launch: PyTorch copies lists of several dtypes one by one.

    What does not begin where an element may is copied alone, as the memory it is. Its elements no kernel can read.
    """
    groups: dict[torch.dtype | int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, (target, source) in enumerate(zip(targets, sources, strict=True)):
        group = groups.setdefault(target.dtype if _is_aligned(target, source) else place, ([], []))
        group[0].append(target)
        group[1].append(source)
    return list(groups.values())


def _is_aligned(target: torch.Tensor, source: torch.Tensor) -> bool:
    if target.layout is not torch.strided or source.layout is not torch.strided:
        return False
    return not (target.data_ptr() | source.data_ptr()) % target.element_size()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a placeholder. In inference mode it is such a tensor only where the input is: compiled code looks at that,
    and writes into others are counted."""
    with torch.inference_mode(torch.is_inference_mode_enabled() and tensor.is_inference()):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def have_no_other_reference(found: Sequence[torch.Tensor | None], *, as_gradients: bool) -> list[bool]:
    """Return, for each tensor in a list, whether only the list holds it. `as_gradients`: the list and a `.grad`."""
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = torch.zeros(1, device="cpu")
        known = [parameter.grad]
        if not as_gradients:
            parameter.grad = None
    expected = _holders(known, 0)
    return [found[index] is not None and _holders(found, index) == expected for index in range(len(found))]


def _holders(found: Sequence[torch.Tensor | None], index: int) -> tuple[int, ...] | None:
    """Return the counts of references to a tensor of a list. It is not bound to a name here, which would count."""
    if not is_plain(found[index]):
        return None
    storage = untyped_storage(found[index])
    return (
        sys.getrefcount(found[index]),
        weakref.getweakrefcount(found[index]),
        torch_internals.tensor_use_count(found[index]),
        torch_internals.storage_use_count(storage._cdata),
        sys.getrefcount(storage),
    )


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether it has a storage, and is nothing but a tensor."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def untyped_storage(tensor: torch.Tensor | None) -> torch.UntypedStorage:
    """Return the storage of a tensor which is there."""
    assert tensor is not None
    return tensor.untyped_storage()
