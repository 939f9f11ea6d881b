"""Compile a cell's program in a mode, and call it until its CUDA graphs are final.

Compiling ends with warm-up, in which every CUDA graph is recorded and replayed. Settling continues until none of
Encore's graphs waits for more calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import optimizations
from models.parts import CapturedByHand
from optimizations.torch_internals.tuning import mark_graphs
from suite.measure.compile_times import restart_timers, timer_seconds
from suite.measure.graphs import GraphLog, graphs_wait_for_memory
from suite.measure.iteration import Iterate, callable_for, iteration, seed_all
from suite.measure.memory import Peak, peak, release, release_workspaces, restart_peak
from suite.measure.modes import Mode
from suite.measure.profiling import KernelSources
from suite.results.schema import CALLS_OF_START, CompileConditions, CompileTimes
from suite.worker.captured_iteration import CapturedIteration, captured_iteration
from suite.worker.cell_program import CellProgram
from suite.worker.protocol import OomTogether, Unsupported

SETTLE_S = 100.0
"""Longest time in seconds for which a cell is called until Encore's graphs are final, without waits for the GPU's
lock."""

PAIR = 2
"""Number of modes in the smallest group: a mode and its baseline."""

CALLS_TO_CAPTURE = 4
"""`graph_step` runs the first call unchanged, observes two, and launches a graph from the fourth on."""

CALLS_TO_REPLAY = 3
"""CUDAGraph Trees warm a function up in the first call, record it in the second, and replay it from the third on."""


class Compilation:
    """Compile a program in a mode. `announce` is called with each phase as it begins.

    Attributes:
        iterate: the compiled iteration; set by `compile`.
        captured: the same, where the mode captures more than the module.
        graphs, sources, compile_peak: of the last compilation, for `MeasuredOnce`.
    """

    def __init__(self, program: CellProgram, mode: Mode, announce: Callable[[str], None]) -> None:
        self._program = program
        self._announce = announce
        self.mode = mode
        self.graphs = GraphLog(wants_cuda_graphs=mode.uses_cuda_graphs)
        self.compile_peak: Peak | None = None
        self.sources = KernelSources()
        self.captured: CapturedIteration | None = None
        self.iterate: Iterate
        self._call: Callable[..., Any]
        self._compile_times: CompileTimes | None = None

    def compile(self, conditions: CompileConditions) -> None:
        """Run the real compilation, recordings and warm-up."""
        # The modes share a cache, and must not load graphs of other modes or of the trial from it.
        mark_graphs(self.mode.name)
        self.sources = KernelSources()  # without the trial's kernels
        self._compile_times = self._compile_and_warm_up(conditions)

    def settle(self) -> CompileTimes:
        """Call until Encore's graphs are what they will stay; return the times of compiling with what that took."""
        assert self._compile_times is not None, "it is compiled before"
        return self._settle(self._compile_times)

    def compile_again(self) -> None:
        """Compile again from the beginning, after the compiled code was dropped."""
        self.graphs = GraphLog(wants_cuda_graphs=self.mode.uses_cuda_graphs)  # the first graphs are gone
        self.sources = KernelSources()
        self._settle(self._compile_and_warm_up(CompileConditions.WARM, again=True))

    def callable_for(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the module as the mode calls it.

        Raises:
            Unsupported: the mode captures by hand, and the program neither trains nor is a `CapturedByHand`.
        """
        if self.mode.captures != "by hand" or self._program.instance.workload.task == "training":
            return callable_for(self.mode, module)
        if not isinstance(module, CapturedByHand):
            raise Unsupported(
                f"mode {self.mode.name} is for training, and for programs that capture a part, as NANOGPT"
            )
        return module.captured_by_hand()

    def compiled_iteration(self, call: Callable[..., object]) -> Iterate:
        """Return the iteration with the compiled module, captured as the mode requires."""
        by_hand = self.mode.captures == "by hand" and self._program.instance.workload.task == "training"
        if not (self.mode.wraps_iteration or by_hand):
            return self._iteration(call)
        self._free_capture()
        self.captured = captured_iteration(self.mode, self._program.instance, call)
        return self.captured

    @property
    def calls_to_replay(self) -> int:
        """Return the number of the first call that launches graphs."""
        return CALLS_TO_CAPTURE if self.mode.captures_more else CALLS_TO_REPLAY

    def iterate_set(self, position: int) -> None:
        """Run one iteration. Any number is allowed: input sets rotate."""
        input_sets = self._program.input_sets
        self.iterate(input_sets[position % len(input_sets)])

    def take_optimizer_in(self) -> None:
        """Step the optimizer in each later iteration, if requested; checks ran without it, on unchanged weights.

        What is captured is captured again, for loops whose steps return the loss and nothing else.
        """
        workload = self._program.instance.workload
        wanted = self._program.spec.with_optimizer and workload.task == "training" and workload.own is None
        optimizer = self._program.instance.optimizer() if wanted else None
        if self.captured is not None:
            self._free_capture()
            self.iterate = self.captured = captured_iteration(
                self.mode, self._program.instance, self._call, optimizer=optimizer, outputs=False
            )
        elif optimizer is None:
            return
        else:
            self.iterate = iteration(
                self._program.instance, self._call, marks_steps=self._program.marks_steps, optimizer=optimizer
            )
        calls = len(self._program.input_sets) + (CALLS_TO_CAPTURE if self.captured is not None else 0)
        for position in range(calls):
            self.iterate_set(position)
        if self.captured is not None:
            self.captured.require_replays()

    def forget_trial(self) -> None:
        """Drop all state of the trial, even if it failed."""
        self._free_capture()
        self.forget()

    def _free_capture(self) -> None:
        if self.captured is not None:
            self.captured.close()
            self.captured = None

    def forget(self) -> None:
        """Drop the compiled code and its graphs, which would wait for calls and use memory."""
        torch.compiler.reset()
        if self.mode.is_encores:
            optimizations.reset()
        release(torch.device(self._program.spec.device))

    def _compile_and_warm_up(self, conditions: CompileConditions, *, again: bool = False) -> CompileTimes:
        spec, device = self._program.spec, self._program.instance.device
        announce = (lambda phase: None) if again else self._announce  # phases are announced in order, each once
        announce("compile")
        self._call = self.callable_for(self._program.instance.module)
        self.iterate = self.compiled_iteration(self._call)
        seed_all(spec.seed)
        restart_timers()
        turns = self._program.turns
        turns.waited_s = 0.0
        release_workspaces(device)
        restart_peak(device)
        with self.graphs.recording():
            begin = time.perf_counter()
            self.iterate_set(0)
            self._program.timer.synchronize()
            first_call_s = time.perf_counter() - begin - turns.waited_s
            announce("warm-up")
            calls_s = [first_call_s]
            for position in range(1, max(spec.warm_up, self.calls_to_replay - 1 + spec.input_sets)):
                calls_s.append(self._timed_call(position))
            warm_up_s = time.perf_counter() - begin - turns.waited_s
        return CompileTimes(
            first_call_s=first_call_s,
            warm_up_s=warm_up_s,
            waited_s=turns.waited_s,
            warm_cache=spec.warm_cache,
            parts=timer_seconds(),
            conditions=conditions,
            warm_up_calls=len(calls_s),
            calls_s=tuple(calls_s[:CALLS_OF_START]),
        )

    def _timed_call(self, position: int) -> float:
        """Run one iteration to its end, and return the seconds it took; a wait for its turn is not among them."""
        with self._program.calling():
            begin = time.perf_counter()
            self.iterate_set(position)
            self._program.timer.synchronize()
            return time.perf_counter() - begin

    def _settle(self, times: CompileTimes) -> CompileTimes:
        """Call on until no graph of Encore's waits for more calls, or time is up; return the times with what that took.

        In a user's program, graphs are examined once they were in use for ten times the time of the examination. The
        suite does not wait so long; the row has the time spent. Also, a user's program shares the GPU with no other
        modes.

        Raises:
            OomTogether: graphs wait for memory that other modes use, and a smaller group is possible.
        """
        calls, spent, calls_s = 0, 0.0, [*times.calls_s]
        with self.graphs.recording():
            while self._program.ranks.any(not optimizations.settled() and spent < SETTLE_S):
                took_s = self._timed_call(calls)
                spent += took_s
                calls += 1
                if len(calls_s) < CALLS_OF_START:
                    calls_s.append(took_s)
        if self._program.spec.alive_together > PAIR and (short := graphs_wait_for_memory()) is not None:
            raise OomTogether(f"with other modes on the GPU, Encore's graphs stay as stock's are for lack of {short}")
        if self.captured is not None:
            self.captured.require_replays()
        self.compile_peak = peak(self._program.instance.device)
        found = {
            "settle_calls": calls,
            "settled": optimizations.settled(),
            "settle_s": spent,
            "calls_s": tuple(calls_s),
        }
        return times.model_copy(update=found)

    def _iteration(self, call: Callable[..., object]) -> Iterate:
        return iteration(self._program.instance, call, marks_steps=self._program.marks_steps)
