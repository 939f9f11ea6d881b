"""The drawn sessions of test_user_sessions.py on a GPU: what graphs and the allocator there make of them is eager's."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as functorch_config
from user_sessions import differences, run_session

import optimizations
from optimizations import torch_internals

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ACTIONS = 60


@pytest.mark.parametrize(("seed", "mark_steps"), [(11, False), (12, True), (13, False), (14, False)])
def test_what_a_session_notes_is_eagers(seed: int, mark_steps: bool) -> None:
    torch.compiler.reset()
    optimizations.reset()
    expected = run_session(seed, lambda target: target, ACTIONS, device=DEVICE, mark_steps=mark_steps)
    # ATen's kernels: nothing is compiled by Triton, and what is computed is eager's. Buffers that a backward may write
    # over are PyTorch's reason to refuse retain_graph.
    settings = {"fallback_by_default": True}
    with torch_internals.inductor_config.patch(settings), functorch_config.patch(donated_buffer=False):
        found = run_session(
            seed,
            lambda target: torch.compile(target, backend="encore"),
            ACTIONS,
            device=DEVICE,
            reset=optimizations.reset,
            mark_steps=mark_steps,
        )
    assert not differences(found, expected), found.said
    assert found.said == expected.said
