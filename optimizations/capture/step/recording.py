"""The capture of one call, and what has to hold for its launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.device import Device
from optimizations.capture.inputs import CopiedInputs
from optimizations.capture.signature import describe, replaced
from optimizations.capture.step import forbidden_calls
from optimizations.capture.step.call import Call, by_storage
from optimizations.capture.step.gradients import Gradients, gradients, memory
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.observer import Observer, StepRefused, storage
from optimizations.capture.step.observing import CHECKPOINT_DRAWS, host_change
from optimizations.capture.step.operations import first_difference
from optimizations.capture.step.outputs import Outputs
from optimizations.capture.step.progress import Progress
from optimizations.capture.step.source_lines import line_of
from optimizations.capture.step.watch import Watch
from optimizations.report.steps import RecordedStep, Refusal


@dataclass(slots=True)
class Recording:
    """A captured step. `written` are inputs it writes, `mutated` other tensors; `kept` holds what it reads."""

    graph: Any
    inputs: CopiedInputs
    written: list[int]
    gradients: Gradients
    watch: Watch
    outputs: Outputs
    mutated: list[torch.Tensor]
    kept: list[torch.Tensor]
    report: RecordedStep
    replays: int = 0

    def fits(self) -> bool:
        """Whether a launch now would do what the call would do."""
        return self.watch.unchanged() and self.gradients.fit()

    def launch(self, tensors: Sequence[torch.Tensor], rates: LearningRates) -> Any:
        """Do the work of a call with these inputs, and give its results."""
        self.inputs.bind(tensors)
        self.gradients.bring()
        rates.write()
        self.graph.replay()
        if self.written:
            self.inputs.give_back(tensors, self.written)
        self.gradients.leave()
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)
        self.replays += 1
        return self.outputs.take(tensors)


def capture(
    device: Device,
    step: Callable[..., Any],
    call: Call,
    graph: Any,
    pool: Any,
    rates: LearningRates,
    progress: Progress,
    memory_budget_bytes: int | None,
) -> Recording:
    """Capture the call into `graph`. Python runs, nothing is executed.

    Raises:
        StepRefused: the captured call is not what was observed, or does not fit into the budget.
        Exception: what the capture raised.
    """
    with device.here():
        inputs = CopiedInputs(call.tensors)
    placeholders = list(inputs.recording_inputs)
    stand_ins = iter(placeholders)
    args, kwargs = replaced(call.args, stand_ins), replaced(call.kwargs, stand_ins)
    pool_before = device.pool_bytes(pool)
    observer = Observer(
        device.holds, by_storage(placeholders, call.labels), forbid=True, generators=progress.generators
    )
    random = forbidden_calls.RandomState()
    versions = {
        id(tensor): tensor._version
        for tensor in [*call.state.tensors.values(), *placeholders]
        if not tensor.is_inference()
    }
    torch.clear_autocast_cache()
    with rates.as_tensors():
        snapshot = call.state.snapshot()
        with (
            device.capturing(graph, pool, progress.generators),
            forbidden_calls.watched(observer, random, capturing=True),
            observer,
        ):
            returned = step(*args, **kwargs)
        changes = list(call.state.changes(snapshot))
    torch.clear_autocast_cache()
    _check(observer, random, progress, changes)
    pool_bytes = device.pool_bytes(pool)
    if memory_budget_bytes is not None and pool_bytes > memory_budget_bytes:
        raise StepRefused(
            Refusal(
                f"its graphs need {pool_bytes} bytes and memory_budget_bytes is {memory_budget_bytes}",
                "raise the budget, or make the batch smaller",
            )
        )
    after = gradients(call.parameters)
    indifferent = _indifferent(device, graph, observer, call.before, after)
    unread = _storages(old for old, new in zip(call.before, after, strict=True) if indifferent and old is not new)
    kept = [
        tensor
        for address, (reference, _) in observer.outside.items()
        if address in progress.outside and address not in unread and (tensor := reference()) is not None
    ]
    static = [*call.state.tensors.values(), *(gradient for gradient in call.before if gradient is not None)]
    return Recording(
        graph=graph,
        inputs=inputs,
        written=[index for index, tensor in enumerate(placeholders) if _was_written(tensor, versions)],
        gradients=Gradients(call.parameters, call.before, after, indifferent=indifferent),
        watch=Watch(call.state, rates.stands_for, _reads(device, graph, observer, call), kept),
        outputs=Outputs(returned, placeholders, _storages(static) - unread),
        mutated=[tensor for tensor in call.state.tensors.values() if _was_written(tensor, versions)],
        kept=kept,
        report=RecordedStep(
            signature=describe(call.tensors),
            operations=len(observer.operations),
            copied_bytes=inputs.copied_bytes,
            pool_bytes=pool_bytes - pool_before,
            replays=0,
            record_s=0.0,
        ),
    )


def why(error: Exception) -> Refusal:
    """The refusal for what a capture raised."""
    if isinstance(error, StepRefused):
        return error.refusal
    if isinstance(error, torch.OutOfMemoryError):
        return Refusal("needs more memory for its capture than is free", "make the batch smaller, or free some before")
    text = str(error).strip().split("\n")[0][:300]
    return Refusal(
        f"could not be captured ({type(error).__name__}: {text})",
        "see docs/capture.md for what a graph cannot hold",
        line_of(error),
    )


def _check(observer: Observer, random: forbidden_calls.RandomState, progress: Progress, changes: Sequence[str]) -> None:
    """The captured call must be what was observed, and have changed nothing on the host.

    Raises:
        StepRefused: it is not.
    """
    if observer.refusals:  # the step may have caught the exception
        raise StepRefused(observer.refusals[0])
    if random.kept and (observer.draws or progress.draws):
        raise StepRefused(CHECKPOINT_DRAWS)
    if (difference := first_difference(progress.trace, observer.operations)) is not None:
        raise StepRefused(difference)
    if changes:
        raise StepRefused(host_change(changes[0]))


def _indifferent(
    device: Device,
    graph: Any,
    observer: Observer,
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
) -> bool:
    """Whether gradients from before the call play no part in it. Note [Gradients before and after]."""
    there = [gradient for gradient in before if gradient is not None]
    return (
        bool(there)
        and not any(storage(gradient) in observer.outside for gradient in there)
        and not any(old is not None and old is new for old, new in zip(before, after, strict=True))
        and not device.mentions(graph, memory(there))
    )


def _reads(device: Device, graph: Any, observer: Observer, call: Call) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is read by the step: by an operator, or by a kernel of compiled code."""
    unseen = [t for t in call.state.tensors.values() if device.holds(t) and storage(t) not in observer.outside]
    in_compiled_code = call.state.compiled and device.mentions(graph, memory(unseen))
    return lambda tensor: in_compiled_code or storage(tensor) in observer.outside


def _storages(tensors: Any) -> set[int]:
    return {storage(tensor) for tensor in tensors if tensor is not None}


def _was_written(tensor: torch.Tensor, versions: dict[int, int]) -> bool:
    return id(tensor) in versions and bool(tensor._version != versions[id(tensor)])
