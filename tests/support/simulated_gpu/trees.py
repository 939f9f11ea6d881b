"""Functions as Inductor would hold them, on stock's CUDAGraph Trees on host memory with Encore's nodes in them.

Everything is called as Inductor calls it: a function from `EncoreMaker.cudagraphify`, with a list of inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.plan import Choice
from optimizations.in_place.generated import GeneratedCode
from optimizations.options import Concurrency, Options
from optimizations.report.recordings import RecordingReport
from optimizations.selection import Selection
from optimizations.trees.containers import managers
from optimizations.trees.graphed_function import EncoreContainer, EncoreMaker, container
from optimizations.trees.node import EncoreNode
from simulated_gpu.allocator import aligned
from simulated_gpu.driver import Function, Node, floats, word
from simulated_gpu.runtime import CudaOnCpu, at_address

COUNT = 16

KNOWN = GeneratedCode(None, products=frozenset({0, 1, 2}))
"""Code of a `Model` that uses its inputs in products only, so that all uses are known."""

HIDES_Y = GeneratedCode(None, products=frozenset({0, 2}))


def values(start: float, offset: int = 0) -> torch.Tensor:
    return aligned(COUNT, offset).copy_(torch.arange(COUNT) + start)


class Model:
    """out = 2 * x + y * w, `w` at a fixed address; then, by option, x += 1, or x is returned as well, or w += 1.

    `code` is what is known of it as a generated function: by default that products alone use its inputs.
    `hides_y`: the kernel finds y's address in memory of its own. `reuses_x`: the output takes the memory of x's
    placeholder, as the allocator has it when x is dead. `results`: so many are returned; others only have to exist.
    """

    def __init__(
        self,
        cuda: CudaOnCpu,
        *,
        writes_x: bool = False,
        returns_x: bool = False,
        writes_w: bool = False,
        hides_y: bool = False,
        reuses_x: bool = False,
        results: int = 1,
        code: GeneratedCode | None = None,
    ) -> None:
        self.cuda = cuda
        self.writes_x = writes_x
        self.returns_x = returns_x
        self.writes_w = writes_w
        self.hides_y = hides_y
        self.reuses_x = reuses_x
        self.others = range(results - 1)
        self.code = code or (HIDES_Y if hides_y else KNOWN)
        self.runs: list[str] = []
        self.body = Function("body", (8, 8, 8, 8), self._body)
        cuda.driver.add_function(self.body)

    def _body(self, x: bytes, y: bytes, w: bytes, out: bytes) -> None:
        if self.hides_y:
            y = bytes((ctypes.c_uint8 * 8).from_address(int.from_bytes(y, "little")))
        at = [floats(int.from_bytes(pointer, "little"), COUNT) for pointer in (x, y, w, out)]
        one, other, weight = (list(memory) for memory in at[:3])
        at[3][:] = [2 * a + b * c for a, b, c in zip(one, other, weight, strict=True)]
        if self.writes_x:
            at[0][:] = [value + 1 for value in one]
        if self.writes_w:
            at[2][:] = [value + 1 for value in weight]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        x, y, w = inputs
        inputs.clear()
        if self.cuda.capturing is None:
            self.runs.append("plain")
            out = 2 * x + y * w
            if self.writes_x:
                x += 1
            if self.writes_w:
                w += 1
        else:
            self.runs.append("captured")
            out = self.cuda.allocate(COUNT)
            if self.reuses_x and self.cuda.is_placeholder(x):
                out = at_address(x.data_ptr(), COUNT * 4, torch.float32)
            second = y.data_ptr()
            if self.hides_y:
                table = self.cuda.allocate(COUNT).view(torch.int64)
                table[0] = second
                second = table.data_ptr()
            pointers = [word(address) for address in (x.data_ptr(), second, w.data_ptr(), out.data_ptr())]
            self.cuda.driver.add_node(self.cuda.capturing.graph, Node("KERNEL", self.body, pointers))
        others = [out.clone() if self.cuda.capturing is None else self.cuda.allocate(COUNT) for _ in self.others]
        return [out, x, *others] if self.returns_x else [out, *others]


def own_container(device_index: int) -> EncoreContainer:
    """The container of a device."""
    return container(device_index)


class Compiled:
    """A function as Inductor would hold it, and the reports of its recordings."""

    def __init__(
        self,
        model: Callable[..., Any],
        choice: Choice = Choice.HOST,
        outputs: int = 1,
        static_inputs: tuple[int, ...] = (2,),
        inputs: int = 3,
        lean: bool = True,
        selection: Selection = "off",
        concurrency: Concurrency = "off",
        device_index: int = 0,
        **keywords: Any,
    ) -> None:
        self.functions: list[Any] = []
        placeholders = [
            torch_internals.cudagraph_utils.PlaceholderInfo(name, None, [], None) for name in "xyw".ljust(inputs, "a")
        ]
        settings = {"is_backward": False, "is_inference": True, "stack_traces": [None] * outputs, **keywords}
        options = Options(indirection=choice.value, lean=lean, selection=selection, concurrency=concurrency)
        maker = EncoreMaker(options, self.functions.append)
        self.function = maker.cudagraphify(
            model, static_inputs, device_index=device_index, placeholders=placeholders, constants=(), **settings
        )

    @property
    def reports(self) -> list[RecordingReport]:
        return [report for function in self.functions for report in function.recordings()]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """A call of a new iteration: results are copied, as a caller that keeps them would."""
        torch.compiler.cudagraph_mark_step_begin()
        return [result.clone() for result in self.function(list(inputs))]

    def checked(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *, mark: bool = True) -> list[torch.Tensor]:
        """The results of a call, of a new iteration if it is marked. The first is as a `Model` computes it."""
        if mark:
            torch.compiler.cudagraph_mark_step_begin()
        expected = 2 * x + y * w
        results: list[torch.Tensor] = self.function([x, y, w])
        assert torch.equal(results[0], expected)
        return results

    def uncaptured(self) -> dict[str, int]:
        """Return the number of calls without a graph by reason."""
        return {one.reason: one.calls for function in self.functions for one in function.uncaptured()}

    def slow_reasons(self) -> list[str]:
        """Why calls took the slow path since the last query."""
        found = [one.reason for function in self.functions for one in function.slow_calls()]
        for function in self.functions:
            function._slow_calls.clear()
        return found


class Training:
    """A forward and a backward that share memory, as one step of training. The backward reads `saved` results."""

    def __init__(self, forward: Any, backward: Any, *, saved: int = 1, lean: bool = True) -> None:
        self.w = values(7)
        self.forward = Compiled(forward, outputs=saved, is_inference=False, lean=lean)
        self.backward = Compiled(backward, inputs=2 + saved, is_inference=False, is_backward=True, lean=lean)
        self.both = self.forward, self.backward

    def step(
        self,
        start: float,
        *,
        backward: bool = True,
        mark: bool = True,
        look: Callable[[list[torch.Tensor]], Any] = lambda saved: None,
    ) -> Any:
        """Run a forward and, with `backward`, its backward; return what `look` returned for the forward's results."""
        x, y, tangent = values(start), values(start + 1), values(start + 2)
        saved = self.forward.checked(x, y, self.w, mark=mark)
        expected, seen = 2 * x + y * self.w, look(saved)
        if backward:
            given = [tangent, saved[0], self.w, *saved[1:]]
            saved.clear()
            (gradient,) = self.backward.function(given)
            assert torch.equal(gradient, 2 * tangent + expected * self.w)
        return seen


def slow_reasons(*functions: Compiled) -> list[str]:
    """Why calls of these functions took the slow path since the last query."""
    return [reason for function in functions for reason in function.slow_reasons()]


def settle(iteration: Callable[[int], Any], *functions: Compiled, calls: int = 40) -> None:
    """Run this iteration until all its calls take the fast path."""
    for start in range(calls):
        iteration(start)
    slow_reasons(*functions)
    iteration(calls)
    assert slow_reasons(*functions) == []


def nodes() -> list[EncoreNode]:
    return [node for one in managers() for node in one.nodes()]


def check(compiled: Compiled, w: torch.Tensor, calls: int = 8) -> None:
    """Results over calls at ever new addresses."""
    kept = []
    for step in range(calls):
        x, y = values(step), values(-3 * step)
        kept.append((x, y))
        result = compiled(x, y, w)[0]
        assert torch.equal(result, 2 * x + y * w), step
