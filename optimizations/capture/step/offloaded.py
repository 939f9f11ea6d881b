"""Offload gradients from before a call, so that the device has their memory back while the call is captured.

Note [Offloaded gradients]. A step that sets gradients to None before it computes others lets go of the memory of those
first, and eager computes the others in it. A capture computes nothing: where it fails, the gradients from before have
to be there, so they would be alive next to those that the capture allocates. So their bytes go to host memory, and
their own memory back to the device. The tensors stay the same objects, of no bytes meanwhile, and get memory and bytes
again where the capture fails. Where it succeeds, the step has set them to None, and nothing can read them any more.

During the capture a stand-in is in each `.grad`: a tensor of the same looks, at the address of the bytes in host
memory. It takes no memory of the device. What reads gradients is led there, so it is noticed: an operator before it
runs (`Observer`), compiled code by node parameters. No kernel runs in a capture, so nothing is ever read there.
Then, and where compiled code does not take such an address, the call is captured once more, with the gradients in their
places. What is left of a stand-in after a capture that failed, as in a variable that a traceback holds, raises an
error when it is read. Another thread that reads `.grad` at that time would read host memory on the device; it would
read what was never computed a moment later.

Only such gradients are offloaded that the observed calls neither read nor kept, and that nothing but the parameter
holds: no variable or list, no view, no history. The references to a tensor are counted, and compared with the counts of
one that is known to have no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations import torch_internals
from optimizations.capture.device import Device
from optimizations.capture.sole_references import have_no_other_reference, untyped_storage
from optimizations.capture.step.host_memory import spare_host_bytes
from optimizations.lazy_view import is_lazy_view

SPARE = 8
"""Host memory that has to be free, as a multiple of what is offloaded: each process of a machine may do so at once."""


ALIGNMENT = 512
"""Bytes. As PyTorch's allocator aligns what it gives."""


GONE = "this stood for a gradient while a step was recorded, and the recording failed: read .grad again"
"""The message of the error if a stand-in is read after the capture."""


class GradientsNeeded(RuntimeError):
    """Report that a captured call reads, or keeps, a gradient that was offloaded."""


class OffloadedGradients:
    """Hold what is offloaded for one capture. Note [Offloaded gradients]. `needed`: something led to it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[tuple[torch.Tensor, torch.UntypedStorage]] = []
        self._places: frozenset[int] = frozenset()
        self._stand_ins: list[StorageWeakRef] = []
        self.needed = False

    def __bool__(self) -> bool:
        return bool(self._places)

    def take(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Offload those of the parameters' gradients that may be.

        Returns:
            For each what is to be in its place: a stand-in, or itself.
        """
        chosen = [
            index
            for index, alone in enumerate(have_no_other_reference(gradients, as_gradients=True))
            if alone and _may_go(gradients[index], self._device)
        ]
        storages = {index: untyped_storage(gradients[index]) for index in chosen}
        size_bytes = sum(storage.nbytes() for storage in storages.values())
        if not size_bytes or SPARE * size_bytes > spare_host_bytes():
            return list(gradients)
        self._device.wait()  # whatever stream computes them
        try:
            copies = dict(zip(storages, _copies_of(list(storages.values())), strict=True))
        except (RuntimeError, MemoryError):  # less host memory could be had than was free
            return list(gradients)
        found = [
            _stand_in(gradient, copies[index]) if gradient is not None and index in copies else gradient
            for index, gradient in enumerate(gradients)
        ]
        self._stand_ins = [StorageWeakRef(untyped_storage(found[index])) for index in copies]
        there = ((index, gradient) for index, gradient in enumerate(gradients) if gradient is not None)
        self._kept = [(gradient, copies[index]) for index, gradient in there if index in copies]
        self._places = frozenset(copy.data_ptr() for copy in copies.values())
        for storage in storages.values():
            storage.resize_(0)
        return found

    def look(self, storages: Collection[int]) -> None:
        """Check the storages of an operator's tensors before it runs.

        Raises:
            GradientsNeeded: one of them is a stand-in's.
        """
        if not self._places.isdisjoint(storages):
            self.needed = True
            raise GradientsNeeded("an operator reads a gradient that observed calls did not read")

    def require_gone(self, stand_ins: Sequence[torch.Tensor | None], *, indifferent: bool) -> None:
        """Check after a capture that only this list holds them. `indifferent`: nothing read them.

        Raises:
            GradientsNeeded: the step read a stand-in, or keeps one.
        """
        if not self:
            return
        alone = have_no_other_reference(stand_ins, as_gradients=False)
        kept = any(
            not alone[index]
            for index, one in enumerate(stand_ins)
            if one is not None and one.untyped_storage().data_ptr() in self._places
        )
        if self.needed or kept or not indifferent:  # the step may have caught the exception
            self.needed = True
            raise GradientsNeeded("the step keeps a gradient that observed calls did not keep")

    def restore(self) -> None:
        """Give the gradients memory and bytes again.

        To be called again where it was interrupted.

        Raises:
            torch.OutOfMemoryError: there is none. To be called again when there is.
        """
        while self._stand_ins:
            held = torch_internals.storage_of_weak(self._stand_ins[-1].cdata)
            if held is not None:
                torch_internals.storage_refuses(held._cdata, GONE)
            self._stand_ins.pop()
        while self._kept:
            gradient, copy = self._kept[-1]
            storage = gradient.untyped_storage()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._kept.pop()

    def lost(self) -> list[torch.Tensor]:
        """Return gradients that `restore` found no memory for."""
        return [gradient for gradient, _ in self._kept]

    def drop(self) -> None:
        """Drop the copies: the step has let go of the gradients."""
        self._kept.clear()


def _may_go(gradient: torch.Tensor | None, device: Device) -> bool:
    """Return whether a stand-in may replace a tensor that nothing else holds, and its memory is the device's."""
    return (
        gradient is not None
        and device.holds(gradient)
        and not gradient.requires_grad
        and not gradient.is_inference()
        and not is_lazy_view(gradient)
        and not vars(gradient)  # what the program notes on it
        and gradient.untyped_storage().resizable()
        and gradient.untyped_storage().nbytes() > 0
    )


def rounded_up(size: int) -> int:
    """Return how many bytes PyTorch's allocator gives for so many."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copies_of(storages: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Return their bytes in host memory.

    All are parts of one block: unwritten words may be addresses of the host's small blocks.
    """
    ends = [0, *itertools.accumulate(rounded_up(storage.nbytes()) for storage in storages)]
    block = torch.UntypedStorage(ends[-1], device="cpu")
    parts = [block[start : start + one.nbytes()] for start, one in zip(ends[:-1], storages, strict=True)]
    for part, storage in zip(parts, storages, strict=True):
        part.copy_(storage, non_blocking=False)
    return parts


def _stand_in(gradient: torch.Tensor, copy: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor that looks like a gradient, at the address of its copy, which it does not keep alive."""
    with torch.inference_mode(False):
        storage = torch_internals.storage_at(copy.data_ptr(), gradient.device, copy.nbytes())
        made = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
        return made.set_(storage, gradient.storage_offset(), gradient.shape, gradient.stride())
