"""Second captures use their own cuBLAS workspaces, and free none of a graph of the program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from simulated_gpu.allocator import DEFAULT, Block, Workspaces

from optimizations.graph import recapture
from optimizations.graph.pools import claim, new_pool, others_have_pools, pool_memory, scratch_pool

STREAM = SimpleNamespace(cuda_stream=50)
"""Of stock's manager."""
ENDS = 4096


def captured_again(simulated: Workspaces) -> tuple[Block, bool]:
    """Return a product's workspace in a second capture, and whether that counts as the capture's memory."""
    with scratch_pool(0) as pool, recapture._own_workspace(0, STREAM, pool) as (used, others):  # type: ignore[arg-type]
        simulated.begin(0, pool)
        with simulated.on(used):
            found = simulated.use()
        simulated.end(0, pool)
        simulated.release(0, pool)
        owned = [*pool_memory(pool), *(one for other in others for one in pool_memory(other))]
    return found, any(one.address <= found.number * ENDS < one.address + one.size_bytes for one in owned)


def captured_by_hand(simulated: Workspaces) -> Block:
    """Capture a graph by hand: its workspace exists before, its results are in a pool."""
    with simulated.on(7):
        workspace = simulated.use()
        pool = simulated.new_pool()
        simulated.begin(0, pool)
        simulated.allocate("a result")
        simulated.end(0, pool)
    return workspace


def test_all_workspaces_are_freed_where_the_program_has_no_pool(workspaces: Workspaces) -> None:
    with workspaces.on(7):
        before = workspaces.use()
    found, owned = captured_again(workspaces)
    assert owned and found.pool != DEFAULT
    assert before.gone and found.gone, "no memory stays"


def test_graph_captured_by_hand_keeps_its_workspace(workspaces: Workspaces) -> None:
    by_hand = captured_by_hand(workspaces)
    found, owned = captured_again(workspaces)
    assert owned and found is not by_hand
    workspaces.empty_cache()
    with workspaces.on(7):
        tensors = [workspaces.allocate("a tensor") for _ in range(5)]
    assert not by_hand.gone and by_hand not in tensors


def test_second_captures_reuse_one_workspace(workspaces: Workspaces) -> None:
    captured_by_hand(workspaces)
    first, _ = captured_again(workspaces)
    count = len(workspaces.blocks)
    for _ in range(3):
        found, owned = captured_again(workspaces)
        assert found is first and owned
    assert len(workspaces.blocks) == count
    workspaces.clear()
    assert first.gone, "a recording of stock's gives it back to the device"
    found, owned = captured_again(workspaces)
    assert owned and found is not first


def test_pools_of_encore_are_not_the_programs(workspaces: Workspaces) -> None:
    for pool in (new_pool(), new_pool()):
        workspaces.begin(0, pool)
        workspaces.allocate("a result")
        workspaces.end(0, pool)
    workspaces.allocate("a tensor")
    assert not others_have_pools()
    of_the_manager: Any = workspaces.new_pool()
    workspaces.begin(0, of_the_manager)
    workspaces.allocate("a result")
    assert others_have_pools()
    claim(of_the_manager)
    assert not others_have_pools()


@pytest.mark.parametrize("rounds", range(1, 4))
def test_capture_after_a_failed_one_is_correct(workspaces: Workspaces, rounds: int) -> None:
    captured_by_hand(workspaces)
    for _ in range(rounds):
        with (
            pytest.raises(ValueError, match="within"),
            scratch_pool(0) as pool,
            recapture._own_workspace(0, STREAM, pool) as (used, _),  # type: ignore[arg-type]
        ):
            workspaces.begin(0, pool)
            with workspaces.on(used):
                workspaces.use()
            workspaces.end(0, pool)
            workspaces.release(0, pool)
            raise ValueError("within")
    _, owned = captured_again(workspaces)
    assert owned
