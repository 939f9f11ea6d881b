"""Manage `.grad` of the parameters around a recording: attributes of Python that the work of the GPU depends on.

Note [Gradients before and after]. A backward puts a new tensor into a `.grad` that is None and adds to one that is
there. These are different graphs, and the second has the address of the gradient in it. So a recording notes each
parameter's gradient before (None, or which tensor) and after. It may be launched where the gradients are None for the
same parameters; one that is another tensor is copied to where the graph expects it. After a launch every parameter has
the tensor that the recording left, as it would have after the call. A step that throws its gradients away before it
computes new ones does not depend on those before: neither an operator nor a node parameter leads to them. That is
known of gradients that were there. Where there was none, the call may add to what is there, or leave it.

A gradient whose memory was exchanged since (`.data =`, `set_`), or whose metadata differ (`t_()`, `requires_grad_()`),
counts as another tensor. The memory that the graph knows is kept, and gets a tensor of its own (`gradient_places`). A
gradient is brought only where it looks as the graph's: what eager leaves looks as what it found.

A program may hold the tensor that it put into a `.grad`, or one that shares its memory, as a flat buffer of all
gradients does. What the call adds to it is to be seen there. So after a launch the sum is copied back to it, and it
stays in the `.grad`; but where nothing else holds it, the graph's own takes its place. So it does where only another
recording holds it, which left it: the first call after `zero_grad` makes gradients, and a graph with gradients of its
own adds to them from then on. The program may hold the graph's own as well, such as one of two buffers that it uses in
turn, or a part of a larger one. So a launch with other gradients puts back what it held, and these stay. Parameters may
also have exchanged their gradients. Where the step itself gives one's gradient to another, which of them gets what
shows in the tensors that stand there. So the recording serves calls that find its own gradients in their places, and no
others. So it is with each gradient that lies, then or now, where the step uses what lies there in another way, too, as
an attribute: there is something else during a launch. An argument may lie there as well (`shared_with`).

Where eager leaves a new gradient, a launch writes the one that it left before. If the program holds that still, it is
put back as well, and a copy of the new one is in the `.grad`. Note [Gradients that are held] in `gradient_holders`.

Note [Words that are left over]. What launches a kernel may leave a part of its parameters as it finds the memory, with
an address of before in it. Kernels of operators read what these were given (Note [What an operator was given] in
`launches`), so their words do not count where the origin of each node is known. Where only another word leads to the
gradients, the call is captured once more with copies of them in their place: code that reads them leads to the copies
then. If nothing does, they are unused.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from optimizations.capture.held_alone import held_by_nobody_else, is_plain
from optimizations.capture.signature import first_places
from optimizations.capture.step.gradient_copies import clones, copy_in, copy_over, is_a_part
from optimizations.capture.step.gradient_holders import Family, Holders, Left, plain, taken_by
from optimizations.capture.step.gradient_places import GradientPlaces
from optimizations.capture.step.tensor_marks import look
from optimizations.graph.memory import MemoryRanges, memory_of, size_bytes
from optimizations.graph.records import MemoryRange
from optimizations.torch_internals.tensor_guard import same_gradients

_get: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("grad")


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


class Gradients:
    """Manage gradients around launches. Note [Gradients before and after]. `indifferent`: the step does not depend on
    those before.

    `written`: of each that is there before and after, whether the graph writes it. `made`: of each that is left in the
    place of another, or of none, whether the call made its memory. `given_out`: what the step returns lies in the
    memory of some, other than as what is in a `.grad` after the call. `writes_there`: what else of the program's the
    graph writes where it lies, and `reads_there` what it reads so. `places` are those of all that the graph knows,
    and `times_kept` counts launches that would have overwritten some that the program held, and was to find as they
    were. `stood`: after the last launch each was in its `.grad` already. `brought`: that launch copied gradients to
    where the graph reads them, or put back what was held.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
        *,
        indifferent: bool,
        written: Callable[[torch.Tensor], bool] = lambda gradient: True,
        made: Callable[[torch.Tensor], bool] = lambda gradient: False,
        given_out: bool = False,
        writes_there: Iterable[torch.Tensor] = (),
        reads_there: Iterable[torch.Tensor] = (),
    ) -> None:
        self._given_out = given_out
        self._writes_there = MemoryRanges(map(memory_of, filter(is_plain, writes_there)))
        self._uses_there = self._writes_there.joined(memory(filter(is_plain, reads_there)))
        self._sizes = [size_bytes(old) if is_plain(old) else 0 for old in before]
        after = _without_bases(before, after)
        taken_in = functools.partial(Gradients._taken_in, parameters, before, after, indifferent, written, made)
        take_in = functools.partial(self._take_in, parameters, before, after, indifferent, written, made)
        _, self._own = taken_by(take_in, plain([*before, *after]), taken_in)

    @classmethod
    def _taken_in(cls, *args: Any) -> Gradients:
        """Return an object that holds all that one holds."""
        made = cls.__new__(cls)
        made._take_in(*args)
        return made

    def _take_in(
        self,
        parameters: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
        indifferent: bool,
        written: Callable[[torch.Tensor], bool],
        made: Callable[[torch.Tensor], bool],
    ) -> None:
        self.parameters = tuple(parameters)
        # Unused gradients are not kept alive.
        self._before = [] if indifferent else list(before)
        self._without = tuple(one for one, gradient in zip(self.parameters, before, strict=True) if gradient is None)
        self._after = list(after)
        self._pattern = pattern(before)
        self._indifferent = indifferent
        pairs = list(zip(before, after, strict=True))
        self._added_to = [old is not None and old is new for old, new in pairs]
        there = {id(old) for old in before if old is not None}
        self._exchanges = any(id(new) in there and new is not old for old, new in pairs)  # gives one to another
        self._writes = [new is not None and (old is not new or written(new)) for old, new in pairs]
        self._writes_before = [not indifferent and old is not None and written(old) for old in before]
        self.places = GradientPlaces([*self._before, *after])
        self._compare_these()
        found = plain(new for old, new in pairs if new is not None and old is not new and made(new))
        self._left = Left(Holders(found), _times(self._after), weakref.WeakMethod(self._stand))
        self._found = Holders(plain(self._before))
        self._in_place = False
        self.stood = self.brought = self._stands = False
        self._may_stand = all(new is None for old, new in pairs if old is None)
        self.times_kept = 0
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._held: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._put_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._untouched: list[tuple[int, torch.Tensor]] = []

    def _compare_these(self) -> None:
        self._as_before = same_gradients(self.parameters, self._before) if self._before else None
        self._as_after = same_gradients(self.parameters, self._after)
        found = [one for one, writes in zip(self._after, self._writes, strict=True) if writes and one is not None]
        self._written = list({id(one): one for one in found}.values())

    def _stand(self) -> bool:
        return bool(self._as_after(self.parameters))

    def _renew(self) -> bool:
        """Replace those that are others now here, too: their memory gets new tensors. Return False if one is lost."""
        others = self.places.renewed()
        if not others:
            return others is not None
        self._before = [others.get(id(one), one) for one in self._before]
        self._after = [others.get(id(one), one) for one in self._after]
        self._compare_these()
        self._left = self._left.of_others(others)
        self._found = self._found.of_others(others)
        self._own = self._own.of_others(others)  # each is held where the other was
        return True

    @property
    def family(self) -> Family:
        """Return all that is left by recordings which share a pool with this one's."""
        return self._left.family

    def join(self, other: Gradients) -> None:
        """Join its family: the recordings share a pool."""
        self._left.join(other.family)

    def outlive(self) -> None:
        """Pass what is held to the family: the recording is about to be freed, and others of its family are not."""
        self._left.outlive()

    def unheld(self) -> Callable[[], bool]:
        """Return what tells before a launch that only Encore holds what launches left. For calls like the last one."""
        stands = self._left if self._indifferent and self.stood else None
        return functools.partial(self.family.unheld, stands)

    def written(self) -> list[torch.Tensor]:
        """Return those that a launch writes, whose versions are to be counted up."""
        return self._written

    def fit(self) -> bool:
        """Return whether a launch now would find gradients where the recording found some.

        Of unused gradients that stand where the last launch left them, only some are compared by their
        memory (`GradientPlaces.some_stand`).
        """
        self._stands = self._indifferent and self._may_stand and self.stood and self._stand()
        if self._stands and self.places.some_stand():
            return True
        self._stands = False
        if not self._renew():
            return False
        if self._indifferent:
            return all(_get(one) is None for one in self._without)
        self._in_place = self._as_before is None or self._as_before(self.parameters)
        if self._given_out and not (self._in_place and self.family.unheld(None)):
            return False  # another tensor is to be returned, or one whose content is put back
        if self._in_place:
            return True
        if self._exchanges:
            return False  # which of them gets what is to be seen in what stands there
        now = gradients(self.parameters)
        if pattern(now) != self._pattern or _shared(now) != _shared(self._before):
            return False  # gradients are there for others, or others share one
        return all(
            there is expected or (look(there) == look(expected) and not self._show_otherwise(there, expected, size))
            for there, expected, size in zip(now, self._before, self._sizes, strict=True)
            if there is not None and expected is not None
        )

    def _show_otherwise(self, there: torch.Tensor, expected: torch.Tensor, size: int) -> bool:
        """Return whether the two lie apart, and the graph uses what lies at one of both places in another way.

        `size`: bytes of each.
        """
        if not size:
            return False
        places = {there.data_ptr(), expected.data_ptr()}
        return len(places) > 1 and any(self._uses_there.overlap(place, size) for place in places)

    def shared_with(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these lies in a gradient that is there now and that the graph has elsewhere.

        What the step does to the one would not show in the other before the end of a launch. Or whether one lies in the
        graph's own gradient, which gets what the other holds before the graph reads its inputs.
        """
        if self._as_before is None or self._as_before(self.parameters):
            return False
        return _overlap(MemoryRanges(memory(filter(is_plain, [*gradients(self.parameters), *self._before]))), tensors)

    def bring(self) -> None:
        """Copy gradients that lie elsewhere to where the graph reads them, before a launch.

        And keep what lies where the launch writes and the program looks.
        """
        others = not (self._indifferent or self._in_place)  # `fit` has just seen that
        self._held, self._put_back, self._untouched, self._in_place = [], [], [], False
        stands = not (self._indifferent and self.stood) or self._stands  # or another's `.grad` may count as its own
        if not others and stands and self.unheld()():  # nearly always: only Encore holds what launches left
            self._kept, self.brought = [], False
            return
        in_use = self._found.held() if others else set()
        members = self.family.members()
        # No list of the gradients, which would count.
        now = [id(_get(parameter)) for parameter in self.parameters] if members else []
        standing = Counter(now)
        left = [(one.holders, one.holders.held(standing)) for one in members]
        self._kept = self._left_and_held(now, left)
        self.brought = others or bool(self._kept)
        if others:
            self._bring_others(in_use, _let_go(left), {there.data_ptr() for _, there, _ in self._kept})

    def _left_and_held(
        self, now: Sequence[int], left: Iterable[_LeftAndHeld]
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return the memory of gradients that launches left and the program holds, each with its identity and a copy.

        Also that of gradients in the memory of such.

        But for those that this one finds where eager does, and those where it writes what it is given: what it writes
        there, eager writes. `now`: the identities of the gradients that are there.
        """
        in_place = {id(old) for there, old in zip(now, self._before, strict=False) if there == id(old)}
        found = []
        for holders, held in left:
            cells = holders.cells(held - in_place)
            there = [index for index, (one, cell) in enumerate(holders.keys) if one not in in_place and cell in cells]
            found += [(holders, index) for index in filter(holders.lasts, there)]
        lying = [(holders.keys[index][0], holders.memory(index)) for holders, index in found]
        lying = [(key, there) for key, there in lying if not self._writes_into(there)]
        copies = clones([there for _, there in lying])
        return [(key, there, copy) for (key, there), copy in zip(lying, copies, strict=True)]

    def _writes_into(self, there: torch.Tensor) -> bool:
        return _overlap(self._writes_there, [there])

    def _bring_others(self, in_use: Collection[int], let_go: Collection[int], kept: Collection[int]) -> None:
        """Copy gradients that are others to where the graph reads them.

        `in_use`: the identities of those of the graph's own that the program holds; `kept` are the places of those that
        launches left, in which another tensor may stand than the one that was left.
        """
        now = gradients(self.parameters)
        alone = held_by_nobody_else(now, as_gradients=True)
        alone = [nobody or id(there) in let_go for nobody, there in zip(alone, now, strict=True)]
        moved = [
            (index, there, expected)
            for index, (there, expected) in enumerate(zip(now, self._before, strict=True))
            if there is not None and expected is not None and there is not expected
        ]
        sources, targets = [there for _, there, _ in moved], [expected for _, _, expected in moved]
        exchanged = not _places(sources).isdisjoint(_places(targets))
        if exchanged:
            sources = clones(sources)
        left = {one.data_ptr() for one in self._after if one is not None}
        self._held = [
            (index, there, expected)
            for index, there, expected in moved
            if self._writes_before[index]
            and (exchanged or not alone[index] or is_a_part(expected) or id(expected) in in_use)
            # The step itself may exchange gradients.
            and (self._added_to[index] or there.data_ptr() not in left or there.data_ptr() in kept)
        ]
        put_back = [
            expected
            for index, _, expected in moved
            if (is_a_part(expected) or id(expected) in in_use)
            and (self._added_to[index] or expected.data_ptr() not in left)
        ]
        self._put_back = list(zip(put_back, clones(put_back), strict=True))
        # The launch leaves these as they are, and eager leaves the tensor, too.
        self._untouched = [
            (index, there)
            for index, there, expected in moved
            if self._added_to[index]
            and not self._writes_before[index]
            and (not alone[index] or is_a_part(expected) or id(expected) in in_use)
        ]
        copy_over(targets, sources)

    def take_back(self) -> None:
        """Put back the gradients from before the capture: what the capture left is not there.

        To be called before the first launch or instead.

        If they are unused, they are None.
        """
        put(self.parameters, self._before or [None] * len(self.parameters))

    def leave(self) -> None:
        """Give every parameter the gradient that the recording left, after a launch."""
        self.stood = self._stands or self._stand()
        if not self.stood:
            # Most are others then: to set them takes less than to ask first, as `put` does.
            for parameter, gradient in zip(self.parameters, self._after, strict=True):
                parameter.grad = gradient
        if not self.brought:
            return
        held, put_back, kept, untouched = self._held, self._put_back, self._kept, self._untouched
        self._held, self._put_back, self._kept, self._untouched = [], [], [], []
        self.times_kept += bool(kept or put_back)
        if kept:
            self._leave_copies_of({key for key, _, _ in kept}, {there.data_ptr() for _, there, _ in kept})
        targets, sums = [there for _, there, _ in held], [expected for _, _, expected in held]
        if put_back or kept or not _places(targets).isdisjoint(_places(sums)):
            sums = clones(sums)  # they may lie where something is put back
        known = [*[(there, before) for _, there, before in kept], *put_back]
        copy_over([there for there, _ in known], [before for _, before in known])
        copy_over(targets, sums)
        for index, there, _ in held:
            if self._added_to[index]:
                self.parameters[index].grad = there
        for index, there in untouched:
            self.parameters[index].grad = there

    def _leave_copies_of(self, held: Collection[int], places: Collection[int]) -> None:
        """Leave copies in place of those that the program holds from before, and of those that lie where one lay."""
        memory: dict[int, torch.UntypedStorage] = {}
        there = [one for one in self._after if one is not None]
        found = {id(one): one for one in there if id(one) in held or (is_plain(one) and one.data_ptr() in places)}
        sharing = Counter(one.untyped_storage()._cdata for one in found.values())
        parts = {key: one for key, one in found.items() if is_a_part(one) or sharing[one.untyped_storage()._cdata] > 1}
        whole = [one for key, one in found.items() if key not in parts]
        copies = {key: copy_in(memory, one) for key, one in parts.items()}
        copies.update(zip(map(id, whole), clones(whole), strict=True))
        for parameter, gradient in zip(self.parameters, self._after, strict=True):
            if id(gradient) in copies:
                parameter.grad = copies[id(gradient)]


_LeftAndHeld = tuple[Holders, set[int]]
"""Gradients that a recording left, and the identities of those that something other than Encore holds."""


def _let_go(left: Iterable[_LeftAndHeld]) -> set[int]:
    """Return the identities of what recordings left that only they and a `.grad` hold.

    A graph's own may take its place, as that of what the program let go of.
    """
    found: set[int] = set()
    for holders, held in left:
        cells = holders.cells(held)
        found.update(tensor for tensor, cell in holders.keys if cell not in cells)
    return found


def _overlap(ranges: MemoryRanges, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of these lies there, wholly or in part."""
    return any(ranges.overlap(one.data_ptr(), size_bytes(one)) for one in tensors)


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


def _times(found: Iterable[torch.Tensor | None]) -> Counter[int]:
    """Count how often each is among these, by its identity."""
    return Counter(id(gradient) for gradient in found if gradient is not None)


def _shared(found: Sequence[torch.Tensor | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return for each the place of the first that is the same tensor, and of the first that lies where it does."""
    tensors = [id(one) for one in found]
    starts = [one.data_ptr() if one is not None and is_plain(one) else 0 for one in found]
    return first_places(tensors), first_places([start or key for start, key in zip(starts, tensors, strict=True)])


def _places(found: Iterable[torch.Tensor]) -> set[int]:
    return {gradient.untyped_storage().data_ptr() for gradient in found}


def put(parameters: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor | None]) -> None:
    """Give each parameter this gradient."""
    for parameter, gradient in zip(parameters, wanted, strict=True):
        if _get(parameter) is not gradient:
            parameter.grad = gradient
