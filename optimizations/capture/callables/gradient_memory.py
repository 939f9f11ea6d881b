"""Decide when the program gets the memory that a callable's backward graphs write the gradients of parameters to.

Note [Donated gradients]. A program that sets its gradients to None in each step gets this memory for the new ones, and
nothing is copied. The graph writes it again in the next step, and graphs that were captured before in the same pool may
do so earlier, for it was free then. So before each of these launches it is asked in counts whether anyone holds it, as
`gradient_holders` does for steps. What is held, by whatever (a `.grad`, a list, a view, a history of autograd, DLPack),
is copied before that launch and put back after it, and the program gets copies of the launch's own gradients. The
holder may read it on any stream, so the device waits before and after. That is slow and is done for what is out
already: from then on gradients are copied.

Memory is donated when gradients were copied for some backwards in a row, and each copy was gone before it would have
been overwritten. Then none of them could have stayed in its place, so no address of a `.grad` was worth knowing. Calls
on a second stream end it, as reads may be under way there of what is not held any more. So does a `graph_step` in the
same program, of the optimizer as it may be: its recording would keep what it finds in a `.grad`.

Memory that a backward writes may be memory in which its forward left something for it: it was free again by then. What
is put back there after the forward would take the place of what the backward has to read. So a copy of what was left
is kept, and is there again when the backward is launched.

It is asked of each gradient first whether it may be written by the program: it lies in the graph's pool, in memory of
its own that nothing else holds, and in none that a graph reads at a fixed address. One for which that does not hold is
always copied: a hook may remove the `.grad` to which it was to be added, and it would become one itself.

A program that resizes a gradient that was donated gives its storage other memory. Then what graphs write is not
what the gradient reads, and none of the graphs that write there is launched any more. Readers in other processes, with
which a gradient was shared, are not counted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import numpy
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations import torch_internals
from optimizations.capture.step.gradient_holders import NOWHERE, Holders, taken_by
from optimizations.graph.memory import MemoryRanges
from optimizations.lazy_view import is_lazy_view
from optimizations.torch_internals.reference_counts import COUNTS

ROUNDS = 2
"""Backwards in a row after which copies must be gone in time."""

TRIES = 16
"""Backwards whose copies are looked after, at most."""

PATIENCE = 8
"""Launches after which held gradients are put back before a warning says so."""

Kept = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
"""Memory that a launch overwrites although it is held, and what it held."""


class GradientMemory:
    """Donate the memory of gradients to the program where that is safe. Note [Donated gradients].

    Args:
        gradients: those of a callable's parameters, in memory that its graphs write. Only the graphs' owner holds them.
        name: the callable, in a warning.
        kept_elsewhere: whether something may keep gradients for good.
        tries: backwards within which it has to show that memory can be donated; 0 if it never is.
    """

    def __init__(
        self,
        name: str,
        gradients: Iterable[torch.Tensor],
        kept_elsewhere: Callable[[], bool] = lambda: False,
        *,
        tries: int = TRIES,
    ) -> None:
        self._name = name
        chosen = _held_by_nobody(list(gradients))
        self._kept_elsewhere = kept_elsewhere
        self._places = {id(one): index for index, one in enumerate(chosen)}
        self._holders, self._own = taken_by(partial(Holders, chosen), chosen)
        self._alone = _of_memory(self._holders.expected(NOWHERE))
        self._unheld = b""
        self._addresses, self._indices = [one.data_ptr() for one in chosen], list(range(len(chosen)))
        self._lost = False
        self._tries, self._rounds = tries, 0
        self._copies: list[StorageWeakRef] = []
        self._too_late = False
        self._read_elsewhere = False
        self._out = self._given = False
        self._held: frozenset[int] = frozenset()
        self.gives = False
        self.adds = True
        self.times_put_back = 0

    @property
    def lost(self) -> bool:
        """Return whether memory that the program got lies elsewhere now, as after a resize. See the Note."""
        if self._out and not self._lost:
            there = torch_internals.data_ptrs_equal(self._holders.tensors, self._addresses, self._indices)
            self._lost = not there
        return self._lost

    def among(self, left: MemoryRanges) -> frozenset[int]:
        """Return places of the gradients that share memory with what a graph left for a later one."""
        storages = [one.untyped_storage() for one in self._holders.tensors]
        return frozenset(place for place, one in enumerate(storages) if left.overlap(one.data_ptr(), one.nbytes()))

    def held_in(self, places: Collection[int]) -> list[int]:
        """Return in which of these places the memory is held. To be called after `before_launch`."""
        return sorted(self._held.intersection(places))

    def storage(self, place: int) -> torch.UntypedStorage:
        """Return the storage at a place. Let go of it before the next launch: a reference to it counts as held."""
        return self._holders.tensors[place].untyped_storage()

    def before_launch(self) -> bool:
        """Prepare for a launch that may overwrite it; return whether to wait for the device before `set_aside`."""
        self._too_late = self._too_late or any(not copy.expired() for copy in self._copies)
        self._held = frozenset()
        if not self._out:
            return False
        self._held = frozenset(self._held_now())
        waits = bool(self._held) or self._read_elsewhere
        if not self._held:
            self._out = self._given = self._read_elsewhere = False
        return waits

    def set_aside(self) -> Kept:
        """Return what held memory is to be put back after that launch, and copies of what it holds."""
        if not self._held:
            return []
        if self.times_put_back == PATIENCE:
            warnings.warn(
                f"gradients of {self._name} stay where its graphs write them, so each launch waits for the device and "
                "puts them back; set .grad to None once, drop what holds them, or close() and call graph_callables "
                "again",
                stacklevel=3,
            )
        self.adds = self.adds and self._given  # or it is still in use where it was to be added only
        self.end()
        self.times_put_back += 1
        storages = [self.storage(place) for place in sorted(self._held)]
        return [(storage, storage.clone()) for storage in storages]

    def _held_now(self) -> list[int]:
        """Return the places whose memory is held."""
        counts = self._holders.now()
        if (content := counts.tobytes()) == self._unheld:
            return []
        differs = (_of_memory(counts) != self._alone).any(axis=1)
        if not differs.any():
            self._unheld = content
        return [int(index) for index in numpy.flatnonzero(differs)]

    def begin_round(self) -> None:
        """Begin a round of a backward of the callable. To be called after `before_launch`."""
        if (self._copies or self.gives) and self._kept_elsewhere():
            self.end()
        if self._copies:
            self._rounds = 0 if self._too_late else self._rounds + 1
            self.gives = self._rounds >= ROUNDS
        self._copies, self._too_late = [], False

    def hands_out(self, gradient: torch.Tensor, *, to_add: bool) -> bool:
        """Return whether the launch that was made gives the program this memory of one of its gradients, and no copy.
        It is `to_add` where it is only added to a `.grad`; otherwise it becomes one."""
        place = self._places.get(id(gradient))
        if place is None:
            return False
        found = place not in self._held and (self.adds if to_add else self.gives)
        self._out = self._out or found
        self._given = self._given or (found and not to_add)
        return found

    def became(self, copies: Sequence[torch.Tensor]) -> None:
        """Note that these copies go to places where the memory itself could have gone."""
        if not self.gives and self._tries > 0:
            self._tries -= 1
            self._copies = [StorageWeakRef(one.untyped_storage()) for one in copies]

    def end(self) -> None:
        """Donate none from now on."""
        self.gives, self._tries, self._copies = False, 0, []

    def read_on_several_streams(self) -> None:
        """Note that calls have come on a second stream."""
        self._read_elsewhere = self._read_elsewhere or self._given
        self.end()


def before_launch(memories: Sequence[GradientMemory], wait: Callable[[], None]) -> Kept:
    """Prepare for a launch that may overwrite these; return what `put_back` takes after it.

    `wait`: makes the host wait for all of the device's work.
    """
    waits = [memory.before_launch() for memory in memories]
    if any(waits):
        wait()
        return [one for memory in memories for one in memory.set_aside()]
    return []


class LeftAside:
    """Keep what a forward left for its backward in memory where something that is held is put back. See the Note.

    `there`: places of gradients in which a forward leaves something. To be made before the launch, for it takes memory.
    """

    def __init__(self, there: Iterable[tuple[GradientMemory, Collection[int]]] = ()) -> None:
        self._copies = []
        for memory, places in there:
            for place in memory.held_in(places):
                of = memory.storage(place)
                self._copies.append((memory, place, torch.UntypedStorage(of.nbytes(), device=of.device)))

    def take(self) -> None:
        """Copy what the forward left, after its launch and before anything is put back."""
        for memory, place, copy in self._copies:
            copy.copy_(memory.storage(place))

    def give_back(self) -> None:
        """Put it there again before the launch of the backward, when what is held has been copied once more."""
        for memory, place, copy in self._copies:
            memory.storage(place).copy_(copy)
        self._copies = []


def put_back(kept: Kept, wait: Callable[[], None]) -> None:
    """Put held memory back, after the launch and after what reads its gradients. `kept` is empty then: an exception
    that the program keeps keeps the frames it came through, and what is in them would count as held."""
    for storage, content in kept:
        storage.copy_(content)
    if kept:
        wait()
    storage = content = None  # type: ignore[assignment]
    kept.clear()


def writable(gradients: Iterable[torch.Tensor | None], pool: MemoryRanges, used: Collection[int]) -> list[torch.Tensor]:
    """Return those of the gradients that the program may write when it gets them.

    `used`: addresses of storages that graphs read or write for something else.
    """
    there = [one for one in gradients if one is not None and not is_lazy_view(one)]
    places = list(map(_start, there))
    times = Counter(places)
    return [
        one
        for one, place in zip(there, places, strict=True)
        if place and times[place] == 1 and place not in used and pool.cover(place, one.untyped_storage().nbytes())
    ]


def _held_by_nobody(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return those whose memory nothing holds but these tensors and what Encore knows to be its own."""
    if not gradients:
        return []
    holders, own = taken_by(partial(Holders, gradients), gradients)
    same = (_of_memory(holders.now()) == _of_memory(holders.expected(NOWHERE))).all(axis=1)
    own.release()
    return [one for one, alone in zip(gradients, same, strict=True) if alone]


def _start(tensor: torch.Tensor) -> int:
    """Return the address at which its storage begins."""
    return tensor.untyped_storage().data_ptr()


def _of_memory(counts: numpy.ndarray) -> numpy.ndarray:
    """Return the counts of the storages, a row for each: tensors are the graphs' own, and the program gets none."""
    return counts.reshape(-1, COUNTS)[:, 2:].copy()
