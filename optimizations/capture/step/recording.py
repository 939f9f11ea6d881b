"""Capture one call, check the conditions for launching its graph, and say why a capture failed.

A result is in the memory of the graph, and the next launch overwrites it. So it is copied out, with one fused copy for
each dtype.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.device import Device
from optimizations.capture.inputs import CopiedInputs, copy_all, is_plain
from optimizations.capture.side_by_side import RacedGraph, report_of, side_by_side
from optimizations.capture.signature import describe, flatten, replaced
from optimizations.capture.step.audit import Audits, Operation
from optimizations.capture.step.call import Arguments, Call, Key
from optimizations.capture.step.gradients import Gradients, Use, bytes_for_gradients, carves, gradients, memory
from optimizations.capture.step.host_state import Content, HostState
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.observer import SETS_UP, Observer, StepDiffers, StepRefused, storage
from optimizations.capture.step.observing import CHANGES_ARGUMENT, CHECKPOINT_DRAWS, changed_itself, contents, observed
from optimizations.capture.step.options import StepOptions
from optimizations.capture.step.progress import Progress
from optimizations.capture.step.tensor_marks import TensorMarks, Writes, storages
from optimizations.capture.step.user_code import line_of
from optimizations.capture.step.watch import Watch
from optimizations.concurrency.launch_log import MADE_OF_OTHERS, LaunchLog
from optimizations.graph.memory import overlaps, size_bytes
from optimizations.report.steps import RecordedStep, Refusal
from optimizations.torch_internals.generated_modules import loaded_modules
from optimizations.torch_internals.geometry import is_lazy_view


@dataclass(slots=True, eq=False)
class Recording:
    """Hold a captured step.

    Attributes:
        key: the signature, settings and `key=` of the calls that it is for.
        mutated: tensors whose versions it increments, apart from gradients.
        written: storages of the tensors that it writes, except gradients that it makes.
        pool_bytes: growth of the pool by its capture.
        arguments: the structure and metadata of the arguments that it can be replayed with.
        replays_then: number of replays when the latest recording was made.
    """

    graph: RacedGraph
    key: Key
    inputs: CopiedInputs
    gradients: Gradients
    watch: Watch
    outputs: Outputs
    mutated: list[torch.Tensor]
    written: set[int]
    pool_bytes: int
    arguments: Arguments
    trace: Sequence[Operation]
    progress: Progress
    audits: Audits
    replays: int = 0
    replays_then: int = 0
    record_s: float = 0.0

    def report(self) -> RecordedStep:
        """Return the report of the recording."""
        return RecordedStep(
            signature=describe(self.inputs.recording_inputs),
            operations=len(self.trace),
            copied_bytes=self.inputs.copied_bytes,
            copied_tensors=self.inputs.copied_tensors,
            watched=len(self.watch),
            pool_bytes=self.pool_bytes,
            replays=self.replays,
            record_s=self.record_s,
            audits=self.audits.done,
            audits_skipped=self.audits.skipped,
            concurrency=report_of(self.graph.race),
        )

    def fits(self, tensors: Sequence[torch.Tensor], state: HostState | None = None) -> bool:
        """Return whether a launch with these inputs would do the same as the call.

        `state`: what the step reaches now. Without it only the recorded containers are compared.
        """
        if self.shares(tensors):
            return False
        unchanged = self.watch.unchanged() if state is None else self.watch.can_replay_in(state)
        return unchanged and self.gradients.fit()

    def shares(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether an input that is copied shares memory that the step writes."""
        return not self.written.isdisjoint(map(storage, tensors))

    def launch(self, tensors: Sequence[torch.Tensor], rates: LearningRates) -> Any:
        """Do the work of a call with these inputs, and return its results.

        Raises:
            NotLaunched: the edges of its graph could not be restored. The call can be run in another way.
        """
        fresh = self.outputs.prepare()
        self.inputs.bind(tensors)
        self.gradients.load()
        rates.write()
        self.replays += 1  # an interrupt during the launch is raised after it
        try:
            self.graph.replay()
        except Exception:
            self.replays -= 1
            raise
        self.gradients.publish()
        counted = [*self.mutated, *self.gradients.written()]
        if counted:  # autograd detects the write to a saved tensor by its version
            torch_internals.increment_version(counted)
        return self.outputs.take(fresh)


def capture(
    graph: RacedGraph,
    step: Callable[..., Any],
    key: Key,
    call: Call,
    rates: LearningRates,
    progress: Progress,
    options: StepOptions,
    *,
    snapshot: list[Content],
    marks: TensorMarks,
    dropped: set[str],
) -> Recording:
    """Capture the call into `graph`. Python runs, but no work of the GPU is executed.

    Args:
        snapshot: of the state that the step reaches, made before the call.
        marks: of the tensors that it reaches and of the earlier gradients, made before the call.
        dropped: names of entries that are not compared.

    Raises:
        StepDiffers: the captured call differs from the observed ones.
        StepRefused: a graph cannot repeat the call.
        Exception: an exception of the step or of the capture.
    """
    assert progress.last is not None
    device, seen = graph.device, progress.last
    with device.here():
        inputs = CopiedInputs(call.tensors)
    placeholders = list(inputs.recording_inputs)
    stand_ins = iter(placeholders)
    args, kwargs = replaced(call.args, stand_ins), replaced(call.kwargs, stand_ins)
    given = contents(args, kwargs)
    pool_before = device.pool_bytes(graph.pool)
    observer = Observer(device, call.known(placeholders), forbid=True, as_captured=progress.as_captured)
    room = bytes_for_gradients(call.parameters, call.before, call.state.optimizers.values(), seen.makes_gradients)
    branches = options.concurrency == "auto"
    observer.log = log = device.launch_log(notes_memory=branches)
    with rates.as_tensors(), contextlib.ExitStack() as after_capture:
        torch.clear_autocast_cache()
        after_capture.callback(torch.clear_autocast_cache)  # casts that are made in it are in the graph's memory
        with device.capturing(graph.captured, graph.pool), log.noting(*loaded_modules(), operators=False):
            if not pool_before and carves(os.environ):
                device.make_room(room)
            there = [gradient for gradient in call.before if gradient is not None]
            writes = Writes([*call.state.tensors.values(), *placeholders, *there], compiled=call.state.compiled)
            there.clear()
            observer.before_write = writes.note
            with observed(observer, call.state):
                returned = step(*args, **kwargs)
            of_kernels, observer.log, observer.before_write = given_to_kernels(log), None, None
    observer.structure = flatten(returned, [])
    if not device.streams.ready():
        raise StepDiffers(FREED_MEANWHILE)
    if observer.set_up:  # the step may have caught the exception, here and below
        raise StepDiffers(SETS_UP)
    found = observer.refusals
    if observer.queries_random_state and (observer.draws or seen.draws):
        found.append(CHECKPOINT_DRAWS)
    if not found and (difference := progress.difference(observer)) is not None:
        raise StepDiffers(difference)
    if contents(args, kwargs) != given:
        found.append(CHANGES_ARGUMENT)
    for refusal in [*found, *call.state.changes(snapshot), *map(changed_itself, marks.changed())]:
        raise StepRefused(refusal)
    pool_bytes = device.pool_bytes(graph.pool)
    after = gradients(call.parameters)
    uses = _uses_of(device, graph.captured, observer, of_kernels, call.before, after, writes.include)
    gradients_of_call = {id(one) for one in [*call.before, *after] if one is not None}
    kept = [
        tensor
        for address, reference in observer.read.items()
        if address in seen.outside
        and (tensor := reference()) is not None
        and id(tensor) not in gradients_of_call  # `Gradients` keeps them
    ]
    mutated = [tensor for tensor in call.state.tensors.values() if writes.include(tensor)]
    added_to = [old for old, new in zip(call.before, after, strict=True) if new is not None and old is new]
    written = storages([*mutated, *added_to])
    for tensor, label, placeholder in zip(call.tensors, call.labels, placeholders, strict=True):
        if writes.include(placeholder):
            writing = "may write" if placeholder.is_inference() else "writes"
            raise StepRefused(
                Refusal(
                    f"{writing} into {label}, of which a graph has a copy",
                    "write into a copy (`clone()`), or keep what is written in an attribute or a buffer",
                )
            )
        if storage(tensor) in written:
            reason = f"writes into a tensor, which shares memory with {label}"
            raise StepRefused(Refusal(reason, "pass a copy (`clone()`) of the argument"))
    unseen = [one for one in call.state.tensors.values() if device.holds(one) and storage(one) not in observer.outside]
    in_compiled_code = call.state.compiled and device.mentions(graph.captured, memory(unseen))
    known = call.known(placeholders)
    recording = Recording(
        graph=graph,
        key=key,
        inputs=inputs,
        gradients=Gradients(
            call.parameters,
            call.parameter_names(),
            call.before,
            after,
            uses,
            written=writes.include,
            made=lambda gradient: storage(gradient) not in known and storage(gradient) not in observer.outside,
        ),
        watch=Watch(
            call.state,
            rates.stands_for,
            lambda tensor: in_compiled_code or storage(tensor) in observer.outside,
            kept,
            dropped=dropped,
        ),
        outputs=Outputs(returned),
        mutated=[tensor for tensor in mutated if writes.counted(tensor) or tensor.is_inference()],
        written=written,
        arguments=Arguments(call.args, call.kwargs),
        trace=observer.operations,
        progress=progress,
        audits=Audits(options.check_every, time.perf_counter()),
        pool_bytes=pool_bytes - pool_before,
    )
    graph.race = side_by_side(device, graph.captured, graph.pool, log if branches else None)
    return recording


def _uses_of(
    device: Device,
    graph: Any,
    observer: Observer,
    given: set[int] | None,
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
    writes: Callable[[torch.Tensor], bool],
) -> list[Use]:
    """Return how a call used each gradient that it found. Note [Gradients before and after] in `gradients`.

    Compiled code is not observed. So the arguments of all kernels count; where these are unknown, all parameters of the
    graph's nodes.

    `given`: what `given_to_kernels` returned. `writes`: whether the call wrote a gradient that is still there.
    """
    found = []
    for old, new in zip(before, after, strict=True):
        if old is None:
            found.append(Use.ABSENT)
        elif size_bytes(old) and storage(old) in observer.outside:
            found.append(Use.NEEDED)
        elif new is not old:
            found.append(Use.DROPPED)
        else:
            found.append(Use.NEEDED if writes(old) else Use.LEFT_ALONE)
    for unread in (Use.DROPPED, Use.LEFT_ALONE):
        these = [one for one, use in zip(before, found, strict=True) if use is unread]
        if device.mentions(graph, memory(these)) if given is None else not given.isdisjoint(storages(these)):
            found = [Use.NEEDED if use is unread else use for use in found]
    return found


def given_to_kernels(log: LaunchLog) -> set[int] | None:
    """Return the storages that operators and Inductor's kernels were given; None if other code added nodes.

    Note [Words that are left over] in `gradients`.
    """
    log.note_others("at the end")
    found = set[int]()
    for one in log.logged:
        launch = one.launch
        if one.is_operator:
            is_own = launch.name.partition(".")[0] not in torch_internals.PURE_OPERATORS
            known = not is_own and launch.barrier != MADE_OF_OTHERS
        else:
            known = bool(one.given) and launch.count == 1
        if not known:
            return None
        found |= one.given
    return None if log.failure is not None else found


FREED_MEANWHILE = Refusal(
    "was captured in part when cuBLAS's workspaces were freed, as a recording in another thread may do",
    "record steps, make graphs of callables, and call compiled code for the first time, in one thread after the other",
)
"""A workspace allocated during a capture is in the graph's pool, where later graphs may reuse its memory."""


def cause(error: BaseException) -> BaseException:
    """Return the first exception of a capture: ending the capture may raise a second one because of it."""
    while isinstance(error, torch.AcceleratorError) and error.__context__ is not None:
        error = error.__context__
    return error


HELD_NODES = Refusal(
    "goes on with what autograd keeps of a call on the default stream: a loss or another result of a call before the "
    "step's own is still held with its graph",
    "detach() what is kept of earlier calls, or make the step before the first backward",
)
"""The nodes that add to gradients belong to the stream they were first used on, as long as a result refers to them."""


def why(error: Exception) -> Refusal:
    """Return the refusal for an exception of a capture."""
    if isinstance(error, StepRefused):
        return error.refusal
    if isinstance(error, torch.OutOfMemoryError):
        return Refusal(
            "needs more memory for its capture than is free",
            "make the batch smaller, or call zero_grad() at the end of the step and not at its beginning",
        )
    text = str(error).strip().split("\n")[0][:300]
    if "legacy stream depend on a capturing" in text:
        return HELD_NODES
    return Refusal(
        f"could not be captured ({type(error).__name__}: {text})",
        "compute it outside of the step, or make graphs of the modules with graph_callables; see docs/capture.md for "
        "what a graph cannot hold",
        line_of(error),
    )


def do_all(actions: list[Callable[[], Any]]) -> None:
    """Run all actions. An action that is interrupted is run again from its beginning.

    Raises:
        KeyboardInterrupt: an action was interrupted. It is raised after the last action.
    """
    try:
        while actions:
            actions[0]()
            del actions[0]
    except KeyboardInterrupt:
        do_all(actions)
        raise


_LAYOUT = Refusal(
    "returns a tensor that is no plain one: its elements share memory, or it is sparse, quantized, a lazy conjugate or "
    "of a class of its own",
    "return a plain copy of it: `contiguous()`, `to_dense()`, `dequantize()`, `resolve_conj()`, `resolve_neg()`",
)


class Outputs:
    """Copy results out of the graph's memory. `copied` are the different tensors among the results of the recording.

    Raises:
        StepRefused: a result cannot be copied as it is.
    """

    def __init__(self, returned: Any) -> None:
        tensors: list[torch.Tensor] = []
        flatten(returned, tensors)
        if not all(_is_plain(tensor) and not overlaps(tensor) for tensor in tensors):
            raise StepRefused(_LAYOUT)
        self._nest = returned if not tensors else replaced(returned, iter([tensor.detach() for tensor in tensors]))
        made = {id(tensor): tensor.detach() for tensor in tensors}
        self.copied, places = list(made.values()), {key: place for place, key in enumerate(made)}
        self._plan = [places[id(tensor)] for tensor in tensors]
        self._single = len(tensors) == 1 and tensors[0] is returned

    def prepare(self) -> list[torch.Tensor]:
        """Allocate tensors for the next launch's results, before the launch, because this may run out of memory."""
        return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in self.copied]

    def take(self, fresh: list[torch.Tensor]) -> Any:
        """Copy results to `fresh`, after the launch, and return the results of a call."""
        if self.copied:
            copy_all(fresh, self.copied)
        return fresh[0] if self._single else replaced(self._nest, (fresh[place] for place in self._plan))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided and dense, without lazy conjugation, negation or quantization."""
    return is_plain(tensor) and not (is_lazy_view(tensor) or tensor.is_quantized)
