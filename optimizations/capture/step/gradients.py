"""Manage `.grad` of the parameters around a recording: attributes of Python that the work of the GPU depends on.

Note [Gradients before and after]. A backward puts a new tensor into a `.grad` that is None and adds to one that is
there. These are different graphs, and the second has the address of the gradient in it. So a recording notes how the
call used each gradient that it found (`Use`), and which tensor it left. A gradient that the call dropped unread is
unused, one that it left alone only has to be there. What the graph reads is copied to where it reads it if another
tensor stands in the `.grad`. After a launch every parameter has the tensor that the recording left, as it would have
after the call.

The graph owns these tensors. Where the program holds one that a launch would overwrite, as in a list or by a view, the
call runs uncaptured, and the report tells the parameter: Note [Gradients that are held]. A
gradient whose memory was exchanged (`.data =`) is recorded again. What a call leaves in a `.grad` and did not make,
such as a view of a flat buffer, is the program's, and eager writes it as well.

Note [Words that are left over]. What launches a kernel may leave a part of its parameters as it finds the memory, with
an address of before in it. Kernels of operators read what these were given (Note [What an operator was given] in
`launches`), so their words do not count where the origin of each node is known. Where it is not, such a word means that
the gradient is needed.

Note [Gradients that are held]. A launch writes its gradients where the recording had them, whatever is in a `.grad`
now. The program may see that memory: it took `.grad` into a list, or made a view of it. So the references to these
tensors and to their storages are counted before a launch. Encore refers to each gradient that its graphs know through
one object alone (`own`), in whichever recording, so the counts of one that only Encore holds are always the same.

Note [Room for gradients]. In eager the gradients of the iteration before are free memory when the next one begins:
what the forward computes lies there, and after it the new gradients do. The pool of a graph begins with nothing. What
the forward computes gets many small pieces, into which no gradient fits later, so gradients get pieces of their own
(DeepRecommender: 1.7 GB, where eager takes 1.3). So a new pool gets one piece of the size of all gradients first, which
is free again at once.

That is of use only if gradients are made there. So those count that the step lets go of. Where no parameter has one
before a call, those count that an observed call left, and if it left none, as with a `zero_grad` at its end, those that
parameters of the step's optimizers will have. Of parameters that stand for others, such as parts on several GPUs, the
size says nothing. And options of PyTorch's allocator may keep it from carving small pieces out of a large free one:
then a piece of this size would be of no use to what the forward computes.
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
from optimizations.capture.step.tensor_marks import Metadata, look
from optimizations.graph.memory import size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.report.steps import Refusal, StepRefused
from optimizations.torch_internals.reference_counts import ReferenceCounts
from optimizations.torch_internals.tensor_guard import same_gradients

TURNS = 8
"""Launches in which the metadata and views of all gradients are compared once, where there are many."""
FEW = 32
"""Gradients of which so many are compared each time at least."""
SMALL = 1 << 20
"""Bytes. PyTorch's allocator has pieces of their own for what is not larger."""
_ALIGNMENT = 512
"""Bytes. As PyTorch's allocator aligns what it gives."""
_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with options of PyTorch's allocator."""
_KEEP_WHOLE = ("max_split_size_mb", "roundup_power2_divisions", "cudaMallocAsync")

Counts = tuple[int, ...]
Owned = tuple["GradientReferences", int]
"""Gradients that Encore holds once, and which of these."""

_owners: dict[int, tuple[weakref.ref[GradientReferences], int]] = {}
"""Who holds a gradient, by its identity."""

_get: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("grad")


class Use(enum.Enum):
    """Name how a call used the gradient that it found."""

    ABSENT = enum.auto()
    """There was none."""
    DROPPED = enum.auto()
    """It was not read, and another one, or none, is there after the call."""
    LEFT_ALONE = enum.auto()
    """It was neither read nor written, and is still there."""
    NEEDED = enum.auto()


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return `.grad` of each."""
    return list(map(_get, parameters))


def pattern(found: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
    """Return which of the gradients are there."""
    return tuple([gradient is not None for gradient in found])


def memory(found: Iterable[torch.Tensor | None]) -> list[MemoryRange]:
    """Return where the gradients lie."""
    return [
        MemoryRange(address=gradient.data_ptr(), size_bytes=size_bytes(gradient))
        for gradient in found
        if gradient is not None and size_bytes(gradient)
    ]


def put(parameters: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor | None]) -> None:
    """Give each parameter this gradient."""
    for parameter, gradient in zip(parameters, wanted, strict=True):
        if _get(parameter) is not gradient:
            parameter.grad = gradient


def held(name: str) -> Refusal:
    """Return why a call runs uncaptured for which the program holds a gradient."""
    return Refusal(
        f"is called while the program holds the gradient of {name}, which a launch would overwrite",
        "clone() what is kept of gradients, or drop it before the step is called again",
    )


class GradientReferences:
    """Hold gradients once each, with their storages, and count who else holds them. Note [Gradients that are held].

    A program that exchanges the memory of gradients (`.data =`) does so with all of them. So of many a part is
    compared before each launch, and so are views of them.

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
        self._in_parts = [tuple([self.tensors[index] for index in part]) for part in self._parts]
        self._metadata = list(map(Metadata, self._in_parts))
        self._addresses = [[one.data_ptr() for one in part] for part in self._in_parts]
        self._turn = 0
        self._expected_parts: list[tuple[list[int], ...] | None] = [None] * turns
        keys = list(map(id, self.tensors))
        here = weakref.ref(self, functools.partial(_forget, keys))
        _owners.update((key, (here, index)) for index, key in enumerate(keys))

    def same(self) -> bool:
        """Return whether all have the memory and metadata they had."""
        return all(map(self._part_is_same, range(len(self._parts))))

    def same_in_turn(self) -> bool:
        """Return whether those have it whose turn it is."""
        self._turn = (self._turn + 1) % len(self._parts)
        return self._part_is_same(self._turn)

    def _part_is_same(self, turn: int) -> bool:
        part, addresses = self._in_parts[turn], self._addresses[turn]
        lie = torch_internals.data_ptrs_equal([*part], addresses, list(range(len(part))))
        return lie and self._metadata[turn].same(part)

    def held(self, standing: Collection[int], among: Iterable[int] | None = None) -> int | None:
        """Return one that something else than Encore holds. Those `standing`, by identity, are each in one `.grad`."""
        indices = range(len(self.tensors)) if among is None else list(among)
        keys = list(map(id, self.tensors))
        counts = zip(*self._counts.of(indices), strict=True)
        expected = [self._expected(index, keys[index] in standing) for index in indices]
        return next((index for index, now, one in zip(indices, counts, expected, strict=True) if now != one), None)

    def stand_unheld(self) -> bool:
        """Return whether each is in one `.grad`, and only Encore holds them apart from that, as far as it is compared.

        Of tensors all are compared, of storages those whose turn it is.
        """
        _, of_object = _counts_when(stands=True)
        if list(map(sys.getrefcount, self.tensors)).count(of_object) != len(self.tensors):
            return False
        part = self._parts[self._turn]
        if self._expected_parts[self._turn] is None:
            counts = [self._expected(index, stands=True) for index in part]
            self._expected_parts[self._turn] = tuple(map(list, zip(*counts, strict=True)))
        return self._counts.of(part) == self._expected_parts[self._turn] or not part

    def _expected(self, index: int, stands: bool) -> Counts:
        (of_tensor, of_object, of_storage, of_its_object), _ = _counts_when(stands)
        return of_tensor, of_object, of_storage + self._sharing[index], of_its_object + self._sharing[index]


def _forget(keys: Sequence[int], gone: object) -> None:
    for key in keys:
        if (found := _owners.get(key)) is not None and found[0] is gone:
            del _owners[key]


@functools.cache
def _counts_when(stands: bool) -> tuple[Counts, int]:
    """Return the counts of a gradient that only Encore holds, or that is in a `.grad`, too; and that of its object in
    a tuple."""
    with torch.inference_mode(False):
        sample = GradientReferences([torch.zeros(1, device="cpu")])
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = sample.tensors[0] if stands else None
        (counts,) = zip(*sample._counts.of([0]), strict=True)
        (of_object,) = map(sys.getrefcount, sample.tensors)
        return counts, of_object


def own(gradients: Sequence[torch.Tensor | None]) -> list[Owned | None]:
    """Return who holds each of these plain tensors for Encore, from now on."""
    new = {id(one): one for one in gradients if one is not None and _owner(id(one)) is None}
    made = GradientReferences(list(new.values())) if new else None
    found = [None if one is None else _owner(id(one)) for one in gradients]
    del made  # what is found holds it
    return found


def _owner(key: int) -> Owned | None:
    known = _owners.get(key)
    references = known[0]() if known is not None else None
    return (references, known[1]) if known is not None and references is not None else None


def held_gradient(parameters: Sequence[torch.Tensor], indices: Iterable[int]) -> int | None:
    """Return one of these places of parameters whose `.grad` something else than Encore holds, too.

    A gradient that Encore knows is bound to no name here, and stands in no list, which would count.
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
        names: of the parameters.
        before, after: the gradients around the call, and `uses` how it used the first.
        made: whether the call made the memory of a gradient that it left.
        written: whether it wrote a gradient that is there before and after.

    Raises:
        StepRefused: it leaves a gradient that no graph can own.
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
        self._stay_in_place = [after[index] is before[index] for index in self._needed]
        there = zip(self._before, self._needed, self._stay_in_place, strict=True)
        self._written = [one for one, index, stays in there if one is not None and stays and written(_tensor(one))]
        self._stands = self._in_place = False

    def stay(self, before: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return those of the gradients before the captured call that a launch finds: others are dropped."""
        return [one if stays else None for one, stays in zip(before, self._stays, strict=True)]

    def written(self) -> list[torch.Tensor]:
        """Return those that a launch adds to, whose versions are to be counted up."""
        return list(map(_tensor, self._written))

    def lost(self) -> bool:
        """Return whether the memory or metadata of one was exchanged, so that no launch may follow."""
        known = {id(one[0]): one[0] for one in [*self._before, *self._after] if one is not None}
        return not all(one.same() for one in known.values())

    def fit(self) -> bool:
        """Return whether a launch now would find gradients where the recording found some."""
        if any(_get(one) is not None for one in self._without) or any(_get(one) is None for one in self._present):
            return False
        if not self._mine.same_in_turn():
            return False
        self._in_place = not self._needed or self._as_before(self._of_needed)
        if not self._needed:
            return True
        return not self.lost() and (self._in_place or self._can_be_copied())

    def _can_be_copied(self) -> bool:
        """Return whether what stands in the places of gradients that the graph reads can be copied to these.

        `held` tells whether anything else shares memory with one of either.
        """
        found = [(there, _tensor(one)) for there, one in self._moved()]
        return all(is_plain(there) and look(there) == look(one) and 0 not in one.stride() for there, one in found)

    def _moved(self) -> list[tuple[torch.Tensor | None, Owned]]:
        """Return pairs of what stands in a place, and the graph's own that is read there, where they differ."""
        pairs = zip(gradients(self._of_needed), self._before, strict=True)
        return [(there, one) for there, one in pairs if one is not None and there is not _tensor(one)]

    def held(self) -> str | None:
        """Return the name of a parameter whose gradient the program holds and a launch now would overwrite."""
        self._stands = self._as_after(self._of_replaced)
        if not (self._stands and self._mine.stand_unheld()):
            index = self._mine.held(set(map(id, gradients(self.parameters))))
            if index is not None:
                return self._of_mine[id(self._mine.tensors[index])]
        if self._in_place or not self._needed:
            return None
        # No list of gradients is alive meanwhile, which would count.
        moved = [
            place for place in range(len(self._needed)) if not _stands_at(self._of_needed[place], self._before[place])
        ]
        index = held_gradient(self._of_needed, moved)
        if index is None:
            index = next((place for place in moved if _is_held(self._before[place])), None)
        return None if index is None else self._names[self._needed[index]]

    def bring(self) -> None:
        """Copy gradients that lie elsewhere to where the graph reads them, before a launch."""
        if self._in_place or not self._needed:
            return
        moved = self._moved()
        copy_all([_tensor(one) for _, one in moved], [there for there, _ in moved if there is not None])

    def leave(self) -> None:
        """Give every parameter the gradient that the recording left, after a launch."""
        if not self._stands:
            for parameter, one in zip(self._of_replaced, self._after, strict=True):
                parameter.grad = None if one is None else _tensor(one)
        if not self._in_place:
            for parameter, one, stays in zip(self._of_needed, self._before, self._stay_in_place, strict=True):
                if stays and one is not None:
                    parameter.grad = _tensor(one)
        self._stands = self._in_place = False


def _tensor(owned: Owned) -> torch.Tensor:
    references, index = owned
    return references.tensors[index]


def _stands_at(parameter: torch.Tensor, owned: Owned | None) -> bool:
    return owned is not None and parameter.grad is _tensor(owned)


def _is_held(owned: Owned | None) -> bool:
    """Return whether something else than Encore holds a gradient that is in no `.grad`."""
    return owned is not None and owned[0].held((), (owned[1],)) is not None


def _check(
    names: Sequence[str],
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
    uses: Sequence[Use],
) -> None:
    """Check that a graph can own these gradients.

    Raises:
        StepRefused: it cannot.
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
    """Return those after the call. A new one that is a view, as of `autograd.grad`, is detached from its base.

    Both share memory, which would count as held.
    """
    there = {id(one) for one in before}
    found = {id(one): one for one in after if one is not None and id(one) not in there}
    others = {key: one.detach() for key, one in found.items() if one._is_view() and not one.requires_grad}
    return [others.get(id(one), one) for one in after]


def carves(environment: Mapping[str, str]) -> bool:
    """Return whether PyTorch's allocator, by its options there, carves requests out of free pieces of any size."""
    return not any(option in environment.get(name, "") for name in _OPTIONS for option in _KEEP_WHOLE)


def room_for_gradients(
    parameters: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor | None],
    optimizers: Iterable[torch.optim.Optimizer],
    made: Set[int],
) -> int:
    """Return the bytes of the gradients that a call makes. Note [Room for gradients].

    `before`: the gradient of each parameter before the call. `made`: identities of parameters whose gradients an
    observed call replaced, where it let go of all from before.
    """
    counted = set(made)
    if not counted and all(gradient is None for gradient in before):
        groups = [group.get("params", ()) for optimizer in optimizers for group in optimizer.param_groups]
        counted = {id(parameter) for group in groups for parameter in group if parameter.requires_grad}
    found = [parameter for parameter in parameters if id(parameter) in counted]
    plain = [one for one in found if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided]
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in map(size_bytes, plain) if size > SMALL)
