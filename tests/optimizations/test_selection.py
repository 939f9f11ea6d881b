"""The rules of selection, on numbers alone."""

from __future__ import annotations

import pytest

from optimizations.selection import (
    LARGE_RESULT_BYTES,
    CopiedInput,
    copies_cost_more,
    reason_to_copy,
    without_graph,
)

MIB = 2**20


def copied(
    data_bytes: int, updates: int = 1, moves: int = 8, copied_inputs: int = 1, table: bool = False
) -> str | None:
    """Why an input that moved in so many of eight calls is copied."""
    return reason_to_copy(CopiedInput(data_bytes, updates, table, moves, 8, copied_inputs))


@pytest.mark.parametrize(("kernels", "is_tiny"), [(0, True), (1, True), (2, True), (3, False), (None, False)])
def test_tiny_inference_gets_no_graph(kernels: int | None, is_tiny: bool) -> None:
    assert (without_graph(kernels) is not None) is is_tiny


@pytest.mark.parametrize(("result_bytes", "is_tiny"), [(LARGE_RESULT_BYTES - 1, True), (LARGE_RESULT_BYTES, False)])
def test_large_results_for_a_later_partition_keep_the_graph(result_bytes: int, is_tiny: bool) -> None:
    assert (without_graph(2, result_bytes) is not None) is is_tiny
    assert (copies_cost_more(2**34, 2, result_bytes) is not None) is is_tiny


@pytest.mark.parametrize(
    ("kernels", "copied_bytes", "pays"),
    [
        (16, 3_243_229_184, False),  # DR-I with stock's copies: 0.81 of no graph
        (69, 182_450_000, True),  # TKE: 1.28
        (28, 38_540_000, True),  # ALNET-128: 1.03
        (257, 340_000, True),  # MMC: 2.75
        (3, 0, True),
        (None, 2**34, True),
    ],
)
def test_graph_is_kept_where_it_was_measured_faster(kernels: int | None, copied_bytes: int, pays: bool) -> None:
    why = copies_cost_more(copied_bytes, kernels)
    assert (why is None) is pays


def test_large_moving_input_is_read_in_place() -> None:
    assert copied(182 * MIB, updates=79) is None, "of TKE, where that is 1.2 times as fast"
    assert copied(3_243_229_184) is None


def test_small_input_of_many_nodes_is_copied() -> None:
    why = copied(4096, updates=24)
    assert why is not None
    assert "it moved in 8 of 8 calls" in why


def test_unmoved_input_is_read_in_place() -> None:
    """Its address is set once, and copying it would cost the same in every call."""
    assert copied(4096, updates=8, moves=8) is not None
    assert copied(4096, updates=8, moves=0) is None
