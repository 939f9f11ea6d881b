"""Fake tensors with known values: which operations keep them, and which make them unknown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from suite.measure.known_values import KnownValuesMode, UnknownValue


@pytest.fixture
def mode() -> Iterator[KnownValuesMode]:
    with KnownValuesMode() as mode:
        yield mode


@pytest.mark.parametrize("lengths", [[3, 1], [0, 4]])
def test_constants_and_writes_through_views_are_tracked(mode: KnownValuesMode, lengths: list[int]) -> None:
    on_gpu = torch.tensor(lengths).to("cuda")
    assert on_gpu.device.type == "cuda" and (on_gpu * 2)[1].item() == 2 * lengths[1]
    mask = torch.ones(2, 4, device="cuda")
    for row in range(2):
        mask[row, on_gpu[row] :] = 0
    assert [int(mask[row].sum().item()) for row in range(2)] == lengths
    chosen = on_gpu[on_gpu != lengths[0]]
    assert (chosen.shape, chosen.device.type, chosen[0].item()) == ((1,), "cuda", lengths[1])


def test_filled_memory_is_known(mode: KnownValuesMode) -> None:
    with mode.random_values():
        assert 0 <= torch.empty((), dtype=torch.int64).random_(7).item() < 7
    assert torch.empty(2, device="cuda").fill_(3.0).sum().item() == 6
    with pytest.raises(UnknownValue):
        torch.empty(2).random_(7).sum().item()
    whole = torch.empty(4)
    whole[:2].zero_()
    with pytest.raises(UnknownValue):
        whole.sum().item()


def test_random_inputs_are_known_only_on_request(mode: KnownValuesMode) -> None:
    with mode.random_values():
        known, same = (
            torch.randint(0, 10**6, (3,), generator=torch.Generator().manual_seed(7), device=device)
            for device in ("cuda", "cpu")
        )
    unknown = torch.randint(0, 10**6, (3,), device="cuda")
    assert known.is_cuda
    assert [value.item() for value in known] == [value.item() for value in same]
    with pytest.raises(UnknownValue):
        unknown[2].item()


def test_single_host_draw_is_known_to_branch_on(mode: KnownValuesMode) -> None:
    assert not torch.rand([]) < 0.0
    assert 0 <= torch.randint(5, ()).item() < 5
    for unknown in (torch.rand([], device="cuda"), torch.rand(1)[0], nn.Linear(1, 1).weight[0, 0]):
        with pytest.raises(UnknownValue, match="reads a value"):
            unknown.item()


def test_tensor_written_with_an_unknown_is_unknown(mode: KnownValuesMode) -> None:
    table = torch.zeros(4)
    row = table[1:]
    assert row[0].item() == 0
    table.copy_(torch.randn(4))
    with pytest.raises(UnknownValue):
        row[0].item()
