"""Tensors transposed or reshaped in place on a GPU never silently keep the old layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = torch.arange(64.0).reshape(8, 8)
        self.register_buffer("state", torch.arange(64.0).reshape(8, 8).cuda() / 7)
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8).cuda() / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "table":
            return x + self.table.to(x.device) * 2
        if self.kind == "state":
            return x @ self.state + self.state
        result: torch.Tensor = (x @ self.weight).relu() + x
        return result


def transposed(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def transposed_in_place(tensor: torch.Tensor) -> None:
    tensor.t_()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", [transposed, transposed_in_place])
@pytest.mark.parametrize("kind", ["table", "state", "weight"])
def test_changed_geometry_is_never_silent(kind: str, change: Callable[[torch.Tensor], None], training: bool) -> None:
    torch.compiler.reset()
    model = nn.Sequential(Layer(kind)).requires_grad_(training)
    if training and kind != "weight":
        pytest.skip("nothing is trained")
    call = torch.compile(model, backend="encore", options={"selection": "off"})
    tensor = getattr(model[0], kind)
    errors = 0
    for step in range(64):
        torch.compiler.cudagraph_mark_step_begin()
        if step % 16 == 12:
            with torch.no_grad():
                change(tensor)
        x = torch.randn(8, 8, device="cuda")
        try:
            found = call(x)
        except (AssertionError, RuntimeError):  # that of generated code, as from plain torch.compile
            errors += 1
            continue
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)
        if training:
            found.sum().backward()
            model.zero_grad()
    assert errors < 64 - 12, "it goes on once the geometry is the old one"
    if kind == "table":
        assert not errors
