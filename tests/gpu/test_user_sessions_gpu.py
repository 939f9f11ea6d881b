"""Drawn sessions of test_strange_programs.py on a GPU: what graphs and the allocator make of them is eager's."""

from __future__ import annotations

import pytest
import torch
from user_sessions import check_session

from optimizations import torch_internals

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ACTIONS = 60


@pytest.mark.parametrize(("seed", "mark_steps"), [(11, False), (12, True), (13, False), (14, False)])
def test_what_a_session_notes_is_eagers(seed: int, mark_steps: bool) -> None:
    torch.compiler.reset()
    # ATen's kernels: nothing is compiled by Triton, and what is computed is eager's. Inductor supposes that all their
    # results are aligned, views of inputs too of which it knows that they are not.
    with torch_internals.inductor_config.patch({"fallback_by_default": True, "alignment_asserts": False}):
        check_session(seed, ACTIONS, device=DEVICE, mark_steps=mark_steps)
