"""Each reason to need AOTAutograd's wrapper keeps it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import optimizations
from optimizations.calls import shortcut
from optimizations.calls.shortcut import FULL_CALLS, needed

pytestmark = pytest.mark.usefixtures("fresh_encore")

X = torch.arange(8.0).reshape(2, 4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the metadata that was checked."""
    seen: list[Any] = []
    monkeypatch.setattr(shortcut, "needed", lambda metadata: (seen.append(metadata), needed(metadata))[1])
    return seen


def compiled(program: Callable[..., Any], x: torch.Tensor, asked: list[Any]) -> Any:
    """Return PyTorch's metadata of this program."""
    torch.compile(program, backend="encore", fullgraph=True)(x)
    (found,) = asked
    return found


NEEDS = {
    "num_mutated_inp_runtime_indices": (1, "the graph changes inputs"),
    "num_outputs_aliased": (1, "outputs share memory with inputs or with each other"),
    "num_intermediate_bases": (1, "outputs share memory with inputs or with each other"),
    "dynamic_outputs": (True, "sizes of outputs differ from call to call"),
    "is_rng_op_functionalized": (True, "the state of random numbers is an argument"),
    "tokens": ({"an effect": torch.ones(1)}, "operators with side effects are kept in order"),
    "grad_enabled_mutation": (False, "the graph changes the grad mode"),
}


@torch.no_grad()
def test_each_need_alone_keeps_the_wrappers(asked: list[Any]) -> None:
    """Change one field of the metadata of a graph without needs."""
    metadata = compiled(lambda x: x * 2, X, asked)
    assert needed(metadata) is None
    for name, (value, reason) in NEEDS.items():
        changed = copy.copy(metadata)
        assert not getattr(changed, name), name
        changed.__dict__[name] = value
        assert needed(changed) == reason, name


@pytest.mark.parametrize("trained", [True, False])
def test_inputs_written_by_a_graph_need_no_wrapper(asked: list[Any], trained: bool) -> None:
    """Shortcuts increment their versions."""
    metadata = compiled(lambda x: x * 2, X.clone().requires_grad_(trained), asked)
    changed = copy.copy(metadata)
    changed.__dict__["mutated_graph_handled_indices_seen_by_autograd"] = [0]
    assert needed(changed) is None


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    torch._C._set_grad_enabled(False)
    return x * 2


def test_graph_that_switches_gradients_off_leaves_them_off() -> None:
    run = torch.compile(without_gradients, backend="encore", fullgraph=True)
    for _ in range(FULL_CALLS + 3):
        with torch.enable_grad():
            assert torch.equal(run(X), X * 2)
            assert not torch.is_grad_enabled()
    (report,) = optimizations.report()
    assert report.shortcut is not None
    assert report.shortcut.kept == "the graph changes the grad mode"
