"""A run on fake tensors finds effects of operators behind any Python call."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from simulated_gpu.placement import fake_cuda, graphs_of
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimizations import torch_internals
from optimizations.placement import place
from optimizations.placement.observe import CannotObserve, Effects, Observation, observe

GPU = torch.device("cuda:0")


def _observed(
    target: Any, *operands: Any, method: bool = False, devices: str = "", **keywords: Any
) -> tuple[Observation, Effects]:
    """One call on tensors like `operands`; a letter of `devices` per tensor says where it is ("g" or "c")."""
    graph = torch.fx.Graph()
    arguments, inputs = [], []
    where = iter(devices + "c" * len(operands))
    mode = torch_internals.FakeTensorMode()
    for position, operand in enumerate(operands):
        if isinstance(operand, torch.Tensor):
            arguments.append(graph.placeholder(f"input_{position}"))
            inputs.append(fake_cuda(operand, mode) if next(where) == "g" else operand)
        else:
            arguments.append(operand)
    create = graph.call_method if method else graph.call_function
    call = create(target, tuple(arguments), keywords)
    call.name = "call"
    graph.output((call,))
    observation = observe(torch.fx.GraphModule(torch.nn.Module(), graph), inputs)
    return observation, observation.effects["call"]


def _storages(observation: Observation, name: str) -> set[int]:
    return {facts.storage for facts in observation.tensors[name]}


@pytest.mark.parametrize(
    ("target", "operands", "method"),
    [
        ("add_", (torch.ones(3), 1), True),
        (operator.iadd, (torch.ones(3), torch.ones(3)), False),
        (operator.setitem, (torch.ones(3), 0, 2.0), False),
        ("copy_", (torch.ones(3), torch.zeros(3)), True),
        ("unsqueeze_", (torch.ones(3), 0), True),
        (torch.nn.init.ones_, (torch.ones(3),), False),
        (torch.ops.aten.relu_.default, (torch.ones(3),), False),
    ],
)
def test_writes_are_found_in_every_call_form(target: Any, operands: tuple[Any, ...], method: bool) -> None:
    observation, effects = _observed(target, *operands, method=method)
    assert effects.writes == _storages(observation, "input_0")


@pytest.mark.parametrize(
    ("target", "operands", "method", "aliases"),
    [
        ("view", (torch.ones(4), 2, 2), True, True),
        ("reshape", (torch.ones(4), 2, 2), True, True),
        ("reshape", (torch.ones(2, 2).t(), -1), True, False),
        ("contiguous", (torch.ones(4),), True, True),
        ("float", (torch.ones(4),), True, True),
        ("double", (torch.ones(4),), True, False),
        ("clone", (torch.ones(4),), True, False),
        (operator.getitem, (torch.ones(4), slice(0, 2)), False, True),
        (operator.getitem, (torch.ones(4), [0, 1]), False, False),
        (torch.nn.functional.dropout, (torch.ones(4), 0.5, False), False, True),
    ],
)
def test_aliases_are_found_by_running(target: Any, operands: tuple[Any, ...], method: bool, aliases: bool) -> None:
    observation, _ = _observed(target, *operands, method=method)
    assert observation.share_memory("call", "input_0") is aliases


@pytest.mark.parametrize(
    ("target", "operands", "random"),
    [
        (torch.rand, (3,), True),
        (torch.bernoulli, (torch.ones(3),), True),
        (torch.nn.functional.dropout, (torch.ones(3), 0.5, True), True),
        (torch.nn.functional.dropout, (torch.ones(3), 0.5, False), False),
        (torch.ones, (3,), False),
    ],
)
def test_random_numbers_on_the_cpu_are_found(target: Any, operands: tuple[Any, ...], random: bool) -> None:
    assert _observed(target, *operands)[1].random_on_cpu is random


@pytest.mark.parametrize(
    ("target", "operands"),
    [
        ("item", (torch.tensor(2),)),
        ("nonzero", (torch.ones(3),)),
        (operator.getitem, (torch.ones(3), torch.ones(3, dtype=torch.bool))),
        (torch.unique, (torch.ones(3),)),
        (torch.repeat_interleave, (torch.ones(3, dtype=torch.int64),)),
    ],
)
def test_host_reads_are_found_or_the_graph_is_unchanged(target: Any, operands: tuple[Any, ...]) -> None:
    """Without symbols for unknown sizes PyTorch refuses such calls; with them the effect is noted."""
    try:
        observation, effects = _observed(target, *operands, method=isinstance(target, str))
    except CannotObserve as error:
        assert error.node == "call"
    else:
        assert effects.host_reads >= _storages(observation, f"input_{len(operands) - 1}")


@pytest.mark.parametrize(
    ("target", "operands", "devices", "obstacle"),
    [
        (operator.add, (torch.ones(3), torch.tensor(1.0)), "gc", None),
        (operator.getitem, (torch.ones(3), torch.tensor([1, 0])), "gc", None),
        ("copy_", (torch.ones(3), torch.ones(3)), "gc", None),
        ("index_put_", (torch.ones(3), (torch.tensor([1]),), torch.tensor(1.0)), "g", None),
        (torch.histogram, (torch.ones(3), torch.ones(3)), "cc", "has no kernel for the GPU"),
    ],
)
def test_obstacles_keep_operands_on_the_cpu(
    target: Any, operands: tuple[Any, ...], devices: str, obstacle: str | None
) -> None:
    _, effects = _observed(target, *operands, method=isinstance(target, str), devices=devices)
    if obstacle is None:
        assert effects.gpu_obstacle is None
    else:
        assert obstacle in (effects.gpu_obstacle or "")


def test_operators_that_run_graphs_are_opaque_and_may_write() -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> Any:
        def body(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) * mask

        return torch.utils.checkpoint.checkpoint(body, x, mask, use_reentrant=False)

    import torch.utils.checkpoint

    ((graph_module, inputs),) = graphs_of(program, torch.ones(3, requires_grad=True), torch.ones(3))
    observation = observe(graph_module, inputs)
    (opaque,) = [effects for effects in observation.effects.values() if effects.opaque]
    assert "runs its own graph" in (opaque.opaque or "")
    assert opaque.writes


def _cuda_synchronize() -> None:
    """Stands for PyTorch's."""


def _wait(graph: torch.fx.Graph) -> None:
    graph.call_function(_cuda_synchronize)


def _wait_for_stream(graph: torch.fx.Graph) -> None:
    graph.call_method("synchronize", (graph.call_function(torch.cuda.current_stream),))


def _choose_stream(graph: torch.fx.Graph) -> None:
    graph.call_function(torch.ops.streams.fork, (1, 2, []))


def _wait_for_event(graph: torch.fx.Graph) -> None:
    graph.call_function(torch.ops.streams.wait_event.default, (1, 2))


@pytest.mark.parametrize("ordering", [_wait, _wait_for_stream, _choose_stream, _wait_for_event])
def test_graphs_with_waits_or_streams_are_unchanged(ordering: Callable[[torch.fx.Graph], None]) -> None:
    """Work moved after the graph would follow the wait: the copy would be read before it is complete."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    copy = graph.call_method("to", (x, "cpu"), {"non_blocking": True})
    ordering(graph)
    graph.output((graph.call_function(operator.mul, (copy, 2)),))
    with torch_internals.FakeTensorMode():
        inputs = [torch.ones(3, device="cuda:0")]
    placement = place(torch.fx.GraphModule(torch.nn.Module(), graph), inputs)
    assert placement.feeds is None
    assert "orders the host's work and the GPU's" in (placement.report.untouched or "")


def test_failed_run_restores_global_modes() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch_internals.set_grad_enabled, (False,))
    graph.call_function(torch_internals.enter_autocast, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_without_flash_attention)
    graph.output((graph.call_function(operator.matmul, (x, x)),))
    with pytest.raises(CannotObserve):
        observe(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.ones(2, 3)])
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.backends.cuda.flash_sdp_enabled()


def _without_flash_attention() -> None:
    torch.backends.cuda.enable_flash_sdp(False)


def test_cpu_attention_stays_where_the_graph_chooses_its_kernel() -> None:
    def program(x: torch.Tensor, heads: torch.Tensor, chosen: bool) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH) if chosen else contextlib.nullcontext():
            scores = functional.scaled_dot_product_attention(heads, heads, heads)
        return x * scores.to(x.device)

    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    heads = torch.ones(1, 1, 2, 3)
    for chosen in (True, False):
        ((graph_module, inputs),) = graphs_of(program, fake_cuda(heads, mode), heads, chosen, mode=mode)
        placement = place(graph_module, inputs)
        assert placement.report.before == (() if chosen else ("scores",))
        assert chosen is any("a kernel that the graph chooses" in left.reason for left in placement.report.left)
