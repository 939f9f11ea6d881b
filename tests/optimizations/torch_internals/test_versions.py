"""Versions of tensors are counted up where PyTorch counts them, and nothing else is written."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from optimizations import host_code, torch_internals
from optimizations.torch_internals import memory_words, versions
from optimizations.torch_internals.versions import count_up

WORD = memory_words.WORD


@pytest.mark.usefixtures("looked_at")
def test_each_version_counts_up_by_one_in_each_call() -> None:
    plain, parameter, apart = torch.zeros(3), nn.Parameter(torch.zeros(3)), torch.zeros(3)
    plain.add_(1)
    count = count_up([plain, parameter])
    for calls in range(1, 4):
        count()
        assert (plain._version, parameter._version, apart._version) == (1 + calls, calls, 0)


@pytest.mark.usefixtures("looked_at")
def test_a_tensor_and_its_views_have_one_count() -> None:
    whole = torch.zeros(4, 3)
    view, detached = whole[1:], whole.detach()
    count_up([whole, view, detached])()
    assert whole._version == view._version == detached._version == 3


@pytest.mark.usefixtures("looked_at")
def test_what_autograd_saved_is_found_written() -> None:
    saved = torch.ones(3)
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * saved).sum()
    count_up([saved])()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("looked_at")
def test_tensor_with_an_exchanged_part_has_its_current_version() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    count = count_up([one])
    torch.utils.swap_tensors(one, other)
    one.data = torch.zeros(5)
    before = one._version, other._version
    count()
    assert (one._version, other._version) == (before[0] + 1, before[1])


def test_what_has_no_version_is_left_out(compiled_looks: object) -> None:
    with torch.inference_mode():
        without = torch.zeros(3)
    plain = torch.zeros(3)
    count_up([without, plain])()
    assert plain._version == 1
    with pytest.raises(RuntimeError, match="version"):
        assert without._version


@pytest.mark.usefixtures("looked_at")
def test_tensors_that_are_counted_are_held_for_as_long() -> None:
    one = torch.zeros(3)
    gone = weakref.ref(one)
    count = count_up([one])
    del one
    gc.collect()
    assert gone() is not None
    count()
    del count
    gc.collect()
    assert gone() is None


def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors PyTorch is asked to count up."""
    given: list[int] = []
    monkeypatch.setattr(torch_internals, "increment_version", lambda some: given.append(len(some)))
    return given


def test_compiled_code_asks_pytorch_for_nothing(compiled_looks: object, monkeypatch: pytest.MonkeyPatch) -> None:
    given = asked_for(monkeypatch)
    count_up([torch.zeros(3)])()
    assert not given


@pytest.mark.parametrize(("name", "words"), [(name, by) for name in ("_COUNTER", "_VERSION") for by in (-1, 1, 2)])
def test_counts_that_are_elsewhere_are_left_to_pytorch(
    compiled_looks: object, name: str, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_found = versions._is_found.__wrapped__
    assert is_found()
    monkeypatch.setattr(versions, name, getattr(versions, name) + words * WORD)
    assert not is_found()
    monkeypatch.setattr(versions, "_is_found", is_found)
    given = asked_for(monkeypatch)
    count_up([torch.zeros(3), torch.zeros(3)])()
    assert given == [2]


def test_a_count_that_adds_otherwise_is_left_to_pytorch(
    compiled_looks: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice:
        @staticmethod
        def Versions(some: tuple[torch.Tensor, ...], *places: int) -> object:
            return lambda: torch_internals.increment_version([*some, *some])

    monkeypatch.setattr(host_code, "looks", lambda: Twice)
    assert not versions._is_found.__wrapped__()


def test_without_compiled_code_pytorch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_code, "looks", lambda: None)
    given = asked_for(monkeypatch)
    count_up([torch.zeros(3)])()
    assert given == [1]
