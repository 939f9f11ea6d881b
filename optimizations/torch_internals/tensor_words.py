"""Whether tensors lie where they lay and look as they did, read of all of them at once.

PyTorch's guards, and its functions that tell an address, ask one tensor after the other, 0.1 us for each where all is
in caches. All that they ask for stands in few words at known places, which NumPy gathers (`memory_words`), 20 ns for
each. They are the address of the tensor's part in C++ and its class in Python; there its storage, sizes, strides,
offset, dtype, device, flags and dispatch keys; and of its storage where the memory lies, and who frees that: a lazy
clone is another one. What autograd keeps of a tensor has its `.grad` and whether it requires one.

Each stage is read only when the one before is as it was: an object that was exchanged may be gone. `.data =` gives a
tensor another storage, and `torch.utils.swap_tensors` another part in C++. So what is read is always memory of
something that the reader holds, or that something held owns.

Settings of a thread, such as autocast and dispatch modes, change the keys that operators on a tensor go through, and
stand in no tensor. Who wants to know of them asks in another way, about one tensor for each set of keys
(`one_of_each_kind`).

Whether the words are where they are looked for is tried out once: each is compared with what PyTorch says, and each
change of a tensor has to be seen. Where that is not so, as in another build, nothing is read.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from optimizations import torch_internals
from optimizations.torch_internals.memory_words import PART, WORD, places_of, takers

_CLASS = WORD
"""Where an object of Python has the address of its class."""

# Of a tensor's part in C++, `c10::TensorImpl`.
_STORAGE, _AUTOGRAD, _EXTRA, _SIZES, _OFFSET, _KIND, _KEYS = 16, 24, 32, 64, 152, 168, 176
"""`_KIND` has the dtype, the device and flags. At `_SIZES` is the number of dimensions."""
_MOST_DIMENSIONS = 5
"""Up to these sizes and strides are in the tensor itself: first all sizes that may be, then strides."""

# Of a storage's, `c10::StorageImpl`: the address, and what frees the memory with its argument.
_MEMORY = (16, 24, 32)

# Of what autograd keeps of a tensor, `AutogradMeta`.
_GRAD, _GRAD_FN, _REQUIRES_GRAD = 40, 48, 144


class TensorWords:
    """Tensors as they are now, and the very `.grad` that these `parameters` are expected to have, which are held, too.

    Those that cannot be read are left out: `tells_of` says of which tensors it tells that they lie where they lay and
    look as they did, `tells_of_gradient` of which parameters it tells that they have the gradient expected of them.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        parameters: Sequence[torch.Tensor] = (),
        expected: Sequence[torch.Tensor | None] = (),
    ) -> None:
        found = {id(one): one for one in [*tensors, *(one for one in expected if one is not None)]}
        self._tensors = {key: one for key, one in found.items() if _has_words(one)}
        self._gradients = {
            id(one): gradient for one, gradient in zip(parameters, expected, strict=True) if self._reads(one, gradient)
        }
        self.unchanged = _unchanged(self._tensors, self._gradients)

    def _reads(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Whether it is seen that a parameter has this gradient. One that autograd keeps nothing of has none."""
        known = id(parameter) in self._tensors and (gradient is None or id(gradient) in self._tensors)
        return known and (gradient is None or bool(_word(parameter._cdata + _AUTOGRAD)))

    def tells_of(self, tensor: torch.Tensor) -> bool:
        """See above."""
        return id(tensor) in self._tensors

    def tells_of_gradient(self, parameter: torch.Tensor) -> bool:
        """See above."""
        return id(parameter) in self._gradients

    def one_of_each_kind(self) -> list[torch.Tensor]:
        """Of those that it tells of, one for each set of dispatch keys."""
        return list({_word(one._cdata + _KEYS): one for one in self._tensors.values()}.values())


def _unchanged(known: Mapping[int, torch.Tensor], expected: Mapping[int, torch.Tensor | None]) -> Callable[[], bool]:
    """What tells whether these tensors, by their identities, are as now, and have the gradients expected of some."""
    tensors = tuple(known.values())
    if not tensors:
        return lambda: True
    take, _ = takers()
    of_objects = [id(one) + place for one in tensors for place in (_CLASS, PART)]
    of_parts, of_rest, gradients = [], [], {}
    for one in tensors:
        part = one._cdata
        of_parts += [part + place for place in _places(one.dim())]
        of_rest += [_word(part + _STORAGE) + place for place in _MEMORY]
        if kept := _word(part + _AUTOGRAD):
            if id(one) in expected:
                gradient = expected[id(one)]
                gradients[len(of_rest)] = _none() if gradient is None else gradient._cdata
                of_rest.append(kept + _GRAD)
            of_rest += [kept + _GRAD_FN, kept + _REQUIRES_GRAD]
    objects, parts, rest = map(places_of, (of_objects, of_parts, of_rest))
    objects_then, parts_then, found = take(objects).tobytes(), take(parts).tobytes(), take(rest)
    for index, part in gradients.items():
        found[index] = part
    rest_then = found.tobytes()

    def unchanged() -> bool:
        # `tensors` is never empty: it is named so that this function holds what it reads.
        return (
            take(objects).tobytes() == objects_then
            and take(parts).tobytes() == parts_then
            and take(rest).tobytes() == rest_then
            and tensors != ()
        )

    return unchanged


@functools.cache
def _none() -> int:
    """What stands in the place of a gradient where there is none: a tensor that C++ has for that."""
    with torch.inference_mode(False):
        one = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    return _word(_word(one._cdata + _AUTOGRAD) + _GRAD)


def _places(dimensions: int) -> list[int]:
    """Where a tensor of so many dimensions has what counts, in its part in C++."""
    sizes = [_SIZES + WORD * (1 + index) for index in range(dimensions)]
    strides = [size + WORD * _MOST_DIMENSIONS for size in sizes]
    return [_STORAGE, _AUTOGRAD, _EXTRA, _SIZES, *sizes, *strides, _OFFSET, _KIND, _KEYS]


def _word(address: int) -> int:
    take, _ = takers()
    return int(take(places_of([address]))[0])


def _has_words(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor, of which all stands where it is looked for."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or tensor.dim() > _MOST_DIMENSIONS or not _can_be_read():
        return False
    try:
        return _word(tensor._cdata + _STORAGE) == tensor.untyped_storage()._cdata != 0
    except (RuntimeError, NotImplementedError):  # one that stands for another
        return False


@functools.cache
def _can_be_read() -> bool:
    """Whether the words are what they should be, and every change shows in them."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return sys.implementation.name == "cpython" and _are_found() and all(map(_is_seen, _CHANGES))
    except Exception:  # whatever this build has otherwise: it can be asked for
        return False


class _Other(torch.nn.Parameter):
    """Another class that a parameter may get."""


def _sample() -> torch.nn.Parameter:
    """One of three dimensions that lies behind the start of its memory, with a gradient."""
    made = torch.nn.Parameter(torch.zeros(5, 2, 3, device="cpu", dtype=torch.float32)[1:])
    made.grad = torch.zeros(4, 2, 3, device="cpu", dtype=torch.float32)
    return made


def _are_found() -> bool:
    """Whether the words are what PyTorch says."""
    one = _sample()
    part, storage, gradient = one._cdata, one.untyped_storage(), one.grad
    assert gradient is not None
    told = {
        id(one) + _CLASS: id(torch.nn.Parameter),
        id(one) + PART: part,
        part + _STORAGE: storage._cdata,
        part + _EXTRA: 0,
        part + _SIZES: 3,
        **dict(zip([part + place for place in _places(3)[4:11]], (4, 2, 3, 6, 3, 1, 6), strict=True)),
        part + _KEYS: torch_internals.dispatch_keys(one).raw_repr(),
        storage._cdata + _MEMORY[0]: storage.data_ptr(),
        _word(part + _AUTOGRAD) + _GRAD: gradient._cdata,
        _word(part + _AUTOGRAD) + _GRAD_FN: 0,
    }
    if any(_word(address) != value for address, value in told.items()):
        return False
    other = _sample()
    other.grad = None
    if _word(_word(other._cdata + _AUTOGRAD) + _GRAD) != _none():
        return False
    plain = one.detach()
    kinds = [plain, plain.view(torch.int32), torch.empty_like(plain, device="meta"), plain.transpose(0, 1)]
    of_kinds = [_word(one._cdata + _KIND) for one in kinds]
    by_grad = [
        _word(_word(some._cdata + _AUTOGRAD) + _REQUIRES_GRAD) & 1 for some in (one, other.requires_grad_(False))
    ]
    return len(set(of_kinds)) == len(kinds) and by_grad == [1, 0]


def _is_seen(change: Callable[[torch.nn.Parameter], object]) -> bool:
    """Whether a change of a parameter is seen, and nothing is before. Who holds it, or its memory, does not matter."""
    one = _sample()
    unchanged = _unchanged({id(one): one}, {id(one): one.grad})
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


_CHANGES: tuple[Callable[[torch.nn.Parameter], object], ...] = (
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
