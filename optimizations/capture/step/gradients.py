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
(`own`). So the counts of a gradient that only Encore references are constant. An argument that lies in a gradient is
such a reference, too.

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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import copy_all, have_no_other_reference, is_plain
from optimizations.capture.step.tensor_marks import Metadata, metadata_of
from optimizations.graph.memory import memory_of, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.report.steps import Refusal, StepRefused
from optimizations.torch_internals.geometry import is_lazy_view
from optimizations.torch_internals.tensor_guard import same_gradients
from optimizations.weak_registry import WeakRegistry

TURNS = 8
"""With many gradients, address, metadata and views of each are compared once in this number of launches."""
MANY = 64
"""Least number of gradients that are compared in turn."""
SMALL = 1 << 20
"""Bytes. PyTorch's allocator has separate segments for blocks up to this size."""
_ALIGNMENT = 512
"""Bytes: the alignment of PyTorch's allocator."""
_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with options of PyTorch's allocator."""
_KEEP_WHOLE = ("max_split_size_mb", "roundup_power2_divisions", "cudaMallocAsync")

Owned = tuple["GradientReferences", int]
"""References to gradients, and the index of one of them."""

_groups: WeakRegistry[GradientReferences] = WeakRegistry()
"""All groups of gradients that recordings refer to. Each gradient is in one of them."""

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
    return [memory_of(gradient) for gradient in found if gradient is not None and size_bytes(gradient)]


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


def _may_find(use: Use, gradient: torch.Tensor | None) -> bool:
    """Return whether a call with this use may find such a gradient."""
    return use is Use.DROPPED or (gradient is None) == (use is Use.ABSENT)


class GradientReferences:
    """Count the references to a group of gradients and to their storages. Note [Gradients that the program references].

    A program that replaces the memory of gradients (`.data =`), or changes their layout, does so for all of them. So if
    a recording has several groups, one of them is compared before each launch.

    Args:
        among: the gradients of all groups that were made together, this one's among them.
        sharing: the number of gradients that lie in a storage, by the storage's address in C++.

    Attributes:
        tensors: the gradients.
        index: the place of each, by its id.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], among: tuple[torch.Tensor, ...], sharing: Mapping[int, int]
    ) -> None:
        self._listed, self._among = list(tensors), among
        self.tensors = tuple(self._listed)  # never `among` itself: each counts as a reference
        self.index = {id(one): index for index, one in enumerate(tensors)}
        self._storages = tuple([one.untyped_storage() for one in tensors])
        self._cells = [one._cdata for one in self._storages]
        self._others = [sharing[cell] - 1 for cell in self._cells]
        self._places, self._addresses = list(range(len(tensors))), [one.data_ptr() for one in tensors]
        self._if_bound: tuple[list[int], ...] | None = None
        _groups.add(self)

    def unmoved(self) -> bool:
        """Return whether the addresses are unchanged."""
        return torch_internals.data_ptrs_equal(self._listed, self._addresses, self._places)

    def only_encore_refers(self) -> bool:
        """Return whether each, and its storage, is referenced by one `.grad` and by Encore only.

        Of the gradients of other groups only Python's references are counted.
        """
        if self._if_bound is None:
            counts = [self._expected(others, is_bound=True) for others in self._others]
            self._if_bound = tuple([[one[kind] for one in counts] for kind in (1, 2, 3)])
        in_one_grad = _references_to(self._among).count(_counts_when(is_bound=True)[0])
        return in_one_grad == len(self._among) and self._counts_but_objects() == self._if_bound

    def referenced(self, bound: Collection[int]) -> list[int]:
        """Return the ids of those that are referenced outside Encore. Each one in `bound` (ids) is in one `.grad`."""
        counts = zip(self.index, self._counts(), self._others, strict=True)
        return [key for key, now, others in counts if now != self._expected(others, is_bound=key in bound)]

    def _counts(self) -> list[tuple[int, ...]]:
        """Return for each what Python holds of the object, and the other counts."""
        return list(zip(_references_to(self.tensors), *self._counts_but_objects(), strict=True))

    def _counts_but_objects(self) -> tuple[list[int], ...]:
        """Return what C++ holds of the tensors, then what C++ and Python hold of the storages."""
        return list(map(torch_internals.tensor_use_count, self.tensors)), *storage_counts(self._cells, self._storages)

    @staticmethod
    def _expected(others: int, is_bound: bool) -> tuple[int, ...]:
        of_object, of_tensor, of_storage, of_its_object = _counts_when(is_bound)
        return of_object, of_tensor, of_storage + others, of_its_object + others


def storage_counts(cells: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> tuple[list[int], list[int]]:
    """Return what C++ holds of storages, by their addresses there, and Python of their objects."""
    return list(map(torch_internals.storage_use_count, cells)), _references_to(storages)


def _references_to(kept: Sequence[object]) -> list[int]:
    """Return Python's references to each object, for a sequence that is kept: one made for the call would count."""
    return list(map(sys.getrefcount, kept))


def _grouped(among: tuple[torch.Tensor, ...]) -> list[GradientReferences]:
    """Return these gradients in one group, or in `TURNS` groups if there are `MANY`."""
    sharing = Counter(one.untyped_storage()._cdata for one in among)
    turns = TURNS if len(among) >= MANY else 1
    return [GradientReferences(among[turn::turns], among, sharing) for turn in range(turns)]


@functools.cache
def _counts_when(is_bound: bool) -> tuple[int, ...]:
    """Return the four counts of a gradient that only Encore and, if `is_bound`, a `.grad` reference."""
    with torch.inference_mode(False):
        (sample,) = _grouped((torch.zeros(1, device="cpu"),))
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = sample.tensors[0] if is_bound else None
        (counts,) = sample._counts()
        return counts


def own(gradients: Sequence[torch.Tensor | None]) -> list[Owned | None]:
    """Return the group and the index of each of these plain tensors; make a group of those that are in none."""
    groups = _groups.alive()  # once: another thread may free one
    known = {key for group in groups for key in group.index}
    new = {id(one): one for one in gradients if one is not None and id(one) not in known}
    groups += _grouped(tuple(new.values()))
    owners = {key: (group, index) for group in groups for key, index in group.index.items()}
    return [None if one is None else owners[id(one)] for one in gradients]


def referenced_gradient(parameters: Sequence[torch.Tensor], indices: Collection[int]) -> int | None:
    """Return the index of a parameter whose `.grad` is also referenced outside Encore.

    No variable or list here may reference a gradient that is in a group: it would be counted.
    """
    bound = {id(parameters[index].grad): index for index in indices}
    groups = [group for group in _groups.alive() if not bound.keys().isdisjoint(group.index)]
    found = [bound[key] for group in groups for key in group.referenced(bound) if key in bound]
    known = {key for group in groups for key in group.index}
    strangers = [
        parameter.grad if index in indices and id(parameter.grad) not in known else None
        for index, parameter in enumerate(parameters)
    ]
    alone = have_no_other_reference(strangers, as_gradients=True)
    found += [index for index, one in enumerate(strangers) if one is not None and not alone[index]]
    return min(found, default=None)


def _tensor(owned: Owned) -> torch.Tensor:
    group, index = owned
    return group.tensors[index]


class _Bound:
    """Hold the gradients that the parameters at some places are to have."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], places: Sequence[int]
    ) -> None:
        self.places, self.parameters = places, tuple([parameters[index] for index in places])
        wanted = [gradients[index] for index in places]
        self.owned, self._ids = own(wanted), list(map(id, wanted))

    def holds(self) -> bool:
        """Return whether each parameter has the very gradient."""
        return not self.places or list(map(id, map(_get, self.parameters))) == self._ids

    def tensors(self) -> list[torch.Tensor]:
        """Return the gradients that are not None."""
        return list(map(_tensor, filter(None, self.owned)))

    def moved(self) -> dict[int, int]:
        """Return which of the parameters have another gradient, with the id of the one that they are to have."""
        now = map(id, map(_get, self.parameters))
        return {index: key for index, (there, key) in enumerate(zip(now, self._ids, strict=True)) if there != key}

    def put(self) -> None:
        """Set the gradient of each parameter."""
        for parameter, one in zip(self.parameters, self.owned, strict=True):
            parameter.grad = None if one is None else _tensor(one)


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
        self.parameters, self._names, self._uses = tuple(parameters), names, uses
        places = range(len(self.parameters))
        needed = [index for index in places if uses[index] is Use.NEEDED]
        changed = [index for index in places if after[index] is not before[index]]
        mine = {id(one): one for index in changed if (one := after[index]) is not None and made(one)}
        self._mine, self._turn = _grouped(tuple(mine.values())), 0
        self._of_mine = {id(one): names[index] for index in places if id(one := after[index]) in mine}
        self._before = _Bound(self.parameters, before, needed)
        self._after = _Bound(self.parameters, after, sorted({*needed, *changed}))
        triples = list(zip(before, after, uses, strict=True))
        # Gradients as a launch leaves them; and whether the next launch may begin with these.
        left = [None if use is Use.LEFT_ALONE else id(new) for _, new, use in triples]
        self._are_left = same_gradients(self.parameters, left)
        self._repeats = all(use is Use.DROPPED or new is old for old, new, use in triples)
        stays = [after[index] is before[index] for index in needed]
        found = zip(filter(None, self._before.owned), stays, strict=True)
        self._written = [one for one, stay in found if stay and written(_tensor(one))]
        owned = filter(None, [*self._before.owned, *self._after.owned])
        self._groups = list({id(group): group for group in [*self._mine, *(group for group, _ in owned)]}.values())
        self._metadata = [Metadata(group.tensors) for group in self._groups]
        self._is_published = self._in_place = False

    def stay(self, before: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients from before the captured call that a launch needs; None for dropped ones."""
        stays = (Use.LEFT_ALONE, Use.NEEDED)
        return [one if use in stays else None for one, use in zip(before, self._uses, strict=True)]

    def written(self) -> list[torch.Tensor]:
        """Return gradients that a launch accumulates into, whose versions must be incremented."""
        return list(map(_tensor, self._written))

    def lost(self) -> bool:
        """Return whether the memory or metadata of a gradient was replaced, so that no launch may follow."""
        return not all(map(self._is_unchanged, range(len(self._groups))))

    def _is_unchanged(self, index: int) -> bool:
        """Return whether memory and metadata of the gradients in a group are as in the recording."""
        group = self._groups[index]
        return group.unmoved() and self._metadata[index].same(group.tensors)

    def fit(self) -> bool:
        """Return whether the same parameters as in the recording have gradients, with unchanged memory and metadata."""
        self._is_published = self._are_left(self.parameters)
        repeats = self._is_published and self._repeats
        if not (repeats or all(map(_may_find, self._uses, gradients(self.parameters)))):
            return False
        self._in_place = repeats or self._before.holds()
        self._turn = (self._turn + 1) % len(self._mine)
        if not self._before.places:
            return self._is_unchanged(self._turn)  # its own groups are the first ones
        return not self.lost() and (self._in_place or self._can_be_copied())

    def _can_be_copied(self) -> bool:
        """Return whether the current gradients can be copied to those that the graph reads."""
        found = self._moved()
        if any(is_lazy_view(one) or 0 in one.stride() for _, one in found):
            return False
        if not all(is_plain(there) and metadata_of(there) == metadata_of(one) for there, one in found):
            return False
        sources = {there.untyped_storage().data_ptr() for there, _ in found if there is not None}
        targets = {one.untyped_storage().data_ptr() for one in self._before.tensors()}
        return len({id(there) for there, _ in found}) == len(found) and sources.isdisjoint(targets)

    def _moved(self) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """Return pairs of a current gradient and the different one that the graph reads in its place."""
        pairs = zip(gradients(self._before.parameters), self._before.tensors(), strict=True)
        return [(there, one) for there, one in pairs if there is not one]

    def held(self, *, fits: bool = False) -> str | None:
        """Return the name of a parameter whose gradient the program references and a launch would overwrite.

        `fits`: `fit` compared the gradients of this call.
        """
        if not fits:
            self._is_published, self._in_place = self._are_left(self.parameters), self._before.holds()
        if not (self._is_published and self._mine[self._turn].only_encore_refers()):
            bound = set(map(id, gradients(self.parameters)))
            for group in self._mine:
                for key in group.referenced(bound):
                    return self._of_mine[key]
        if self._in_place:
            return None
        # No list of gradients may be alive here: its references would be counted.
        moved = self._before.moved()
        index = referenced_gradient(self._before.parameters, moved)
        if index is None:
            groups = {id(one[0]): one[0] for one in self._before.owned if one is not None}
            others = {key for group in groups.values() for key in group.referenced(())}
            index = next((place for place, key in moved.items() if key in others), None)
        return None if index is None else self._names[self._before.places[index]]

    def load(self) -> None:
        """Copy gradients to the addresses that the graph reads, before a launch."""
        if not self._in_place and (moved := self._moved()):
            copy_all([one for _, one in moved], [there for there, _ in moved if there is not None])

    def publish(self) -> None:
        """Set the `.grad` of every parameter to the tensor that the recording left, after a launch."""
        if not self._is_published:
            self._after.put()
        self._is_published = self._in_place = False


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
