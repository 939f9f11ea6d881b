"""Each thing that a graph may need AOTAutograd's wrapper for keeps it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimizations.calls import shortcut
from optimizations.calls.shortcut import needed

pytestmark = pytest.mark.usefixtures("fresh_encore")

X = torch.arange(8.0).reshape(2, 4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The metadata of PyTorch's that was asked about."""
    seen: list[Any] = []
    monkeypatch.setattr(shortcut, "needed", lambda metadata: (seen.append(metadata), needed(metadata))[1])
    return seen


def compiled(program: Callable[..., Any], x: torch.Tensor, asked: list[Any]) -> Any:
    """What PyTorch says of this program."""
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
def test_one_need_is_enough(asked: list[Any]) -> None:
    """Of a graph that PyTorch describes as one without needs, changed in this one thing."""
    metadata = compiled(lambda x: x * 2, X, asked)
    assert needed(metadata) is None
    for name, (value, reason) in NEEDS.items():
        changed = copy.copy(metadata)
        assert not getattr(changed, name), name
        changed.__dict__[name] = value
        assert needed(changed) == reason, name
