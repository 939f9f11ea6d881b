"""How the tensors of a call look, and where they lie, is read by compiled code as PyTorch would tell it."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizations import host_code, torch_internals
from optimizations.torch_internals import argument_words as module
from optimizations.torch_internals import tensor_words
from optimizations.torch_internals.argument_words import MOST, argument_words, like_each
from optimizations.torch_internals.tensor_guard import same_metadata
from tests.optimizations.torch_internals.test_tensor_words import GAINED

pytestmark = pytest.mark.usefixtures("compiled_looks")


class OfItsOwn(torch.Tensor):
    """A class of a program."""


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 3)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(4, 3),
    "part of a larger one": lambda: torch.zeros(6, 3)[2:],
    "part of one without gradients": lambda: torch.zeros(6, 3).detach()[2:],
    "turned": lambda: torch.zeros(3, 4).t(),
    "with larger strides": lambda: torch.zeros(4, 6)[:, ::2],
    "broadcast": lambda: torch.zeros(3).expand(4, 3),
    "a number": lambda: torch.zeros(()),
    "a row": lambda: torch.zeros(12),
    "in another shape": lambda: torch.zeros(3, 4),
    "of five dimensions": lambda: torch.zeros(1, 2, 3, 2, 1),
    "integers": lambda: torch.zeros(4, 3, dtype=torch.int32),
    "halves": lambda: torch.zeros(4, 3, dtype=torch.float16),
    "parameter": lambda: nn.Parameter(torch.zeros(4, 3)),
    "frozen parameter": lambda: nn.Parameter(torch.zeros(4, 3), requires_grad=False),
    "with a gradient": lambda: torch.zeros(4, 3, requires_grad=True),
    "with a history": lambda: torch.zeros(4, 3, requires_grad=True) * 2,
    "part of one with a gradient": lambda: torch.zeros(6, 3, requires_grad=True)[2:],
    "of inference": of_inference,
    "negative by a flag": lambda: torch_internals.neg_view(torch.zeros(4, 3)),
    "conjugate by a flag": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj(),
    "complex": lambda: torch.zeros(4, 3, dtype=torch.complex64),
    "of a program's class": lambda: torch.zeros(4, 3).as_subclass(OfItsOwn),
    "on another device": lambda: torch.zeros(4, 3, device="meta"),
    "sparse": lambda: torch.zeros(4, 3).to_sparse(),
    "lazy": lambda: torch_internals.lazy_clone(torch.zeros(4, 3)),
    "empty": lambda: torch.zeros(0, 3),
    "of six dimensions": lambda: torch.zeros(1, 2, 3, 2, 1, 1),
}
UNREAD = {"of a program's class", "on another device", "sparse", "lazy", "empty", "of six dimensions"}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_tensor_is_found_where_one_that_looks_like_it_is_expected_and_nowhere_else(kind: str) -> None:
    first = KINDS[kind]()
    look = argument_words([first], distinct=True)
    assert (look is None) == (kind in UNREAD)
    if look is None:
        return
    same = same_metadata([first])
    found = []
    for other, make in KINDS.items():
        tensor = make()
        lies = look([tensor])
        assert lies in (None, [tensor.data_ptr()] if lies else None)
        assert lies is None or same((tensor,)), other
        assert lies is not None or not same((tensor,)) or other in UNREAD, other
        found += [other] if lies else []
    assert kind in found


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "other memory": lambda one: setattr(one, "data", one.detach().clone()),
    "another dtype": lambda one: setattr(one, "data", one.detach().double()),
    "later in its memory": lambda one: setattr(one, "data", one.detach().clone().view(-1)[3:].view(3, 3)),
    "at the start": lambda one: one.as_strided_((4, 3), (3, 1), 0),
    "another storage": lambda one: one.set_(torch.ones(4, 3)),
    "another size": lambda one: one.as_strided_((2, 3), (3, 1)),
    "resized": lambda one: one.requires_grad or one.resize_(2, 3),
    "turned": lambda one: one.t_(),
    "one more dimension": lambda one: one.unsqueeze_(0),
    "a larger storage": lambda one: one.untyped_storage().resize_(4096),
    "no storage": lambda one: one.untyped_storage().resize_(0),
    "a gradient": lambda one: one.requires_grad_(not one.requires_grad),
    "a class": lambda one: setattr(one, "__class__", OfItsOwn),
    "a lazy clone": lambda one: torch_internals.lazy_clone(one),
    "written": lambda one: one.add_(1),
    "exchanged": lambda one: torch.utils.swap_tensors(one, torch.ones(5, 5)),
    "exchanged for one like it": lambda one: torch.utils.swap_tensors(one, one.detach().clone()),
    "a .grad": lambda one: setattr(one, "grad", torch.ones_like(one)),
    "shared": lambda one: one.share_memory_(),
    "an attribute": lambda one: setattr(one, "attribute", 1),
    "a hook": lambda one: one.requires_grad and one.register_hook(lambda gradient: None),
}


@pytest.mark.parametrize("kind", ["plain", "parameter", "with a gradient"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_tensor_that_has_changed_is_found_only_where_it_looks_and_lies_so(change: str, kind: str) -> None:
    def made() -> torch.Tensor:
        return KINDS[kind]()

    one, like = made(), made()
    look, same = argument_words([like, like.detach()], distinct=True), same_metadata([like])
    other = like.detach().clone()
    assert look is not None and look([one, other]) == [one.data_ptr(), other.data_ptr()]
    with torch.no_grad():
        kept = CHANGES[change](one)
    found = look([one, other])
    if not same((one,)) or not one.untyped_storage().nbytes() or change == "a lazy clone":
        assert found is None
    else:
        assert found == [one.data_ptr(), other.data_ptr()]
    del kept


@pytest.mark.parametrize("without_gradients", [True, False])
@pytest.mark.parametrize("how", sorted(GAINED))
def test_a_view_requires_a_gradient_once_what_it_is_a_view_of_does(how: str, without_gradients: bool) -> None:
    whole, apart = torch.zeros(4, 3), torch.zeros(4, 3)
    with torch.set_grad_enabled(not without_gradients):
        view, of_view, other = whole[1:], whole.view(12)[3:].view(3, 3), apart[1:]
    detached = whole.detach()[1:]
    look = argument_words([view], distinct=True)
    assert look is not None and all(look([one]) for one in (view, of_view, other, detached))
    GAINED[how](whole)
    assert look([view]) is look([of_view]) is None
    assert look([other]) and look([detached])
    if how == "by itself":
        with_gradient = argument_words([view], distinct=True)
        assert with_gradient is not None and with_gradient([view]) and not with_gradient([other])
        whole.requires_grad_(False)
        assert look([view]) and not with_gradient([view])


def test_tensors_are_found_in_their_order_and_as_many() -> None:
    some = [torch.zeros(2), torch.zeros(3, dtype=torch.int64), nn.Parameter(torch.zeros(2)), torch.zeros(2)]
    look = argument_words(some, distinct=True)
    assert look is not None
    others = [one.detach().clone() for one in some]
    others[2] = nn.Parameter(others[2])
    assert look(others) == [one.data_ptr() for one in others]
    for wrong in (others[:3], [*others, others[0]], others[::-1], [*others[:3], others[0]], [], [None, *others[1:]]):
        assert look(wrong) is None  # type: ignore[arg-type]
    for wrong in ([*others[:3], 5], [*others[:3], object()], [*others[:3], torch.Tensor]):
        assert look(wrong) is None


def test_a_tensor_may_stand_twice_where_that_is_compared_elsewhere() -> None:
    one = torch.zeros(2)
    look = argument_words([one, one], distinct=False)
    assert look is not None
    assert look([one, one]) == [one.data_ptr()] * 2
    assert argument_words([one, one], distinct=True) is None, "it would never be found"


def test_what_it_was_made_of_is_not_held() -> None:
    one = torch.zeros(2)
    gone = weakref.ref(one)
    look = argument_words([one], distinct=True)
    del one
    gc.collect()
    assert look is not None and gone() is None


def test_looking_keeps_nothing() -> None:
    some = [torch.zeros(2), torch.zeros(3)]
    look = argument_words(some, distinct=True)
    assert look is not None
    look(some), look(some[::-1])
    before = [sys.getrefcount(one) for one in some], sys.getallocatedblocks()
    for _ in range(20_000):
        look(some)
        look(some[::-1])
    assert [sys.getrefcount(one) for one in some] == before[0]
    assert sys.getallocatedblocks() - before[1] < 200


def test_many_tensors_are_left_to_others() -> None:
    some = [torch.zeros(2) for _ in range(MOST + 1)]
    assert argument_words(some, distinct=True) is None
    assert argument_words(some[:MOST], distinct=True) is not None


def test_of_no_tensors_none_are_found() -> None:
    look = argument_words([], distinct=True)
    assert look is not None and look([]) == [] and look([torch.zeros(2)]) is None


def test_one_of_each_set_of_keys_stands_for_all() -> None:
    plain, parameter, inference = torch.zeros(2), nn.Parameter(torch.zeros(2)), of_inference()
    assert like_each([plain, torch.zeros(5)], [inference, plain]) == [plain]
    assert like_each([plain, inference], [plain]) is None
    found = like_each([plain, parameter, inference], [inference, plain, parameter])
    assert found is not None and inference in [one for one in found if one.is_inference()]
    assert like_each([], [plain]) == []


def test_without_compiled_code_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_code, "looks", lambda: None)
    assert argument_words([torch.zeros(2)], distinct=True) is None
    monkeypatch.undo()
    assert argument_words([torch.zeros(2)], distinct=True) is not None


FIELDS = [field.name for field in dataclasses.fields(tensor_words.PLACES)]
ALIKE = {("history", 1), ("memory", 2)}
"""Of the history there are two words, either of which will do, and so there are of memory that PyTorch allocated."""
FOLLOWED = {("storage", -1)}
"""What stands there would be followed. The places are those of `tensor_words`, which looks at what is there before."""


SHIFTED = {(name, words) for name in (*FIELDS, "_FLAGS") for words in (-1, 1, 2)} - ALIKE - FOLLOWED


@pytest.mark.parametrize(("name", "words"), sorted(SHIFTED))
def test_nothing_is_read_where_a_word_is_elsewhere(name: str, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    can_be_read = module._can_be_read.__wrapped__
    assert can_be_read()
    monkeypatch.setattr(module, "_flag", module._flag.__wrapped__)
    if name == "_FLAGS":
        monkeypatch.setattr(module, name, module._FLAGS + 8 * words)
    else:
        shifted = getattr(tensor_words.PLACES, name) + 8 * words
        monkeypatch.setattr(tensor_words, "PLACES", dataclasses.replace(tensor_words.PLACES, **{name: shifted}))
    assert not can_be_read()


def test_nothing_is_read_where_words_of_tensors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module._can_be_read.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tensor_words, "can_be_read", lambda: False)
        assert argument_words([torch.ones(1)], distinct=True) is None
    assert argument_words([torch.ones(1)], distinct=True) is not None  # that they were not is not kept


@pytest.mark.parametrize("place", ["_KIND", "_KEYS"])
def test_what_does_not_show_is_found_out(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the dtype where its word is left out."""
    looks = tensor_words.looks

    def without(tensors: Any) -> Any:
        found = looks(tensors)
        return found and [[word for word in one if word[0] != getattr(tensor_words, place)] for one in found]

    assert module._can_be_read.__wrapped__()
    monkeypatch.setattr(tensor_words, "looks", without)
    assert not module._can_be_read.__wrapped__()
