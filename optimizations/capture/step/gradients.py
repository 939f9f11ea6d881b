"""Manage the `.grad` of parameters around launches of a recording.

Note [Gradients before and after]. A backward assigns a new tensor to a `.grad` that is None and accumulates into an
existing one. These are different graphs, and the second contains the address of the gradient. So a recording stores how
the call used each gradient that it found (`Use`), and which tensor it left. A gradient that the call dropped unread is
unused. One that it neither read nor wrote only has to exist. If the graph reads a gradient and `.grad` is a different
tensor now, that one is copied to the address that the graph reads. After a launch every parameter has the tensor that
the recording left, as it would after the call.

The graph owns these tensors. If the program references one that a launch would overwrite, by a list or a view, the call
runs uncaptured and the report names the parameter: Note [Gradients that the program references]. A tensor that a call
leaves in a `.grad` and did not allocate, such as a view of a flat buffer, belongs to the program. Eager writes it as
well.

Note [Words that are left over]. The code that launches a kernel may leave a part of the parameter buffer
uninitialized, with an old address in it. So the tensors count that operators and Inductor's kernels were given. Only if
other code added nodes, any node parameter that is an address in a gradient makes it count as needed.

Note [Gradients that the program references]. A launch writes gradients to their recorded addresses, whatever `.grad`
is now. The program may see that memory if it stored `.grad` in a list, or made a view of it. So the references to these
tensors and to their storages are counted before a launch. All recordings refer to a gradient through one shared object
(`own`). So the counts of a gradient that only Encore references are constant. An argument that lies in a gradient is
such a reference, too. If the program replaces the memory of a gradient (`.data =`), its storage has one reference less.

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
from dataclasses import dataclass

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import copy_all, is_plain
from optimizations.capture.step.tensor_marks import Metadata, metadata_of
from optimizations.graph.memory import memory_of, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.report.steps import Refusal, StepRefused
from optimizations.torch_internals.geometry import is_lazy_view, same_gradients

SMALL = 1 << 20
"""Bytes. PyTorch's allocator has separate segments for blocks up to this size."""
_ALIGNMENT = 512
"""Bytes: the alignment of PyTorch's allocator."""
_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with options of PyTorch's allocator."""
_KEEP_WHOLE = ("max_split_size_mb", "roundup_power2_divisions", "cudaMallocAsync")

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


def memory(found: Iterable[torch.Tensor | None]) -> list[MemoryRange]:
    """Return the memory of the gradients."""
    return [memory_of(gradient) for gradient in found if gradient is not None and size_bytes(gradient)]


def put(parameters: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor | None]) -> None:
    """Set the gradient of each parameter."""
    for parameter, gradient in zip(parameters, wanted, strict=True):
        if _get(parameter) is not gradient:
            parameter.grad = gradient


def _may_find(use: Use, gradient: torch.Tensor | None) -> bool:
    """Return whether a call with this use may find such a gradient."""
    return use is Use.DROPPED or (gradient is None) == (use is Use.ABSENT)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Owned:
    """Refer to a gradient for all recordings that know it. Note [Gradients that the program references].

    Attributes:
        cell: address of the storage in C++.
        others: number of gradients, made together with it, in the same storage.
    """

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    cell: int
    others: int


_owned: weakref.WeakValueDictionary[int, _Owned] = weakref.WeakValueDictionary()
"""The references to each gradient, by its id."""


def own(gradients: Iterable[torch.Tensor | None]) -> dict[int, _Owned]:
    """Return the references to each of these plain tensors, by their ids."""
    by_id = {id(one): one for one in gradients if one is not None}
    found = {key: known for key in by_id if (known := _owned.get(key)) is not None}
    storages = {key: one.untyped_storage() for key, one in by_id.items() if key not in found}
    sharing = Counter(storage._cdata for storage in storages.values())
    made = {key: _Owned(by_id[key], one, one._cdata, sharing[one._cdata] - 1) for key, one in storages.items()}
    _owned.update(made)
    return found | made


def storage_counts(cells: Sequence[int]) -> list[int]:
    """Return the references to storages, by their addresses in C++."""
    return list(map(torch_internals.storage_use_count, cells))


def _counts(owned: Sequence[_Owned]) -> tuple[list[int], list[int]]:
    """Return Python's references to each tensor, and all references to its storage."""
    return [sys.getrefcount(one.tensor) for one in owned], storage_counts([one.cell for one in owned])


@functools.cache
def _counts_when(is_bound: bool) -> tuple[int, int]:
    """Return the counts of a gradient that only Encore and, if `is_bound`, a `.grad` reference."""
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = torch.zeros(1, device="cpu")
        owned = _of_grad(parameter)
        if not is_bound:
            parameter.grad = None
        (of_tensor,), (of_storage,) = _counts([owned])
        return of_tensor, of_storage


def _of_grad(parameter: torch.Tensor) -> _Owned:
    """Return the references to the `.grad` of a parameter. A variable of the caller that holds it would be counted."""
    (found,) = own([_get(parameter)]).values()
    return found


def _expected(one: _Owned, is_bound: bool) -> tuple[int, int]:
    """Return the counts of a gradient that only Encore and, if `is_bound`, a `.grad` reference."""
    of_tensor, of_storage = _counts_when(is_bound)
    return of_tensor, of_storage + one.others


def _referenced(owned: Sequence[_Owned], bound: Collection[int]) -> list[_Owned]:
    """Return those that the program references. Each one whose id is in `bound` is in one `.grad`."""
    counts = zip(owned, *_counts(owned), strict=True)
    return [one for one, *now in counts if tuple(now) != _expected(one, id(one.tensor) in bound)]


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
        made: Callable[[torch.Tensor], bool],
        written: Callable[[torch.Tensor], bool],
    ) -> None:
        after = _without_bases(before, after)
        _check(names, before, after, uses)
        self.parameters, self._names, self._uses = tuple(parameters), names, uses
        places = range(len(self.parameters))
        needed = [index for index in places if uses[index] is Use.NEEDED]
        changed = [index for index in places if after[index] is not before[index]]
        owned = own([*(before[index] for index in needed), *(after[index] for index in changed)])
        # By place: what the graph reads, and what it leaves.
        self._needed = {index: owned[id(before[index])] for index in needed}
        self._left = {index: owned.get(id(after[index])) for index in sorted({*needed, *changed})}
        self._written = [
            one for index, one in self._needed.items() if after[index] is one.tensor and written(one.tensor)
        ]
        self._addresses = [one.tensor.data_ptr() for one in self._needed.values()]
        self._metadata = Metadata(tuple([one.tensor for one in self._needed.values()]))
        # What it made, and the name of the parameter by the id of each.
        self._of_mine = {id(one): names[index] for index in changed if (one := after[index]) is not None and made(one)}
        self._mine = [owned[key] for key in self._of_mine]
        expected = [_expected(one, True) for one in self._mine]
        self._expected = [of_tensor for of_tensor, _ in expected], [of_storage for _, of_storage in expected]
        triples = list(zip(before, after, uses, strict=True))
        # Gradients as a launch leaves them; and whether the next launch may begin with these.
        left = [None if use is Use.LEFT_ALONE else id(new) for _, new, use in triples]
        self._are_left = same_gradients(self.parameters, left)
        self._repeats = all(use is Use.DROPPED or new is old for old, new, use in triples)
        self._is_published = self._in_place = False

    def stay(self, before: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients from before the captured call that a launch needs; None for dropped ones."""
        stays = (Use.LEFT_ALONE, Use.NEEDED)
        return [one if use in stays else None for one, use in zip(before, self._uses, strict=True)]

    def written(self) -> list[torch.Tensor]:
        """Return gradients that a launch accumulates into, whose versions must be incremented."""
        return [one.tensor for one in self._written]

    def lost(self) -> bool:
        """Return whether a gradient has other memory, or one that the graph reads has other metadata."""
        if any(one.tensor.untyped_storage()._cdata != one.cell for one in self._mine):
            return True
        tensors = [one.tensor for one in self._needed.values()]
        same = torch_internals.data_ptrs_equal(tensors, self._addresses, list(range(len(tensors))))
        return not (same and self._metadata.same(tuple(tensors)))

    def fit(self) -> bool:
        """Return whether the same parameters as in the recording have gradients, and the graph can read these."""
        self._is_published = self._are_left(self.parameters)
        repeats = self._is_published and self._repeats
        if not (repeats or all(map(_may_find, self._uses, gradients(self.parameters)))):
            return False
        self._in_place = repeats or not self._moved()
        return not self._needed or (not self.lost() and (self._in_place or self._can_be_copied()))

    def _moved(self) -> list[int]:
        """Return the places of parameters that have another gradient than the graph reads."""
        return [index for index, one in self._needed.items() if _get(self.parameters[index]) is not one.tensor]

    def _to_copy(self) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """Return pairs of a current gradient and the different one that the graph reads in its place."""
        return [(_get(self.parameters[index]), self._needed[index].tensor) for index in self._moved()]

    def _can_be_copied(self) -> bool:
        """Return whether the current gradients can be copied to those that the graph reads."""
        found = self._to_copy()
        if any(is_lazy_view(one) or 0 in one.stride() for _, one in found):
            return False
        if not all(is_plain(there) and metadata_of(there) == metadata_of(one) for there, one in found):
            return False
        sources = {there.untyped_storage().data_ptr() for there, _ in found if there is not None}
        return sources.isdisjoint(one.storage.data_ptr() for one in self._needed.values())

    def held(self) -> str | None:
        """Return the name of a parameter whose gradient the program references and a launch would overwrite.

        `fit` compared the gradients of this call.
        """
        # Mostly each gradient that the recording made is referenced by one `.grad` and by Encore only.
        only_encores = self._is_published and _counts(self._mine) == self._expected
        if not only_encores and (name := self.made_and_held()) is not None:
            return name
        for index in () if self._in_place else self._moved():
            pair = _of_grad(self.parameters[index]), self._needed[index]
            if _referenced(pair, (id(pair[0].tensor),)):
                return self._names[index]
        return None

    def made_and_held(self) -> str | None:
        """Return a parameter whose gradient the recording made and the program references."""
        bound = set(map(id, gradients(self.parameters)))
        return next((self._of_mine[id(one.tensor)] for one in _referenced(self._mine, bound)), None)

    def load(self) -> None:
        """Copy gradients to the addresses that the graph reads, before a launch."""
        if not self._in_place and (moved := self._to_copy()):
            copy_all([one for _, one in moved], [there for there, _ in moved if there is not None])

    def publish(self) -> None:
        """Set the `.grad` of every parameter to the tensor that the recording left, after a launch."""
        if not self._is_published:
            for index, one in self._left.items():
                self.parameters[index].grad = None if one is None else one.tensor
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
