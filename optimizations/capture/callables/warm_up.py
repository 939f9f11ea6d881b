"""Run a callable on copies of its sample before its capture, and check that a graph could repeat what it does.

It runs a fixed number of times, forward and backward, under an observer of its operators, and more often while code is
compiled or kernels are timed. Only the last run is checked and compared with the capture. Code that queries whether it
is captured gets False in the first run and True in all others, so that libraries skip what cannot be captured.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.callables.arguments import Options, Sample
from optimizations.capture.device import Device
from optimizations.capture.inputs import CopiedInputs
from optimizations.capture.signature import PLAIN, flatten, parts, replaced
from optimizations.capture.step.audit import Operation
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.observer import SETS_UP, Observer, StepRefused, storage
from optimizations.capture.step.observing import (
    CHANGES_ARGUMENT,
    RandomStates,
    changed_itself,
    contents,
    drawn_on_the_host,
    observed,
)
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.graph.memory import memory_of
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import recorded_of, without_hooks

RUNS = 3
MOST_SET_UPS = 8
"""Runs beyond the fixed number that may compile code or time kernels."""


@dataclass(slots=True)
class Variant:
    """Hold a callable to capture with one of its samples, and the observations of its last run.

    Attributes:
        number, index: the number of the callable, from 1, and that of the sample.
        pairs: how many pairs of graphs are made.
        function: the function that runs; `state` is the state that it reaches, with `marks` of the tensors.
        parameters: leaves whose gradients it computes; `leaves`: all leaves that were reached.
        saved: addresses of storages that its backward reads.
        saved_results: results that must not be written before the backward: it reads them, or they overlap.
        structure: the structure of its results.
        forward, backward: operators that ran.
        as_captured: the value that a query for a capture returns.
    """

    number: int
    index: int
    pairs: int
    function: Callable[..., Any]
    sample: Sample
    state: HostState
    marks: TensorMarks
    device: Device
    options: Options
    parameters: list[torch.Tensor] = field(default_factory=list)
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    saved: Collection[int] = ()
    saved_results: Sequence[int] = ()
    structure: Hashable = None
    forward: Sequence[Operation] = ()
    backward: Sequence[Operation] = ()
    as_captured: bool = False

    @contextlib.contextmanager
    def observing(
        self,
        before_write: Callable[[torch.Tensor], None],
        around: contextlib.AbstractContextManager[None],
        *,
        forbid: bool,
    ) -> Iterator[Observer]:
        """Observe a run in the block. With `forbid` it is a capture: operators that cannot be captured raise.

        After the block the observer's `refusals` list everything that a graph could not repeat.

        Args:
            before_write: is called with each tensor that is about to be written.
            around: the context of the warm-up or capture.
        """
        device, state = self.device, self.state
        observer = Observer(device, {}, forbid=forbid, as_captured=self.as_captured)
        observer.in_region = False  # autocast's cached casts are cleared before each run
        observer.before_write = before_write
        random, snapshot = RandomStates(device), state.snapshot()
        with around, observed(observer, state):
            yield observer
        found = observer.refusals  # the callable may catch exceptions
        found += map(changed_itself, self.marks.changed())
        if self.options.host_draws == "refused":
            found += [drawn_on_the_host(name, state.code, "call") for name in random.drawn_on_host()]
        if not forbid:
            found += random.refusals(observer)
        found += state.changes(snapshot)


def warm_up(variant: Variant, note: Callable[[torch.Tensor], None]) -> None:
    """Run a callable `RUNS` times, or more often while it compiles.

    `note` is called with tensors to be written.

    Raises:
        StepRefused: a graph could not repeat the last run, or the runs changed Python state.
    """
    outset = variant.state.snapshot()
    for count in itertools.count(1):
        with variant.observing(note, variant.device.warming_up(), forbid=False) as observer:
            findings = [*_run_once(variant, observer)]
        if any(parameter.grad is not None for parameter in variant.state.parameters()):
            findings.append(OWN_BACKWARD)
        if count >= RUNS and not observer.set_up:
            break
        if count >= RUNS + MOST_SET_UPS:
            raise StepRefused(SETS_UP)
        variant.as_captured = True
    for refusal in [*findings, *observer.refusals]:
        raise StepRefused(refusal)
    for change in variant.state.changes(outset):
        raise StepRefused(replace(SETS_ITSELF_UP, reason=f"{SETS_ITSELF_UP.reason} ({change.reason})"))


def _run_once(variant: Variant, observer: Observer) -> Iterator[Refusal]:
    """Run a callable on a copy of its sample, forward and backward. Yield refusals of its results and arguments.

    Leaves that are not reached through its state count as parameters, too, if the previous run reached them.
    """
    with observer.unseen():
        inputs = inputs_like(variant.sample).recording_inputs
        given = replaced(variant.sample, iter(inputs))
        before, since = contents(*given), torch_internals.next_sequence_number()
        torch.clear_autocast_cache()
    try:
        returned = variant.function(*given[0], **given[1])
    except RuntimeError as error:
        if "leaf Variable" not in str(error):  # copies of arguments are leaves
            raise
        raise StepRefused(WRITES_ARGUMENT) from error
    middle = len(observer.operations)
    variant.forward, variant.backward = observer.operations[:middle], ()
    if contents(*given) != before:
        yield CHANGES_ARGUMENT
    tensors: list[torch.Tensor] = []
    variant.structure = flatten(returned, tensors)
    for _, one, is_leaf in parts(returned, ""):
        if is_leaf and (refusal := _refused_result(one)) is not None:
            yield refusal
    results = distinct(tensors, inputs)
    outputs = [tensor for tensor in results if tensor.requires_grad]
    if not outputs:
        return
    with observer.unseen():
        leaves, is_older, variant.saved = recorded_of(outputs, since)
        tangents = [torch.zeros_like(output) for output in outputs]
    if is_older:
        yield OLDER
        return
    lasting = [
        *map(id, variant.state.parameters()),
        *(id(leaf) for one in variant.leaves if (leaf := one()) is not None),
    ]
    parameters = [leaf for leaf in distinct(leaves, inputs) if id(leaf) in lasting]
    variant.leaves = list(map(weakref.ref, leaves))
    # Autograd treats results that overlap as separate tensors: a write into one is not in the other's gradient.
    pairs = itertools.combinations([one for one in outputs if storage(one)], 2)
    shared = {id(one) for pair in pairs if memory_of(pair[0]).overlaps(memory_of(pair[1])) for one in pair}
    variant.saved_results = [
        index for index, one in enumerate(results) if id(one) in shared or storage(one) in variant.saved
    ]
    found = gradients_of(outputs, inputs, parameters, tangents)
    # As in eager, hooks of parameters without a gradient must not be called.
    used = zip(parameters, found[len(inputs) :], strict=True)
    variant.parameters = [parameter for parameter, gradient in used if gradient is not None]
    variant.backward = observer.operations[middle:]
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
        yield SPARSE


def distinct(tensors: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return these tensors, each once, without those that are inputs."""
    others = set(map(id, inputs))
    return [one for one in {id(one): one for one in tensors}.values() if id(one) not in others]


def _refused_result(value: Any) -> Refusal | None:
    """Return a refusal of a result that a graph cannot return."""
    kind = type(value)
    is_tensor = kind in (torch.Tensor, torch.nn.Parameter)
    if kind in PLAIN or (is_tensor and value.layout is torch.strided):
        return None
    return Refusal(
        f"returns a {f'tensor of layout {value.layout}' if is_tensor else kind.__qualname__}",
        "return strided tensors, numbers, and containers of such: what an object holds would be overwritten",
    )


def gradients_of(
    outputs: Sequence[torch.Tensor],
    arguments: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return gradients of arguments, then of parameters. A tensor that is passed twice has one gradient.

    Hooks of parameters run when autograd accumulates the gradients, after the graph. Hooks of arguments are captured:
    the callable registered them on the copies.
    """
    surface = [*arguments, *parameters]
    wanted = list({id(tensor): tensor for tensor in surface if tensor.requires_grad}.values())
    if not wanted:
        return [None for _ in surface]
    with without_hooks(parameters):
        found = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    by_id = dict(zip(map(id, wanted), found, strict=True))
    return [by_id.pop(id(tensor), None) for tensor in surface]


def inputs_like(sample: Sample, shared: dict[int, torch.Tensor] | None = None) -> CopiedInputs:
    """Return copies of the tensors among these arguments, as leaves with the same `requires_grad`.

    A tensor that is passed twice has one copy, because code may check identity (`if query is key`).

    Args:
        shared: tensors that are used instead of copies, by index.
    """
    tensors: list[torch.Tensor] = []
    flatten(sample, tensors)
    by_id = {id(tensor): tensor.detach() for tensor in tensors}
    detached = [by_id[id(tensor)] for tensor in tensors]
    for index, there in (shared or {}).items():
        detached[index] = there.detach()
    inputs = CopiedInputs(detached, list(shared or ()))
    for tensor, placeholder in zip(tensors, inputs.recording_inputs, strict=True):
        placeholder.requires_grad_(tensor.requires_grad)
    return inputs


@contextlib.contextmanager
def putting_back(device: Device, variants: Sequence[Variant]) -> Iterator[Callable[[torch.Tensor], None]]:
    """Restore after the block Python state, values of all reached tensors, gradients and random states.

    Yield a function to call with each tensor that is about to be written, so that only written ones are copied.
    """
    states = [one.state for one in variants]
    outset, random = [state.snapshot() for state in states], RandomStates(device)
    tensors = {id(one): one for state in states for one in state.tensors.values()}.values()
    # Inner tensors of wrapper subclasses are in this list themselves.
    plain = [tensor for tensor in tensors if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__]
    reached = set(map(storage, plain)) - {0}
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def note(tensor: torch.Tensor) -> None:
        if (place := storage(tensor)) in reached and place not in saved:
            memory = tensor.detach().untyped_storage()
            saved[place] = memory, memory.clone()

    for one in plain:
        if not one.requires_grad:  # compiled code may write it unobserved
            note(one)
    parameters = {id(one): one for state in states for one in state.parameters()}.values()
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield note
    finally:
        for memory, content in saved.values():
            memory.copy_(content)
        for variant, before in zip(variants, outset, strict=True):
            variant.marks.restore()
            variant.state.restore(before)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        random.restore()


SETS_ITSELF_UP = Refusal(
    "sets itself up in its first call, which is made with a sample",
    "call it once, with the first batch, before graph_callables",
)
WRITES_ARGUMENT = Refusal(
    "writes into an argument, and a graph would write into a copy of it",
    "work on a copy, or keep what is written in a buffer; of modules with `inplace=True`, pass inplace=False to those "
    "that come first",
)
OLDER = Refusal(
    "uses a tensor that takes part in differentiation and was computed before the call",
    "pass it as an argument: its gradient then goes on from there",
)
OWN_BACKWARD = Refusal(
    "changes the `.grad` of a parameter, as a backward inside of it does",
    "use torch.autograd.grad there, or capture it with graph_step",
)
SPARSE = Refusal("computes a sparse gradient, which has no fixed size", "use sparse=False")
