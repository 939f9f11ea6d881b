"""Graphed callables on a GPU, against eager and against `torch.cuda.make_graphed_callables` on the same modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import optimizations
from optimizations.capture.step.observer import StepRefused
from tests.optimizations.capture.callables.test_callables import ORDERS, Stage, follow

pytestmark = pytest.mark.gpu

WIDTH = 6


def stages() -> list[Stage]:
    return [Stage(1).cuda(), Stage(2).cuda()]


def samples() -> list[tuple[torch.Tensor]]:
    return [(torch.randn(5, WIDTH, device="cuda"),), (torch.randn(5, WIDTH, device="cuda", requires_grad=True),)]


def train(call: Any, modules: list[Stage], order: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05)
    torch.manual_seed(9)
    found = []
    for _ in range(4):
        found += follow(call, order, [torch.randn(5, WIDTH, generator=generator).cuda() for _ in range(order.count(1))])
        optimizer.step()
        optimizer.zero_grad()
        for module in modules:
            module.update()
    return [*found, *(t.detach().clone() for module in modules for t in [*module.parameters(), *module.buffers()])]


@pytest.mark.parametrize("outputs", ["static", "copied"])
@pytest.mark.parametrize("name", sorted(ORDERS))
def test_a_pipeline_in_its_order_gives_the_results_of_eager(name: str, outputs: Any) -> None:
    eager = stages()
    expected = train(eager, eager, ORDERS[name])
    modules = stages()
    call = optimizations.graph_callables(modules, samples(), order=ORDERS[name], outputs=outputs)
    found = train(call, modules, ORDERS[name])
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), index
    assert call.calls_without_graph <= 2, "a variable of the loop held a view of a result"
    call.close()


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_first_iteration_tells_order_and_samples(name: str) -> None:
    eager = stages()
    expected = train(eager, eager, ORDERS[name])
    modules = stages()
    call = optimizations.graph_callables(modules)
    found = train(call, modules, ORDERS[name])
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), index
    assert sum(one.replays for one in call.report()) >= 2 * len(ORDERS[name])
    call.close()


def test_chain_of_layers_copies_its_first_input_only() -> None:
    reference = layers()
    model = copy.deepcopy(reference)
    samples = [(torch.randn(16, 64, device="cuda", requires_grad=True),) for _ in model]
    call = optimizations.graph_callables(list(model), samples, share_io=True)
    for _ in range(4):
        x = torch.randn(16, 64, device="cuda", requires_grad=True)
        for one in (reference, model):
            one.zero_grad()
            one(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    assert call.calls_without_graph == 0
    assert [one.copied_tensors for one in call.report() if one.direction == "forward"] == [1, 0, 0]
    call.close()


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(count)]).cuda()


def test_the_results_are_those_of_make_graphed_callables() -> None:
    stock = layers()
    mine, eager = copy.deepcopy(stock), copy.deepcopy(stock)
    sample = torch.randn(16, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(
        tuple(stock), tuple((sample.clone().detach().requires_grad_(),) for _ in stock)
    )
    optimizations.graph_callables(nn.ModuleList(mine), [sample])
    assert len(graphed) == len(mine)
    for _ in range(3):
        x = torch.randn(16, 64, device="cuda")
        results = []
        for model in (eager, stock, mine):
            given = x.clone().requires_grad_()
            model.zero_grad()
            out = model(given)
            out.square().sum().backward()
            results.append([out.detach().clone(), given.grad.clone(), *(p.grad.clone() for p in model.parameters())])
        for one, two, three in zip(*results, strict=True):
            assert torch.equal(one, three)
            assert torch.equal(two, three)


def test_gradients_are_accumulated_over_micro_batches() -> None:
    """With the stock function the second micro-batch overwrites what the first left in `.grad`."""
    reference = nn.Linear(32, 32).cuda()
    module = copy.deepcopy(reference)
    call = optimizations.graph_callables(module, [torch.randn(8, 32, device="cuda")], order=[1, 1, 1, -1, -1, -1])
    batches = [torch.randn(8, 32, device="cuda") for _ in range(3)]
    for each in (call[0], reference):
        for result in [each(batch).square().sum() for batch in batches]:
            result.backward()
    assert module.weight.grad is not None and reference.weight.grad is not None
    assert torch.equal(module.weight.grad, reference.weight.grad)


@pytest.mark.alone
def test_micro_batches_never_alive_together_share_graphs() -> None:
    def reserved(order: list[int]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        module = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]).cuda()
        call = optimizations.graph_callables(module, [torch.randn(8192, 512, device="cuda")], order=order)
        held = torch.cuda.memory_reserved() - before
        call.close()
        return held

    one, apart, together = (reserved(order) for order in ([1, -1], [1, -1] * 4, [1] * 4 + [-1] * 4))
    print(f"reserved for 1, 4 in turn, 4 at once: {one / 2**20:.0f}, {apart / 2**20:.0f}, {together / 2**20:.0f} MiB")
    assert apart < 0.6 * together
    assert apart < 2 * one


def test_autocast_and_one_forward_one_backward() -> None:
    reference = layers()
    model = copy.deepcopy(reference)
    order = [1, 1, 1, -1, 1, -1, -1, -1]
    results = []
    for module in (reference, model):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            call: Any = module
            if module is model:
                call = optimizations.graph_callables(module, [torch.randn(16, 64, device="cuda")], order=order)[0]
        torch.manual_seed(1)
        batches = iter([torch.randn(16, 64, device="cuda") for _ in range(4)])
        waiting = []
        for entry in order:
            if entry > 0:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    waiting.append(call(next(batches)).float().square().sum())
            else:
                waiting.pop(0).backward()
        results.append([parameter.grad for parameter in module.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_what_cannot_be_captured_is_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    with pytest.raises(StepRefused, match="reads a value of the GPU on the host"):
        optimizations.graph_callables(Reads(), [torch.randn(3, device="cuda")])
    assert torch.nn.functional.dropout(torch.ones(8, device="cuda")).shape == (8,)  # random numbers still work


def test_gradients_that_are_kept_stay_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).cuda()
    reference = copy.deepcopy(module)
    group = optimizations.graph_callables(module, [(torch.randn(5, WIDTH, device="cuda"),)])
    held: list[list[torch.Tensor]] = [[], []]
    for _ in range(6):
        x = torch.randn(5, WIDTH, device="cuda")
        for one, kept in zip((module, reference), held, strict=True):
            one.zero_grad(set_to_none=True)
            one(x).square().sum().backward()
            kept += [parameter.grad for parameter in one.parameters() if parameter.grad is not None]
    assert group.calls_without_graph == 0
    torch.cuda.synchronize()
    assert len(held[0]) == len(held[1]) == 24
    for found, expected in zip(*held, strict=True):
        torch.testing.assert_close(found, expected)
    group.close()
