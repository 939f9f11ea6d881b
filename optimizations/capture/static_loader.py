"""Copy batches to fixed addresses ahead of their use, so that a step that fetches its own batches can be recorded.

Note [Batches of a step]. A graph runs no Python, so `next(loader)` in a recorded step fetches nothing. `Fetches` does
it for the step: it records from which loaders a call fetched, and takes as many batches before each later call. If the
call runs Python, `next` returns these batches; if it replays a graph, the graph reads them from the same addresses.
The n-th batch that a call takes from a loader has buffers of its own, so it does not overwrite the one before.

Note [Ahead of use]. The next batch is copied to the GPU on a side stream while the step computes, and from there to
the buffers, which takes no longer than reading the batch once. The buffers themselves cannot be filled earlier: the
step before may still read them.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, flatten, parts, replaced


class Transfer:
    """Copy batches to one GPU on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def stage(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Begin to copy tensors to the device, and return the copies."""
        if any(one.is_cuda for one in tensors):  # they may be results of the calling stream
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return [one.to(self._device, non_blocking=True, copy=True) for one in tensors]

    def fill(self, buffers: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
        """Copy what `stage` returned last into buffers, in the order of the calling stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._stream)
        for buffer, one in zip(buffers, staged, strict=True):
            buffer.copy_(one)
            one.record_stream(stream)

    def is_capturing(self) -> bool:
        """Return whether the calling stream is being captured."""
        return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class Batch:
    """Hold one batch in its buffers.

    Attributes:
        value: the loader's batch, with buffers in place of its tensors.
        buffers: these tensors. They are the same for every batch of this `key`.
        key: the place of the batch in the step, its structure, shapes, dtypes and other values, and the addresses.
    """

    value: Any
    buffers: tuple[torch.Tensor, ...]
    key: tuple[Hashable, ...]


class StaticLoader(Iterator[Any]):
    """Yield the batches of a loader in buffers at fixed addresses. `static_loader` documents it."""

    def __init__(self, loader: Iterable[Any], transfer: Transfer) -> None:
        self._loader = loader
        self.transfer = transfer
        self._iterator: Iterator[Any] | None = None
        self._ahead: deque[tuple[Any, Hashable, Sequence[torch.Tensor]]] = deque()
        self._error: Exception | None = None
        self._buffers: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        self.lent: tuple[Batch, ...] = ()

    def __len__(self) -> int:
        """Return the number of batches of an epoch, if the loader has a length."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> StaticLoader:
        """Begin a new epoch. Batches of the last one that were copied ahead are dropped."""
        self._iterator, self._error = iter(self._loader), None
        self._ahead.clear()
        return self

    def __next__(self) -> Any:
        """Return the next batch. Outside of a step it overwrites the previous batch.

        Raises:
            StopIteration: the epoch is over.
            RuntimeError: the calling stream is being captured, but not for a step.
        """
        if (fetches := _running.get()) is not None:
            return fetches.next(self)
        if self.transfer.is_capturing():
            raise RuntimeError("a graph fetches no batches; call next() before what is captured, or use graph_step")
        batch = self.take(0)
        self.prefetch()
        return batch.value

    def take(self, place: int) -> Batch:
        """Return the next batch in the buffers for the n-th batch of a step.

        Raises:
            StopIteration: the epoch is over.
        """
        if not self.prefetch():
            error = self._error
            assert error is not None
            if not isinstance(error, StopIteration):
                self._error = None  # the loader decides how to continue after it
            raise error
        value, structure, staged = self._ahead.popleft()
        key = place, structure, *((one.shape, one.dtype) for one in staged)
        if key not in self._buffers:
            self._buffers[key] = tuple(map(torch.empty_like, staged))
        buffers = self._buffers[key]
        if staged is not buffers:  # else it was given back, and its buffers are those for this place
            self.transfer.fill(buffers, staged)
        return Batch(replaced(value, iter(buffers)), buffers, (*key, *(one.data_ptr() for one in buffers)))

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Let the next calls of `take` return these batches."""
        self._ahead.extendleft((one.value, one.key[1], one.buffers) for one in reversed(batches))

    def prefetch(self) -> bool:
        """Begin to copy the next batch. Return False if `take` raises: the loader did, or the epoch is over."""
        if self._ahead or self._error is not None:
            return bool(self._ahead)
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            value, tensors = next(self._iterator), list[torch.Tensor]()
            structure = flatten(value, tensors)
            for _, one, is_leaf in parts(value, ""):
                if is_leaf and not isinstance(one, (torch.Tensor, enum.Enum, *PLAIN)):
                    raise TypeError(
                        f"a batch of a static loader holds a {type(one).__name__}; "
                        "yield tensors, numbers and strings in tuples, lists and dicts"
                    )
            self._ahead.append((value, structure, self.transfer.stage(tensors)))
        except Exception as error:
            self._error = error
        return bool(self._ahead)


class Fetches:
    """Take the batches that calls of one step fetch. Note [Batches of a step]."""

    def __init__(self) -> None:
        self._order: tuple[StaticLoader, ...] = ()
        self._noted: list[StaticLoader] | None = None
        self._lent: dict[StaticLoader, list[Batch]] = {}

    def take(self) -> Hashable | None:
        """Take the batches of the next call; return a key that distinguishes calls with different buffers.

        Return None if the epoch ends before it has them all, or a loader raises.
        """
        if not self._order:
            return ()
        for loader in self._order:
            if not loader.prefetch():
                return None
            lent = self._lent.setdefault(loader, [])
            lent.append(loader.take(len(lent)))
            loader.lent = tuple(lent)
        return tuple([one.key for lent in self._lent.values() for one in lent])

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run Python of the step in the block. It fetches its batches from the first on."""
        self._noted, token = [], _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def next(self, loader: StaticLoader) -> Any:
        """Return the batch that the step fetches now.

        Raises:
            StopIteration: the epoch is over.
            RuntimeError: a capture fetches more than the calls before.
        """
        assert self._noted is not None
        lent, at = self._lent.setdefault(loader, []), self._noted.count(loader)
        self._noted.append(loader)
        if at < len(lent):
            return lent[at].value
        if loader.transfer.is_capturing():
            raise RuntimeError("the step fetches more batches than in the call before")
        lent.append(loader.take(at))
        return lent[-1].value

    def end(self) -> None:
        """Record what the call fetched, return unused batches to their loaders, and begin to copy the next batches."""
        if self._noted is not None:
            fetched = Counter(self._noted)
            for loader, lent in self._lent.items():
                loader.give_back(lent[fetched[loader] :])
            if all(count <= len(self._lent[loader]) for loader, count in fetched.items()):  # no epoch ended
                self._order = tuple(self._noted)
        lent_by, self._lent, self._noted = self._lent, {}, None
        for loader in lent_by:
            loader.lent = ()
            loader.prefetch()


_running: ContextVar[Fetches | None] = ContextVar("fetches", default=None)


def static_loader(loader: Iterable[Any], device: torch.device | str | int | None = None) -> StaticLoader:
    """Return an iterator over the batches of `loader` that copies each to fixed addresses on a GPU, ahead of its use.

    A step that fetches its own batches can then be recorded:

        batches = encore.static_loader(DataLoader(dataset, batch_size=32, pin_memory=True))

        @encore.graph_step
        def step():
            inputs, labels = next(batches)
            ...

    `iter(batches)` begins an epoch, and `next` raises StopIteration at its end. Inside of a step each batch of a call
    has buffers of its own. Elsewhere a batch is overwritten by the next one: clone what you keep.

    Args:
        loader: yields tensors of any device, numbers and strings, in tuples, lists, dicts and nests of them. Batches of
            equal structure, shapes and dtypes share their buffers; each other kind gets its own, and a graph.
        device: the GPU; the current one if None.

    Raises:
        TypeError: `loader` cannot be iterated over.
        ValueError: `device` is no CUDA device.
    """
    if not isinstance(loader, Iterable):
        raise TypeError(
            f"static_loader needs an iterable of batches, such as a DataLoader, not {type(loader).__name__}"
        )
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"static_loader copies batches to a CUDA device, not to {found}")
    if found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return StaticLoader(loader, Transfer(found))
