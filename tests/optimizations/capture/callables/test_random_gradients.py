"""Random programs that hold their gradients after a while find in them what they find without graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from callable_programs import differences, give_from_the_first
from gradient_programs import Program
from simulated_gpu.operators import CpuDevice

from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step import graphed_step
from optimizations.weak_registry import WeakRegistry

PROGRAMS = 40


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
@pytest.mark.filterwarnings("ignore:gradients of callable .* stay where its graphs write them")
@pytest.mark.parametrize("first", [False, True])
def test_programs_may_use_donated_gradients(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_step, "_steps", WeakRegistry())
    if first:
        give_from_the_first(monkeypatch)
    put_back = replays = without = 0
    for seed in range(PROGRAMS):
        reference, program = Program(seed, None), Program(seed, partial(graph_callables, device=CpuDevice()))
        expected, found = reference.run(), program.run()
        assert not list(differences(there(found), there(expected), tolerance=1e-5)), (seed, program.acts)
        report = program.group.report()  # type: ignore[attr-defined]
        put_back += sum(one.times_put_back > 0 for one in report)
        replays += sum(one.replays for one in report)
        without += program.group.calls_without_graph  # type: ignore[attr-defined]
    assert put_back > PROGRAMS
    assert replays > 10 * PROGRAMS
    assert without < replays


def there(found: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Those whose memory was not given back."""
    return [None if one is None or not one.untyped_storage().nbytes() else one.detach() for one in found]
