"""Whether tensors lie where they lay and look as they did, read of all of them at once.

PyTorch's guards, and its functions that tell an address, ask one tensor after the other, 0.1 us for each where all is
in caches. All that they ask for stands in few words at known places, which are read together (`memory_words`), 20 ns
for each. They are the address of the tensor's part in C++ and its class in Python; there its storage, sizes, strides,
offset, dtype, device, flags and dispatch keys; and of its storage where the memory lies, and who frees that: a lazy
clone is another one. What autograd keeps of a tensor has its `.grad` and whether it requires one.

Each stage is read only when the one before is as it was: an object that was exchanged may be gone. `.data =` gives a
tensor another storage, and `torch.utils.swap_tensors` another part in C++. So what is read is always memory of
something that the reader holds, or that something held owns. No other thread of Python runs between the stages
(Note [In one go] in `memory_words`). What runs without Python's lock may exchange a storage meanwhile, as `set_` does
in another thread: each is held by a weak reference, which keeps its few words and not the memory of the tensor.

Settings of a thread, such as autocast and dispatch modes, change the keys that operators on a tensor go through, and
stand in no tensor. Who wants to know of them asks in another way, about one tensor for each set of keys
(`one_of_each_kind`).

Whether the words are where they are looked for is tried out once: each is compared with what PyTorch says, and each
change of a tensor has to be seen. Where that is not so, as in another build, nothing is read, and the log says why.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations import torch_internals
from optimizations.torch_internals.memory_words import (
    PART,
    WORD,
    Words,
    as_expected,
    no_lock,
    read_behind,
    side_by_side,
    word,
)

if TYPE_CHECKING:
    from optimizations.torch_internals.entry_words import EntryWords

log = logging.getLogger(__name__)

_CLASS = WORD
"""Where an object of Python has the address of its class."""

# Of a tensor's part in C++, `c10::TensorImpl`.
_STORAGE, _AUTOGRAD, _EXTRA, _SIZES, _OFFSET, _KIND, _KEYS = 16, 24, 32, 64, 152, 168, 176
"""`_KIND` has the dtype, the device and flags. At `_SIZES` is the number of dimensions."""
_SET = (1 << 63) - 1
"""Bits of the word at `_KIND` that PyTorch sets. The last one stays in each tensor as it was in the memory it got."""
_MOST_DIMENSIONS = 5
"""Up to these sizes and strides are in the tensor itself: first all sizes that may be, then strides."""

# Of a storage's, `c10::StorageImpl`: the address, and what frees the memory with its argument.
_MEMORY = (16, 24, 32)

# Of what autograd keeps of a tensor, `AutogradMeta`.
_GRAD, _GRAD_FN, _REQUIRES_GRAD = 40, 48, 144
# And of a view, `DifferentiableViewMeta`: the tensor that it is a view of, and whether there is one.
_BASE, _HAS_BASE = 200, 248
_IS_VIEW = 1 << 16
"""The bit of the word at `_REQUIRES_GRAD` that a view has."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Some of the places above, for who reads tensors that are not known yet."""

    storage: int = _STORAGE
    autograd: int = _AUTOGRAD
    offset: int = _OFFSET
    memory: int = _MEMORY[0]
    history: int = _GRAD_FN
    requires_grad: int = _REQUIRES_GRAD
    has_base: int = _HAS_BASE
    base: int = _BASE


PLACES = _Places()


@dataclass(frozen=True, slots=True)
class _Read:
    """What stands in a tensor's part in C++. `storage` keeps the part of the storage, and not the tensor's memory.

    `autograd`: where what autograd keeps of it is, 0 if nothing. `words` are at `_places` of its dimensions.
    """

    tensor: torch.Tensor
    part: int
    storage: StorageWeakRef
    autograd: int
    keys: int
    words: Any


class TensorWords:
    """Tensors as they are now, and the very `.grad` that these `parameters` are expected to have, which are held, too.

    Those that cannot be read are left out: `tells_of` says of which tensors it tells that they lie where they lay and
    look as they did, `tells_of_gradient` of which parameters it tells that they have the gradient expected of them.
    `unchanged` also tells whether the lists and cells of `beside` hold what they held, and
    whether its sets are empty.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        parameters: Sequence[torch.Tensor] = (),
        expected: Sequence[torch.Tensor | None] = (),
        beside: EntryWords | None = None,
    ) -> None:
        found = {id(one): one for one in [*tensors, *(one for one in expected if one is not None)]}
        self._tensors = _with_bases(list(found.values()))
        self._gradients = {
            id(one): gradient for one, gradient in zip(parameters, expected, strict=True) if self._reads(one, gradient)
        }
        self.unchanged = _unchanged(self._tensors, self._gradients, beside)

    def _reads(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Whether it is seen that a parameter has this gradient. One that autograd keeps nothing of has none."""
        known = self._tensors.get(id(parameter))
        if known is None or gradient is None:
            return known is not None
        return id(gradient) in self._tensors and known.autograd != 0

    def tells_of(self, tensor: torch.Tensor) -> bool:
        """See above."""
        return id(tensor) in self._tensors

    def tells_of_gradient(self, parameter: torch.Tensor) -> bool:
        """See above."""
        return id(parameter) in self._gradients

    def one_of_each_kind(self) -> list[torch.Tensor]:
        """Of those that it tells of, one for each set of dispatch keys."""
        return list({one.keys: one.tensor for one in self._tensors.values()}.values())


def looks(tensors: Sequence[torch.Tensor]) -> list[list[tuple[int, int, int]]] | None:
    """Of each, words of its part in C++ that say how it looks: their places, which bits count, and what stands there.

    None where something of one stands elsewhere. Whether one `requires_grad` is not among them.
    """
    read = _read_all(tensors)
    found = []
    for tensor in tensors:
        if (one := read.get(id(tensor))) is None:
            return None
        places = _places(tensor.dim())
        words = dict(zip(places, map(int, one.words), strict=True))
        if words[_EXTRA]:
            return None
        masks = dict.fromkeys(places, _ALL) | {_KIND: _SET}
        left_out = (_STORAGE, _AUTOGRAD, _OFFSET)
        found.append([(place, masks[place], words[place]) for place in places if place not in left_out])
    return found


_ALL = (1 << 64) - 1


def _with_bases(tensors: Sequence[torch.Tensor]) -> dict[int, _Read]:
    """What stands in these tensors, and in those that they are views of; without views of what is not read.

    A view requires a gradient once the tensor does that it is a view of, and nothing shows that in the view itself.
    """
    bases = {id(one): base for one in tensors if (base := _base_of(one)) is not None}
    read = _read([*{id(one): one for one in (*tensors, *bases.values())}.values()])
    return {key: one for key, one in read.items() if key not in bases or id(bases[key]) in read}


def _base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a plain tensor is a view of; None for others."""
    return tensor._base if type(tensor) in _PLAIN and tensor._is_view() else None


def _read(tensors: Sequence[torch.Tensor]) -> dict[int, _Read]:
    """What stands in these tensors, by their identities; without those of which something may stand elsewhere."""
    return _read_all(tensors) if can_be_read() else {}


def _read_all(tensors: Sequence[torch.Tensor]) -> dict[int, _Read]:
    plain = [(one, one.dim(), storage) for one in tensors if (storage := _storage_of(one)) is not None]
    parts = [one._cdata for one, _, _ in plain]
    of_each = [_places(dimensions) for _, dimensions, _ in plain]
    addresses = [part + place for part, places in zip(parts, of_each, strict=True) for place in places]
    found = read_behind([_of_objects([one for one, _, _ in plain], parts)], addresses)()
    if found is None:  # another thread has exchanged parts in C++ a moment ago
        return {}
    read, end = {}, 0
    for part, places, (one, _, storage) in zip(parts, of_each, plain, strict=True):
        start, end = end, end + len(places)
        words = found[start:end]
        if words[0] == storage._cdata:  # it is that of another where it stands for another tensor
            read[id(one)] = _Read(one, part, StorageWeakRef(storage), int(words[1]), int(words[-1]), words)
    return read


def _of_objects(tensors: Sequence[torch.Tensor], parts: Sequence[int]) -> Words:
    """The class of each, and its part in C++."""
    addresses = [id(one) + place for one in tensors for place in (_CLASS, PART)]
    return Words(
        addresses, [value for one, part in zip(tensors, parts, strict=True) for value in (id(type(one)), part)]
    )


def _unchanged(
    known: Mapping[int, _Read], expected: Mapping[int, torch.Tensor | None], beside: EntryWords | None = None
) -> Callable[[], bool]:
    """What tells whether tensors are as they were read, and have the gradients expected of some, by identities."""
    read = tuple(known.values())
    stages = [] if beside is None else beside.stages
    if read:
        if (of_tensors := _stages(read, expected)) is None:
            return lambda: False
        stages = side_by_side(stages, of_tensors) if stages else of_tensors
    if not stages:
        return lambda: True
    return as_expected(*stages, reads=(read, beside))


def _stages(read: Sequence[_Read], expected: Mapping[int, torch.Tensor | None]) -> list[Words] | None:
    """The words of tensors; None where some have changed already."""
    of_parts = [one.part + place for one in read for place in _places((len(one.words) - _FIXED) // 2)]
    rest: list[int] = []
    gradients = {}
    for one in read:
        rest += [one.storage.cdata + place for place in _MEMORY]
        if one.autograd:
            if id(one.tensor) in expected:
                gradient = expected[id(one.tensor)]
                gradients[len(rest)] = _none() if gradient is None else gradient._cdata
                rest.append(one.autograd + _GRAD)
            rest += [one.autograd + _GRAD_FN, one.autograd + _REQUIRES_GRAD]
    objects = _of_objects([one.tensor for one in read], [one.part for one in read])
    parts = Words(of_parts, [value for one in read for value in one.words])
    then = read_behind([objects, parts], rest)()
    if then is None:
        return None
    for index, part in gradients.items():
        then[index] = part
    return [objects, parts, Words(rest, then)]


@functools.cache
def _none() -> int:
    """What stands in the place of a gradient where there is none: a tensor that C++ has for that."""
    with torch.inference_mode(False):
        one = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    return word(word(one._cdata + _AUTOGRAD) + _GRAD)


def _places(dimensions: int) -> list[int]:
    """Where a tensor of so many dimensions has what counts, in its part in C++: its storage first, its keys last."""
    sizes = [_SIZES + WORD * (1 + index) for index in range(dimensions)]
    strides = [size + WORD * _MOST_DIMENSIONS for size in sizes]
    return [_STORAGE, _AUTOGRAD, _EXTRA, _SIZES, *sizes, *strides, _OFFSET, _KIND, _KEYS]


_FIXED = len(_places(0))

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """That of a plain tensor, of which all stands in the tensor itself; None of others."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    if tensor.is_nested or tensor.dim() > _MOST_DIMENSIONS or torch_internals.stands_for_another(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # it has none
        return None


@functools.cache
def can_be_read() -> bool:
    """Whether the words are what they should be, and every change shows in them."""
    try:
        obstacle = _obstacle()
    except Exception as error:  # whatever this build has otherwise: it can be asked for
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle:
        log.info("Tensors are compared one by one, which takes longer: %s.", obstacle)
    return not obstacle


def _obstacle() -> str:
    """Why words are not read, empty if they are."""
    if why := no_lock():
        return f"other threads may free what is read, for {why}"
    with torch.inference_mode(False), torch.no_grad():
        if wrong := _elsewhere():
            return f"this build of PyTorch has the {wrong} of a tensor elsewhere"
        unseen = [index for index, change in enumerate(CHANGES) if not _is_seen(change)]
    return f"changes {unseen} of a tensor do not show in its words" if unseen else ""


class _Other(torch.nn.Parameter):
    """Another class that a parameter may get."""


def sample() -> torch.nn.Parameter:
    """One of three dimensions that lies behind the start of its memory, with a gradient."""
    made = torch.nn.Parameter(torch.zeros(5, 2, 3, device="cpu", dtype=torch.float32)[1:])
    made.grad = torch.zeros(4, 2, 3, device="cpu", dtype=torch.float32)
    return made


def _elsewhere() -> str:
    """What stands elsewhere than it is looked for; empty if nothing.

    Before an address is followed it is compared with what PyTorch says: reading at a wrong one would end the process.
    """
    one, other, plain = sample(), sample(), sample().detach()
    other.grad = None
    part, storage, gradient = one._cdata, one.untyped_storage(), one.grad
    assert gradient is not None
    for name, address, value in (
        ("class", id(one) + _CLASS, id(torch.nn.Parameter)),
        ("part in C++", id(one) + PART, part),
        ("storage", part + _STORAGE, storage._cdata),
        ("extra", part + _EXTRA, 0),
        ("number of dimensions", part + _SIZES, 3),
        *zip(["shape"] * 6, [part + place for place in _places(3)[4:10]], (4, 2, 3, 6, 3, 1), strict=True),
        ("offset", part + _OFFSET, 6),
        ("keys", part + _KEYS, torch_internals.dispatch_keys(one).raw_repr()),
        ("history", plain._cdata + _AUTOGRAD, 0),
    ):
        if word(address) != value:
            return name
    borrowed = torch.frombuffer(bytearray(64), dtype=torch.float32).untyped_storage()  # freed by another's address
    if any(word(one._cdata + _MEMORY[0]) != one.data_ptr() for one in (storage, borrowed)):
        return "address"
    if [word(word(some._cdata + _AUTOGRAD) + _GRAD) for some in (one, other)] != [gradient._cdata, _none()]:
        return "gradient"
    with torch.enable_grad():
        made = one * 2
    if word(word(part + _AUTOGRAD) + _GRAD_FN) or not word(word(made._cdata + _AUTOGRAD) + _GRAD_FN):
        return "history"
    by_grad = [word(word(some._cdata + _AUTOGRAD) + _REQUIRES_GRAD) & 1 for some in (one, other.requires_grad_(False))]
    if by_grad != [1, 0]:
        return "requires_grad"
    views = [plain[1:] for _ in range(8)]  # one may have it by chance where something else stands, or nothing
    view = views[0]
    kept = [word(some._cdata + _AUTOGRAD) for some in views]
    if any(word(one + _BASE) != plain._cdata or word(one + _HAS_BASE) & 0xFF != 1 for one in kept):
        return "base"
    if [word(word(some._cdata + _AUTOGRAD) + _REQUIRES_GRAD) & _IS_VIEW for some in (view, one)] != [_IS_VIEW, 0]:
        return "mark of views"
    return "" if _kinds_differ() else "dtype"


def _kinds_differ() -> bool:
    """Whether a word is the same for tensors of one kind, and another for each other kind."""

    def of_kinds() -> list[int]:
        plain = torch.zeros(4, 2, 3, device="cpu", dtype=torch.float32)
        kinds = [plain, plain.view(torch.int32), torch.empty_like(plain, device="meta"), plain.transpose(0, 1)]
        return [word(one._cdata + _KIND) & _SET for one in kinds]

    found = [of_kinds() for _ in range(8)]  # it may be so by chance where something else stands
    return len(set(found[0])) == len(found[0]) and all(some == found[0] for some in found)


def _is_seen(change: Callable[[torch.nn.Parameter], object]) -> bool:
    """Whether a change of a parameter is seen, and nothing is before. Who holds it, or its memory, does not matter."""
    one = sample()
    plain = {id(some): some for some in (one, one.grad) if some is not None}
    unchanged = _unchanged(_read_all(list(plain.values())), {id(one): one.grad})
    del plain
    held = one.detach(), one.untyped_storage(), one.view(-1), one
    one.add_(1)
    if not unchanged():
        return False
    del held
    kept = change(one)
    seen = not unchanged()
    del kept
    return seen


def _set(name: str, value: Callable[[torch.nn.Parameter], object]) -> Callable[[torch.nn.Parameter], object]:
    return lambda one: setattr(one, name, value(one))


CHANGES: tuple[Callable[[torch.nn.Parameter], object], ...] = (
    _set("data", lambda one: one.detach().clone()),
    _set("data", lambda one: one.detach().half()),
    _set("data", lambda one: one.detach()[1:]),
    _set("data", lambda one: one.detach()._neg_view()),
    _set("grad", lambda one: None),
    _set("grad", lambda one: torch.zeros_like(one)),
    _set("__class__", lambda one: _Other),
    lambda one: one.requires_grad_(False),
    _set("data", lambda one: one.detach().transpose(0, 1)),
    lambda one: one.untyped_storage().resize_(4096),
    lambda one: one.untyped_storage().resize_(0),
    lambda one: one.unsqueeze_(0),
    lambda one: one.as_strided_((2, 2, 3), (6, 3, 1)),
    lambda one: one.as_strided_((4, 2, 3), (6, 3, 1), 0),
    lambda one: torch.utils.swap_tensors(one, copy.deepcopy(one)),
    lambda one: torch_internals.lazy_clone(one),
)
"""Ways to change a parameter; what one returns is held meanwhile."""
