"""Tensors that stay between calls, and are given other shapes, strides or dtypes where they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.placement import traced
from torch import nn

import optimizations
from optimizations import Options
from optimizations.torch_internals import geometry
from optimizations.torch_internals.geometry import FixedGeometry
from optimizations.trees.reasons import OTHER_GEOMETRY


def transposed(tensor: torch.Tensor) -> None:
    tensor.t_()


def transposed_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def reshaped(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(2, 32)


def reinterpreted(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32)


CHANGES: list[Callable[[torch.Tensor], None]] = [transposed, transposed_data, reshaped, reinterpreted]


def test_fixed_geometry_ignores_strides_of_one_element() -> None:
    fixed = FixedGeometry([torch.zeros(2, 1, 4)], [0])
    assert fixed.holds([torch.zeros(16).as_strided((2, 1, 4), (4, 9, 1))])
    assert not fixed.holds([torch.zeros(4, 2).t()[:, None]])
    assert not fixed.holds([torch.zeros(1, 1, 4)])


def test_fixed_geometry_holds_in_all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    stock = geometry.same_metadata

    def counted(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
        made.append(1)
        return stock(tensors)

    monkeypatch.setattr(geometry, "same_metadata", counted)
    tensors = [torch.zeros(8, 8), nn.Parameter(torch.zeros(8))]
    fixed = FixedGeometry(tensors, [0, 1])
    for _ in range(20):
        assert fixed.holds(tensors)
        with torch.inference_mode():
            assert fixed.holds(tensors)
        with torch.no_grad():
            assert fixed.holds([tensors[0].detach(), tensors[1].detach()])
    assert len(made) <= 4


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.arange(64.0).reshape(8, 8) / 7)
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(x @ self.weight) + x * self.state
        return result


class Table(nn.Module):
    """An attribute on the CPU, of which one value is kept on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(64.0).reshape(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table.to(x.device) * 2


class Looked(Table):
    """The attribute goes over with each call, since what is read of it depends on an argument."""

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return x + (self.table * row).to(x.device)


@pytest.mark.parametrize("kind", [Table, Looked])
@pytest.mark.parametrize("limit", [2**20, 0])
@pytest.mark.parametrize("change", CHANGES)
def test_cpu_attribute_may_change_geometry(
    change: Callable[[torch.Tensor], None], limit: int, kind: type[Table]
) -> None:
    """Other strides have eager's values; another shape or dtype raises, and the attribute can be put back."""
    model = kind()
    rows = (torch.ones(8),) if kind is Looked else ()
    with torch.no_grad():
        found = traced(model, torch.ones(8, 8), *rows, on_cpu=(1,), options=Options(hoist_limit_bytes=limit))
    run = found.placed()

    def check() -> None:
        x, more = torch.randn(8, 8), [torch.randn(8) for _ in rows]
        arguments = found.arguments(table=model.table, x=x, row=more[0] if more else None)
        torch.testing.assert_close(run(*arguments)[0], model(x, *more))

    check()
    before = model.table.data
    change(model.table)
    if change in (transposed, transposed_data):
        check()
    else:
        said = r"self\.table has shape .* was made for shape \(8, 8\)"
        if (change, kind) == (reshaped, Looked):  # eager's own error, which is raised before
            said = "must match the size of tensor"
        with pytest.raises(RuntimeError, match=said):
            check()
    if change is not transposed:
        model.table.data = before
    check()


def outcome(call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor | str:
    """The result of a call, or its error's type."""
    try:
        return call(x).detach().clone()
    except AssertionError as error:
        return type(error).__name__


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", ["weight", "state"])
@pytest.mark.parametrize("change", [transposed, transposed_data, reshaped])
def test_graph_is_not_replayed_in_another_geometry(
    compiled_on_cpu: CompiledOnCpu, change: Callable[[torch.Tensor], None], name: str, lean: bool, gradients: bool
) -> None:
    """The same error as from plain `torch.compile`, or eager's values, and graphs again once it is put back."""
    program = nn.Sequential(Layers()).requires_grad_(gradients)
    call = torch.compile(program, backend="encore", options={"lean": lean})
    for step in range(24):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(8, 8) + step
        before = getattr(program[0], name).data
        changed = step % 8 == 7
        if changed:
            with torch.no_grad():
                change(getattr(program[0], name))
        found = outcome(call, x)
        if isinstance(found, str):
            assert changed, "an error where nothing was changed"
        else:
            torch.testing.assert_close(found, program(x).detach())
        if not isinstance(found, str) and gradients:
            call(x).sum().backward()
        getattr(program[0], name).data = before
    assert compiled_on_cpu.cuda.replays > 10
    said = [one.reason for report in optimizations.report() for one in report.uncaptured]
    assert OTHER_GEOMETRY in said


@pytest.mark.parametrize("lean", [True, False])
def test_graph_in_another_dtype_raises(compiled_on_cpu: CompiledOnCpu, lean: bool) -> None:
    """Generated code does not look at dtypes."""
    program = Layers().requires_grad_(False)
    call = torch.compile(program, backend="encore", options={"lean": lean, "selection": "off"})
    x = torch.randn(8, 8)
    for step in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        before = program.state.data
        if step == 8:
            reinterpreted(program.state)
            with pytest.raises(RuntimeError, match=r"has dtype torch\.int32 now; .* compiled for torch\.float32"):
                call(x)
        program.state.data = before
        torch.testing.assert_close(call(x), program(x))
    assert compiled_on_cpu.cuda.replays >= 8
