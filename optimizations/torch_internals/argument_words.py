"""Whether the tensors of a call look as others did, and where they lie, read by compiled code in one call.

PyTorch's guards ask each tensor, and its address is asked for once more. Where they are plain tensors all of that
stands in words at known places (`tensor_words`). A call's tensors are others each time, so the words are those of
whatever is given, once its class is known to be a plain tensor's.

What a thread's settings change stands in no tensor: whoever compares arguments like this asks PyTorch about one tensor
with the same dispatch keys (`TensorWords.one_of_each_kind`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence

import torch

from optimizations import host_code, torch_internals
from optimizations.torch_internals import tensor_words
from optimizations.torch_internals.memory_words import PART, word

MOST = 32
"""Arguments up to which this is of use: each is compared with all others."""

_FLAGS = 56
"""Where a storage says whether its address may be asked for as it is: behind its size."""

Look = Callable[[list[torch.Tensor]], "list[int] | None"]
"""The addresses of the tensors of a call; None where one looks otherwise, or that cannot be read."""


def argument_words(tensors: Sequence[torch.Tensor], *, distinct: bool) -> Look | None:
    """For tensors that look like these; `distinct`: none stands twice. None where it cannot be read how they look."""
    if len(tensors) > MOST or any(not one.numel() for one in tensors):
        return None
    if host_code.looks() is None or not tensor_words.can_be_read() or not _can_be_read():
        return None
    return _looks_like(tensors, distinct=distinct)


def like_each(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """One of the others for each set of dispatch keys that these tensors have; None where there is none for some."""
    found = {_keys(one): one for one in others}
    wanted = set(map(_keys, tensors))
    return [found[keys] for keys in wanted] if wanted <= found.keys() else None


def _keys(tensor: torch.Tensor) -> int:
    return int(torch_internals.dispatch_keys(tensor).raw_repr())


def _looks_like(tensors: Sequence[torch.Tensor], *, distinct: bool) -> Look | None:
    compiled = host_code.looks()
    known = tensor_words.looks(tensors)
    if compiled is None or known is None:
        return None
    given = tuple(
        [
            (type(one), one.element_size(), one.requires_grad, _words(some))
            for one, some in zip(tensors, known, strict=True)
        ]
    )
    look: Look = compiled.Looks(given, _places(), _flag(), distinct)
    return look if look(list(tensors)) == [one.data_ptr() for one in tensors] else None


def _words(look: Sequence[tuple[int, int, int]]) -> bytes:
    """Places, masks and values."""
    return b"".join([struct.pack("<qQQ", place, mask, value & mask) for place, mask, value in look])


def _places() -> bytes:
    at = tensor_words.PLACES
    of_autograd = at.history, at.requires_grad, at.has_base, at.base
    return struct.pack("<10q", PART, at.storage, at.autograd, at.offset, at.memory, _FLAGS, *of_autograd)


@functools.cache
def _can_be_read() -> bool:
    """Whether compiled code sees how tensors look, and every change of that, if `tensor_words` can be read."""
    try:
        return _flag() != 0 and _is_all_seen()
    except Exception:  # whatever this build has otherwise: it can be asked for
        return False


@functools.cache
def _flag() -> int:
    """The bit of a storage whose memory is another's until somebody asks for its address; 0 where there is none."""
    with torch.inference_mode(False), torch.no_grad():
        plain = torch.zeros(4, device="cpu")
        before = word(plain.untyped_storage()._cdata + _FLAGS)
        lazy = torch_internals.lazy_clone(plain)
        flags = [word(one.untyped_storage()._cdata + _FLAGS) & _BITS for one in (plain, lazy)]
        changed = (before & _BITS) ^ flags[0]
        return changed if flags[0] == flags[1] and changed.bit_count() == 1 else 0


_BITS = (1 << 56) - 1
"""Those of the flags: behind them is what was in the memory before."""


def _is_all_seen() -> bool:
    with torch.inference_mode(False), torch.no_grad():
        return all(map(_is_seen, tensor_words.CHANGES)) and _others_are_told_apart()


def _is_seen(change: Callable[[torch.nn.Parameter], object]) -> bool:
    """Whether a parameter is found where it lies as long as it looks as it did, and not when it looks otherwise."""
    one, like = tensor_words.sample(), tensor_words.sample()
    look = _looks_like([like], distinct=True)
    if look is None or look([one]) != [one.data_ptr()]:
        return False
    kept = change(one)
    found = look([one])
    looks_like = _guarded(like)([one])
    lies = one.data_ptr() if one.untyped_storage().nbytes() else 0
    del kept
    return found in (None, [lies]) if looks_like else found is None


def _guarded(like: torch.Tensor) -> Callable[[list[torch.Tensor]], bool]:
    from optimizations.torch_internals.tensor_guard import same_metadata

    compare = same_metadata([like])
    return lambda tensors: compare(tuple(tensors))


def _others_are_told_apart() -> bool:
    """Whether kinds are, where nothing else differs, and tensors that stand twice; and rows of one are not."""
    plain = torch.zeros(4, 2, 3, device="cpu", dtype=torch.float32)
    look, twice = _looks_like([plain], distinct=True), _looks_like([plain, plain.clone()], distinct=True)
    if look is None or twice is None:
        return False
    with torch.inference_mode():
        inference = torch.zeros(4, 2, 3, device="cpu", dtype=torch.float32)
    others = [
        plain.view(torch.int32),
        torch.empty_like(plain, device="meta"),
        torch.nn.Parameter(plain),
        plain.clone().requires_grad_(),
        plain.transpose(0, 2),
        plain.mul(1).as_subclass(_Subclass),
        inference,
        torch_internals.neg_view(plain),
    ]
    rows = torch.zeros(3, 4, 2, 3, device="cpu", dtype=torch.float32)
    alike = [*rows, plain.detach(), plain.data, rows[1].clone()]
    return (
        all(look([one]) is None for one in others)
        and all(look([one]) == [one.data_ptr()] for one in alike)
        and twice([plain, plain]) is None
        and look([]) is None
        and look([plain, plain]) is None
        and _views_are_told_apart()
    )


def _views_are_told_apart() -> bool:
    """Whether it shows in a view that the tensor requires a gradient now that it is a view of."""
    first, second = (torch.zeros(4, 2, 3, device="cpu", dtype=torch.float32) for _ in range(2))
    views = [first[:], second[:], first.detach()]
    look = _looks_like(views[:1], distinct=True)
    if look is None or any(look([one]) is None for one in views):
        return False
    first.requires_grad_()
    with torch.enable_grad():
        second.mul_(first.sum())  # which gives it a history
    return [look([one]) is None for one in views] == [True, True, False]


class _Subclass(torch.Tensor):
    """Of which operators may be other ones."""
