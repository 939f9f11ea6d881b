"""Modules with collectives are refused as callables, because their communication runs in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.step.observer import StepRefused


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Holder:
    """An object of the program's own that holds a wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def run(self, x: torch.Tensor) -> Any:
        return self.wrapper(x)


class FSDPLinear(nn.Linear):
    """The name that a fully sharded module gets."""


def half(gradients: torch.Tensor) -> Any:
    """Simulate another process without a gradient."""
    found: Any = torch.futures.Future()
    found.set_result(gradients * 0.5)
    return found


WRAPPERS: dict[str, Callable[[], Any]] = {
    "a DistributedDataParallel": lambda: DistributedDataParallel(nn.Linear(3, 3)),
    "a DataParallel": lambda: nn.DataParallel(nn.Linear(3, 3)),
    "a FSDPLinear": lambda: FSDPLinear(3, 3),
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_distributed_wrapper_is_refused(kind: str, within: bool, process_group: None) -> None:
    wrapper = WRAPPERS[kind]()
    callable_: Any = Holder(wrapper).run if within else wrapper
    with pytest.raises(StepRefused, match=f"callable 1 uses .*{'wrapper' if within else ''}, {kind}, whose"):
        GraphedCallables([callable_], [torch.randn(2, 3)], device=CpuDevice())


def test_wrapped_module_may_be_graphed_with_gradient_exchange(process_group: None) -> None:
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        wrapper = DistributedDataParallel(nn.Linear(3, 3))
        wrapper.register_comm_hook(None, lambda state, bucket: half(bucket.buffer()))
        if graphs:
            group = GraphedCallables([wrapper.module], [torch.randn(2, 3)], device=CpuDevice())
        torch.manual_seed(1)
        for _ in range(3):
            wrapper(torch.randn(2, 3)).square().sum().backward()
            found.append([one.grad.clone() for one in wrapper.parameters() if one.grad is not None])
            wrapper.zero_grad()
    assert [one.replays for one in group.report()] == [3, 3]
    assert all(len(one) == 2 for one in found)
    assert all(
        torch.equal(mine, theirs)
        for one, other in zip(found[3:], found[:3], strict=True)
        for mine, theirs in zip(one, other, strict=True)
    )
