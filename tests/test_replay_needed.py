"""Each thing that a graph may need AOTAutograd's wrapper for keeps it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import optimizations
from optimizations.replay import shortcut
from optimizations.replay.shortcut import FULL_CALLS, needed

pytestmark = pytest.mark.usefixtures("fresh_encore")

X = torch.arange(8.0).reshape(2, 4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The wrappers and metadata of PyTorch's that were asked about."""
    seen: list[tuple[Any, Any]] = []
    monkeypatch.setattr(shortcut, "needed", lambda *given: (seen.append(given), needed(*given))[1])
    return seen


def compiled(program: Callable[..., Any], x: torch.Tensor, asked: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """What PyTorch says of this program."""
    torch.compile(program, backend="encore", fullgraph=True)(x)
    (found,) = asked
    return found


NEEDS = {
    "num_mutated_inp_runtime_indices": (1, "the graph changes inputs"),
    "mutated_graph_handled_indices_seen_by_autograd": ([0], "the graph changes inputs"),
    "num_outputs_aliased": (1, "outputs share memory with inputs or with each other"),
    "num_intermediate_bases": (1, "outputs share memory with inputs or with each other"),
    "dynamic_outputs": (True, "sizes of outputs differ from call to call"),
    "is_rng_op_functionalized": (True, "the state of random numbers is an argument"),
    "tokens": ({"an effect": torch.ones(1)}, "operators with side effects are kept in order"),
    "grad_enabled_mutation": (False, "the graph changes the grad mode"),
}


@torch.no_grad()
def test_one_need_is_enough(asked: list[tuple[Any, Any]]) -> None:
    """Of a graph that PyTorch describes as one without needs, changed in this one thing."""
    wrapper, metadata = compiled(lambda x: x * 2, X, asked)
    assert needed(wrapper, metadata) is None
    for name, (value, reason) in NEEDS.items():
        changed = copy.copy(metadata)
        assert not getattr(changed, name), name
        changed.__dict__[name] = value
        assert needed(wrapper, changed) == reason, name


def test_inputs_that_a_trained_graph_changes_are_no_need(asked: list[tuple[Any, Any]]) -> None:
    """Its shortcut counts up their versions."""
    wrapper, metadata = compiled(lambda x: x * 2, X.clone().requires_grad_(), asked)
    assert wrapper.trace_joint
    changed = copy.copy(metadata)
    changed.__dict__["mutated_graph_handled_indices_seen_by_autograd"] = [0]
    assert needed(wrapper, changed) is None


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    torch._C._set_grad_enabled(False)
    return x * 2


def test_a_graph_that_switches_gradients_off_leaves_them_off() -> None:
    run = torch.compile(without_gradients, backend="encore", fullgraph=True)
    for _ in range(FULL_CALLS + 3):
        with torch.enable_grad():
            assert torch.equal(run(X), X * 2)
            assert not torch.is_grad_enabled()
    (report,) = optimizations.report()
    assert report.shortcut is not None
    assert report.shortcut.kept == "the graph changes the grad mode"
