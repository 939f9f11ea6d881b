"""Sessions of users, drawn: calls, training, results kept and written, weights exchanged, are what eager mode has."""

from __future__ import annotations

import pytest
from simulated_gpu.compiler import CompiledOnCpu
from user_sessions import check_session

ACTIONS = 30


@pytest.mark.parametrize(
    ("seed", "lean", "mark_steps"), [(1, True, False), (2, True, True), (3, False, False), (4, True, False)]
)
def test_what_a_session_notes_is_eagers(
    compiled_on_cpu: CompiledOnCpu, seed: int, lean: bool, mark_steps: bool
) -> None:
    check_session(seed, ACTIONS, lean=lean, mark_steps=mark_steps)
    assert any(compiled_on_cpu.captures)
    assert compiled_on_cpu.cuda.replays
