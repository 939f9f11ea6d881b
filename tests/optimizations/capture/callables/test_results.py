"""Results and written arguments of graphed callables, and copies of modules that have graphs."""

from __future__ import annotations

import copy
import functools
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callable_parts import Buffered, Halves, batches, gradients, graphed
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables


def test_written_shared_memory_makes_a_call_run_uncaptured() -> None:
    module = Buffered()
    call = graphed(module, [(torch.randn(3, requires_grad=True), torch.zeros(3))])
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(module(x, module.count), x)
    assert call.calls_without_graph == 1


def test_forward_of_the_modules_own_comes_back() -> None:
    module = nn.Linear(3, 3)
    stock = module.forward
    mine = lambda x: stock(x) * 2  # noqa: E731
    module.forward = mine  # type: ignore[method-assign]
    x = torch.randn(2, 3)
    expected = module(x)
    call = graphed(module, batches(1))
    assert torch.equal(module(x), expected)
    call.close()
    assert vars(module)["forward"] is mine
    call = graphed(module, batches(1))
    module.forward = stock  # type: ignore[method-assign]
    call.close()
    assert vars(module)["forward"] is stock


def test_module_with_graphs_is_refused_until_they_are_closed() -> None:
    module = nn.Linear(3, 3)
    group = graphed(module, batches(1))
    with pytest.raises(ValueError, match=r"a module has graphs of an earlier graph_callables: call close\(\)"):
        graphed(module, [(torch.randn(4, 3),)])
    group.close()
    assert "forward" not in vars(module)
    graphed(module, [(torch.randn(4, 3),)])


def test_closed_group_holds_no_weights_that_were_exchanged() -> None:
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1))
    module(*batches(1)).sum().backward()
    before = [weakref.ref(one) for one in module.parameters()]
    module.load_state_dict(nn.Linear(3, 3).state_dict(), assign=True)
    call.close()
    gc.collect()
    assert [one() for one in before] == [None, None]
    assert call[0](*batches(1)).requires_grad


def test_graphed_module_can_be_exported() -> None:
    module = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    expected = module(x)
    call = graphed(module, batches(1))
    assert torch.equal(torch.export.export(module, (x,)).module()(x), expected)
    assert [one.replays for one in call.report()] == [0, 0]


def saved_and_loaded(module: nn.Module) -> Any:
    held = io.BytesIO()
    torch.save(module, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "saved and loaded": saved_and_loaded,
    "averaged": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", sorted(COPIES))
def test_copy_of_a_graphed_module_is_independent(name: str, own: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    if own and name != "saved and loaded":
        module.forward = functools.partial(nn.Sequential.forward, module)  # type: ignore[method-assign]
    call = graphed(module, batches(1))
    other = COPIES[name](module)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.fill_(2.0)
    found = other(torch.randn(2, 3))
    assert torch.equal(found, torch.full((2, 3), 2.0))
    found.sum().backward()
    assert gradients(module) == [None, None]
    assert None not in gradients(other)
    assert [one.replays for one in call.report()] == [0, 0]
    with pytest.raises(TypeError, match="graphs cannot be copied or saved"):
        copy.deepcopy(call)


def test_graphed_functions_are_copied_as_functions() -> None:
    weight = torch.ones(3, requires_grad=True)
    call = graphed([functools.partial(torch.mul, weight)], [(torch.randn(3),)])
    other = copy.deepcopy(call[0])
    assert isinstance(other, functools.partial)


class GivesItsWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight, self.weight.detach()[0]


@pytest.mark.parametrize("outputs", ["static", "copied"])
def test_results_in_memory_of_the_program_are_not_copied(outputs: str) -> None:
    """A returned weight must show its updates, and other objects such as `state_dict` may reference it."""
    module = GivesItsWeight(3, 3)
    call = graphed(module, batches(1), outputs=outputs)
    kept: list[Any] = []
    for x in batches(4):
        result, weight, row = module(x)
        kept += [(weight, row, module.state_dict())]
        (result.sum() + weight.square().sum()).backward()
        with torch.no_grad():
            module.weight.add_(1)
    for weight, row, _ in kept:
        assert torch.equal(weight, module.weight)
        assert torch.equal(row, module.weight[0])
    assert call.calls_without_graph == 0


def plain_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, module.weight, module.bias).detach()


def test_call_on_another_stream_runs_uncaptured() -> None:
    """The first stream may still read a result whose last reference on the host is gone."""
    device = CpuDevice()
    module = nn.Linear(3, 3)
    group = GraphedCallables(module, batches(1), device=device)
    for stream, without in ((11, 0), (12, 1), (11, 1)):
        device.stream = stream
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            x = batches(1)[0]
            assert torch.equal(module(x), plain_linear(module, x))
        assert ["on another stream" in str(one.message) for one in found] == [True] * (stream == 12)
        assert group.calls_without_graph == without
    assert not device.waits


def test_hooks_of_what_unused_results_need_get_zeros() -> None:
    """Autograd calls hooks of parameters, and of leaves before an argument. Most accept tensors only."""
    first, second, module = nn.Linear(3, 3), nn.Linear(3, 3), Halves()
    call = GraphedCallables(module, [tuple(batches(2, requires_grad=True))], device=CpuDevice())
    seen: list[torch.Tensor] = []
    for layer in (first, module.second):
        layer.weight.register_hook(seen.append)
    for _ in range(2):
        module(second(*batches(1)), first(*batches(1)))[0].sum().backward()
    assert [one.any().item() for one in seen] == [False] * 4
    assert module.second.bias.grad is None
    assert second.weight.grad is not None and second.weight.grad.any()
    assert call.calls_without_graph == 0


def test_graph_with_a_resized_result_is_not_launched() -> None:
    """A launch would write to the old memory of the result and return the new one."""
    call = GraphedCallables([torch.exp], [(torch.randn(4),)], device=CpuDevice())
    out = call[0](torch.randn(4))
    place = out.data_ptr()
    out.resize_(4000)
    assert out.data_ptr() != place
    del out
    with pytest.warns(UserWarning, match="resized"):
        again = call[0](batch := torch.randn(4))
    assert torch.equal(again, batch.exp())
    assert (call.calls_without_graph, call.report()[0].replays) == (1, 1)
