"""Check the results of a cell: run eager as the reference, compile a trial, and check the measured program.

The modes of a workload compute the same on the same inputs, most of them with the same kernels. A comparison takes
seconds, and minutes where eager is no reference in its dtype and the program is also compiled in higher precision. So
one process compares at a time, and the first whose results pass stores their digest with the verdict; processes with
equal results use it.

A stochastic workload is compiled once for trial, so that eager's random numbers are drawn
(`suite.measure.eager_random`), and that is compared. The real compilation has another random stream, so its values
cannot be compared. A mode's later processes have neither a reference nor a trial: they check that their digests equal
those of the first process. If one differs, they do all that the first process does.

Note [Deterministic trials]: EfficientDet chooses among nearly equal values (Note [Choices] in
`suite.measure.correctness`), and the order in which it adds gradients changes between calls, so that the bits of 469
tensors change in a second call. Then no verdict could be shared between modes, and each mode would be compiled in
float32 and in float64 for its own, which takes minutes. So trials, and eager's run before them, use deterministic
algorithms: all have the same bits, and one of them is compared. The measured program uses its usual algorithms.

Note [First calls]: a module may store values of its first call, as Mask R-CNN stores its anchors. If that call is
compiled, they are outputs of a CUDA graph; a later call overwrites them, and stock's graphs raise an error. The first
process of a mode runs a deterministic program in eager mode for reference, before it compiles. So later processes, and
ranks, whose reference is another module, begin with an eager call as well: all measure the same program.

Trials have their own compile caches, so that no trial decides on the kernels of the measured program.

All processes of all modes of a workload share these caches. A workload whose results vary between calls needs a trial
in each process, and only the first processes have to compile it. A first process runs its trial before it marks its
graphs with its mode's name, a later one afterwards; so the graphs of trials have a separate mark.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.instance import Instance
from models.registry import Inputs
from optimizations import torch_internals
from optimizations.atomic_file import write_atomically
from optimizations.torch_internals.tuning import graphs_marked
from suite.measure.correctness import (
    Agreement,
    combine,
    compare_widened,
    compare_with_eager,
    compute_dtype,
    loss_scales,
    refused_of_other_inputs,
    tolerance_of,
)
from suite.measure.eager_random import eager_random_numbers
from suite.measure.fingerprint import sketched_error
from suite.measure.iteration import Iterate, iteration
from suite.measure.memory import release
from suite.measure.results import Results, State, bits_of_run, digest_of, run_checked, run_unchecked
from suite.results.schema import Correctness
from suite.worker.cell_program import CellProgram
from suite.worker.compilation import CALLS_TO_REPLAY, Compilation
from suite.worker.compile_cache import INDUCTOR, JUDGED, TRITON
from suite.worker.protocol import WAITING, Inaccurate
from suite.worker.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class JudgedResults:
    """Store verdicts in a folder that all processes of a workload share. One process at a time reads and adds."""

    folder: Path

    def add(self, results: Sequence[Results], verdict: Agreement) -> None:
        """Add a verdict for other processes; if it cannot be written, they compare by themselves."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(results), json.dumps(asdict(verdict)).encode())
        except OSError as error:
            print(f"the verdict is not stored for other processes: {error}")

    def verdict(self, results: Sequence[Results]) -> Agreement | None:
        """Return the stored verdict on results with these bits, one for each input set, or None."""
        file = self._file(results)
        return Agreement(**json.loads(file.read_bytes())) if file.exists() else None

    def _file(self, results: Sequence[Results]) -> Path:
        digests = " ".join(one.digest() for one in results)
        return self.folder / f"{hashlib.sha256(digests.encode()).hexdigest()}.json"


class Judge:
    """Check the results of a compiled program. `announce` is called before waiting for the lock, and after taking it.

    Attributes:
        eager: eager's results, in host memory; None before eager has run.
        trial_verdict: the verdict on a trial of the mode.
    """

    def __init__(self, program: CellProgram, compilation: Compilation, announce: Callable[[str], None]) -> None:
        self._program = program
        self._compilation = compilation
        self._announce = announce
        self.eager: list[Results] | None = None
        self.trial_verdict: Agreement | None = None

    @property
    def is_tried(self) -> bool:
        """Return whether the verdict is on a trial: see `_trial`."""
        return self._compilation.mode.backend is not None and self._program.instance.workload.stochastic

    def run_reference(self) -> None:
        """Run eager on the checked inputs, and the trial if the workload needs one; store results and verdict."""
        own = self._program.instance
        try:
            for scale in loss_scales(own) if self.is_tried else (own.loss_scale,):
                self._program.instance = replace(own, loss_scale=scale)
                with self._program.calling(), self._program.whole() as (whole, states), self._algorithms():
                    iterate = iteration(whole, whole.module, marks_steps=self._program.marks_steps)
                    eager = _results_of(whole, iterate, self._program.checked, states, self._program.spec.seed)
                release(own.device)
                if scale == own.loss_scale or all(results.is_finite() for results in eager):
                    break
            self.eager = eager
            self.trial_verdict = self._trial(eager) if self.is_tried else None
        finally:
            self._program.instance = own

    def call_uncompiled(self) -> None:
        """Run one eager iteration and drop its results: see Note [First calls]."""
        own = self._program.instance
        with self._program.calling():
            iterate = iteration(own, own.module, marks_steps=self._program.marks_steps)
            run_unchecked(own, iterate, self._program.checked[0], self._program.states[0], self._program.spec.seed)
        release(own.device)

    def correctness(self) -> Correctness | None:
        """Return the comparison of the measured program with eager; None if its digests are the first process's.

        Raises:
            Inaccurate: the results differ from eager's by more than their precision explains.
        """
        is_first = self._program.spec.known_digests is None
        if not self._program.ranks.any(is_first or not self._is_as_in_the_first_process()):
            return None
        if self.eager is None:
            self.run_reference()
            if self.trial_verdict is not None:  # the trial has dropped the compiled code
                self._compilation.compile_again()
        return self._check()

    def forget(self) -> None:
        """Drop the data that only checks need."""
        self.eager = self.trial_verdict = None
        self._program.forget_checks()

    def _trial(self, eager: list[Results]) -> Agreement:
        """Compile a stochastic workload with eager's random numbers, and return the verdict on this trial.

        See Note [Stochastic workloads] in `suite.measure.correctness`.
        """
        calls = self._compilation.calls_to_replay
        cache = Path(self._program.spec.cache_dir)
        torch.compiler.reset()  # in a later process the real compilation came first, and would be found
        with trial_cache(cache), eager_random_numbers(), self._algorithms():
            iterate = self._compilation.compiled_iteration(
                self._compilation.callable_for(self._program.instance.module)
            )
            first, *others = self._each_checked() * (calls - 1)
            run_unchecked(self._program.instance, iterate, *first, self._program.spec.seed)
            with self._program.calling():  # while another process compiles, or all do
                for inputs, state in others:
                    run_unchecked(self._program.instance, iterate, inputs, state, self._program.spec.seed)
                compiled = self._results(iterate)
            self._compilation.forget_trial()
            verdict, _ = self._verdict("trial", compiled, eager)
        if not verdict.passed:
            raise Inaccurate(self._record(verdict))
        return verdict

    @contextmanager
    def _algorithms(self) -> Iterator[None]:
        """Use the algorithms of a trial inside the block: see Note [Deterministic trials], and Note [Attention that
        drops] in `suite.measure.eager_random`."""
        workload = self._program.instance.workload
        with ExitStack() as stack:
            if self.is_tried and workload.task == "training":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.is_tried and workload.tried_deterministic:
                stack.enter_context(deterministic_algorithms())
            yield

    def _check(self) -> Correctness:
        verdict, forgotten = self.trial_verdict, False
        # After a trial only digests are needed, so gigabytes of gradients are not copied to the host.
        compiled = self._results(self._compilation.iterate) if verdict is None else []
        bits = [one.all_bits() for one in compiled] or [self._bits_of_run(*each)[0] for each in self._each_checked()]
        if verdict is None:
            assert self.eager is not None, "eager ran before"
            verdict, forgotten = self._verdict("real", compiled, self.eager)
        if verdict.undecided and verdict.widened_error is None:
            verdict = replace(verdict, passed=False)  # of ranks: a split module cannot be widened
        if forgotten:
            self._compilation.compile_again()
        correctness = self._record(verdict, bits)
        if isinstance(self._program.ranks, RankGroup):
            every = self._program.ranks.all(correctness.digests)
            correctness = correctness.model_copy(update={"ranks_equal": all(one == every[0] for one in every)})
        if not correctness.passed:
            raise Inaccurate(correctness)
        return correctness

    def _verdict(self, kind: str, compiled: list[Results], eager: list[Results]) -> tuple[Agreement, bool]:
        """Return the verdict by comparison with eager, and whether the compiled code was dropped to obtain it.

        Results that are bitwise equal to results of this kind in another process get their stored verdict.
        """
        program = self._program
        if isinstance(program.ranks, RankGroup):
            return self._compared(compiled, eager), False
        shared = JudgedResults(Path(program.spec.cache_dir) / JUDGED / kind)
        release(program.instance.device)
        # A comparison may run and compile the program in a precision that needs several times the memory, so only one
        # process compares at a time. The runner limits the time of that process; the others wait without a limit.
        self._announce(WAITING)
        with program.turns.alone(math.inf):
            self._announce("compare")
            if (known := shared.verdict(compiled)) is not None:
                return known, False
            verdict = self._compared(compiled, eager)
            if forgotten := verdict.undecided:
                verdict = self._widened(verdict)
            if verdict.passed:
                shared.add(compiled, verdict)
            release(program.instance.device)
        return verdict, forgotten

    def _compared(self, compiled: list[Results], eager: list[Results]) -> Agreement:
        seed = self._program.spec.seed
        with self._program.whole() as (whole, states):
            pairs = zip(compiled, eager, self._program.checked, states, strict=True)
            verdict = combine(
                [compare_with_eager(one, other, whole, inputs, state, seed) for one, other, inputs, state in pairs]
            )
        return refused_of_other_inputs(verdict, compiled, eager, device=self._program.instance.device)

    def _widened(self, verdict: Agreement) -> Agreement:
        """Return the verdict in higher precision, where the own dtype decides nothing; drop the compiled code."""
        wide = compare_widened(
            self._compilation.callable_for,
            self._program.instance,
            *self._each_checked()[0],
            self._program.spec.seed,
            marks_steps=self._program.marks_steps,
            calls=CALLS_TO_REPLAY,
            forget=self._compilation.forget,
        )
        self._compilation.forget()
        return replace(verdict, passed=verdict.passed and wide.passed, widened_error=wide.max_relative_error)

    def _record(self, verdict: Agreement, bits: Sequence[Mapping[str, str]] = ()) -> Correctness:
        """Return the verdict as a record, with digests and tensors that vary when the results are computed again."""
        digests, varying = self._repeated(bits)
        deterministic = bool(bits) and not any(varying)
        dtype = compute_dtype(self._program.instance, self._program.checked[0])
        return Correctness(
            passed=verdict.passed,
            input_count=len(self._program.checked),
            compared_tensors=verdict.compared_tensors,
            compute_dtype=dtype,
            tolerance=tolerance_of(self._program.instance, self._program.checked[0]),
            max_relative_error=verdict.max_relative_error,
            worst=verdict.worst,
            reference_error=verdict.reference_error,
            fallback_random=self.is_tried,
            deterministic=deterministic,
            digests=digests,
            varying=varying if any(varying) else None,
            bitwise_with=None,  # the runner has the other modes' digests, and compares them
            bitwise=None,
            widened_error=verdict.widened_error,
        )

    def _is_as_in_the_first_process(self) -> bool:
        """Return whether the compiled iteration has the digests of the mode's first process.

        Tensors that vary between calls must be within the tolerance instead.
        """
        varying = self._program.spec.known_varying or [{}] * len(self._program.checked)
        tolerance = tolerance_of(self._program.instance, self._program.checked[0])
        digests, near = [], True
        for inputs, state, known in zip(self._program.checked, self._program.states, varying, strict=True):
            bits, found = self._bits_of_run(inputs, state, sketched=known)
            digests.append(digest_of({name: each for name, each in bits.items() if name not in known}))
            near &= all(
                name in found and sketched_error(found[name], sketch) <= tolerance
                for name, sketch in known.items()
                if sketch  # a tensor without a sketch is not returned by every call
            )
        return near and digests == self._program.spec.known_digests

    def _bits_of_run(
        self, inputs: Inputs, state: State, sketched: Collection[str] = ()
    ) -> tuple[dict[str, str], dict[str, list[float]]]:
        """Return digests of the compiled iteration's results, and sketches of some tensors: see `bits_of_run`."""
        return bits_of_run(
            self._program.instance, self._compilation.iterate, inputs, state, self._program.spec.seed, sketched
        )

    def _repeated(self, bits: Sequence[Mapping[str, str]]) -> tuple[list[str], list[dict[str, list[float]]]]:
        """Return digests, and sketches of the tensors that vary from call to call, each by input set.

        `bits` are those of earlier calls; the calls are repeated to find tensors whose bits change. A tensor that
        varies on one input set counts as varying on all: two calls may have the same bits by chance.
        """
        varying: list[dict[str, list[float]]] = []
        digests: list[str] = []
        checked = list(zip(bits, self._program.checked, self._program.states, strict=bool(bits)))
        others: set[str] = set()
        for first, inputs, state in checked:
            again, _ = self._bits_of_run(inputs, state)
            others |= {name for name in {**first, **again} if first.get(name) != again.get(name)}
        sketching = self._program.ranks.any(bool(others))
        for first, inputs, state in checked:
            sketches = self._bits_of_run(inputs, state, others)[1] if sketching else {}
            varying.append({name: sketches.get(name, []) for name in sorted(others)})
            digests.append(digest_of({name: each for name, each in first.items() if name not in others}))
        return digests, varying

    def _each_checked(self) -> list[tuple[Inputs, State]]:
        return list(zip(self._program.checked, self._program.states, strict=True))

    def _results(self, iterate: Iterate) -> list[Results]:
        """Return results on each checked input."""
        return _results_of(
            self._program.instance, iterate, self._program.checked, self._program.states, self._program.spec.seed
        )


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use PyTorch's deterministic algorithms inside the block, where it has them.

    New memory is not filled, because this would launch kernels that the program does not have.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module whose settings are properties
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills


def _results_of(
    instance: Instance, iterate: Iterate, checked: Sequence[Inputs], states: Sequence[State], seed: int
) -> list[Results]:
    return [run_checked(instance, iterate, inputs, state, seed) for inputs, state in zip(checked, states, strict=True)]


TRIAL_FOLDER = "trial"


@contextmanager
def trial_cache(cache: Path) -> Iterator[None]:
    """Make Inductor and Triton use a folder in `cache` inside the block; unload code of both folders."""
    own = cache / TRIAL_FOLDER
    used = {"TORCHINDUCTOR_CACHE_DIR": str(own / INDUCTOR), "TRITON_CACHE_DIR": str(own / TRITON)}
    torch_internals.clear_caches()
    try:
        with patch.dict(os.environ, used), graphs_marked(TRIAL_FOLDER):
            yield
    finally:
        torch_internals.clear_caches()
