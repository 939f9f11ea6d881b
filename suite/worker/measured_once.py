"""Measure once, after a cell's timed blocks: Encore's report, memory, copies, other metrics, a profile.

It takes three steps. What needs no profiler comes first, for a profiler slows down all launches after it. Then the
profiler is loaded, which takes seconds and times nothing, so that all cells of a workload can do it at the same time.
Then the cell is profiled, while no other is at work.
"""

from __future__ import annotations

import os

from suite.measure.copies import copies_of
from suite.measure.graphs import encore_report, recorded_graphs
from suite.measure.memory import peak, restart_peak
from suite.measure.metrics import PreparedCell, metrics
from suite.measure.profiling import BEFORE, kernels_of, load_profiler, profile_iterations
from suite.results.schema import Copies, Memory, Metrics
from suite.worker.cell_program import CellProgram
from suite.worker.compilation import Compilation
from suite.worker.protocol import CollectStep, core_for


class MeasuredOnce:
    """Measure what is measured once of a compiled program."""

    def __init__(self, program: CellProgram, compilation: Compilation) -> None:
        self._program = program
        self._compilation = compilation
        self._device = program.instance.device
        self._mode = compilation.mode
        self._iterate = compilation.iterate_set
        self._found: Metrics | None = None
        self._copies: Copies | None = None
        self._loaded = False

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def core(self) -> int | None:
        """Return the core on which metrics are timed: in all modes the same, and one for each rank."""
        cores = sorted(os.sched_getaffinity(0))
        return core_for(0, cores, rank=self._program.spec.rank, ranks=self._program.ranks.count)

    def take(self, step: CollectStep) -> Metrics | None:
        """Take a step, and return what is known then. Those before it are taken first where they were not."""
        if step == "once":
            return self._without_profiler()
        if step == "kernels":
            report = encore_report() if self._mode.backend == "encore" else None
            kernels = kernels_of(self._iterate, self._compilation.sources.digests()) if self._on_gpu else None
            return Metrics(encore_report=report, kernels=kernels)
        found = self._found or self._without_profiler()
        if self._on_gpu and not self._loaded:
            load_profiler(self._iterate)
        self._loaded = True
        return None if step == "profiler" else self._profiled(found)

    def _without_profiler(self) -> Metrics:
        """Return what needs no profiler. On a GPU nothing else may be at work: some of it is timed."""
        report = encore_report() if self._mode.backend == "encore" else None
        memory = self._replay_memory()
        ranks, module = self._program.ranks, self._program.instance.module
        cell = PreparedCell(self._iterate, self._device, self._mode, ranks.largest, self.core, module)
        more = {metric.name: metric.values(cell) for metric in metrics()}
        self._copies = self._placeholder_copies() if self._on_gpu and self._mode.needs_gpu else None
        self._found = Metrics(memory=memory, encore_report=report, more=more)
        return self._found

    def _profiled(self, found: Metrics) -> Metrics:
        profile = None
        if self._on_gpu:
            profile = profile_iterations(self._iterate, self._program.ranks.any, self._compilation.sources.digests())
        # No tree of CUDA graphs holds those of a captured iteration.
        graphs = self._compilation.captured.graphs() if self._compilation.captured is not None else 0
        graphs += len(recorded_graphs(self._device)) if self._mode.uses_cuda_graphs else 0
        profiled = {
            "coverage": profile.coverage if profile else None,
            "graphs": self._compilation.graphs.counts(graphs) if self._mode.backend is not None else None,
            "copies": self._copies,
            "kernel_time_us": profile.kernel_time_us if profile else None,
            "kernels": profile.kernels if profile else None,
        }
        return found.model_copy(update=profiled)

    def _replay_memory(self) -> Memory | None:
        restart_peak(self._device)
        for position in range(len(self._program.input_sets)):
            self._iterate(position)
        self._program.timer.synchronize()
        replay_peak = peak(self._device)
        if replay_peak is None or self._compilation.compile_peak is None:
            return None
        peaks = (*self._compilation.compile_peak, *replay_peak)
        return Memory(**dict(zip(Memory.model_fields, peaks, strict=True)))

    def _placeholder_copies(self) -> Copies:
        self._iterate(BEFORE)  # or the inputs might be where they were, and no pointer be written
        if self._compilation.captured is not None:
            return self._compilation.captured.copies()
        return copies_of(lambda: self._iterate(0))
