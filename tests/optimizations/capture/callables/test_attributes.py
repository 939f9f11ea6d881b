"""Attributes that a graphed callable binds share memory with results and arguments as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step.observer import StepRefused
from tests.optimizations.capture.callables.test_differentiation import batches, gradients, same


class Keeps(nn.Module):
    """Keeps two tensors of each call."""

    def __init__(self, keep: Callable[[Keeps, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.keep = nn.Linear(3, 3), keep
        self.first: torch.Tensor | None = None
        self.second: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        result = self.linear(x * 1)
        self.keep(self, x, result)
        return result, result.detach()[1], x.detach()


def of_a_result(module: Keeps, x: torch.Tensor, result: torch.Tensor) -> None:
    module.first, module.second = result.detach(), result.detach()[0]


def each_other(module: Keeps, x: torch.Tensor, result: torch.Tensor) -> None:
    module.first = module.second = result.detach() * 2


def of_an_argument(module: Keeps, x: torch.Tensor, result: torch.Tensor) -> None:
    module.first, module.second = (x.detach() if x.requires_grad else x), x.detach()[0]


def outcome(module: Keeps, call: Any, *, requires_grad: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    found: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for x in batches(4, requires_grad=requires_grad):
        results = call(x)
        assert module.first is not None and module.second is not None
        tensors = [*results, module.first, module.second, x]
        results[0].sum().backward()
        for index, tensor in enumerate(tensors):
            with torch.no_grad():
                tensor.view(-1)[index % tensor.numel()] += 5.0
        found += [tensor.detach().clone() for tensor in [*tensors, *kept]]
        kept.append(module.first)
    return found


@pytest.mark.parametrize("outputs", ["static", "copied"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("keep", [of_a_result, each_other, of_an_argument])
def test_what_is_written_into_one_shows_in_the_others(keep: Any, requires_grad: bool, outputs: Any) -> None:
    module, reference = Keeps(keep), Keeps(keep)
    sample = batches(1, requires_grad=requires_grad)
    group = graph_callables(module, sample, outputs=outputs, device=CpuDevice())
    found = outcome(module, module, requires_grad=requires_grad)
    assert same(found, outcome(reference, reference, requires_grad=requires_grad))
    assert group.calls_without_graph == 0


class Asks(nn.Module):
    """Does something else where nothing of the kind was kept before."""

    def __init__(self, *, asks: bool, there: bool = True) -> None:
        super().__init__()
        self.weight, self.asks = nn.Parameter(torch.ones(3)), asks
        if there:
            self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = getattr(self, "kept", None)
        result = x * self.weight
        if self.asks and before is not None and before.shape == x.shape:
            result = result * 2
        self.kept = result.detach() + 1
        return result


@pytest.mark.parametrize("there", [False, True])
def test_attributes_are_left_by_warm_up_as_they_were(there: bool) -> None:
    module = Asks(asks=False, there=there)
    call = graph_callables(module, batches(1), device=CpuDevice())
    assert getattr(module, "kept", None) is None and hasattr(module, "kept") == there
    for x in batches(3):
        module(x).sum().backward()
        assert module.kept is not None and torch.equal(module.kept, x + 1)
    assert call.calls_without_graph == 0


class Masked(nn.Module):
    """Binds a mask whose rows lie in the same memory, as BERT's attention does; or its elements do in part, or in each
    row, with gaps between the rows."""

    KINDS: ClassVar[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "expanded": lambda hidden: hidden.expand(4, 4),
        "windows": lambda hidden: hidden.repeat(2).unfold(0, 4, 1)[:4],
        "a column, expanded": lambda hidden: (hidden[:, None] * hidden.new_ones(9))[:, :1].expand(4, 4),
    }

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.mask_of = nn.Linear(4, 4), self.KINDS[kind]
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = self.mask_of((x[0] > 0).float())
        return self.linear(x) @ self.mask


@pytest.mark.parametrize("kind", sorted(Masked.KINDS))
@pytest.mark.parametrize("called_before", [False, True])
def test_tensors_whose_elements_share_memory_are_bound(kind: str, called_before: bool) -> None:
    eager, module = Masked(kind), Masked(kind)
    first, *others = (x.detach() for x in (torch.randn(5, 4), *(torch.randn(5, 4) for _ in range(4))))
    if called_before:
        module(first), eager(first)
    before = None if module.mask is None else module.mask.clone()
    (graphed,) = graph_callables(module, [(torch.randn(5, 4),)], device=CpuDevice())
    assert module.mask is None if before is None else torch.equal(module.mask, before)
    for x in others:
        wanted, found = eager(x), graphed(x)
        wanted.sum().backward()
        found.sum().backward()
        assert torch.equal(found, wanted)
        assert torch.equal(module.mask, eager.mask)
        assert torch.equal(module.linear.weight.grad, eager.linear.weight.grad)


def test_variables_are_left_by_warm_up_as_they_were() -> None:
    kept = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept = x.detach().sum(0)
        return x * 2

    before = kept
    (graphed,) = graph_callables(function, batches(1), device=CpuDevice())
    assert kept is before
    (x,) = batches(1)
    graphed(x)
    assert torch.equal(kept, x.sum(0))


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs. Asks.kept holds another kind of value")
def test_what_a_callable_asks_of_what_it_binds_counts() -> None:
    module, reference = Asks(asks=True), Asks(asks=True)
    call = graph_callables(module, batches(1), device=CpuDevice())
    without = []
    for index, x in enumerate(batches(6)):
        for one in (module, reference):
            one.kept = None if index == 3 else torch.zeros(1) if index == 4 else one.kept
        result = module(x)
        assert torch.equal(result, reference(x))
        result.sum().backward()
        without.append(call.calls_without_graph)
    assert without == [1, 1, 1, 2, 3, 3]


def test_attribute_that_compiled_code_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code passes no dispatcher: the captured graph itself is asked."""
    device = CpuDevice()
    monkeypatch.setattr(device, "mentions", lambda graph, memory, but=(): bool(memory))
    with pytest.raises(StepRefused, match="kept is bound to another tensor"):
        graph_callables(Asks(asks=False), batches(1), device=device)


class Balanced(nn.Module):
    """Attributes take part in the loss, as that which balances experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.balance: Any = None
        self.hidden: Any = None
        self.given: Any = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.given = x
        self.hidden = self.first(x).tanh()
        self.balance = self.hidden.square().mean()
        return self.hidden, self.second(self.hidden)


LOSSES: dict[str, Callable[[Balanced, Any], torch.Tensor]] = {
    "the results": lambda module, found: found[1].sum() + found[0].sum(),
    "an attribute next to a result": lambda module, found: found[1].sum() + module.balance,
    "attributes": lambda module, found: module.balance + module.hidden.sum() + module.given.square().sum(),
}


@pytest.mark.parametrize("outputs", ["static", "copied"])
def test_attributes_take_part_in_differentiation(outputs: Any) -> None:
    found = []
    for is_graphed in (False, True):
        torch.manual_seed(3)
        module = Balanced()
        call: Any = module
        if is_graphed:
            sample = torch.zeros(2, 3, requires_grad=True)
            group = graph_callables(module, [sample], order=[1, 1, -1, -1], outputs=outputs, device=CpuDevice())
            call = group[0]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        kept = []
        for name in [*LOSSES, *LOSSES]:
            xs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
            losses = [LOSSES[name](module, call(x)) for x in xs]
            kept.append(module.hidden)
            for loss in losses:
                loss.backward()
            optimizer.step()
            assert all(x.grad is not None for x in xs)
            found += [*(x.grad for x in xs), *gradients(module), *losses]
            optimizer.zero_grad()
        found += [*kept, *module.parameters()]
    half = len(found) // 2
    assert same(found[:half], found[half:])
    assert group.calls_without_graph == 0


def test_a_result_that_is_an_attribute_too_is_one_tensor() -> None:
    module = Balanced()
    call = graph_callables(module, [torch.zeros(2, 3)], device=CpuDevice())
    result, _ = call[0](torch.randn(2, 3))
    assert result is module.hidden and module.hidden.requires_grad
