"""Programs of many kinds, compiled whole: what they compute is eager's, and nothing of Encore's own fails."""

from __future__ import annotations

import functools
import random
import warnings

import pytest
import torch
from simulated_gpu.compiler import INDUCTOR, CompiledOnCpu, cut_into_partitions

import optimizations
from kinds import KINDS
from kinds.world import Outcome, differences, eager, outcome
from optimizations import torch_internals

ON_CPU = [name for name, kind in KINDS.items() if kind.on_cpu]


def without_graphs(name: str) -> Outcome:
    torch_internals.reset_dynamo()
    with torch_internals.fresh_cache(), torch_internals.inductor_config.patch(INDUCTOR):
        found = outcome(name, "cpu", torch.compile)
    torch_internals.reset_dynamo()
    return found


@pytest.mark.parametrize("name", ON_CPU)
def test_program_computes_eagers_results(request: pytest.FixtureRequest, name: str) -> None:
    expected = without_graphs(name) if KINDS[name].unlike_eager else outcome(name, "cpu", eager)
    if KINDS[name].unlike_eager:
        assert differences(expected, outcome(name, "cpu", eager)), "it is like eager's after all"
    world: CompiledOnCpu = request.getfixturevalue("compiled_on_cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = outcome(name, "cpu", functools.partial(torch.compile, backend="encore"))
    assert not differences(found, expected)
    assert not [str(one.message) for one in warned if "defect of Encore" in str(one.message)]
    if KINDS[name].captured:
        reports = [(one.compiled, one.uncaptured) for one in optimizations.report()]
        assert any(world.captures), reports
        assert world.cuda.replays, reports


SEVERAL_GRAPHS = (
    *("caches_that_modules_hold", "inputs_written_over_and_over", "complex_inputs_of_which_a_part_is_written"),
    *("caches_that_grow", "caches_written_at_a_tensor_of_positions", "backwards_with_given_gradients"),
    *("saved_tensors_packed_once", "parameters_swapped_and_converted", "results_that_become_weights_and_states"),
    *("recurrent_states_carried_on", "hooks_of_all_kinds", "tensors_given_other_memory_inside"),
)
SLOW_PATH = ("several_forwards_in_some_steps", "a_backward_that_comes_steps_later", "graphs_retained_in_some_steps")


@pytest.mark.parametrize(
    ("name", "cut"), [*((name, True) for name in SEVERAL_GRAPHS), *((name, False) for name in SLOW_PATH)]
)
def test_so_it_is_in_several_graphs_and_by_the_slow_path(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, cut: bool
) -> None:
    expected = outcome(name, "cpu", eager)
    if cut:
        cut_into_partitions(monkeypatch)
    world: CompiledOnCpu = request.getfixturevalue("compiled_on_cpu")
    found = outcome(name, "cpu", functools.partial(torch.compile, backend="encore", options={"lean": cut}))
    assert not differences(found, expected)
    assert not cut or len(world.functions) > 1, "nothing was cut"
    assert world.cuda.replays


TOGETHER = [name for name in ON_CPU if not KINDS[name].unlike_eager]


@pytest.mark.parametrize(("seed", "lean"), [(1, True), (2, True), (3, False)])
def test_programs_of_one_process_compute_eagers_results(compiled_on_cpu: CompiledOnCpu, seed: int, lean: bool) -> None:
    """Graphs, recordings and live results of earlier programs are there when a program begins."""
    names = random.Random(seed).sample(TOGETHER, 8)
    compiled = functools.partial(torch.compile, backend="encore", options={"lean": lean})
    for name in [*names, *names[:4]]:
        assert not differences(outcome(name, "cpu", compiled), outcome(name, "cpu", eager)), (name, names)
    assert compiled_on_cpu.cuda.replays


def test_results_with_more_than_memory_are_not_left_to_a_graph(compiled_on_cpu: CompiledOnCpu) -> None:
    """The results of a replay of CUDAGraph Trees have no conjugate bit."""
    run = torch.compile(lambda x: (x * 2).conj(), backend="encore")
    for step in range(4):
        x = torch.randn(3, dtype=torch.complex64) + step
        torch.testing.assert_close(run(x), (x * 2).conj())
    (report,) = optimizations.report()
    assert "lazy conjugate" in report.uncaptured[0].reason
    assert report.uncaptured[0].calls == 3


@pytest.mark.parametrize("lean", [True, False])
def test_gradient_inside_a_loss_is_refused_in_every_call(compiled_on_cpu: CompiledOnCpu, lean: bool) -> None:
    """The replayed forward saves graph memory for `x`; the penalty would otherwise vanish from the loss's gradient."""
    run = torch.compile(lambda x: (x**3).sum(), backend="encore", options={"lean": lean})
    for step in range(8):
        x = (torch.arange(4.0) + step).requires_grad_()
        (slope,) = torch.autograd.grad(run(x), x, create_graph=True)
        torch.testing.assert_close(slope.detach(), 3 * x.detach() ** 2)
        assert slope.requires_grad
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            (slope.norm() + x.sum()).backward()
    assert compiled_on_cpu.cuda.replays


def test_a_linear_gradient_may_stand_in_a_loss(compiled_on_cpu: CompiledOnCpu) -> None:
    factor = torch.arange(4.0)
    run = torch.compile(lambda x: (x * factor).sum(), backend="encore")
    for step in range(6):
        x = (torch.arange(4.0) + step).requires_grad_()
        (slope,) = torch.autograd.grad(run(x), x, create_graph=True)
        (slope.norm() + x.sum()).backward()
        torch.testing.assert_close(x.grad, torch.ones(4))
    assert compiled_on_cpu.cuda.replays
