"""Measure once, after a cell's timed blocks: Encore's report, memory, copies, other metrics, a profile.

It takes three steps. What needs no profiler comes first, for a profiler slows down all launches after it. Then the
profiler is loaded, which takes seconds and times nothing, so that all cells of a workload can do it at the same time.
Then the cell is profiled, while no other is at work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from suite.measure import copies
from suite.measure.copies import CopyCount
from suite.measure.encore_report import encore_report
from suite.measure.graphs import GraphLog, recorded_graphs
from suite.measure.memory import Peak, peak, restart_peak
from suite.measure.metrics import PreparedCell, metrics
from suite.measure.modes import Mode
from suite.measure.profiling import BEFORE, KernelSources, kernels_of, load_profiler, profile_iterations
from suite.results.schema import Copies, Memory, Metrics
from suite.worker.captured_iteration import CapturedIteration


@dataclass(slots=True)
class MeasuredOnce:
    """Measure the part of one cell that is measured once.

    Attributes:
        iterate: one iteration; the number says which of the input sets it takes, all numbers are allowed.
        agreed: whether any of the processes that work on the cell says so.
        largest, core: of what each of them says, and where its calls are timed, as metrics ask
            (`suite.measure.metrics.PreparedCell`).
        graphs: what was compiled until now.
        sources: those of the generated kernels.
        captured: the iteration, where the mode captures more than the module.
        module: that of the program.
    """

    mode: Mode
    device: torch.device
    input_sets: int
    iterate: Callable[[int], object]
    synchronize: Callable[[], None]
    agreed: Callable[[bool], bool]
    largest: Callable[[float], float]
    core: int | None
    graphs: GraphLog
    compile_peak: Peak | None
    sources: KernelSources
    captured: CapturedIteration | None = None
    module: torch.nn.Module | None = None
    _without_profiler: Metrics | None = field(default=None, init=False)
    _counted: CopyCount | None = field(default=None, init=False)
    _loaded: bool = field(default=False, init=False)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def without_profiler(self) -> Metrics:
        """Take the first step, and return what it finds. On a GPU nothing else may be at work: some of it is timed."""
        report = encore_report() if self.mode.backend == "encore" else None
        memory = self._replay_memory()
        cell = PreparedCell(self.iterate, self.device, self.mode, self.largest, self.core, self.module)
        more = {metric.name: metric.values(cell) for metric in metrics()}
        self._counted = self._placeholder_copies() if self._on_gpu and self.mode.needs_gpu else None
        found = _nothing().model_copy(update={"memory": memory, "encore_report": report, "more": more})
        self._without_profiler = found
        return found

    def load_profiler(self) -> None:
        """Take the second step. What others do meanwhile does not matter."""
        if self._on_gpu:
            load_profiler(self.iterate)
        self._loaded = True

    def whole(self) -> Metrics:
        """Take the third step, and those before it that were not taken."""
        found = self._without_profiler or self.without_profiler()
        if not self._loaded:
            self.load_profiler()
        counted = self._counted
        profile = profile_iterations(self.iterate, self.agreed, self.sources.digests()) if self._on_gpu else None
        graphs = recorded_graphs(self.device) if self.mode.uses_cuda_graphs else []
        # No tree of CUDA graphs holds those of a captured iteration.
        captured = self.captured.graphs() if self.captured is not None else 0
        coverage = profile.coverage if profile else None
        profiled = {
            "coverage": coverage,
            "graphs": self.graphs.counts(len(graphs) + captured) if self.mode.backend is not None else None,
            "copies": Copies(
                placeholder_bytes=counted.copied_bytes if counted else None,
                placeholder_tensors=counted.tensors if counted else None,
                pointer_bytes=counted.pointer_bytes if counted else None,
                device_to_device_bytes=profile.device_to_device_bytes,
                host_to_device=profile.host_to_device,
            )
            if profile
            else None,
            "kernel_time_us": profile.kernel_time_us if profile else None,
            "kernels": profile.kernels if profile else None,
        }
        return found.model_copy(update=profiled)

    def kernels(self) -> Metrics:
        """Return which kernels an iteration runs, what Encore says, and nothing else."""
        report = encore_report() if self.mode.backend == "encore" else None
        kernels = kernels_of(self.iterate, self.sources.digests()) if self._on_gpu else None
        return _nothing().model_copy(update={"encore_report": report, "kernels": kernels})

    def _replay_memory(self) -> Memory | None:
        restart_peak(self.device)
        for position in range(self.input_sets):
            self.iterate(position)
        self.synchronize()
        replay_peak = peak(self.device)
        if replay_peak is None or self.compile_peak is None:
            return None
        return Memory(
            compile_peak_allocated_bytes=self.compile_peak.allocated_bytes,
            compile_peak_reserved_bytes=self.compile_peak.reserved_bytes,
            replay_peak_allocated_bytes=replay_peak.allocated_bytes,
            replay_peak_reserved_bytes=replay_peak.reserved_bytes,
        )

    def _placeholder_copies(self) -> CopyCount:
        self.iterate(BEFORE)  # or the inputs might be where they were, and no pointer be written
        if self.captured is not None:
            return self.captured.copies(lambda: self.iterate(0))
        with copies.counting() as count:
            self.iterate(0)
        return count


def _nothing() -> Metrics:
    return Metrics(coverage=None, graphs=None, copies=None, memory=None, kernel_time_us=None)
