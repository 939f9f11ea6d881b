"""Sessions of users, drawn: calls, training, results kept and written, weights exchanged, are what eager mode has."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as functorch_config
from compiled_on_cpu import CompiledOnCpu, compiled_on_cpu
from user_sessions import differences, run_session

import optimizations

__all__ = ["compiled_on_cpu"]

ACTIONS = 40


@pytest.mark.parametrize(
    ("seed", "lean", "mark_steps"), [(1, True, False), (2, True, True), (3, False, False), (4, True, False)]
)
def test_what_a_session_notes_is_eagers(
    compiled_on_cpu: CompiledOnCpu, seed: int, lean: bool, mark_steps: bool
) -> None:
    expected = run_session(seed, lambda target: target, ACTIONS, mark_steps=mark_steps)
    # Buffers that a backward may write over are PyTorch's reason to refuse retain_graph.
    with functorch_config.patch(donated_buffer=False):
        found = run_session(
            seed,
            lambda target: torch.compile(target, backend="encore", options={"lean": lean}),
            ACTIONS,
            reset=optimizations.reset,
            mark_steps=mark_steps,
        )
    assert not differences(found, expected), found.said
    assert found.said == expected.said
    assert any(compiled_on_cpu.captures)
    assert compiled_on_cpu.cuda.replays
