"""Run a call eagerly and observe whether a graph could repeat it.

A graph draws random numbers on the GPU, but none on the host. So the states of generators are compared.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch

from optimizations.capture.device import Device
from optimizations.capture.signature import flatten
from optimizations.capture.step.call import Call, ambient
from optimizations.capture.step.forbidden_calls import noticed, watched
from optimizations.capture.step.gradients import gradients
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.observer import Observer, storage
from optimizations.capture.step.tensor_marks import TensorMarks
from optimizations.capture.step.user_code import line_with
from optimizations.report.steps import Refusal

RETURNS_DRAWS = Refusal(
    "draws random numbers on the host, and returns a CPU tensor, which may hold them",
    "draw them after the step, or on the GPU",
)
NO_BACKWARD = Refusal(
    "returns a tensor whose backward has not run",
    "call backward in the step, return it detached, or use graph_callables",
)
CHANGES_ARGUMENT = Refusal(
    "changes a container that it is given as an argument, and a graph does not do so",
    "work on a copy of it (`dict(batch)`, `list(batch)`), and return what it makes",
)
LEAVES_SETTINGS = Refusal(
    "leaves a setting of PyTorch other than it found it (gradients on or off, autocast, default dtype, precision)",
    "set it before the step, or for a block of it (`with torch.set_grad_enabled(...)`)",
)


def observe(
    device: Device,
    step: Callable[..., Any],
    call: Call,
    rates: LearningRates,
    seen_outside: Collection[int],
    *,
    as_captured: bool = False,
    draws_unused: bool = False,
) -> tuple[Any, Observer]:
    """Run the call eagerly on the side stream; return its results and the observer, with all refusals.

    Args:
        seen_outside: `Observer.outside` of the previous call, if any.
        as_captured: the value that the step gets if it queries whether it is captured.
        draws_unused: the caller declared that random numbers drawn on the host have no effect (`host_draws="unused"`).
    """
    state = call.state
    observer = Observer(device, call.known(call.tensors), forbid=False, as_captured=as_captured)
    random, settings = RandomStates(device), ambient()
    arguments = dict(zip(call.labels, call.tensors, strict=False))
    marks = TensorMarks({**state.tensors, **call.named_gradients(), **arguments})
    there = {storage(one) for one in call.before if one is not None}  # the call may replace their memory
    with device.warming_up(), rates.as_tensors():
        device.may_read(gradients(call.parameters))
        snapshot = state.snapshot()
        with observed(observer, state):
            returned = step(*call.args, **call.kwargs)
        results: list[torch.Tensor] = []
        observer.structure = flatten(returned, results)
        on_host = not all(map(device.holds, results))
        findings = observer.refusals
        findings += state.changes(snapshot)
    after = gradients(call.parameters)
    if ambient() != settings:
        findings.append(LEAVES_SETTINGS)
    if (drawn := random.drawn_on_host()) and on_host:
        findings.append(RETURNS_DRAWS)
    if not draws_unused:
        findings += [drawn_on_the_host(name, state.code) for name in drawn]
    findings += map(changed_itself, marks.changed())
    findings += random.refusals(observer)
    replaced = [new is not old for old, new in zip(call.before, after, strict=True)]
    if not (observer.in_backward or any(replaced)) and any(tensor.grad_fn is not None for tensor in results):
        findings.append(NO_BACKWARD)
    findings += _moved_tensors(observer, call, there, seen_outside)
    findings += _returned_tensors(call, after, results)
    drops_all = all(new or old is None for old, new in zip(call.before, replaced, strict=True))
    if drops_all and there.isdisjoint(observer.outside):
        made_for = zip(call.parameters, after, replaced, strict=True)
        observer.makes_gradients = {id(one) for one, new, is_new in made_for if is_new and new is not None}
    return returned, observer


@contextlib.contextmanager
def observed(observer: Observer, state: HostState) -> Iterator[None]:
    """Observe the operators, compilations and forbidden calls of the block. `state`: what its code reaches."""
    with noticed(observer), watched(observer, compiled=state.compiled), observer:
        yield


def changed_itself(name: str) -> Refusal:
    """Return the refusal for a tensor whose metadata or address a call changed without an operator."""
    return Refusal(
        f"changes {name} itself (its requires_grad, shape or memory)",
        "do it outside of the step, write new values in place (`copy_`, `mul_`), or work on `detach()` of it",
    )


def contents(*nests: Any) -> Hashable:
    """Return what containers hold now: structure, numbers, and ids of tensors, which must stay alive."""
    tensors: list[torch.Tensor] = []
    return flatten(nests, tensors), tuple(map(id, tensors))


def _returned_tensors(
    call: Call, after: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor]
) -> Iterator[Refusal]:
    """Yield a refusal for each result that outlives the call: an argument, what the step reaches, or a gradient."""
    places = call.known(call.tensors)
    named = zip(after, call.parameter_names(), strict=True)
    places.update((storage(one), f"the gradient of {name}") for one, name in named if one is not None)
    for name in dict.fromkeys(places[place] for place in map(storage, results) if place and place in places):
        yield Refusal(
            f"returns {name} or a view of it, which the next launch may overwrite", "return a copy of it (`clone()`)"
        )


def _moved_tensors(observer: Observer, call: Call, of_gradients: set[int], seen: Collection[int]) -> Iterator[Refusal]:
    """Yield a refusal for a tensor of unknown origin that was not read in the previous call.

    Note [Compiled modules] in `observer`. `of_gradients`: storage addresses of the gradients before the call.
    """
    if call.state.compiled or not seen:
        return
    known = of_gradients.union(map(storage, [*call.state.tensors.values(), *call.tensors]))
    for address, line in observer.outside.items():
        if address and address not in known and address not in seen:
            yield Refusal("reads a tensor that changes on every call", "pass it as an argument of the step", line)
            return


CHECKPOINT_DRAWS = Refusal(
    "keeps the GPU's random state to draw the same numbers again, as torch.utils.checkpoint does for recomputation",
    "use torch.compile for the checkpointed part, or pass preserve_rng_state=False if it draws no random numbers",
)
RESEEDS = Refusal(
    "seeds a generator of random numbers, or sets its state",
    "do so before the step: a graph would not repeat it, and would continue its sequence of random numbers",
)


class RandomStates:
    """Record the states of the default generators of PyTorch, Python and NumPy."""

    def __init__(self, device: Device) -> None:
        self._generator = device.default_generator()
        self._before = self._generator.get_state()
        of_host: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "random": (random.getstate, random.setstate)
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            of_host["numpy.random"] = numpy.random.get_state, numpy.random.set_state
        if device.has_own_random:  # else the CPU simulates the GPU
            of_host["torch's CPU generator"] = torch.get_rng_state, torch.set_rng_state
        self._on_host = [(name, read, write, read()) for name, (read, write) in of_host.items()]

    def drawn_on_host(self) -> list[str]:
        """Return the program's names of the generators of the host whose state changed."""
        return [name for name, read, _, state in self._on_host if not _equal(read(), state)]

    def refusals(self, observer: Observer) -> list[Refusal]:
        """Record whether the call drew on the GPU. Return a refusal if a launch would draw different numbers.

        Either the seed changed, which is the first eight bytes of a state, or the generator drew and still has its
        state.
        """
        before, now = self._before, self._generator.get_state()
        observer.draws |= not torch.equal(before, now)
        if not observer.draws:
            return []
        if observer.queries_random_state:
            return [CHECKPOINT_DRAWS]
        reseeds = not torch.equal(now[:8], before[:8]) or (observer.draws_by_default and torch.equal(now, before))
        return [RESEEDS] if reseeds else []

    def restore(self) -> None:
        """Restore the recorded states."""
        # Setting even the same state makes the next recurrent layer of cuDNN draw its dropout from another seed.
        if not torch.equal(self._before, self._generator.get_state()):
            self._generator.set_state(self._before)
        for _, read, write, state in self._on_host:
            if not _equal(read(), state):
                write(state)


def drawn_on_the_host(generator: str, code: Sequence[types.CodeType], what: str = "step") -> Refusal:
    """Return the refusal for random numbers from a host generator. `what` names the function, which reaches `code`."""
    return Refusal(
        f"draws random numbers on the host ({generator})",
        f"draw them before the {what} and pass them as arguments, or draw them on the GPU; if they decide nothing, as "
        "those of LayerDrop at rate 0, say so with host_draws='unused'",
        line_with(code, generator),
    )


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal. They may contain arrays, tensors and tuples."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tolist"):
        one, other = one.tolist(), other.tolist()
    return bool(one == other)
