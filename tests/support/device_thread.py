"""Run backwards in autograd's own thread for a device, without a GPU, as a program of its own.

A device that Python registers has such a thread as a GPU has, for the rest of the process. In each case one thread runs
a backward, in which the device's thread calls a function. Another thread is in a call of that function, or of one with
the same lock, and an operator of its own runs another backward.
"""

from __future__ import annotations

import faulthandler
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu, played_by_the_cpu
from simulated_gpu.trees import Compiled, Model, values
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register_device

from optimizations.compiled_graph import _fed
from optimizations.in_place.generated import GeneratedCode
from optimizations.placement.feed_plan import FeedPlan
from optimizations.placement.feeds import Feeds

LIMIT_S = 20
UNTIL_IT_WAITS_S = 0.3

x, y, w = values(1), values(2), values(3)


class OnDevice(torch.Tensor):
    """A tensor of the registered device over one of the CPU."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(cls, on_cpu.shape, device="ownthread:0")  # type: ignore[attr-defined]
        made.on_cpu = on_cpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments, keywords = pytree.tree_map_only(cls, lambda one: one.on_cpu, (args, kwargs or {}))
        keywords.pop("device", None)
        return pytree.tree_map_only(torch.Tensor, cls, func(*arguments, **keywords))


class Calls(torch.autograd.Function):
    """Call a function in the backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return gradient * 2, None


def backward(call: Callable[[], None]) -> None:
    with torch.enable_grad():
        value = OnDevice(torch.ones(3)).requires_grad_()
        Calls.apply(value, call).backward(OnDevice(torch.ones(3)))


class Outer(Model):
    """A function with an operator that runs a backward while another thread's is in progress."""

    in_backward, inside = threading.Event(), threading.Event()
    runs_backward = False
    nested: Callable[[], Any] = staticmethod(lambda: None)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.runs_backward and not self.inside.is_set():
            self.inside.set()
            assert self.in_backward.wait(LIMIT_S)
            threading.Event().wait(UNTIL_IT_WAITS_S)
            backward(self.nested)
        return super().__call__(inputs)


def both(model: Outer, call: Callable[[], torch.Tensor], called_meanwhile: Callable[[], torch.Tensor]) -> None:
    """Call functions at once, the second in a backward of another thread. The first has the operator of `model`."""
    found: list[torch.Tensor] = []
    threads: list[int] = []

    def in_backward() -> None:
        threads.append(threading.get_ident())
        model.in_backward.set()
        found.append(called_meanwhile().clone())

    def other() -> None:
        assert model.inside.wait(LIMIT_S)
        backward(in_backward)

    model.in_backward, model.inside, model.runs_backward = threading.Event(), threading.Event(), True
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    found.append(call().clone())
    thread.join(LIMIT_S)
    assert len(found) == 2
    assert all(torch.equal(one, 2 * x + y * w) for one in found)
    assert threads[0] not in (thread.ident, threading.get_ident()), "the device has no thread of its own"


def lock_of_the_manager(cuda: CudaOnCpu, *, lean: bool) -> None:
    """The backwards call functions that were recorded before."""
    inner, model = Compiled(Model(cuda), lean=lean), Outer(cuda)
    outer, nested = Compiled(model, lean=lean), Compiled(Model(cuda), lean=lean, is_backward=True, is_inference=False)
    for _ in range(3):
        inner(x, y, w)
        nested(x, y, w)
    found: list[torch.Tensor] = []
    model.nested = lambda: found.append(nested.function([x, y, w])[0])
    for without_graph in (None, None, "a reason"):  # while it is warmed up, recorded, and runs without a graph
        if without_graph:
            outer.functions[0].without_graph = without_graph
        both(model, functools.partial(called, outer), functools.partial(called, inner))
        assert torch.equal(found.pop(), 2 * x + y * w)  # a recorded one is there after the launch


def lock_of_a_first_call(cuda: CudaOnCpu, *, lean: bool) -> None:
    """The backward calls the function that is called for the first time, with a graph or without one."""
    recorded, small = Outer(cuda), Outer(cuda, code=GeneratedCode(None, kernels=1))
    for model in (recorded, small):
        outer = Compiled(model, lean=lean, selection="rule")
        both(model, functools.partial(called, outer), functools.partial(called, outer))


def called(compiled: Compiled) -> torch.Tensor:
    result: torch.Tensor = compiled.function([x, y, w])[0]
    return result


def lock_of_feeds(cuda: CudaOnCpu, *, lean: bool) -> None:
    """The backward calls the function with CPU values, whose operator runs between its graphs."""
    model = Outer(cuda)
    plan = FeedPlan(torch.device("cpu"), (0, 1, 2))
    fed = _fed(lambda *inputs: model([*inputs]), Feeds(plan), lambda x, y, w: [2 * x + y * w], own_operators=True)
    both(model, lambda: fed(x, y, w)[0], lambda: fed(x, y, w)[0])


CASES = {case.__name__: case for case in (lock_of_the_manager, lock_of_a_first_call, lock_of_feeds)}

if __name__ == "__main__":
    register_device("ownthread")
    faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)  # where threads wait for each other
    for lean in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            CASES[sys.argv[1]](next(played_by_the_cpu(monkeypatch)), lean=lean)
