"""What is read of tensors all at once tells whether they are as they were, and reads nothing that is gone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations import host_code, torch_internals
from optimizations.torch_internals import memory_words, reference_counts, tensor_words
from optimizations.torch_internals.argument_guard import Held
from optimizations.torch_internals.entry_words import EntryWords
from optimizations.torch_internals.reference_counts import ReferenceCounts
from optimizations.torch_internals.tensor_words import TensorWords

pytestmark = pytest.mark.usefixtures("looked_at")

Change = Callable[[torch.Tensor], object]


def other_memory(one: torch.Tensor) -> None:
    one.data = one.detach().clone()


def other_dtype(one: torch.Tensor) -> None:
    one.data = one.detach().double()


def later_in_its_memory(one: torch.Tensor) -> None:
    one.data = torch.cat([one.detach(), one.detach()])[len(one) :]


def in_the_same_memory_turned_round(one: torch.Tensor) -> None:
    one.data = one.detach().flip(0).set_(one.untyped_storage(), 0, one.shape, one.stride()).t()


def negative_by_a_flag(one: torch.Tensor) -> None:
    one.data = one.detach()._neg_view()


def another_class(one: torch.Tensor) -> None:
    one.__class__ = type("Another", (type(one),), {})


def larger_storage(one: torch.Tensor) -> None:
    one.untyped_storage().resize_(2**20)


def exchanged_whole(one: torch.Tensor) -> None:
    torch.utils.swap_tensors(one, one.detach().clone().requires_grad_(one.requires_grad))


def shared_by_a_lazy_clone(one: torch.Tensor) -> torch.Tensor:
    return torch_internals.lazy_clone(one)


def through_a_view(one: torch.Tensor) -> None:
    one.detach().as_strided_((2,), (1,))
    one.detach().resize_(1)


CHANGES: dict[str, Change] = {
    one.__name__: one
    for one in (
        other_memory,
        other_dtype,
        later_in_its_memory,
        in_the_same_memory_turned_round,
        negative_by_a_flag,
        another_class,
        larger_storage,
        exchanged_whole,
        shared_by_a_lazy_clone,
    )
}
CHANGES |= {
    "requires_grad": lambda one: one.requires_grad_(not one.requires_grad),
    "no_storage": lambda one: one.untyped_storage().resize_(0),
    "shape": lambda one: one.unsqueeze_(0),
    "shape_of_as_many": lambda one: one.as_strided_((1, 9), (9, 1)),
    "strides": lambda one: one.t_(),
    "smaller": lambda one: one.as_strided_((1, 3), (3, 1)),
}


def tensors(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(2)
    made = [torch.randn(3, 3) for _ in range(6)]
    return [nn.Parameter(one) for one in made] if kind == "parameters" else made


@pytest.mark.parametrize("place", [0, 3, 5])
@pytest.mark.parametrize("kind", ["parameters", "tensors"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_of_any_tensor_is_seen(change: str, kind: str, place: int) -> None:
    found = tensors(kind)
    words = TensorWords(found)
    assert all(map(words.tells_of, found)) and words.unchanged()
    with torch.no_grad():
        held = CHANGES[change](found[place])
    assert not words.unchanged()
    assert TensorWords(one for one in found if words.tells_of(one)) is not None
    del held


def test_who_holds_tensors_and_what_they_hold_does_not_matter() -> None:
    found = tensors("parameters")
    words = TensorWords(found)
    held = [one.detach() for one in found], [one.view(-1) for one in found], [one.untyped_storage() for one in found]
    sum(one.square().sum() for one in found).backward()
    torch.optim.SGD(found, lr=0.1).step()
    through_a_view(found[0])
    found[1].register_hook(lambda gradient: None)
    found[2].note = 1  # type: ignore[attr-defined]
    assert words.unchanged() and len(held) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "grad", None),
        lambda one: setattr(one, "grad", torch.zeros_like(one)),
        lambda one: one.grad.t_(),
        lambda one: setattr(one.grad, "data", torch.zeros(3, 3)),
        lambda one: one.grad.requires_grad_(),
        lambda one: one.grad.untyped_storage().resize_(2**20),
    ],
)
def test_another_gradient_is_seen(change: Change) -> None:
    found = tensors("parameters")
    for one in found[1:]:
        one.grad = torch.ones(3, 3)
    expected = [one.grad for one in found]
    words = TensorWords(found, found, expected)
    assert all(map(words.tells_of_gradient, found)) and words.unchanged()
    change(found[4])
    assert not words.unchanged()


def test_a_gradient_where_there_was_none_is_seen() -> None:
    for before in (None, torch.ones(3, 3)):
        found = tensors("parameters")
        found[0].grad = before
        words = TensorWords(found, found, [None] * 6)
        assert words.unchanged() is (before is None)
        found[0].grad = None
        assert words.unchanged()
        found[5].grad = torch.ones(3, 3)
        assert not words.unchanged()


def test_gradients_are_compared_with_those_expected_and_not_with_those_that_are_there() -> None:
    found = tensors("parameters")
    expected = [torch.full((3, 3), float(index)) for index in range(6)]
    words = TensorWords(found, found, expected)
    assert not words.unchanged()
    for one, gradient in zip(found, reversed(expected), strict=True):
        one.grad = gradient
    assert not words.unchanged()
    for one, gradient in zip(found, expected, strict=True):
        one.grad = gradient
    assert words.unchanged()


class Wrapper(torch.Tensor):
    """A class of tensors of a program's own."""


def test_tensors_of_other_kinds_are_left_to_others() -> None:
    plain = torch.zeros(2, 2)
    others = [
        torch.zeros(2, 2).as_subclass(Wrapper),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(1, 1, 1, 1, 1, 2),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    ]
    words = TensorWords([plain, *others])
    assert words.tells_of(plain) and not any(map(words.tells_of, others))
    for one in others[:1]:
        one.data = torch.ones(2, 2)
    assert words.unchanged()
    with_sparse = nn.Parameter(torch.zeros(2, 2))
    assert not TensorWords([with_sparse], [with_sparse], [others[1]]).tells_of_gradient(with_sparse)


def test_one_tensor_stands_for_all_with_the_same_dispatch_keys() -> None:
    with torch.inference_mode():
        of_inference = [torch.zeros(1), torch.zeros(2)]
    found = [*tensors("parameters"), *of_inference, torch.zeros(3, device="meta")]
    kept = TensorWords(found).one_of_each_kind()
    assert len(kept) == 3
    keys = {torch._C._dispatch_keys(one).raw_repr() for one in kept}
    assert keys == {torch._C._dispatch_keys(one).raw_repr() for one in found}


PLACES = (
    *("_CLASS", "_STORAGE", "_AUTOGRAD", "_EXTRA", "_SIZES", "_OFFSET", "_KIND", "_KEYS", "_MEMORY"),
    *("_GRAD", "_GRAD_FN", "_REQUIRES_GRAD", "_BASE", "_HAS_BASE", "PART"),
)


@pytest.mark.parametrize("name", PLACES)
def test_nothing_is_read_where_a_word_is_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And to find that out follows no word that is no address. Of the history there are two words, either of which
    will do."""
    assert tensor_words.can_be_read()
    place = getattr(tensor_words, name)
    for words in (-1, 1, 2):
        if (name, words) == ("_GRAD_FN", 1):
            continue
        shift = words * tensor_words.WORD
        with monkeypatch.context() as patched:
            shifted = tuple(one + shift for one in place) if isinstance(place, tuple) else place + shift
            patched.setattr(tensor_words, name, shifted)
            patched.setattr(tensor_words, "_none", tensor_words._none.__wrapped__)
            assert not tensor_words.can_be_read.__wrapped__(), words


def test_why_nothing_is_read_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tensor_words, "_KEYS", tensor_words._KEYS - tensor_words.WORD)
    with caplog.at_level(logging.INFO):
        assert not tensor_words.can_be_read.__wrapped__()
    (said,) = caplog.messages
    assert "keys" in said and "one by one" in said


def test_nothing_is_read_where_python_has_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not tensor_words.can_be_read.__wrapped__() and not reference_counts._can_be_read.__wrapped__()


@pytest.mark.parametrize("byte", [85, 170])
def test_what_memory_holds_before_a_tensor_gets_it_does_not_matter(byte: int, looked_at: bool) -> None:
    """PyTorch leaves a bit of each tensor as it finds it."""
    asked = "from optimizations.torch_internals import tensor_words; print(tensor_words.can_be_read())"
    way = {"ENCORE_HOST_CODE": "on" if looked_at else "off"}
    environment = {**os.environ, "MALLOC_PERTURB_": str(byte), **way}
    done = subprocess.run(
        [sys.executable, "-P", "-c", asked], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"]


def test_nothing_is_read_where_numpy_gives_the_lock_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As this one does for more words at once, and another may do for as many."""
    assert tensor_words.can_be_read.__wrapped__() and reference_counts._can_be_read.__wrapped__()
    monkeypatch.setattr(memory_words, "AT_ONCE", 1000)
    with caplog.at_level(logging.INFO, logger=tensor_words.__name__):
        assert not tensor_words.can_be_read.__wrapped__() and not reference_counts._can_be_read.__wrapped__()
    assert "NumPy" in caplog.text


class Busy:
    """A thread that runs whenever the lock of Python is given away, which is not done for the time it takes."""

    def __enter__(self) -> Busy:
        self.rounds, self._over = 0, False
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        time.sleep(0)
        return self

    def _run(self) -> None:
        while not self._over:
            self.rounds += 1
            if self.rounds % 50 == 0:
                time.sleep(0)

    def __exit__(self, *_: object) -> None:
        self._over = True
        sys.setswitchinterval(self._interval)
        self._thread.join()


def test_no_other_thread_runs_while_words_are_read() -> None:
    """It could free what is read, of a tensor whose part in C++ or storage it has exchanged."""
    many = [nn.Parameter(torch.zeros(3, 3)) for _ in range(400)]
    for one in many:
        one.grad = torch.zeros(3, 3)
    gradients = [one.grad for one in many if one.grad is not None]
    words, counts = TensorWords(many, many, gradients), ReferenceCounts(gradients)
    as_now = counts.compared(counts.now())
    with Busy() as busy:
        ran = 0
        for _ in range(2000):
            before = busy.rounds
            assert words.unchanged() and counts.now() is not None and as_now()
            ran += busy.rounds != before
    assert not ran


def test_what_tells_whether_tensors_are_unchanged_holds_them_for_as_long_as_it_lives() -> None:
    found = tensors("parameters")
    unchanged = TensorWords(found).unchanged
    weak = [weakref.ref(one) for one in found]
    found.clear()
    assert all(one() is not None for one in weak) and unchanged()
    del unchanged
    assert all(one() is None for one in weak)


def test_the_place_of_a_storage_that_was_exchanged_is_no_other_s_and_its_memory_is_free() -> None:
    """A thread that does not need the lock of Python may exchange one while words are read."""
    found = tensors("parameters")
    words = TensorWords(found)
    cells = {one.untyped_storage()._cdata for one in found}
    weak = [StorageWeakRef(one.untyped_storage()) for one in found]
    for one in found:
        one.data = torch.ones(3, 3)
    assert all(one.expired() for one in weak) and not words.unchanged()
    weak.clear()
    made = [torch.zeros(3) for _ in range(1000)]
    assert cells.isdisjoint(one.untyped_storage()._cdata for one in made)


def test_tensors_and_entries_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gathers are as many as tensors alone take, and what is read of either counts."""
    tensors: list[torch.Tensor] = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    names: list[object] = ["one", "other"]
    empty: set[str] = set()
    held = Held(names, tuple(enumerate(names)), len(names)), Held(empty, (), 0)
    gathered: list[int] = []
    to_bytes = memory_words._TO_BYTES
    monkeypatch.setattr(host_code, "looks", lambda: None)
    monkeypatch.setattr(memory_words, "_TO_BYTES", lambda words: gathered.append(len(words)) or to_bytes(words))
    words = TensorWords(tensors, beside=EntryWords(held))
    gathered.clear()
    assert words.unchanged() and len(gathered) == 3
    for change, back in (
        (lambda: names.__setitem__(0, "another"), lambda: names.__setitem__(0, held[0].entries[0][1])),
        (lambda: empty.add("one"), empty.clear),
        (lambda: tensors[1].requires_grad_(False), tensors[1].requires_grad_),
    ):
        change()
        assert not words.unchanged()
        back()
        assert words.unchanged()
    names.append("third")
    assert not words.unchanged()


def test_a_tensor_that_stands_for_another_is_left_to_others() -> None:
    inner = torch.zeros(3)
    other = torch._to_functional_tensor(inner)
    assert type(other) is torch.Tensor and not TensorWords([inner, other]).tells_of(other)


def test_a_tensor_that_gets_more_dimensions_than_it_has_room_for_is_seen() -> None:
    """Sizes and strides are elsewhere then, and may be put back."""
    one = torch.zeros(2, 1, 1, 1, 2)
    words = TensorWords([one])
    one.unsqueeze_(0)
    assert not words.unchanged() and not TensorWords([one]).tells_of(one)
    one.squeeze_(0)
    assert words.unchanged()
    one.transpose_(0, 1)
    assert not words.unchanged()


def test_a_history_that_a_tensor_got_in_place_is_seen() -> None:
    one, weight = torch.zeros(3), nn.Parameter(torch.ones(3))
    one.requires_grad_().requires_grad_(False)  # so that autograd keeps something of it
    words = TensorWords([one])
    one.mul_(weight)
    assert not words.unchanged()


def test_a_change_that_does_not_show_is_found_out_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_words, "CHANGES", (*tensor_words.CHANGES, lambda one: one.add_(1)))
    assert not tensor_words.can_be_read.__wrapped__()


GAINED: dict[str, Change] = {
    "by_itself": lambda whole: whole.requires_grad_(),
    "by_a_history": lambda whole: whole.mul_(torch.ones(1, requires_grad=True)),
}


@pytest.mark.parametrize("made_without_gradients", [True, False])
@pytest.mark.parametrize("how", sorted(GAINED))
def test_a_view_requires_a_gradient_once_what_it_is_a_view_of_does(how: str, made_without_gradients: bool) -> None:
    whole, apart = torch.zeros(4, 3), torch.zeros(4, 3)
    with torch.set_grad_enabled(not made_without_gradients):
        view, of_view, other = whole[1:3], whole.view(12)[2:], apart[1:]
    detached = whole.detach()[1:3]
    for some in ([view], [of_view, other], [whole, view]):
        words = TensorWords(some)
        assert all(map(words.tells_of, some)) and words.unchanged()
    left = TensorWords([other, detached])
    words = [TensorWords([one]) for one in (view, of_view)]
    GAINED[how](whole)
    assert view.requires_grad and of_view.requires_grad
    assert not any(one.unchanged() for one in words)
    assert left.unchanged()


def test_a_view_of_what_cannot_be_read_is_left_to_others() -> None:
    whole = torch.zeros(1, 1, 1, 1, 1, 4)
    view = whole.view(4)
    assert not TensorWords([view, whole]).tells_of(view)
    assert TensorWords([view.clone()]).one_of_each_kind() != []
