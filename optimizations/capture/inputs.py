"""Bring the inputs of a call to the graph that is replayed.

An input has a placeholder at a fixed address, and one fused copy brings all of them up to date before a launch. What is
the same tensor in each call is read where it lies. Whatever reads others in place can take this one's part: it gives
the recording its tensors, and brings a call's inputs to where the graph reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from optimizations import torch_internals
from optimizations.capture.copy_nodes import MOST_CARRIED, CopyNode, NotCarried
from optimizations.capture.fused_copies import FusedCopy, fused_copies
from optimizations.capture.sole_references import have_no_other_reference
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.memory import MemoryRanges, each_once, memory_of, overlaps, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.in_place.addresses import AddressTracker, Pointers, TrackedInput


class CopiedInputs:
    """Hold placeholders of the inputs' shapes, strides and dtypes, which one fused copy fills.

    An input that is passed twice has one placeholder. Of inputs whose elements overlap (expanded ones) what lies in
    memory is copied once, so that placeholders overlap in the same way. Inputs at the indices `in_place` have none: the
    recording runs on them, they are kept alive, and calls are served while inputs lie where they lay.

    Copies become part of a graph where it captured them: as nodes whose sources are set to the inputs (`carry`), or as
    kernels that make several (`follow`). Where the graph reads an input itself, its placeholder need have no memory
    (`free`), and gets some again for an input that cannot be read where it lies.
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
        self._use_nodes({})
        self._sources: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._tracker: AddressTracker | None = None
        self._fused: list[int] = []
        self._count_copies()
        self.bind(inputs)

    def _count_copies(self) -> None:
        copied = [self.recording_inputs[index] for index in [*self._copied, *self._carried, *self._fused]]
        self.copied_tensors, self.copied_bytes = len(copied), sum(map(size_bytes, copied))

    @property
    def followed(self) -> Sequence[int]:
        """Return the inputs that the graph reads wherever they lie."""
        if self._tracker is None:
            return ()
        return [index for index in self._tracker.indices if index not in self._fused]

    @property
    def pointer_bytes(self) -> int:
        """Return the bytes written so far to set addresses of inputs in the graph and its kernels for copies."""
        return self._tracker.pointer_bytes if self._tracker is not None else 0

    def placeholders(self) -> dict[int, torch.Tensor]:
        """Return, by index, the placeholders of inputs that are copied as the elements they are."""
        plain = [index for index, once in zip(self._copied, self._once, strict=True) if not once]
        return {index: self.recording_inputs[index] for index in [*plain, *self._carried]}

    def follow(
        self,
        inputs: Sequence[TrackedInput],
        pointers: Pointers,
        owned: Sequence[MemoryRange],
        fused: Sequence[FusedCopy] = (),
    ) -> None:
        """Let the graph read these inputs where they lie from now on, and kernels those of `fused`. To be called after
        `carry`.

        `owned`: memory that the graph writes.

        Raises:
            NotCarried: a copy cannot be taken out of the graph.
        """
        indices = {one.index for one in inputs}
        for node, index in zip(self._nodes, self._carried, strict=True):
            if index in indices:
                node.switch_off()
        kept = [(node, index) for node, index in zip(self._nodes, self._carried, strict=True) if index not in indices]
        self._use_nodes({index: node for node, index in kept})
        recorded: list[int | None] = [None] * len(self.recording_inputs)
        for index in indices:
            recorded[index] = self.recording_inputs[index].data_ptr()
        for copy in fused:
            for index, source in zip(copy.indices, copy.sources, strict=True):
                recorded[index] = source.data_ptr()
        self._fused = [index for copy in fused for index in copy.indices]
        indices.update(self._fused)
        self._leave_out(indices)
        tracked = [*inputs, *(one for copy in fused for one in copy.tracked())]
        # The kernels write these while others may read: an input that lies there is copied before the launch.
        written = [*owned, *(memory_of(self.recording_inputs[index]) for index in self._fused)]
        self._tracker = AddressTracker(tracked, recorded, pointers, MemoryRanges(written), self._fill)
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

    def _leave_out(self, indices: Collection[int]) -> None:
        """Leave these inputs out of the copies before a launch."""
        rest = [place for place, index in enumerate(self._copied) if index not in indices]
        self._copied = [self._copied[place] for place in rest]
        self._once = [self._once[place] for place in rest]
        self._targets = [self._targets[place] for place in rest]

    def moved(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        """Return inputs that are read in place and do not lie there."""
        return [
            index
            for index, address in zip(self.in_place, self._addresses, strict=True)
            if inputs[index].data_ptr() != address
        ]

    def to_fuse(self, inputs: Sequence[torch.Tensor]) -> list[FusedCopy]:
        """Return copies of small inputs to placeholders that may be a few kernels of the graph. See `fused_copies`."""
        return fused_copies(self._of_contiguous_memory(inputs))

    def to_carry(
        self, inputs: Sequence[torch.Tensor], fused: Sequence[FusedCopy] = ()
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return, by index, inputs and placeholders whose copies may be nodes of the graph.

        These are inputs of contiguous memory, but for those that are `fused`.
        """
        others = {index for copy in fused for index in copy.indices}
        found = {index: ends for index, ends in self._of_contiguous_memory(inputs).items() if index not in others}
        return found if len(found) <= MOST_CARRIED else {}

    def _of_contiguous_memory(self, inputs: Sequence[torch.Tensor]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {
            index: (inputs[index], self.recording_inputs[index])
            for index, once in zip(self._copied, self._once, strict=True)
            if not once and inputs[index].is_contiguous()
        }

    def capture_copies(
        self, to_carry: Mapping[int, tuple[torch.Tensor, torch.Tensor]], fused: Sequence[FusedCopy] = ()
    ) -> None:
        """Copy inputs to their placeholders, inside of a capture."""
        for copy in fused:
            copy.copy()
        with torch.no_grad():
            for given, placeholder in to_carry.values():
                placeholder.copy_(given, non_blocking=True)

    def carry(self, nodes: Mapping[int, CopyNode], inputs: Sequence[torch.Tensor]) -> None:
        """Let these nodes of the graph copy inputs from now on, at first these `inputs`.

        Raises:
            NotCarried: the graph cannot be led to them.
        """
        self._use_nodes(nodes)
        self._sources = [0] * len(inputs)
        self._lead(inputs)
        self._leave_out(nodes)

    def _use_nodes(self, nodes: Mapping[int, CopyNode]) -> None:
        self._carried, self._nodes = list(nodes), list(nodes.values())

    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy what is not read in place, or let the graph do so. Inputs that are read in place must not have `moved`.

        Raises:
            NotCarried: the graph cannot be led to an input.
        """
        if self._nodes and not torch_internals.data_ptrs_equal(inputs, self._sources, self._carried):
            self._lead(inputs)
        if self._tracker is not None:
            self._follow(inputs)
        if self._copied:
            self._copy(inputs)

    def _follow(self, inputs: Sequence[torch.Tensor]) -> None:
        assert self._tracker is not None
        try:
            self._tracker.follow(inputs)
        except CudaCallFailed as error:
            raise NotCarried(str(error)) from error

    def _copy(self, inputs: Sequence[torch.Tensor]) -> None:
        sources = [
            each_once(inputs[index]) if once else inputs[index]
            for index, once in zip(self._copied, self._once, strict=True)
        ]
        copy_all(self._targets, sources)

    def _lead(self, inputs: Sequence[torch.Tensor]) -> None:
        """Set the sources of the graph's copies to those of these inputs that lie elsewhere than those before.

        One that the driver does not take, such as memory of another process, is read from a copy of it.
        """
        for node, index in zip(self._nodes, self._carried, strict=True):
            address = inputs[index].data_ptr()
            if address == self._sources[index]:
                continue
            self._sources[index] = 0  # unknown until it is set: a call may end in between
            try:
                node.read_from(address)
                self._sources[index] = address
            except NotCarried:
                copy = self._copies.setdefault(index, torch.empty_like(self.recording_inputs[index]))
                copy_all([copy], [inputs[index]])
                node.read_from(copy.data_ptr())  # its source stays unknown: it is copied again in the next call

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
