"""Manage `.grad` of the parameters around a recording: attributes of Python that the work of the GPU depends on.

Note [Gradients before and after]. A backward puts a new tensor into a `.grad` that is None and adds to one that is
there. These are different graphs, and the second has the address of the gradient in it. So a recording notes how the
call used each gradient that it found (`Use`), and which tensor it left. A gradient that the call dropped unread is
unused, one that it left alone only has to be there. What the graph reads is copied to where it reads it if another
tensor stands in the `.grad`. After a launch every parameter has the tensor that the recording left, as it would have
after the call.

The graph owns these tensors. Where the program holds one that a launch would overwrite, as in a list or by a view, the
call runs uncaptured, and the report tells the parameter: Note [Gradients that are held] in `gradient_references`. A
gradient whose memory was exchanged (`.data =`) is recorded again. What a call leaves in a `.grad` and did not make,
such as a view of a flat buffer, is the program's, and eager writes it as well.

Note [Words that are left over]. What launches a kernel may leave a part of its parameters as it finds the memory, with
an address of before in it. Kernels of operators read what these were given (Note [What an operator was given] in
`launches`), so their words do not count where the origin of each node is known. Where it is not, such a word means that
the gradient is needed.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence

import torch

from optimizations.capture.inputs import copy_all, is_plain
from optimizations.capture.step.gradient_references import GradientReferences, Owned, held_gradient, own
from optimizations.capture.step.tensor_marks import Metadata, look
from optimizations.graph.memory import MemoryRanges, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.report.steps import Refusal, StepRefused
from optimizations.torch_internals.geometry import is_lazy_view
from optimizations.torch_internals.tensor_guard import same_gradients

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
        self._metadata = Metadata(self._mine.tensors), Metadata(self._found())
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
        of_mine, of_found = self._metadata
        alike = of_mine.same(self._mine.tensors) and (not self._needed or of_found.same(self._found()))
        return not (alike and all(one.lie() for one in self._known()))

    def _found(self) -> tuple[torch.Tensor, ...]:
        """Return the graph's own tensors that it reads gradients from."""
        return tuple([_tensor(one) for one in self._before if one is not None])

    def _known(self) -> list[GradientReferences]:
        return list({id(one[0]): one[0] for one in [*self._before, *self._after] if one is not None}.values())

    def fit(self) -> bool:
        """Return whether a launch now would find gradients where the recording found some."""
        if any(_get(one) is not None for one in self._without) or any(_get(one) is None for one in self._present):
            return False
        if not self._mine.lie(in_turn=True) or not self._metadata[0].same(self._mine.tensors):
            return False
        self._in_place = not self._needed or self._as_before(self._of_needed)
        if not self._needed:
            return True
        return not self.lost() and (self._in_place or self._can_be_copied())

    def _can_be_copied(self) -> bool:
        """Return whether what stands in the places of gradients that the graph reads can be copied to these."""
        found = [(there, _tensor(one)) for there, one in self._moved()]
        if any(is_lazy_view(one) or 0 in one.stride() for _, one in found):
            return False
        if not all(is_plain(there) and look(there) == look(one) for there, one in found):
            return False
        sources = {there.untyped_storage().data_ptr() for there, _ in found if there is not None}
        targets = {one.untyped_storage().data_ptr() for one in self._found()}
        return len({id(there) for there, _ in found}) == len(found) and sources.isdisjoint(targets)

    def _moved(self) -> list[tuple[torch.Tensor | None, Owned]]:
        """Return pairs of what stands in a place, and the graph's own that is read there, where they differ."""
        pairs = zip(gradients(self._of_needed), self._before, strict=True)
        return [(there, one) for there, one in pairs if one is not None and there is not _tensor(one)]

    def shared_with(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these lies in a gradient that is to be copied, or where it is copied to."""
        if not self._needed or self._as_before(self._of_needed):
            return False
        places = MemoryRanges(memory(filter(is_plain, [*gradients(self._of_needed), *self._found()])))
        return any(places.overlap(one.data_ptr(), size_bytes(one)) for one in tensors)

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
