"""One cell alive in this process: built, checked, compiled and warmed up, then measured block by block.

The order of `build` and `compile`, and why:

1. Build the module and all input sets, the latter at different addresses.
2. Run eager for reference; its results wait in host memory. Start the compilers.
3. Stochastic workloads: compile once for trial so that eager's random numbers are drawn (`suite.measure.eager_random`),
   and compare that. The real compilation has another random stream, so its values cannot be compared. Where other
   processes do this meanwhile (Note [Trials] in `suite.trials`), this one takes their verdict in step 5.
4. The real compilation: first call, then warm-up until every CUDA graph is recorded and replayed. In both compilations
   one mode leads, and the others find its kernels (`suite.compile_order`).
5. Compare replays with eager (a first call replays nothing), and call on each input once more to see which tensors
   have the same bits in each call. To the outside this is the end of warm-up: phases follow one another and none comes
   back.
6. Forget the references, so that they take no memory while the mode is timed.

Results that have the bits of others which were compared, in another process or mode, are as right as those
(`suite.measure.judged`). A mode's later processes leave out 2 and 3: they look whether they have the digests of the
first process. Of a tensor that has other bits in each call they compare a sketch (`suite.measure.fingerprint`). If one
is not as in the first process, everything is done as there.

A workload that is split over GPUs has a process for each (`suite.rank_group`). Each compares its own results with those
of the whole module, and all compare theirs with one another. What is decided about further calls is decided together.

This module imports torch; the worker imports it once the environment variables of the cell are set.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

import optimizations
from models.instance import Instance, instantiate
from models.registry import Inputs, find
from optimizations.recording.budget import spent_at_once
from optimizations.torch_internals.graph_keys import mark_graphs
from optimizations.torch_internals.tuning import tune_once
from suite.captured_iteration import CapturedIteration, captured_iteration
from suite.cell_errors import Inaccurate, Unsupported
from suite.compile_cache import JUDGED
from suite.compile_order import REAL, TRIAL, Follower, Place
from suite.gpu import LEAST_COMPUTE_CAPABILITY
from suite.gpu_turns import GpuTurns
from suite.iteration import Iterate, callable_for, iteration, seed_all, set_numerics
from suite.measure.across_ranks import largest_spread, norms
from suite.measure.captured import CaptureLog
from suite.measure.compile_times import (
    restart_timers,
    share_toolchain,
    start_toolchain,
    tell_toolchain,
    timer_seconds,
    untimed,
    waited_s,
)
from suite.measure.correctness import (
    TOLERANCE,
    Agreement,
    combine,
    compare_widened,
    compare_with_eager,
    compute_dtype,
    distances,
    loss_scales,
    refused_of_other_inputs,
)
from suite.measure.eager_random import eager_random_numbers
from suite.measure.fingerprint import sketched_error
from suite.measure.gpu_state import gpu_reader
from suite.measure.graphs import GraphLog
from suite.measure.judged import Judged, JudgedResults
from suite.measure.kernel_sources import KernelSources
from suite.measure.memory import Peak, peak, release, reserved_bytes, restart_peak
from suite.measure.results import Results, State, bits_of_run, digest_of, run_checked, run_unchecked
from suite.measure.timing import iteration_us, measure_block, require_distinct_addresses, timer_for
from suite.measured_once import MeasuredOnce
from suite.memory_need import require_memory
from suite.modes import select_modes
from suite.protocol import WAITING, Built, CellSpec, Measure, Prepared
from suite.rank_group import RankGroup, join
from suite.schema import Block, CompileConditions, CompileTimes, Correctness
from suite.trial_cache import trial_cache

SETTLE_S = 20.0
"""How long a cell is called before it is measured, at most, so that Encore's graphs become what they will stay: seconds
of calls, without those in which it waits for its turn."""

TURNS = "turns"
"""The file in the cache folder by which a workload's processes share the GPU."""

CALLS_TO_CAPTURE = 4
"""`graph_step` runs the first call as it is, looks at two, and launches a graph from the fourth on."""

CALLS_TO_REPLAY = 3
"""CUDAGraph Trees warm a function up in the first call, record it in the second, and replay it from the third on."""


def start(spec: CellSpec, *, asked: bool = False) -> Built:
    """What a process does while others compile: import what the cell will need, without a GPU.

    It starts the compilers too, once it is known what they can do, or where it is `asked` to find that out.
    """
    torch.compiler.cudagraph_mark_step_begin()  # all modes mark their steps, and the first mark imports Inductor
    (mode,) = select_modes([spec.mode])
    workload = find(spec.workload)
    if not workload.builds_on_device:
        with contextlib.suppress(Exception):  # if the tiny model fails, the real one will say why
            instantiate(workload, variant=spec.variant, size="tiny", device="cpu", seed=spec.seed)
    vec_isa_ok = None
    if mode.backend is not None and (asked or spec.vec_isa_ok is not None):
        try:
            vec_isa_ok = start_toolchain(torch.device("cpu"), spec.vec_isa_ok, spec.headers_dir)
        finally:
            if asked and spec.headers_dir is not None:
                tell_toolchain(vec_isa_ok, spec.headers_dir)
    return Built(vec_isa_ok=vec_isa_ok)


@contextmanager
def alone_to_tune(turns: GpuTurns, device: str) -> Iterator[None]:
    """The GPU for this process, for as long as a kernel is tuned.

    What this process has launched is waited for before. It may be a collective, which ends when another rank has
    launched its part; and that rank must not wait for the turn on its own GPU of a process whose neighbour waits for
    the turn on this one.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    with turns.alone():
        yield


@cache
def _turns_of(file: Path) -> GpuTurns:
    """One place for a process: it would wait for itself with two of them, and cells that follow one another tune by the
    first one's."""
    return GpuTurns(file, untimed)


class LiveCell:
    """A prepared cell. `announce` is told each phase as it begins."""

    def __init__(self, spec: CellSpec, announce: Callable[[str], None]) -> None:
        self._spec = spec
        self._announce = announce
        (self._mode,) = select_modes([spec.mode])
        self._turns = _turns_of(Path(spec.cache_dir) / TURNS)
        self._place = Place(Path(spec.cache_dir), leads=spec.leads, follows=spec.follows, most_wait_s=spec.most_wait_s)
        self._captures = CaptureLog()
        self._once: MeasuredOnce | None = None
        self._graphs = GraphLog(wants_cuda_graphs=self._mode.uses_cuda_graphs)
        self._compile_peak: Peak | None = None
        self._sources = KernelSources()
        self._captured: CapturedIteration | None = None
        self._eager: list[Results] | None = None
        self._trial_verdict: Agreement | None = None
        self._has_room_for_trials = True
        self._set_aside: Instance | None = None
        self._compile_times: CompileTimes | None = None

    def build(self) -> Built:
        """Everything up to the real compilation.

        Raises:
            Unsupported: there is no GPU for a GPU cell, or it is too old.
            OomExpected: the GPU has less memory than the workload needs at least.
            OomTogether: it has less than all modes need that are to be on it at the same time.
            Inaccurate: the trial of a stochastic workload differs from eager by more than its precision explains.
        """
        self._announce("build")
        with self._place.built():
            tune_once(partial(alone_to_tune, self._turns, self._spec.device))
            self._build()
            self._announce("check")
            spec, found = self._spec, None
            share_toolchain(spec.vec_isa_ok, spec.headers_dir, being_asked=spec.being_asked)
            if spec.known_digests is None and not self._tried_elsewhere:
                self._run_reference()
            if self._mode.backend is not None:
                # Behind the trial, which takes longer than whoever is being asked about C++ to find it out.
                found = start_toolchain(
                    self._instance.device, spec.vec_isa_ok, spec.headers_dir, being_asked=spec.being_asked
                )
            return Built(vec_isa_ok=found, was_tried=self._trial_verdict is not None)

    @property
    def _tried_elsewhere(self) -> bool:
        return self._is_tried and self._spec.tried_elsewhere is not None and self._has_room_for_trials

    def try_out(self, mode: str) -> Correctness:
        """The verdict on a trial of another mode, by a built cell that does not compile. It is as before afterwards.

        The trials of others follow this one (`suite.compile_order`).

        Raises:
            Inaccurate: the trial differs from eager by more than its precision explains.
        """
        before = self._mode, self._place, self._eager
        (self._mode,) = select_modes([mode])
        self._place = Place(Path(self._spec.cache_dir), leads=True, follows=False, compilations=(TRIAL,))
        try:
            with self._place.built():
                self._run_reference()
            return self.trial_correctness()
        finally:
            self.forget_trial()
            self._mode, self._place, self._eager = before
            self._trial_verdict = None

    def forget_trial(self) -> None:
        """Nothing of it is left, however it has ended."""
        self._free_capture()
        self._forget_compiled()

    def trial_correctness(self) -> Correctness:
        """The verdict on the trial, of a cell that has run one."""
        assert self._trial_verdict is not None, "stochastic workloads are tried, in modes that compile"
        return self._correctness(self._trial_verdict)

    def compile(self, conditions: CompileConditions) -> None:
        """The real compilation, recordings and warm-up."""
        # In the cache that all modes share, graphs of another mode, or of the trial, are not this one's.
        mark_graphs(self._mode.name)
        self._sources = KernelSources()  # nor are the trial's kernels
        self._compile_times = self._compile_and_warm_up(conditions)

    def settle(self, tried: Correctness | None = None, alike: Sequence[Correctness] = ()) -> Prepared:
        """Bring the compiled cell to the point where blocks can be measured.

        Args:
            tried: the verdict on a trial of this mode in another process.
            alike: verdicts on other modes, which hold for this one if it has their bits.

        Raises:
            Inaccurate: the results differ from eager's by more than their precision explains.
        """
        assert self._compile_times is not None, "it is compiled before"
        compile_times = self._settle(self._compile_times)
        correctness = None
        if tried is not None:
            self._trial_verdict = _agreement(tried)
        if self._ranks.any(self._spec.known_digests is None or not self._as_in_the_first_process()):
            correctness = next((known for known in alike if self._as_known(known.digests, known.varying)), None)
            if correctness is None:
                if self._eager is None and tried is None:
                    self._run_reference()
                    if self._trial_verdict is not None:  # the trial has thrown away what was compiled
                        self._compile_again()
                correctness = self._check()
        self._eager = self._trial_verdict = self._set_aside = None
        self._states.clear()
        self._take_optimizer_in()
        restart_peak(self._instance.device)
        gc.freeze()  # or each block would wait for a walk over all that torch has imported
        return Prepared(
            parameters=self._instance.parameters,
            input_bytes=self._instance.input_bytes(self._input_sets[0]),
            correctness=correctness,
            compile=compile_times,
            reserved_bytes=reserved_bytes(self._instance.device),
            iteration_us=self._iteration_us(),
        )

    def _iteration_us(self) -> float:
        """What the mode's first process said; or taken while no other process calls, where they settle side by side.

        Ranks have no turns: see `_calling`.
        """
        if self._spec.known_iteration_us is not None:
            return self._spec.known_iteration_us
        with contextlib.nullcontext() if isinstance(self._ranks, RankGroup) else self._turns.alone():
            return iteration_us(self._iterate, self._input_sets, self._timer)

    def measure(self, command: Measure) -> Block:
        """One block of samples."""
        return measure_block(
            self._iterate,
            self._input_sets,
            self._timer,
            index=command.index,
            turn=command.turn,
            samples=command.samples,
            throughput_iterations=command.throughput_iterations,
            read_gpu=self._read_gpu,
            lead_in=command.lead_in,
            process=command.process,
            core=command.core,
        )

    @property
    def once(self) -> MeasuredOnce:
        """What is measured once, behind the blocks."""
        if self._once is None:
            self._once = MeasuredOnce(
                mode=self._mode,
                device=self._instance.device,
                input_sets=len(self._input_sets),
                iterate=self._iterate_set,
                synchronize=self._timer.synchronize,
                agreed=self._ranks.any,
                largest=self._ranks.largest,
                graphs=self._graphs,
                captures=self._captures,
                compile_peak=self._compile_peak,
                sources=self._sources,
                captured=self._captured,
            )
        return self._once

    def _build(self) -> None:
        spec = self._spec
        workload = find(spec.workload)
        _require_device(spec.device)
        if spec.device == "cuda" and not spec.later:
            total = torch.cuda.get_device_properties(spec.device).total_memory
            need = require_memory(
                workload,
                variant=spec.variant,
                size=spec.size,
                input_sets=spec.input_sets,
                available=total,
                cells=spec.alive_together,
            )
            cells = spec.alive_together + (spec.tried_elsewhere or 0)
            self._has_room_for_trials = need is not None and cells * need <= total
        set_numerics()
        self._ranks = join(spec)
        self._instance: Instance = instantiate(
            workload, variant=spec.variant, size=spec.size, device=spec.device, seed=spec.seed
        )
        if isinstance(self._ranks, RankGroup):
            assert workload.sharding is not None
            workload.sharding.shard(self._instance.module, self._ranks.mesh)
        self._input_sets = [self._instance.inputs(index) for index in range(spec.input_sets)]
        require_distinct_addresses(self._input_sets)
        self._checked = self._input_sets[: spec.check_inputs]
        self._states = [State(self._instance.module, inputs) for inputs in self._checked]
        self._timer = self._ranks.timer(timer_for(self._instance.device))
        self._read_gpu = gpu_reader(_gpu_uuid(self._instance.device))

    @property
    def _marks_steps(self) -> bool:
        """In all modes alike, those that need no marks among them: they differ in what is compiled, in nothing else."""
        return self._instance.device.type == "cuda"

    def _iteration(self, call: Callable[..., object]) -> Iterate:
        return iteration(self._instance, call, marks_steps=self._marks_steps)

    def _compiled_iteration(self, call: Callable[..., object]) -> Iterate:
        """The iteration with what the mode makes of the module, captured as the mode says."""
        if not self._mode.captures_more:
            return self._iteration(call)
        self._free_capture()
        self._captured = captured_iteration(self._mode, self._instance, call)
        return self._captured

    @property
    def _calls_to_replay(self) -> int:
        return CALLS_TO_CAPTURE if self._mode.captures_more else CALLS_TO_REPLAY

    def _free_capture(self) -> None:
        if self._captured is not None:
            self._captured.close()
            self._captured = None

    def _results(self, iterate: Iterate) -> list[Results]:
        """Results on each checked input."""
        return _results_of(self._instance, iterate, self._checked, self._states, self._spec.seed)

    def _as_in_the_first_process(self) -> bool:
        return self._as_known(self._spec.known_digests or [], self._spec.known_varying)

    def _as_known(
        self, known_digests: Sequence[str], known_varying: Sequence[Mapping[str, Sequence[float]]] | None
    ) -> bool:
        """Whether the compiled iteration has these digests, and what varies from call to call is within the
        tolerance."""
        varying = known_varying or [{}] * len(self._checked)
        tolerance = TOLERANCE[compute_dtype(self._instance, self._checked[0])]
        digests, near = [], True
        for inputs, state, known in zip(self._checked, self._states, varying, strict=True):
            bits, found = self._bits(inputs, state, sketched=known)
            digests.append(digest_of({name: each for name, each in bits.items() if name not in known}))
            near &= all(
                name in found and sketched_error(found[name], sketch) <= tolerance
                for name, sketch in known.items()
                if sketch  # or it is not there in every call
            )
        return near and digests == list(known_digests)

    def _bits(
        self, inputs: Inputs, state: State, sketched: Collection[str] = ()
    ) -> tuple[dict[str, str], dict[str, list[float]]]:
        """Of what the compiled iteration computes the bits, and sketches of some tensors: see `bits_of_run`."""
        return bits_of_run(self._instance, self._iterate, inputs, state, self._spec.seed, sketched)

    def _judged(self, kind: str, compiled: list[Results], eager: list[Results]) -> tuple[Agreement, bool]:
        """The verdict, and whether all that was compiled had to be forgotten for it.

        Results that are as right as others of this kind, which another process has compared, get their verdict.
        """
        if isinstance(self._ranks, RankGroup):
            return self._verdict(compiled, eager)[0], False
        shared = JudgedResults(Path(self._spec.cache_dir) / JUDGED / kind)
        release(self._instance.device)
        # It may run the program in a precision that takes several times the memory, and compile it in that: one process
        # at a time. The runner has a clock on whoever has the turn, so the others may wait for as long as it takes.
        self._announce(WAITING)
        with self._turns.alone(math.inf):
            self._announce("compare")
            if (known := self._known_verdict(shared, compiled, eager)) is not None:
                return known, False
            verdict, found = self._verdict(compiled, eager)
            if forgotten := verdict.undecided:
                verdict = self._widened(verdict)
            if verdict.passed:
                shared.add(Judged(tuple(one.all_bits() for one in compiled), tuple(found), verdict))
            release(self._instance.device)
        return verdict, forgotten

    def _verdict(self, compiled: list[Results], eager: list[Results]) -> tuple[Agreement, list[dict[str, float]]]:
        """By comparison with eager; and the errors of each input set by tensor."""
        with self._whole() as (whole, states):
            each = list(zip(compiled, eager, self._checked, states, strict=True))
            found = [distances(one, expected, whole, inputs, state) for one, expected, inputs, state in each]
            verdict = combine(
                [
                    compare_with_eager(one, expected, whole, inputs, state, self._spec.seed, errors)
                    for (one, expected, inputs, state), errors in zip(each, found, strict=True)
                ]
            )
        return refused_of_other_inputs(verdict, compiled, eager, device=self._instance.device), found

    def _known_verdict(self, shared: JudgedResults, compiled: list[Results], eager: list[Results]) -> Agreement | None:
        """The verdict on results that are as right as others, which they join where some bits are their own."""
        others: list[Results] = [Results({}) for _ in compiled]

        def errors(place: int, names: Collection[str]) -> dict[str, float]:
            others[place] = Results({name: compiled[place].tensors[name] for name in names})
            found = distances(
                compiled[place], eager[place], self._instance, self._checked[place], self._states[place], names
            )
            return {name: found[name] for name in names}

        tolerance = TOLERANCE[compute_dtype(self._instance, self._checked[0])]
        as_right = shared.as_right([one.all_bits() for one in compiled], errors, tolerance)
        if as_right is None:
            return None
        verdict = refused_of_other_inputs(as_right.verdict, others, eager, device=self._instance.device)
        if not verdict.passed:
            return None
        if any(one.tensors for one in others):
            shared.add(as_right)
        return verdict

    @property
    def _is_tried(self) -> bool:
        """Whether the verdict is on a trial: see `_trial`."""
        return self._mode.backend is not None and self._instance.workload.stochastic

    def _run_reference(self) -> None:
        own = self._instance
        for scale in loss_scales(own) if self._is_tried else (own.loss_scale,):
            self._instance = replace(own, loss_scale=scale)
            with self._calling(), self._whole() as (whole, states):
                iterate = iteration(whole, whole.module, marks_steps=self._marks_steps)
                eager = _results_of(whole, iterate, self._checked, states, self._spec.seed)
            release(own.device)
            if scale == own.loss_scale or all(results.is_finite() for results in eager):
                break
        self._eager = eager
        try:
            self._trial_verdict = self._trial(eager) if self._is_tried else None
        finally:
            self._instance = own

    @contextmanager
    def _whole(self) -> Iterator[tuple[Instance, list[State]]]:
        """The program on one GPU, and its state: what results are compared with.

        Where it is split over GPUs, that is another instance with the same weights. It is built when it is first asked
        for, and waits in host memory between.
        """
        if not isinstance(self._ranks, RankGroup):
            yield self._instance, self._states
            return
        spec, device = self._spec, self._instance.device
        whole = self._set_aside or instantiate(
            self._instance.workload, variant=spec.variant, size=spec.size, device=spec.device, seed=spec.seed
        )
        whole.module.to(device)
        yield (
            replace(whole, loss_scale=self._instance.loss_scale),
            [State(whole.module, inputs) for inputs in self._checked],
        )
        whole.module.to("cpu")
        self._set_aside = whole
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _trial(self, eager: list[Results]) -> Agreement:
        """Of a stochastic workload: the verdict on it compiled with eager's random numbers, which needs a compilation
        of its own anyway: see Note [Stochastic workloads] in `suite.measure.correctness`."""
        calls = self._calls_to_replay
        cache = Path(self._spec.cache_dir)
        torch.compiler.reset()  # in a later process the real compilation came first, and would be found
        with trial_cache(cache), eager_random_numbers():
            iterate = self._compiled_iteration(callable_for(self._mode, self._instance.module))
            first, *others = self._each_checked() * (calls - 1)
            with self._place.first_call(TRIAL):
                run_unchecked(self._instance, iterate, *first, self._spec.seed)
            with self._calling():  # while another process compiles, or all do
                for inputs, state in others:
                    run_unchecked(self._instance, iterate, inputs, state, self._spec.seed)
                compiled = self._results(iterate)
            self._free_capture()
            self._forget_compiled()
            verdict, _ = self._judged("trial", compiled, eager)
        if not verdict.passed:
            raise Inaccurate(self._correctness(verdict))
        return verdict

    def _forget_compiled(self) -> None:
        """Nothing of what was compiled is left: no graph that would wait for calls, or take memory."""
        torch.compiler.reset()
        if self._mode.is_encores:
            optimizations.reset()
        release(torch.device(self._spec.device))

    def _widened(self, verdict: Agreement) -> Agreement:
        """The verdict on a mode that its own dtype does not decide. All that was compiled is forgotten."""
        wide = compare_widened(
            lambda module: callable_for(self._mode, module),
            self._instance,
            self._checked[0],
            self._states[0],
            self._spec.seed,
            marks_steps=self._marks_steps,
            calls=CALLS_TO_REPLAY,
            forget=self._forget_compiled,
        )
        self._forget_compiled()
        return replace(verdict, passed=verdict.passed and wide.passed, widened_error=wide.max_relative_error)

    def _compile_and_warm_up(self, conditions: CompileConditions, *, again: bool = False) -> CompileTimes:
        spec, device = self._spec, self._instance.device
        announce = (lambda phase: None) if again else self._announce  # phases follow one another, and none comes back
        announce("compile")
        self._call = callable_for(self._mode, self._instance.module)
        self._iterate = self._compiled_iteration(self._call)
        seed_all(spec.seed)
        restart_timers()
        self._turns.waited_s = 0.0
        restart_peak(device)
        with self._noting_graphs():
            begin = time.perf_counter()
            with self._place.first_call(REAL) as place:
                self._iterate_set(0)
                self._timer.synchronize()
            first_call_s = time.perf_counter() - begin - self._waited_s(place)
            announce("warm-up")
            for position in range(1, max(spec.warm_up, self._calls_to_replay - 1 + spec.input_sets)):
                with self._calling():
                    self._iterate_set(position)
            self._timer.synchronize()
            warm_up_s = time.perf_counter() - begin - self._waited_s(place)
        return CompileTimes(
            first_call_s=first_call_s,
            warm_up_s=warm_up_s,
            waited_s=self._waited_s(place),
            warm_cache=spec.warm_cache,
            parts=timer_seconds(),
            conditions=conditions,
        )

    def _waited_s(self, place: Follower) -> float:
        """For the mode that leads, for turns on the GPU, and for what another process was finding out."""
        return place.waited_s + self._turns.waited_s + waited_s()

    def _calling(self) -> AbstractContextManager[None]:
        """A turn for a call that another process's tuning, or its timing of an iteration, must not meet.

        Ranks have none: one that waits for its turn while its neighbour waits for it in a collective would wait for
        ever.
        """
        return contextlib.nullcontext() if isinstance(self._ranks, RankGroup) else self._turns.calling()

    def _compile_again(self) -> None:
        self._graphs = GraphLog(wants_cuda_graphs=self._mode.uses_cuda_graphs)  # of the first time nothing is left
        self._sources = KernelSources()
        self._settle(self._compile_and_warm_up(CompileConditions.WARM, again=True))

    def _settle(self, times: CompileTimes) -> CompileTimes:
        """Call on until no graph of Encore's waits for more calls, or time is up; the times with what that took.

        A user's graphs are looked at once they have been in use for ten times as long as that takes. Here nobody waits
        for that; the row has what looking took.
        """
        calls, spent = 0, 0.0
        with self._noting_graphs(), spent_at_once():
            while self._ranks.any(not optimizations.settled() and spent < SETTLE_S):
                with self._calling():
                    begin = time.perf_counter()
                    self._iterate_set(calls)
                    spent += time.perf_counter() - begin
                calls += 1
            self._timer.synchronize()
        if self._captured is not None:
            self._captured.require_replays()
        for error in self._captures.errors:
            print(f"captured nodes not counted: {error}")
        self._compile_peak = peak(self._instance.device)
        return times.model_copy(update={"settle_calls": calls, "settled": optimizations.settled()})

    @contextmanager
    def _noting_graphs(self) -> Iterator[None]:
        """What is compiled and captured inside the block is counted."""
        with ExitStack() as stack:
            stack.enter_context(self._graphs.recording())
            if self._instance.device.type == "cuda" and self._mode.uses_cuda_graphs:
                stack.enter_context(self._captures.recording())
            yield

    def _iterate_set(self, position: int) -> None:
        self._iterate(self._input_sets[position % len(self._input_sets)])

    def _check(self) -> Correctness:
        verdict, forgotten = self._trial_verdict, False
        ranked = isinstance(self._ranks, RankGroup)
        # Of what was tried only the bits are asked for, and gigabytes of gradients need not come to the host.
        compiled = self._results(self._iterate) if verdict is None or ranked else []
        bits = [one.all_bits() for one in compiled] or [self._bits(*each)[0] for each in self._each_checked()]
        if verdict is None:
            assert self._eager is not None, "eager ran before"
            verdict, forgotten = self._judged("real", compiled, self._eager)
        if verdict.undecided and verdict.widened_error is None:
            verdict = replace(verdict, passed=False)  # of ranks: what is split is not copied to be widened
        if forgotten:
            self._compile_again()
        correctness = self._correctness(verdict, bits)
        if ranked:
            correctness = self._across_ranks(correctness, compiled)
        if not correctness.passed:
            raise Inaccurate(correctness)
        return correctness

    def _across_ranks(self, correctness: Correctness, compiled: list[Results]) -> Correctness:
        """The correctness with what a comparison of all ranks' results adds: their digests, and norms of tensors."""
        said = self._ranks.all((correctness.digests, norms(compiled)))
        spread = largest_spread([own for _, own in said])
        return correctness.model_copy(
            update={
                "ranks_equal": all(digests == said[0][0] for digests, _ in said),
                "ranks_spread": spread,
                "passed": correctness.passed and spread <= correctness.tolerance,
            }
        )

    def _each_checked(self) -> list[tuple[Inputs, State]]:
        return list(zip(self._checked, self._states, strict=True))

    def _correctness(self, verdict: Agreement, bits: Sequence[Mapping[str, str]] = ()) -> Correctness:
        """`bits` are those of the calls before; they are made again, to see which tensors stay the same.

        One that varies on an input set counts as varying on all: two calls may have the same bits by chance.
        """
        varying: list[dict[str, list[float]]] = []
        digests: list[str] = []
        checked = list(zip(bits, self._checked, self._states, strict=bool(bits)))
        others: set[str] = set()
        for first, inputs, state in checked:
            again, _ = self._bits(inputs, state)
            others |= {name for name in {**first, **again} if first.get(name) != again.get(name)}
        sketching = self._ranks.any(bool(others))
        for first, inputs, state in checked:
            sketches = self._bits(inputs, state, others)[1] if sketching else {}
            varying.append({name: sketches.get(name, []) for name in sorted(others)})
            digests.append(digest_of({name: each for name, each in first.items() if name not in others}))
        deterministic = bool(bits) and not any(varying)
        dtype = compute_dtype(self._instance, self._checked[0])
        return Correctness(
            passed=verdict.passed,
            input_count=len(self._checked),
            compared_tensors=verdict.compared_tensors,
            compute_dtype=dtype,
            tolerance=TOLERANCE[dtype],
            max_relative_error=verdict.max_relative_error,
            worst=verdict.worst,
            reference_error=verdict.reference_error,
            fallback_random=self._is_tried,
            deterministic=deterministic,
            digests=digests,
            varying=varying if any(varying) else None,
            bitwise_with=None,  # the runner has the other modes' digests, and compares them
            bitwise=None,
            widened_error=verdict.widened_error,
        )

    def _take_optimizer_in(self) -> None:
        """From here on each iteration steps the optimizer, if asked for; checks ran without, on unchanged weights.

        What is captured is captured again, for loops whose steps return the loss and nothing else.
        """
        wanted = self._spec.with_optimizer and self._instance.workload.task == "training"
        optimizer = self._instance.optimizer() if wanted else None
        if self._captured is not None:
            self._free_capture()
            self._iterate = self._captured = captured_iteration(
                self._mode, self._instance, self._call, optimizer=optimizer, outputs=False
            )
        elif optimizer is None:
            return
        else:
            self._iterate = iteration(self._instance, self._call, marks_steps=self._marks_steps, optimizer=optimizer)
        calls = len(self._input_sets) + (CALLS_TO_CAPTURE if self._captured is not None else 0)
        for position in range(calls):
            self._iterate_set(position)
        if self._captured is not None:
            self._captured.require_replays()


def _results_of(
    instance: Instance, iterate: Iterate, checked: Sequence[Inputs], states: Sequence[State], seed: int
) -> list[Results]:
    return [run_checked(instance, iterate, inputs, state, seed) for inputs, state in zip(checked, states, strict=True)]


def _agreement(correctness: Correctness) -> Agreement:
    return Agreement(
        correctness.passed,
        correctness.compared_tensors,
        correctness.max_relative_error,
        correctness.worst,
        correctness.reference_error,
        widened_error=correctness.widened_error,
    )


def _require_device(device: str) -> None:
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        raise Unsupported("PyTorch finds no NVIDIA GPU here; `--device cpu --size tiny` runs the small sizes without")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_COMPUTE_CAPABILITY:
        had, least = (".".join(map(str, version)) for version in (capability, LEAST_COMPUTE_CAPABILITY))
        raise Unsupported(
            f"{torch.cuda.get_device_name()} has compute capability {had}; torch.compile needs {least} or newer"
        )


def _gpu_uuid(device: torch.device) -> str | None:
    """NVML's name of the GPU that torch uses; None on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
