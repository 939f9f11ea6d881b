"""Measure the cost of a replay whose inputs move: copied by stock's fused copy, or read in place by each node updater.

For every point the variants' graphs are captured from the same kernels, and are analysed, planned and changed by the
code that does it for a compiled function. Every variant's result is checked on both sets of inputs before it is timed.
Rounds alternate over the variants, so that clock drift affects all of them equally.

The kernel of the indirection microbenchmark. It reads so little that only replay itself takes time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import triton
import triton.language as tl

from optimizations import torch_internals
from optimizations.graph.applied import AppliedPlan
from optimizations.graph.editing import EditableGraph
from optimizations.graph.memory import MemoryRanges, memory_of
from optimizations.graph.plan import Choice, Plan, make_plan
from optimizations.graph.pointers import find_pointer_uses
from optimizations.graph.prelude_check import available, device_tools, unload_kernels
from optimizations.graph.read import read_graph
from optimizations.graph.recapture import GRANULE_BYTES, buffer_bytes, displace
from optimizations.graph.records import Capture, CapturedGraph, MemoryRange, Placeholder
from optimizations.in_place.addresses import AddressTracker, TrackedInput
from suite.micro.records import INPUT_BYTES, MEASURED, MeasuredPoint, Series, Variant
from suite.results.errors import EncoreError

LEAD_IN = 3
"""Replays before the samples of each round that are not timed."""

ROUNDS = 5
"""Alternating rounds that the samples are spread over."""


Replay = Callable[[list[torch.Tensor]], None]
"""A variant, ready to be called with a list of inputs."""


class Bench:
    """Run the microbenchmark on one CUDA device, with so many samples per series."""

    def __init__(self, device: int, *, samples: int) -> None:
        self._device = torch.device("cuda", device)
        self._samples = samples
        self._tools = device_tools(device)

    def close(self) -> None:
        """Unload what was loaded for the variants."""
        unload_kernels()

    def measure(self, count: int) -> MeasuredPoint:
        """Measure all variants with so many inputs.

        Raises:
            EncoreError: a variant computes something else.
        """
        with torch.cuda.device(self._device):
            series = self._measure(count)
        torch.cuda.empty_cache()
        return MeasuredPoint(sweep="inputs", inputs=count, series=series)

    def _measure(self, count: int) -> list[Series]:
        sets = [
            [torch.full((INPUT_BYTES // 4,), float(which + index), device=self._device) for index in range(count)]
            for which in (1, 1000)
        ]
        outputs = torch.zeros(count, ELEMENTS, device=self._device)
        placeholders = [torch.empty_like(one) for one in sets[0]]
        ready: dict[Variant, Replay] = {}
        for variant in MEASURED:
            made = self._variant(variant, placeholders, outputs)
            if isinstance(made, str):
                print(f"{variant} cannot be had with {count} inputs: {made}", file=sys.stderr)
            else:
                self._check(variant, made, sets, outputs)
                ready[variant] = made
        samples = self._time(ready, sets)
        return [
            Series(variant=variant, moved=moved, host_us=samples.get((variant, moved), []))
            for variant in MEASURED
            for moved in (True, False)
        ]

    def _variant(self, variant: Variant, placeholders: list[torch.Tensor], outputs: torch.Tensor) -> Replay | str:
        """Return the variant for these inputs, or why it cannot be had."""
        graph = self._capture(placeholders, outputs)
        if variant == "copy":
            graph.instantiate()
            return _copying(graph, placeholders)
        driver = self._tools.driver
        raw = driver.CUgraph(graph.raw_cuda_graph())
        memory = {index: memory_of(one) for index, one in enumerate(placeholders)}
        elsewhere = _displaced(placeholders)
        other = self._capture(elsewhere, outputs)
        first = _captured(read_graph(driver, raw), memory)
        second = _captured(
            read_graph(driver, driver.CUgraph(other.raw_cuda_graph())),
            {index: memory_of(one) for index, one in enumerate(elsewhere)},
        )
        analysis = find_pointer_uses(first, second)
        usable = available(self._tools, first.graph, {consume.fn.__name__})
        plan = make_plan(first.graph, analysis, Choice(variant), usable)
        objection = _objection(plan, variant)
        if objection is not None:
            return objection
        applied = AppliedPlan(EditableGraph.of(driver, raw, first.graph), plan, self._tools)
        graph.instantiate()
        applied.instantiated(driver.CUgraphExec(graph.raw_cuda_graph_exec()), self._tools.stream())
        addresses = {index: one.address for index, one in memory.items()}
        applied.point(addresses)
        tracked = [TrackedInput(one.input, one.alignment_bytes, addresses[one.input]) for one in plan.inputs]
        tracker = AddressTracker(tracked, list(addresses.values()), applied, MemoryRanges(()), _never_copied)
        return _following(graph, tracker)

    def _capture(self, inputs: Sequence[torch.Tensor], outputs: torch.Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for node, output in enumerate(outputs):
                launch(inputs[node % len(inputs)], output)
        return graph

    def _check(
        self, variant: Variant, replay: Replay, sets: Sequence[list[torch.Tensor]], outputs: torch.Tensor
    ) -> None:
        for inputs in (*sets, sets[0]):
            outputs.zero_()
            replay(inputs)
            expected = torch.stack([2 * inputs[node % len(inputs)][:ELEMENTS] for node in range(len(outputs))])
            if not torch.equal(outputs, expected):
                raise EncoreError(f"variant {variant} computes something else than its kernels do; nothing was timed")

    def _time(
        self, ready: dict[Variant, Replay], sets: Sequence[list[torch.Tensor]]
    ) -> dict[tuple[Variant, bool], list[float]]:
        samples: dict[tuple[Variant, bool], list[float]] = {}
        per_round = -(-self._samples // ROUNDS)
        for _ in range(ROUNDS):
            for variant, replay in ready.items():
                for moved in (True, False):
                    found = samples.setdefault((variant, moved), [])
                    found += self._round(replay, sets if moved else sets[:1], per_round)
        return samples

    def _round(self, replay: Replay, sets: Sequence[list[torch.Tensor]], count: int) -> list[float]:
        """Return microseconds from a call to completion on the device; the inputs rotate over `sets`."""
        taken = []
        for number in range(-LEAD_IN, count):
            inputs = sets[number % len(sets)]
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            replay(inputs)
            torch.cuda.synchronize()
            if number >= 0:
                taken.append((time.perf_counter_ns() - start) / 1000)
        return taken


def _copying(graph: torch.cuda.CUDAGraph, placeholders: list[torch.Tensor]) -> Replay:
    copy = torch_internals.foreach_copy_

    def run(inputs: list[torch.Tensor]) -> None:
        copy(placeholders, inputs)
        graph.replay()

    return run


def _displaced(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like these at other addresses, each by its own distance. They may overlap: nothing reads them."""
    memory = {index: memory_of(one) for index, one in enumerate(inputs)}
    buffer = torch.empty(buffer_bytes(memory) + GRANULE_BYTES, dtype=torch.uint8, device=inputs[0].device)
    skip = -buffer.data_ptr() % GRANULE_BYTES
    places = displace(memory, buffer.data_ptr() + skip)
    return [
        buffer[skip + places[index] :][: one.nbytes].view(one.dtype).view(one.shape) for index, one in enumerate(inputs)
    ]


def _never_copied(values: Mapping[int, torch.Tensor]) -> None:
    raise AssertionError(f"input {min(values)} is aligned and lies outside of the graph's memory")


def _following(graph: torch.cuda.CUDAGraph, tracker: AddressTracker) -> Replay:
    def run(inputs: list[torch.Tensor]) -> None:
        tracker.follow(inputs)
        graph.replay()
        tracker.launched()

    return run


def _captured(graph: CapturedGraph, memory: dict[int, MemoryRange]) -> Capture:
    placeholders = tuple(Placeholder(input=index, memory=one) for index, one in memory.items())
    return Capture(graph=graph, placeholders=placeholders)


def _objection(plan: Plan, variant: Variant) -> str | None:
    """Return why the plan is not one of this variant alone; None where it is."""
    copied = [reason.message for one in plan.inputs for reason in one.reasons]
    if copied:
        return copied[0]
    if any(node.updater != variant for node in plan.nodes):
        return next((reason for _, reason in plan.fallbacks), "another updater was taken")
    return None


ELEMENTS = 128
"""Elements that one node reads and writes; the smallest input has twice as many."""


@triton.jit
def consume(source, destination, elements: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set destination = 2 * source, of the first `elements` elements."""
    places = tl.arange(0, elements)
    tl.store(destination + places, tl.load(source + places) * 2)


def launch(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Launch one node's work."""
    consume[(1,)](source, destination, elements=ELEMENTS)
