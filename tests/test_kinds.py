"""Programs of many kinds, compiled whole: what they compute is eager's, and nothing of Encore's own fails."""

from __future__ import annotations

import warnings

import pytest
import torch
from compiled_on_cpu import INDUCTOR, CompiledOnCpu, compiled_on_cpu
from kinds import KINDS
from kinds.world import Outcome, differences, eager, outcome

import optimizations
from optimizations import torch_internals

__all__ = ["compiled_on_cpu"]

ON_CPU = [name for name, kind in KINDS.items() if kind.on_cpu]


def without_graphs(name: str) -> Outcome:
    torch_internals.reset_dynamo()
    with torch_internals.fresh_cache(), torch_internals.inductor_config.patch(INDUCTOR):
        found = outcome(name, "cpu", torch.compile)
    torch_internals.reset_dynamo()
    return found


@pytest.mark.parametrize("name", ON_CPU)
def test_what_a_program_computes_is_eagers(request: pytest.FixtureRequest, name: str) -> None:
    expected = without_graphs(name) if KINDS[name].unlike_eager else outcome(name, "cpu", eager)
    if KINDS[name].unlike_eager:
        assert differences(expected, outcome(name, "cpu", eager)), "it is like eager's after all"
    world: CompiledOnCpu = request.getfixturevalue("compiled_on_cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = outcome(name, "cpu", lambda target, **keywords: torch.compile(target, backend="encore", **keywords))
    assert not differences(found, expected)
    assert not [str(one.message) for one in warned if "defect of Encore" in str(one.message)]
    if KINDS[name].captured:
        assert any(world.captures), "nothing was captured"
        assert world.cuda.replays, [report.uncaptured for report in optimizations.report()]
