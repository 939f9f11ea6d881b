"""Keep one cell alive in this process: built, checked, compiled and warmed up, then measured block by block.

It has a program (`suite.worker.cell_program`), its compilation in the mode (`suite.worker.compilation`), and a check of
the results (`suite.worker.judge`). The order of `build`, `compile` and `settle`, with reasons:

1. Build the module and all input sets, the latter at different addresses.
2. Run eager for reference; its results wait in host memory. Start the compilers.
3. Stochastic workloads: compile once for trial so that eager's random numbers are drawn, and compare that.
4. The real compilation: first call, then warm-up until every CUDA graph is recorded and replayed.
5. Compare replays with eager (a first call replays nothing), and call on each input once more to see which tensors
   have the same bits in each call. This is reported as the end of warm-up: phases are announced in order, each once.
6. Forget the references, so that they take no memory while the mode is timed.

A mode's later processes leave out 2 and 3.

This module imports torch; the worker imports it once the environment variables of the cell are set.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial

import torch

from models.instance import instantiate
from models.registry import find
from optimizations.torch_internals.tuning import tune_once
from suite.measure.compile_times import share_toolchain, start_toolchain
from suite.measure.memory import restart_peak
from suite.measure.modes import select_modes
from suite.measure.timing import iteration_us, measure_block
from suite.results.schema import Block, CompileConditions
from suite.worker.cell_program import CellProgram
from suite.worker.compilation import Compilation
from suite.worker.gpu_turns import alone_to_tune
from suite.worker.judge import Judge
from suite.worker.measured_once import MeasuredOnce
from suite.worker.protocol import CellSpec, Done, Measure, Prepared
from suite.worker.rank_group import RankGroup


def start(spec: CellSpec) -> Done:
    """Import the modules of a cell and start the compilers, without a GPU, while other cells compile."""
    torch.compiler.cudagraph_mark_step_begin()  # all modes mark their steps, and the first mark imports Inductor
    (mode,) = select_modes([spec.mode])
    workload = find(spec.workload)
    if not workload.builds_on_device:
        with contextlib.suppress(Exception):  # if the tiny model fails, the real one reports the reason
            instantiate(workload, variant=spec.variant, size="tiny", device="cpu", seed=spec.seed)
    if mode.backend is None:
        return Done()
    return Done(vec_isa_ok=start_toolchain(torch.device("cpu"), spec.vec_isa_ok, spec.headers_dir))


class LiveCell:
    """Run a prepared cell. `announce` is called with each phase as it begins."""

    def __init__(self, spec: CellSpec, announce: Callable[[str], None]) -> None:
        self._spec = spec
        self._announce = announce
        (mode,) = select_modes([spec.mode])
        self._program = CellProgram(spec)
        self._compilation = Compilation(self._program, mode, announce)
        self._judge = Judge(self._program, self._compilation, announce)
        self._once: MeasuredOnce | None = None

    def build(self) -> Done:
        """Run everything up to the real compilation.

        Raises:
            Inaccurate: the trial of a stochastic workload differs from eager by more than its precision explains.
        """
        self._announce("build")
        tune_once(partial(alone_to_tune, self._program.turns, self._spec.device))
        self._program.build()
        self._announce("check")
        spec, found = self._spec, None
        share_toolchain(spec.vec_isa_ok, spec.headers_dir)
        if spec.known_digests is None:
            self._judge.run_reference()
        has_reference_elsewhere = spec.known_digests is not None or isinstance(self._program.ranks, RankGroup)
        if has_reference_elsewhere and not self._judge.is_tried:
            self._judge.call_uncompiled()
        if self._compilation.mode.backend is not None:
            found = start_toolchain(self._program.instance.device, spec.vec_isa_ok, spec.headers_dir)
        return Done(vec_isa_ok=found)

    def compile(self, conditions: CompileConditions) -> None:
        """Run the real compilation, recordings and warm-up."""
        self._compilation.compile(conditions)

    def settle(self) -> Prepared:
        """Check and settle the compiled cell, so that blocks can be measured.

        Raises:
            Inaccurate: the results differ from eager's by more than their precision explains.
        """
        compile_times = self._compilation.settle()
        correctness = self._judge.correctness()
        self._judge.forget()
        self._compilation.take_optimizer_in()
        instance = self._program.instance
        restart_peak(instance.device)
        if instance.device.type != "cuda":
            gc.collect()  # `freeze` would keep this garbage
        gc.freeze()  # otherwise each block collects over all objects that torch has imported
        return Prepared(
            parameters=instance.parameters,
            input_bytes=instance.input_bytes(self._program.input_sets[0]),
            correctness=correctness,
            compile=compile_times,
            iteration_us=self._iteration_us(),
        )

    def _iteration_us(self) -> float:
        """Return the iteration time of the mode's first process; in that process, measure it.

        Other processes that settle at the same time must not call meanwhile, so the GPU is locked exclusively.

        Ranks do not lock: see `CellProgram.calling`.
        """
        if self._spec.known_iteration_us is not None:
            return self._spec.known_iteration_us
        program = self._program
        with contextlib.nullcontext() if isinstance(program.ranks, RankGroup) else program.turns.alone():
            return iteration_us(self._compilation.iterate, program.input_sets, program.timer)

    def measure(self, command: Measure) -> Block:
        """Measure one block of samples."""
        return measure_block(
            self._compilation.iterate,
            self._program.input_sets,
            self._program.timer,
            read_gpu=self._program.read_gpu,
            **command.model_dump(exclude={"do"}),
        )

    @property
    def once(self) -> MeasuredOnce:
        """Return what is measured once, after the blocks."""
        self._once = self._once or MeasuredOnce(self._program, self._compilation)
        return self._once
