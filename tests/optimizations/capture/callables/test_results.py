"""Results and written arguments of graphed callables, and copies of modules that have graphs."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from optimizations.capture.callables.graph_callables import graph_callables
from tests.optimizations.capture.callables.test_differentiation import batches, gradients, graphed, same


def test_written_shared_memory_makes_a_call_run_uncaptured() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * y

    module = Counts()
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


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    rest: Any = None
    number: int = 3


class Structured(nn.Module):
    """Returns all kinds of things, with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return {
            "output": BaseModelOutput(last_hidden_state=y, hidden_states=(y, x)),
            "pair": Pair(y * 2, None),
            "result": Result(y + 1, [y, {"x": x.detach()}]),
            "mask": y > 0,
            "index": y.argmax(-1),
            "text": "text",
            "list": [],
        }


def test_results_of_any_structure_are_new_on_every_call() -> None:
    module = Structured()
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1))
    for x in batches(3):
        for one in (module, reference):
            found = one(x)
            found["list"].append(1)
            assert found["list"] == [1]
            assert (found["text"], found["result"].number, found["pair"].second) == ("text", 3, None)
            assert found["mask"].dtype == torch.bool
            assert not found["index"].requires_grad
            parts = found["output"], found["pair"].first, found["result"].rest[0], found["result"].first.exp()
            (
                parts[0].last_hidden_state + parts[0].hidden_states[0].square() + parts[1] + parts[2] + parts[3]
            ).sum().backward()
    assert same(gradients(module), gradients(reference))
    assert call.calls_without_graph == 0


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


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
@pytest.mark.parametrize("order", [None, [1, 1, -1, -1]])
def test_view_referenced_by_a_loop_variable_costs_one_call(order: list[int] | None) -> None:
    module, eager = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()), nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
    eager.load_state_dict(module.state_dict())
    call = graphed(module, batches(1), order=order)
    count = 1 if order is None else 2
    found, expected = [torch.empty(0)] * count, [torch.empty(0)] * count
    for _ in range(8):
        for index, x in enumerate(batches(count)):
            found[index], expected[index] = module(x).squeeze(-1), eager(x).squeeze(-1)
        assert same(found, expected)
        for one in (*found, *expected):
            one.square().sum().backward()
        assert same(found, expected) and same(gradients(module), gradients(eager))
    assert call.calls_without_graph == count


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_permanently_referenced_view_is_never_overwritten() -> None:
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1))
    kept, values = [], []
    for x in batches(6):
        result = module(x)
        result.sum().backward()
        kept.append(result.detach()[0])
        values.append(plain_linear(module, x)[0])
    assert same(kept, values)
    assert call.calls_without_graph == 5
    del kept, result
    for x in batches(3):
        result = module(x)
        kept = result.detach()[0]
        assert torch.equal(kept, plain_linear(module, x)[0])
        result.sum().backward()
    assert call.calls_without_graph == 5


def plain_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, module.weight, module.bias).detach()


class Unused(nn.Module):
    """One of its parameters and one of its arguments have no part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.used(x) + y.detach()  # type: ignore[no-any-return]


def test_hooks_without_a_gradient_are_not_called() -> None:
    module = Unused()
    reference = copy.deepcopy(module)
    call = graphed(module, [tuple(batches(2, requires_grad=True))])
    found = []
    for one in (module, reference):
        torch.manual_seed(2)
        kept: list[Any] = []
        one.unused.weight.register_hook(kept.append)
        for _ in range(2):
            x, y = batches(2, requires_grad=True)
            y.register_hook(kept.append)
            one(x, y).square().sum().backward()
            assert y.grad is None
        assert kept == []
        found.append(gradients(one))
    assert same(*found)
    assert call.calls_without_graph == 0


class Views(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        result = super().forward(x)
        return result, result[0], result


def test_result_returned_twice_is_one_tensor() -> None:
    module = Views(3, 3)
    call = graphed(module, batches(1))
    for x in batches(2):
        result, _, again = module(x)
        assert result is again
        again.sum().backward()
    assert call.report()[0].replays == 1


def test_write_into_a_shared_result_is_an_error_of_the_backward() -> None:
    """Autograd records the views that a callable makes in eager, but not views of a graph's memory."""
    module = Views(3, 3)
    graphed(module, batches(1))
    result, row, _ = module(torch.randn(2, 3))
    with torch.no_grad():
        row.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result.sum() + row.sum()).backward()


def test_call_on_another_stream_runs_uncaptured() -> None:
    """The first stream may still read a result whose last reference on the host is gone."""
    device = CpuDevice()
    module = nn.Linear(3, 3)
    group = graph_callables(module, batches(1), device=device)
    for stream, without in ((11, 0), (12, 1), (11, 1)):
        device.stream = stream
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            x = batches(1)[0]
            assert torch.equal(module(x), plain_linear(module, x))
        assert ["on another stream" in str(one.message) for one in found] == [True] * (stream == 12)
        assert group.calls_without_graph == without
    assert not device.waits


class Halves(nn.Module):
    """Two results, of which one depends on all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return hidden, self.second(hidden) * y


def test_inputs_of_unused_results_get_no_gradient() -> None:
    """An optimizer leaves such a parameter as it is, weight decay and momentum included."""
    found = []
    for is_graphed in (False, True):
        torch.manual_seed(3)
        module = Halves()
        call: Any = module
        if is_graphed:
            sample = tuple(torch.randn(2, 3, requires_grad=True, generator=torch.Generator()) for _ in range(2))
            call = graph_callables(module, [sample], device=CpuDevice())[0]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for uses in ([0], [1], [0], [0, 1], [0]):
            x, y = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
            optimizer.zero_grad()
            results = call(x, y)
            sum(results[index].square().sum() for index in uses).backward()
            optimizer.step()
            leaves = [x, y, *module.parameters()]
            found += [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        found += [parameter.detach().clone() for parameter in module.parameters()]
    half = len(found) // 2
    for mine, theirs in zip(found[half:], found[:half], strict=True):
        assert (mine is None) is (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


def test_hooks_of_parameters_of_unused_results_get_zeros() -> None:
    """Autograd calls these hooks, and most accept tensors only."""
    module = Halves()
    call = graph_callables(module, [tuple(batches(2))], device=CpuDevice())[0]
    module.second.weight.register_hook(lambda gradient: gradient * 2)
    call(*batches(2))[0].sum().backward()
    assert module.second.weight.grad is not None and not module.second.weight.grad.any()
    assert module.second.bias.grad is None


def test_hooks_before_an_unused_argument_get_zeros() -> None:
    first, second, module = nn.Linear(3, 3), nn.Linear(3, 3), Halves()
    call = graph_callables(module, [tuple(batches(2, requires_grad=True))], device=CpuDevice())
    seen: list[torch.Tensor] = []
    first.weight.register_hook(seen.append)
    for _ in range(2):
        module(second(*batches(1)), first(*batches(1)))[0].sum().backward()
    assert [one.any().item() for one in seen] == [False, False]
    assert second.weight.grad is not None and second.weight.grad.any()
    assert call.calls_without_graph == 0


def test_graph_with_a_resized_result_is_not_launched() -> None:
    """A launch would write to the old memory of the result and return the new one."""
    call = graph_callables([torch.exp], [(torch.randn(4),)], order=[1], device=CpuDevice())
    with torch.no_grad():
        out = call[0](torch.randn(4))
        place = out.data_ptr()
        out.resize_(4000)
        assert out.data_ptr() != place
        del out
        with pytest.warns(UserWarning, match="resized"):
            again = call[0](batch := torch.randn(4))
    assert torch.equal(again, batch.exp())
    assert (call.calls_without_graph, call.report()[0].replays) == (1, 1)


class Skips(nn.Module):
    """Gives its argument back, next to a result or alone."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.linear, self.alone = nn.Linear(3, 3), alone

    def forward(self, x: torch.Tensor) -> Any:
        return x if self.alone else (x, self.linear(x), x.detach())


@pytest.mark.parametrize("outputs", ["static", "copied"])
@pytest.mark.parametrize("alone", [False, True])
def test_returned_argument_is_the_callers_with_gradients(alone: bool, outputs: Any) -> None:
    torch.manual_seed(0)
    module = Skips(alone=alone)
    reference = copy.deepcopy(module)
    sample = torch.randn(2, 3, requires_grad=True)
    call = graph_callables(module, [sample], outputs=outputs, device=CpuDevice())
    for leaf in torch.randn(3, 2, 3):
        found = []
        for one in (module, reference):
            start = leaf.clone().requires_grad_()
            x = start * 2
            returned = one(x)
            same_one = returned if alone else returned[0]
            assert same_one is x
            loss = (x * 3).sum() if alone else (returned[1] * x.detach()).sum() + x.square().sum()
            if alone:
                same_one.mul_(2)
                loss = loss + (x * same_one).sum()
            loss.backward()
            assert start.grad is not None
            found.append([x.detach(), start.grad, *(weight.grad for weight in one.parameters() if not alone)])
        assert all(map(torch.equal, *found))
    assert call.calls_without_graph == 0
