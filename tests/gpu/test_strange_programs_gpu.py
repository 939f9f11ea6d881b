"""Programs and sessions of test_strange_programs.py equal eager with graphs and the allocator of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from user_sessions import check_session

import optimizations
import tests.optimizations.trees.test_strange_programs as strange
from optimizations import torch_internals
from tests.optimizations.trees.test_strange_programs import FULL_WAYS, PROGRAMS, Net, flat

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FORGETS_ITS_GRAPHS = "resets_while_a_backward_is_pending"


class OnDevice(Net):
    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.to(DEVICE)


@pytest.mark.parametrize(
    ("name", "lean"), [*((name, True) for name in PROGRAMS), *((name, False) for name in FULL_WAYS)]
)
def test_program_computes_eagers_results(monkeypatch: pytest.MonkeyPatch, name: str, lean: bool) -> None:
    values = strange.values
    monkeypatch.setattr(strange, "values", lambda seed, rows=3: values(seed, rows).to(DEVICE))
    monkeypatch.setattr(strange, "Net", OnDevice)
    torch.compiler.reset()
    optimizations.reset()

    def compiled(module: Any) -> Any:
        return torch.compile(module, backend="encore", options={"lean": lean})

    torch.manual_seed(0)
    expected = flat(PROGRAMS[name](lambda module: module))
    torch.manual_seed(0)
    # Dropout draws eager's numbers; and buffers that a backward may write over are PyTorch's reason to refuse
    # retain_graph.
    with torch_internals.inductor_config.patch(fallback_random=True), functorch_config.patch(donated_buffer=False):
        found = flat(PROGRAMS[name](compiled))
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"value {n}: {text}")
    if name != FORGETS_ITS_GRAPHS:
        assert sum(recording.replays for recording in optimizations.recordings()) > 0


ACTIONS = 60


@pytest.mark.parametrize(("seed", "mark_steps"), [(11, False), (12, True), (13, False), (14, False)])
def test_session_results_equal_eager(seed: int, mark_steps: bool) -> None:
    torch.compiler.reset()
    # ATen's kernels: nothing is compiled by Triton, and what is computed is eager's. Inductor supposes that all their
    # results are aligned, views of inputs too of which it knows that they are not.
    with torch_internals.inductor_config.patch({"fallback_by_default": True, "alignment_asserts": False}):
        check_session(seed, ACTIONS, device=DEVICE, mark_steps=mark_steps)
