"""The rewritten graph: inputs, literals in place, originals swept, copies kept where they count."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from simulated_gpu.placement import Traced, bits, graphs_of, placed_runner, retargeted, runner, traced

from optimizations import Options, torch_internals
from optimizations.placement import Placement, place
from optimizations.placement.feed_plan import Source


@torch.no_grad()
def _traced(program: Callable[..., Any], *tensors: torch.Tensor, **settings: Any) -> Traced:
    return traced(program, *tensors, **settings)


def _names(placement: Placement, op: str) -> list[str]:
    return [node.name for node in placement.graph_module.graph.nodes if node.op == op]


def test_added_inputs_come_last_and_are_marked() -> None:
    placement = _traced(
        lambda x, t, y: x * torch.linspace(0, 1, 3).exp().to(x.device) + t.to(x.device) + y,
        *(torch.ones(3), torch.ones(3), torch.ones(3)),
        on_cpu=(1,),
    ).placement
    assert _names(placement, "placeholder") == ["l_x_", "l_y_", "encore_hoisted_0", "encore_staged_0"]
    assert placement.feeds is not None
    assert placement.feeds.kept == (0, 2)
    assert [staged.source for staged in placement.feeds.staged] == [Source("argument", 1)]
    added = [node for node in placement.graph_module.graph.nodes if node.name.startswith("encore")]
    for node in added:
        assert torch_internals.static_input_type(node) == "unguarded"
        # AOTAutograd wants each source once.
        assert torch_internals.dynamo_source(node).name == node.name


TABLE = torch.arange(6.0).reshape(2, 3)


def test_copy_that_is_only_read_becomes_no_clone() -> None:
    found = _traced(lambda x: (TABLE.to(x.device) * x, x + 1), torch.ones(2, 3))
    targets = [node.target for node in found.placement.graph_module.graph.nodes]
    assert torch_internals.clone_that_stays not in targets


def _the_same_twice(x: torch.Tensor) -> Any:
    step = torch.arange(3)
    return step.to(x.device), x * 2, step.to(x.device)


def _a_view_and_the_whole(x: torch.Tensor) -> Any:
    zeros = torch.zeros(3, 2)
    return zeros.to(x.device).t(), x * 2, zeros.to(x.device)


@pytest.mark.parametrize(
    ("program", "kept"), [(_the_same_twice, torch.arange(3)), (_a_view_and_the_whole, torch.zeros(3, 2))]
)
def test_copies_are_no_aliases_after_inductor(program: Callable[..., Any], kept: torch.Tensor) -> None:
    """Inductor removes clones, even if two are returned, but keeps the transfers that they simulate."""
    found = _traced(program, torch.ones(3))
    assert found.placement.report.untouched is None
    x = torch.tensor([1.0, -2.0, 3.0])
    with torch.no_grad():
        compiled = torch_internals.compile_fx.compile_fx(retargeted(found.placement.graph_module), [x, kept])
        results = compiled(x, kept.clone())
    expected = found.original()(x)
    assert bits(list(results)) == bits(list(expected))
    results[0].fill_(99.0)
    assert bits(list(results[1:])) == bits(list(expected[1:]))


def test_copy_to_the_cpu_keeps_its_position() -> None:
    def program(x: torch.Tensor) -> Any:
        before = x.cpu()
        x.add_(1)
        return before.sqrt(), x * 2

    found = _traced(program, torch.ones(3))
    assert found.placement.report.after == ("before", "sqrt")
    assert found.placement.report.cpu_outputs == ("sqrt",)
    before, doubled = found.placed()(torch.full((3,), 4.0))
    assert (before.tolist(), doubled.tolist()) == ([2.0] * 3, [10.0] * 3)


@pytest.mark.parametrize("grad", [True, False])
def test_views_made_before_the_graph_equal_the_programs(grad: bool) -> None:
    """One that was made without gradients could not be written with a tensor that requires them."""
    switched = torch.ones(3, requires_grad=True)

    def program(x: torch.Tensor, t: torch.Tensor) -> Any:
        with torch.no_grad():
            fixed = switched * 2
        return x * t.exp().to(x.device), t[1:], fixed

    with torch.set_grad_enabled(grad):
        found = traced(program, torch.ones(3), torch.ones(3), on_cpu=(1,))
        assert {"getitem", "fixed"} <= set(found.placement.report.before)
        _, view, fixed = found.placed()(*found.arguments(switched, x=torch.ones(3), t=torch.rand(3)))
        assert torch.is_grad_enabled() is grad
    assert not fixed.requires_grad
    learned = torch.ones((), requires_grad=True)
    if grad:
        view.mul_(learned)
        assert view.requires_grad
    else:
        with pytest.raises(RuntimeError, match="view was created in no_grad mode"):
            view.mul_(learned)


def test_remaining_operations_read_earlier_results() -> None:
    counter = torch.zeros(3)

    def program(x: torch.Tensor, t: torch.Tensor) -> Any:
        halved = t / 2
        counter.add_(halved)
        return x + halved.to(x.device), x * counter.to(x.device)

    found = _traced(program, torch.ones(3), torch.ones(3), on_cpu=(1,))
    placement, placed = found.placement, found.placed()
    assert "encore_passed_0" in _names(placement, "placeholder")
    assert [staged.node for staged in placement.report.staged] == ["halved"]
    reasons = {left.reason for left in placement.report.left}
    assert any("visible outside of the graph" in reason for reason in reasons)
    expected = torch.zeros(3)
    for number in (1.0, 3.0):
        first, second = placed(*found.arguments(counter, x=torch.ones(3), t=torch.full((3,), number)))
        expected = expected + number / 2
        assert (first.tolist(), second.tolist()) == ([1 + number / 2] * 3, expected.tolist())
        assert torch.equal(counter, expected)


def test_error_of_a_constant_is_raised_by_the_call() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(3.0)[torch.arange(7, 8)].to(x.device)

    found = _traced(program, torch.ones(3))
    assert [hoisted.form for hoisted in found.placement.report.hoisted] == ["kept"]
    placed = found.placed()
    for _ in range(2):
        with pytest.raises(IndexError, match="out of bounds"):
            placed(torch.ones(3))


def test_graph_on_several_gpus_is_unchanged() -> None:
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    graph = torch.fx.Graph()
    x, y, t = (graph.placeholder(name) for name in "xyt")
    graph.output((graph.call_function(operator.add, (x, t)), y))
    with mode:
        inputs = [torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.tensor(1.0)]
    placement = place(torch.fx.GraphModule(torch.nn.Module(), graph), inputs)
    assert placement.feeds is None
    assert "one CUDA device; here: cuda:0, cuda:1" in (placement.report.untouched or "")


def _switches_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + (TABLE @ TABLE.t()).sum().to(x.device)


def _switches_inference_mode(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        score = x.cpu() * 2
    return x * TABLE.exp().sum().to(x.device), score


def _switches_default_dtype(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return x * torch.tensor(0.1).exp().to(x.device)
    finally:
        torch.set_default_dtype(torch.float32)


def _switches_determinism(x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    result = x * TABLE.exp().sum().to(x.device)
    torch.use_deterministic_algorithms(False)
    return result


def _negative_by_a_flag(x: torch.Tensor) -> Any:
    angles = torch.complex(TABLE, TABLE).conj().imag
    return x * angles.sum().to(x.device), x + (x.cpu().sin() * angles.flatten()[:3]).to(x.device)


@pytest.mark.parametrize(
    ("program", "options", "reason"),
    [
        (_switches_inference_mode, {}, "_enter_inference_mode: changes what the operations after it do"),
        (_switches_default_dtype, {}, "set_default_dtype: changes what the operations after it do"),
        (_switches_determinism, {}, "_set_deterministic_algorithms: changes what the operations after it do"),
        (_negative_by_a_flag, {"hoist_limit_bytes": 0}, "conjugate or negative only by a flag"),
        (lambda x: x + 1, {}, "nothing is on the CPU"),
        (lambda x: x + TABLE.to(x.device), {"placement": False}, "placement is switched off"),
        (lambda x: x + (x.cpu() + 3).to(x.device), {}, "nothing could be moved"),
        (_switches_autocast, {}, "switches autocast on the CPU"),
        (lambda x: torch.vmap(lambda row: row * torch.tensor(2.0))(x), {}, "function transforms"),
    ],
)
def test_unchanged_graphs_are_the_same_objects_with_a_reason(
    program: Callable[..., Any], options: dict[str, Any], reason: str
) -> None:
    found = _traced(program, torch.ones(2, 3), options=Options(**options))
    assert found.placement.graph_module is found.graph_module
    assert found.placement.example_inputs(found.inputs) == found.inputs
    assert found.placement.feeds is None
    assert reason in (found.placement.report.untouched or "")


def _with_sizes(x: torch.Tensor, t: torch.Tensor, index: torch.Tensor) -> Any:
    positions = torch.arange(x.shape[0])
    angles = t.float()[:, None] * torch.linspace(0, 1, x.shape[1] if isinstance(x.shape[1], int) else 4)
    moved = x + angles.to(x.device) + positions.to(x.device)[:, None]
    return moved, x[index], (x.sum() * 2).cpu()


def test_placed_graph_accepts_changing_sizes() -> None:
    example = (torch.ones(5, 4), torch.arange(5), torch.tensor([0, 2, 1]))
    torch_internals.reset_dynamo()
    sized = _traced(_with_sizes, *example, on_cpu=(1, 2), dynamic=True)
    graph_module, report = sized.graph_module, sized.placement.report
    assert (report.cpu_nodes_after, report.left) == ((), ())
    assert {staged.node for staged in report.staged} == {"angles", "positions", "l_index_"}
    assert all(staged.staged_bytes is None for staged in report.staged)
    layouts = [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    placed = placed_runner(graph_module, sized.placement, layouts)
    original = runner(graph_module, layouts)
    for rows, picked in ((5, 3), (7, 2), (2, 6), (7, 2)):
        x = torch.rand(rows, 4)
        t, index = torch.randint(0, 9, (rows,)), torch.randint(0, rows, (picked,))
        ((_, real),) = graphs_of(_with_sizes, x, t, index, dynamic=True)
        real = [int(value) if isinstance(value, torch.SymInt) else value for value in real]
        found = bits(list(placed(*real)))
        assert found == bits(list(original(*real)))
        assert found == bits(list(_with_sizes(x, t, index)))
