"""Manage the `.grad` of parameters around launches of a recording.

Note [Gradients before and after]. A backward assigns a new tensor to a `.grad` that is None and accumulates into an
existing one. These are different graphs, and the second contains the address of the gradient. So a recording stores how
the call used each gradient that it found (`Use`), and which tensor it left. A gradient that the call dropped unread is
unused. One that it neither read nor wrote only has to exist. If the graph reads a gradient and `.grad` is a different
tensor now, that one is copied to the address that the graph reads. After a launch every parameter has the tensor that
the recording left, as it would after the call.

The graph owns these tensors. If the program references one that a launch would overwrite, by a list or a view, the call
runs uncaptured and the report names the parameter: Note [Gradients that the program references]. If the memory of a
gradient was replaced (`.data =`), the step is recorded again. A tensor that a call leaves in a `.grad` and did not
allocate, such as a view of a flat buffer, belongs to the program. Eager writes it as well.

Note [Words that are left over]. The code that launches a kernel may leave a part of the parameter buffer
uninitialized, with an old address in it. Kernels of operators read the operators' arguments only (Note [What an
operator was given] in `launches`). So their leftover words are ignored if the origin of every node is known. If not,
such a word makes the gradient count as needed.

Note [Gradients that the program references]. A launch writes gradients to their recorded addresses, whatever `.grad`
is now. The program may see that memory if it stored `.grad` in a list, or made a view of it. So the references to these
tensors and to their storages are counted before a launch. All recordings refer to a gradient through one shared object
(`own`). So the counts of a gradient that only Encore references are constant.

Note [Room for gradients]. In eager the gradients of the previous iteration are free memory when the next one begins.
The forward allocates its activations there, and the backward the new gradients. The pool of a graph begins empty. The
forward then allocates many small segments, into which no gradient fits later, so gradients need further segments
(DeepRecommender: 1.7 GB, eager: 1.3 GB). So in a new pool a block of the size of all gradients is allocated and freed
first.

This only helps if gradients are allocated in the pool. So the gradients count that the step drops. If no parameter has
one before a call, those that an observed call left count. If it left none, as with a `zero_grad` at its end, those of
all parameters of the step's optimizers count. Tensor subclasses, such as parameters sharded over GPUs, are skipped:
their size is not that of their memory. Options of PyTorch's allocator may prevent it from splitting large blocks. The
block would then be of no use to the forward.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import copy_all, have_no_other_reference, is_plain
from optimizations.capture.step.tensor_marks import Metadata, metadata_of
from optimizations.graph.memory import MemoryRanges, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.report.steps import Refusal, StepRefused
from optimizations.torch_internals.geometry import is_lazy_view
from optimizations.torch_internals.reference_counts import ReferenceCounts
from optimizations.torch_internals.tensor_guard import same_gradients

TURNS = 8
"""With many gradients, addresses and views of each are compared once in this number of launches."""
FEW = 32
"""Least number of gradients that are compared before each launch."""
SMALL = 1 << 20
"""Bytes. PyTorch's allocator has separate segments for blocks up to this size."""
_ALIGNMENT = 512
"""Bytes: the alignment of PyTorch's allocator."""
_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with options of PyTorch's allocator."""
_KEEP_WHOLE = ("max_split_size_mb", "roundup_power2_divisions", "cudaMallocAsync")

Counts = tuple[int, ...]
Owned = tuple["GradientReferences", int]
"""References to gradients, and the index of one of them."""

_owners: dict[int, tuple[weakref.ref[GradientReferences], int]] = {}
"""The reference object and index of each gradient, by the id of the gradient."""

_get: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("grad")


class Use(enum.Enum):
    """Name how a call used the gradient that it found."""

    ABSENT = enum.auto()
    """`.grad` was None."""
    DROPPED = enum.auto()
    """It was not read, and `.grad` is a different tensor or None after the call."""
    LEFT_ALONE = enum.auto()
    """It was neither read nor written, and is still in `.grad`."""
    NEEDED = enum.auto()


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the `.grad` of each parameter."""
    return list(map(_get, parameters))


def pattern(found: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
    """Return which gradients are not None."""
    return tuple([gradient is not None for gradient in found])


def memory(found: Iterable[torch.Tensor | None]) -> list[MemoryRange]:
    """Return the memory of the gradients."""
    return [
        MemoryRange(address=gradient.data_ptr(), size_bytes=size_bytes(gradient))
        for gradient in found
        if gradient is not None and size_bytes(gradient)
    ]


def put(parameters: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor | None]) -> None:
    """Set the gradient of each parameter."""
    for parameter, gradient in zip(parameters, wanted, strict=True):
        if _get(parameter) is not gradient:
            parameter.grad = gradient


def held(name: str) -> Refusal:
    """Return the refusal of a call whose gradient the program still references."""
    return Refusal(
        f"is called while the program holds the gradient of {name}, which a launch would overwrite",
        "clone() what is kept of gradients, or drop it before the step is called again",
    )


class GradientReferences:
    """Count the references to gradients and their storages. Note [Gradients that the program references].

    A program that replaces the memory of gradients (`.data =`) does so for all of them. So if there are many, only a
    part of them and of their views is compared before each launch.

    Attributes:
        tensors: the gradients.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._counts = ReferenceCounts(tensors)
        self.tensors = self._counts.tensors
        times = Counter(self._counts.cells)
        self._sharing = [times[cell] - 1 for cell in self._counts.cells]
        turns = min(TURNS, len(self.tensors) // FEW) or 1
        self._parts = [range(turn, len(self.tensors), turns) for turn in range(turns)]
        self._in_parts = [[self.tensors[index] for index in part] for part in self._parts]
        self._places = [list(range(len(part))) for part in self._parts]
        self._addresses = [[one.data_ptr() for one in part] for part in self._in_parts]
        self._turn = 0
        self._expected_parts: list[tuple[list[int], ...] | None] = [None] * turns
        keys = list(map(id, self.tensors))
        here = weakref.ref(self, functools.partial(_forget, keys))
        _owners.update((key, (here, index)) for index, key in enumerate(keys))

    def unmoved(self) -> bool:
        """Return whether the addresses of all are unchanged."""
        return all(map(self._part_is_unmoved, range(len(self._parts))))

    def next_part_is_unmoved(self) -> bool:
        """Return whether the addresses of the next part are unchanged."""
        self._turn = (self._turn + 1) % len(self._parts)
        return self._part_is_unmoved(self._turn)

    def _part_is_unmoved(self, turn: int) -> bool:
        return torch_internals.data_ptrs_equal(self._in_parts[turn], self._addresses[turn], self._places[turn])

    def held(self, bound: Collection[int], among: Iterable[int] | None = None) -> int | None:
        """Return one that is referenced outside Encore. Those in `bound` (ids) are each referenced by one `.grad`."""
        indices = range(len(self.tensors)) if among is None else list(among)
        keys = list(map(id, self.tensors))
        counts = zip(*self._counts.of(indices), strict=True)
        expected = [self._expected(index, keys[index] in bound) for index in indices]
        return next((index for index, now, one in zip(indices, counts, expected, strict=True) if now != one), None)

    def only_encore_refers(self) -> bool:
        """Return whether each is referenced by one `.grad` and by Encore only.

        All tensors are compared, but only the storages of the current part.
        """
        _, of_object = _counts_when(is_bound=True)
        if list(map(sys.getrefcount, self.tensors)).count(of_object) != len(self.tensors):
            return False
        part = self._parts[self._turn]
        if self._expected_parts[self._turn] is None:
            counts = [self._expected(index, is_bound=True) for index in part]
            self._expected_parts[self._turn] = tuple(map(list, zip(*counts, strict=True)))
        return self._counts.of(part) == self._expected_parts[self._turn] or not part

    def _expected(self, index: int, is_bound: bool) -> Counts:
        (of_tensor, of_object, of_storage, of_its_object), _ = _counts_when(is_bound)
        return of_tensor, of_object, of_storage + self._sharing[index], of_its_object + self._sharing[index]


def _forget(keys: Sequence[int], gone: object) -> None:
    for key in keys:
        if (found := _owners.get(key)) is not None and found[0] is gone:
            del _owners[key]


@functools.cache
def _counts_when(is_bound: bool) -> tuple[Counts, int]:
    """Return the reference counts of a gradient that only Encore and, if `is_bound`, a `.grad` reference.

    Return also that of its Python object in a tuple.
    """
    with torch.inference_mode(False):
        sample = GradientReferences([torch.zeros(1, device="cpu")])
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = sample.tensors[0] if is_bound else None
        (counts,) = zip(*sample._counts.of([0]), strict=True)
        (of_object,) = map(sys.getrefcount, sample.tensors)
        return counts, of_object


def own(gradients: Sequence[torch.Tensor | None]) -> list[Owned | None]:
    """Return the shared reference object of each of these plain tensors; make it if there is none."""
    new = {id(one): one for one in gradients if one is not None and _owner(id(one)) is None}
    made = GradientReferences(list(new.values())) if new else None
    found = [None if one is None else _owner(id(one)) for one in gradients]
    del made  # `found` references it
    return found


def _owner(key: int) -> Owned | None:
    known = _owners.get(key)
    references = known[0]() if known is not None else None
    return (references, known[1]) if known is not None and references is not None else None


def referenced_gradient(parameters: Sequence[torch.Tensor], indices: Iterable[int]) -> int | None:
    """Return the index of a parameter whose `.grad` is also referenced outside Encore.

    No variable or list here may reference a gradient that has a reference object: it would be counted.
    """
    strangers: list[torch.Tensor | None] = [None] * len(parameters)
    for index in indices:
        key = id(parameters[index].grad)
        if (known := _owner(key)) is None:
            strangers[index] = parameters[index].grad
        elif known[0].held({key}, (known[1],)) is not None:
            return index
    alone = have_no_other_reference(strangers, as_gradients=True)
    return next((index for index, one in enumerate(strangers) if one is not None and not alone[index]), None)


class Gradients:
    """Manage the gradients of `parameters` around launches. Note [Gradients before and after].

    Args:
        names: names of the parameters.
        before, after: the gradients before and after the call.
        uses: how the call used those from before.
        made: whether the call allocated the memory of a gradient that it left.
        written: whether it wrote a gradient that is in `.grad` before and after.

    Raises:
        StepRefused: the call leaves a gradient that no graph can own.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
        uses: Sequence[Use],
        *,
        made: Callable[[torch.Tensor], bool] = lambda gradient: True,
        written: Callable[[torch.Tensor], bool] = lambda gradient: True,
    ) -> None:
        after = _without_bases(before, after)
        _check(names, before, after, uses)
        self.parameters, self._names = tuple(parameters), names
        places = range(len(self.parameters))
        self._without = tuple([self.parameters[index] for index in places if uses[index] is Use.ABSENT])
        self._present = tuple([self.parameters[index] for index in places if uses[index] is Use.LEFT_ALONE])
        self._stays = [uses[index] in (Use.LEFT_ALONE, Use.NEEDED) for index in places]
        self._needed = [index for index in places if uses[index] is Use.NEEDED]
        self._replaced = [index for index in places if after[index] is not before[index]]
        self._of_needed = tuple([self.parameters[index] for index in self._needed])
        self._of_replaced = tuple([self.parameters[index] for index in self._replaced])
        self._as_before = same_gradients(self._of_needed, [before[index] for index in self._needed])
        self._as_after = same_gradients(self._of_replaced, [after[index] for index in self._replaced])
        mine = {id(one): one for index in self._replaced if (one := after[index]) is not None and made(one)}
        self._mine = GradientReferences(list(mine.values()))
        self._of_mine = {id(one): names[index] for index in places if id(one := after[index]) in mine}
        self._before = own([before[index] for index in self._needed])
        self._after = own([after[index] for index in self._replaced])
        self._metadata = Metadata(self._mine.tensors), Metadata(self._found())
        self._stay_in_place = [after[index] is before[index] for index in self._needed]
        there = zip(self._before, self._needed, self._stay_in_place, strict=True)
        self._written = [one for one, index, stays in there if one is not None and stays and written(_tensor(one))]
        self._bound_as_after = self._in_place = False

    def stay(self, before: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients from before the captured call that a launch needs; None for dropped ones."""
        return [one if stays else None for one, stays in zip(before, self._stays, strict=True)]

    def written(self) -> list[torch.Tensor]:
        """Return gradients that a launch accumulates into, whose versions must be incremented."""
        return list(map(_tensor, self._written))

    def lost(self) -> bool:
        """Return whether the memory or metadata of a gradient was replaced, so that no launch may follow."""
        of_mine, of_found = self._metadata
        same_metadata = of_mine.same(self._mine.tensors) and (not self._needed or of_found.same(self._found()))
        known = {id(one[0]): one[0] for one in [*self._before, *self._after] if one is not None}
        return not (same_metadata and all(one.unmoved() for one in known.values()))

    def _found(self) -> tuple[torch.Tensor, ...]:
        """Return the graph's own tensors that it reads gradients from."""
        return tuple([_tensor(one) for one in self._before if one is not None])

    def fit(self) -> bool:
        """Return whether the same parameters as in the recording have gradients, with unchanged memory and metadata."""
        if any(_get(one) is not None for one in self._without) or any(_get(one) is None for one in self._present):
            return False
        if not self._mine.next_part_is_unmoved() or not self._metadata[0].same(self._mine.tensors):
            return False
        self._in_place = not self._needed or self._as_before(self._of_needed)
        if not self._needed:
            return True
        return not self.lost() and (self._in_place or self._can_be_copied())

    def _can_be_copied(self) -> bool:
        """Return whether the current gradients can be copied to those that the graph reads."""
        found = [(there, _tensor(one)) for there, one in self._moved()]
        if any(is_lazy_view(one) or 0 in one.stride() for _, one in found):
            return False
        if not all(is_plain(there) and metadata_of(there) == metadata_of(one) for there, one in found):
            return False
        sources = {there.untyped_storage().data_ptr() for there, _ in found if there is not None}
        targets = {one.untyped_storage().data_ptr() for one in self._found()}
        return len({id(there) for there, _ in found}) == len(found) and sources.isdisjoint(targets)

    def _moved(self) -> list[tuple[torch.Tensor | None, Owned]]:
        """Return pairs of a current gradient and the different one that the graph reads in its place."""
        pairs = zip(gradients(self._of_needed), self._before, strict=True)
        return [(there, one) for there, one in pairs if one is not None and there is not _tensor(one)]

    def shared_with(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these lies in a gradient that is to be copied, or where it is copied to."""
        if not self._needed or self._as_before(self._of_needed):
            return False
        places = MemoryRanges(memory(filter(is_plain, [*gradients(self._of_needed), *self._found()])))
        return any(places.overlap(one.data_ptr(), size_bytes(one)) for one in tensors)

    def held(self) -> str | None:
        """Return the name of a parameter whose gradient the program references and a launch would overwrite."""
        self._bound_as_after = self._as_after(self._of_replaced)
        if not (self._bound_as_after and self._mine.only_encore_refers()):
            index = self._mine.held(set(map(id, gradients(self.parameters))))
            if index is not None:
                return self._of_mine[id(self._mine.tensors[index])]
        if self._in_place or not self._needed:
            return None
        # No list of gradients may be alive here: its references would be counted.
        moved = [
            place for place in range(len(self._needed)) if not _is_bound(self._of_needed[place], self._before[place])
        ]
        index = referenced_gradient(self._of_needed, moved)
        if index is None:
            index = next((place for place in moved if _is_held(self._before[place])), None)
        return None if index is None else self._names[self._needed[index]]

    def load(self) -> None:
        """Copy gradients to the addresses that the graph reads, before a launch."""
        if self._in_place or not self._needed:
            return
        moved = self._moved()
        copy_all([_tensor(one) for _, one in moved], [there for there, _ in moved if there is not None])

    def publish(self) -> None:
        """Set the `.grad` of every parameter to the tensor that the recording left, after a launch."""
        if not self._bound_as_after:
            for parameter, one in zip(self._of_replaced, self._after, strict=True):
                parameter.grad = None if one is None else _tensor(one)
        if not self._in_place:
            for parameter, one, stays in zip(self._of_needed, self._before, self._stay_in_place, strict=True):
                if stays and one is not None:
                    parameter.grad = _tensor(one)
        self._bound_as_after = self._in_place = False


def _tensor(owned: Owned) -> torch.Tensor:
    references, index = owned
    return references.tensors[index]


def _is_bound(parameter: torch.Tensor, owned: Owned | None) -> bool:
    return owned is not None and parameter.grad is _tensor(owned)


def _is_held(owned: Owned | None) -> bool:
    """Return whether a gradient that is in no `.grad` is referenced outside Encore."""
    return owned is not None and owned[0].held((), (owned[1],)) is not None


def _check(
    names: Sequence[str],
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
    uses: Sequence[Use],
) -> None:
    """Check that a graph can own these gradients.

    Raises:
        StepRefused: a graph cannot own one of them.
    """
    there = {id(one) for one in before if one is not None}
    for name, old, new, use in zip(names, before, after, uses, strict=True):
        if new is not None and new is not old and id(new) in there:
            advice = "write into the gradients in place (`copy_`)"
            raise StepRefused(Refusal(f"gives {name} the gradient of another parameter", advice))
        kept = [old] if use is Use.NEEDED else []
        if any(one is not None and not is_plain(one) for one in [*kept, new if new is not old else None]):
            raise StepRefused(Refusal(f"leaves {name} a gradient that is no plain tensor", "make it a dense tensor"))


def _without_bases(
    before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the gradients after the call. A new one that is a view is detached from its base.

    `autograd.grad` may return views. The base shares the memory, so it would count as a reference by the program.
    """
    there = {id(one) for one in before}
    found = {id(one): one for one in after if one is not None and id(one) not in there}
    others = {key: one.detach() for key, one in found.items() if one._is_view() and not one.requires_grad}
    return [others.get(id(one), one) for one in after]


def carves(environment: Mapping[str, str]) -> bool:
    """Return whether these options let PyTorch's allocator split free blocks of any size."""
    return not any(option in environment.get(name, "") for name in _OPTIONS for option in _KEEP_WHOLE)


def bytes_for_gradients(
    parameters: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor | None],
    optimizers: Iterable[torch.optim.Optimizer],
    made: Set[int],
) -> int:
    """Return the size of the gradients that a call allocates. Note [Room for gradients].

    `before`: the gradient of each parameter before the call. `made`: ids of parameters whose gradients an observed
    call replaced, if it dropped all earlier ones.
    """
    counted = set(made)
    if not counted and all(gradient is None for gradient in before):
        groups = [group.get("params", ()) for optimizer in optimizers for group in optimizer.param_groups]
        counted = {id(parameter) for group in groups for parameter in group if parameter.requires_grad}
    found = [parameter for parameter in parameters if id(parameter) in counted]
    plain = [one for one in found if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided]
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in map(size_bytes, plain) if size > SMALL)
