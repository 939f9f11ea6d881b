"""Run a call eagerly and observe whether a graph could repeat it."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.device import Device
from optimizations.capture.signature import copies, flatten
from optimizations.capture.step import compilations, forbidden_calls
from optimizations.capture.step.call import Call
from optimizations.capture.step.gradients import gradients
from optimizations.capture.step.host_random import HostRandom, identities
from optimizations.capture.step.host_state import GREW, NUMBER, Change, HostState, Rebound
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.observer import Observer, memory, storage
from optimizations.capture.step.operations import Operation
from optimizations.capture.step.source_lines import BINDS, GROWS, STEPS, line_with
from optimizations.capture.step.surroundings import ambient
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.report.steps import Refusal
from optimizations.torch_internals.generator_identity import identity

CHECKPOINT_DRAWS = Refusal(
    "keeps the GPU's random state to draw the same numbers again, as torch.utils.checkpoint does for recomputation",
    "use torch.compile for the checkpointed part, or pass preserve_rng_state=False if it draws no random numbers",
)
NO_COPY = Refusal(
    "returns an object of a class of which no copy can be made, and each launch would return one",
    "return a dict, a list or a dataclass",
)
GRADIENT_OF_A_RESULT = Refusal(
    "returns, or keeps in an attribute, a tensor that has a gradient (`.grad`), and a result of a graph has none",
    "return the gradient itself (`x.grad`), and the tensor detached",
)
RETURNS_DRAWS = Refusal(
    "returns, or keeps in an attribute, random numbers that were drawn on the host",
    "draw them after the step, or on the GPU",
)
NO_BACKWARD = Refusal(
    "returns a tensor whose backward has not run",
    "call backward in the step, return it detached, or use graph_callables",
)
LEAVES_SETTINGS = Refusal(
    "leaves a setting of PyTorch other than it found it (gradients on or off, autocast, default dtype, precision)",
    "set it before the step, or for a block of it (`with torch.set_grad_enabled(...)`)",
)


@dataclass(frozen=True, slots=True)
class Observed:
    """Record what a call did.

    Attributes:
        structure: the structure of its results.
        findings: what a graph could not repeat.
        outside: addresses of storages that it read and did not allocate.
        generators: generators, other than the default one, from which it drew.
        draws: whether it drew from a generator of the GPU.
        queries_capture: it queried whether it is captured, before anything was refused.
        set_up: something was compiled or tuned during the call, so the next call may differ.
        makes_gradients: ids of parameters with a new gradient, if the call dropped all earlier gradients unread.
    """

    operations: Sequence[Operation]
    structure: Hashable
    findings: list[Refusal]
    outside: frozenset[int]
    generators: list[torch.Generator]
    draws: bool
    queries_capture: bool
    set_up: bool
    makes_gradients: frozenset[int]


def observe(
    device: Device,
    step: Callable[..., Any],
    call: Call,
    rates: LearningRates,
    seen_outside: frozenset[int],
    *,
    as_captured: bool = False,
    draws_unused: bool = False,
) -> tuple[Any, Observed]:
    """Run the call eagerly on the side stream; return its results and what it did.

    Args:
        seen_outside: `Observed.outside` of the previous call, if any.
        as_captured: the value that the step gets if it queries whether it is captured.
        draws_unused: the caller declared that random numbers drawn on the host have no effect (`host_draws="unused"`).
    """
    state = call.state
    observer = Observer(
        device.holds,
        call.known(call.tensors),
        forbid=False,
        as_captured=as_captured,
        keeps_workspace=device.keeps_workspace,
    )
    observer.rates, observer.host_generators = rates.storages(), host_generators(device, state)
    generators = Generators(device, state)
    host_random = HostRandom(with_torch=device.has_own_random, generators=state.generators)
    given = Given(call.args, call.kwargs)
    arguments = dict(zip(call.labels, call.tensors, strict=False))
    marks = TensorMarks({**state.tensors, **call.named_gradients(), **arguments})
    there = {storage(one) for one in call.before if one is not None}  # the call may replace their memory
    states, settings = device.random_states(), ambient()
    with device.warming_up(), rates.as_tensors():
        device.may_read(gradients(call.parameters))
        snapshot = state.snapshot()
        with (
            compilations.noticed(observer),
            forbidden_calls.watched(observer, compiled=state.compiled),
            observer,
        ):
            returned = step(*call.args, **call.kwargs)
        observer.returned = storages_of([returned, gradients(call.parameters)])
        kept = kept_results(state, snapshot, observer)
        findings = [*observer.refusals, *call_changes(state, snapshot, kept)]
    after = gradients(call.parameters)
    pairs = list(zip(call.before, after, strict=True))
    own: list[torch.Tensor] = []
    structure = flatten(returned, own)
    results = [*own, *(entry.new for entry in kept)]
    if ambient() != settings:
        findings.append(LEAVES_SETTINGS)
    drawn = list(host_random.drawn())
    if drawn and any(map(observer.was_drawn_by_host, results)):
        findings.append(RETURNS_DRAWS)
    if not draws_unused:
        findings += [drawn_on_the_host(name, state) for name in drawn]
    findings += [*map(changed_itself, marks.changed()), *given.changes(call.args, call.kwargs)]
    draws = observer.draws or not all(map(torch.equal, states, device.random_states()))
    if draws:
        findings += [CHECKPOINT_DRAWS] if observer.queries_random_state else generators.refusals(observer)
    if not copies(returned):
        findings.append(NO_COPY)
    there_before = set(map(id, [*call.tensors, *state.tensors.values()]))
    made = (one for one in results if id(one) not in there_before)
    if any(one.grad is not None for one in made if one.is_leaf or one.retains_grad):
        findings.append(GRADIENT_OF_A_RESULT)
    backward_ran = observer.in_backward or any(old is not new for old, new in pairs)
    if not backward_ran and any(tensor.grad_fn is not None for tensor in own):
        findings.append(NO_BACKWARD)
    findings += _moved_tensors(observer, call, there, seen_outside)
    findings += _returned_gradients(call, after, results)
    dropped = all(old is None or old is not new for old, new in pairs) and there.isdisjoint(observer.outside)
    makes = (
        id(one) for one, (old, new) in zip(call.parameters, pairs, strict=True) if new is not None and new is not old
    )
    return returned, Observed(
        operations=observer.operations,
        structure=structure,
        findings=findings,
        outside=frozenset(observer.outside),
        generators=observer.generators,
        draws=draws,
        queries_capture=observer.queries_capture,
        set_up=observer.set_up,
        makes_gradients=frozenset(makes) if dropped else frozenset(),
    )


RESEEDS = Refusal(
    "seeds a generator of random numbers, or sets its state",
    "do so before the step: a graph would not repeat it, and would continue its sequence of random numbers",
)


class Generators:
    """Store the states of the GPU's generators before a call, to check that the call only draws from them."""

    def __init__(self, device: Device, state: HostState) -> None:
        self._default, of_host = device.default_generator(), host_generators(device, state)
        reached = (one for one in state.generators.values() if isinstance(one, torch.Generator))
        own = [one for one in [*state.device_generators, *reached] if identity(one) not in of_host]
        self._before = [(one, one.get_state()) for one in [self._default, *own]]

    def refusals(self, observer: Observer) -> list[Refusal]:
        """Return a refusal if a seed changed, or a generator drew and still has its old state.

        A launch would draw different numbers. The first eight bytes of a state are the seed.
        """
        drawn = {identity(one) for one in [self._default] * observer.draws_by_default + observer.generators}
        for one, before in self._before:
            now = one.get_state()
            if not torch.equal(now[:8], before[:8]) or (identity(one) in drawn and torch.equal(now, before)):
                return [RESEEDS]
        return []


def host_generators(device: Device, state: HostState) -> frozenset[int]:
    """Return the ids of the program's own PyTorch generators on the host."""
    return identities(state.generators.values()) if device.has_own_random else frozenset()


def drawn_on_the_host(generator: str, state: HostState, what: str = "step") -> Refusal:
    """Return the refusal for random numbers from a host generator. `what` names the function, which reaches `state`."""
    return Refusal(
        f"draws random numbers on the host ({generator})",
        f"draw them before the {what} and pass them as arguments, or draw them on the GPU; if they decide nothing, as "
        "those of LayerDrop at rate 0, say so with host_draws='unused'",
        line_with(state.code, generator),
    )


def kept_results(
    state: HostState,
    snapshot: list[Any],
    observer: Observer,
) -> list[Rebound]:
    """Return entries that the call bound to tensors it made, or to its batch, without reading the old tensors.

    An example is a module that stores its last activations. A launch can bind such entries as it returns results.
    """
    reached = {memory(tensor) for tensor in state.tensors.values()}
    return [
        entry
        for entry in state.rebound(snapshot)
        if memory(entry.new) not in reached and (entry.old is None or not _is_read(entry.old, observer))
    ]


def _is_read(tensor: torch.Tensor, observer: Observer) -> bool:
    return (storage(tensor) in observer.outside or storage(tensor) in observer.returned) and tensor.numel() > 0


def storages_of(nest: Any) -> frozenset[int]:
    """Return the storage addresses of the tensors in a nest."""
    tensors: list[torch.Tensor] = []
    flatten(nest, tensors)
    return frozenset(map(storage, tensors))


def call_changes(state: HostState, snapshot: list[Any], kept: Sequence[Rebound]) -> Iterator[Refusal]:
    """Yield a refusal for each change of Python state since the snapshot, except those in `kept`."""
    return (host_change(change, state.code) for change in state.changes(snapshot, kept))


def host_change(change: Change, code: Sequence[types.CodeType]) -> Refusal:
    """Return the refusal for a change of Python state. `code`: code objects of functions that may have made it."""
    name, of_group = change.name, ".param_groups[" in change.words  # optimizers also store counters there
    by_scheduler = name in (("lr", "betas", "momentum") if of_group else ("last_epoch", "_last_lr"))
    advice = OF_A_SCHEDULER if by_scheduler else change.advice
    if name == "training":
        advice = OF_A_MODE
    elif change.advice is NUMBER and (".state[" in change.words or (of_group and name in _COUNTS)):
        advice = OF_AN_OPTIMIZER
    line = line_with(code, name, GROWS if change.advice is GREW else BINDS)
    if line is None and by_scheduler and not of_group:  # the scheduler's code binds it
        line = line_with(code, change.words.split(" ")[0].rpartition(".")[0], STEPS)
    return Refusal(f"changes Python's state, and a graph runs no Python: {change.words}", advice, line)


OF_A_MODE = "call train() and eval() outside of the step"
OF_A_SCHEDULER = "call the scheduler after the step"
OF_AN_OPTIMIZER = (
    "count in a tensor on the GPU that is written in place (`count += 1`), or use an optimizer that does so, as "
    "PyTorch's own with capturable=True or fused=True"
)
_COUNTS = ("step", "steps", "k")
"""Names of numbers that optimizers keep for a group of parameters."""


def changed_itself(name: str) -> Refusal:
    """Return the refusal for a tensor whose metadata or address a call changed without an operator."""
    return Refusal(
        f"changes {name} itself (its requires_grad, shape or memory)",
        "do it outside of the step, write new values in place (`copy_`, `mul_`), or work on `detach()` of it",
    )


class Given:
    """Record the contents of containers among a call's arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._then = [_flattened(value) for _, value in _named(args, kwargs)]

    def changes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Refusal]:
        """Yield a refusal for each argument whose tensors, numbers or strings changed."""
        for (name, value), (structure, tensors) in zip(_named(args, kwargs), self._then, strict=True):
            now, held = _flattened(value)
            if now != structure or any(a is not b for a, b in zip(held, tensors, strict=True)):
                yield Refusal(
                    f"changes {name}, a {type(value).__name__} that it is given, and a graph does not do so",
                    "work on a copy of it (`dict(batch)`, `list(batch)`), and return what it makes",
                )


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [*((f"argument {index}", value) for index, value in enumerate(args)), *kwargs.items()]


def _flattened(value: Any) -> tuple[Hashable, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    return flatten(value, tensors), tensors


def _returned_gradients(call: Call, after: Sequence[torch.Tensor | None], results: Any) -> Iterator[Refusal]:
    """Yield a refusal for each result that is a parameter's gradient: gradients belong to the graph."""
    places = {storage(one): name for one, name in zip(after, call.parameter_names(), strict=True) if one is not None}
    for name in dict.fromkeys(places[place] for place in storages_of(results) if place and place in places):
        yield Refusal(
            f"returns, or keeps in an attribute, the gradient of {name}, which the next launch overwrites",
            "return a copy of it (`clone()`)",
        )


def _moved_tensors(observer: Observer, call: Call, of_gradients: set[int], seen: frozenset[int]) -> Iterator[Refusal]:
    """Yield a refusal for a tensor of unknown origin that was not read in the previous call.

    Note [Compiled modules] in `observer`. `of_gradients`: storage addresses of the gradients before the call.
    """
    if call.state.compiled or not seen:
        return
    known = of_gradients.union(map(storage, [*call.state.tensors.values(), *call.tensors]))
    for address, (_, line) in observer.outside.items():
        if address and address not in known and address not in seen:
            yield Refusal("reads a tensor that changes on every call", "pass it as an argument of the step", line)
            return
