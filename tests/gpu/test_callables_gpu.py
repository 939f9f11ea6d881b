"""Graphed callables on a GPU: what micro-batches share, and random programs against eager."""

from __future__ import annotations

from typing import Any

import callable_programs
import pytest
import torch
from callable_programs import differences, drawn, outcome
from torch import nn

import optimizations

pytestmark = pytest.mark.gpu


@pytest.mark.alone
def test_micro_batches_never_live_together_share_graphs() -> None:
    def reserved(order: list[int]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        module = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]).cuda()
        call = optimizations.graph_callables(module, [torch.randn(8192, 512, device="cuda")], order=order)
        held = torch.cuda.memory_reserved() - before
        call.close()
        return held

    one, apart, together = (reserved(order) for order in ([1, -1], [1, -1] * 4, [1] * 4 + [-1] * 4))
    print(f"reserved for 1, 4 in turn, 4 at once: {one / 2**20:.0f}, {apart / 2**20:.0f}, {together / 2**20:.0f} MiB")
    assert apart < 0.6 * together
    assert apart < 2 * one


PROGRAMS = 60
TOLERANCE = 1e-4
"""Sums over rows are not always added in one order."""


BEHIND_CYCLES = 2_000_000
"""About a millisecond: a few calls."""


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
@pytest.mark.parametrize("behind", [False, True], ids=["", "behind"])
def test_random_programs_equal_uncaptured_runs(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`behind`: the device runs later than the host, by more than an iteration."""
    iteration = callable_programs._Running._iteration

    def late(running: Any, actions: list[str]) -> None:
        iteration(running, actions)
        torch.cuda._sleep(BEHIND_CYCLES)

    if behind:
        monkeypatch.setattr(callable_programs._Running, "_iteration", late)
    replays = 0
    for seed in range(PROGRAMS):
        expected, _ = outcome(seed, "cuda", None)
        found, group = outcome(seed, "cuda", optimizations.graph_callables)
        assert not list(differences(found, expected, tolerance=TOLERANCE)), (seed, drawn(seed))
        replays += sum(one.replays for one in group.report())
        group.close()
    torch.cuda.synchronize()
    assert replays > 10 * PROGRAMS
