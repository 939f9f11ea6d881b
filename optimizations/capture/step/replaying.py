"""Steady replays of a step: calls in the state in which its recording served one, with few looks and one function.

`Recording.fits` and `Recording.launch` find out in each call what this recording has to do: gradients to bring, results
to bind, arrays to compare. A `SteadyReplay` is made behind a launch, of the parts that this recording needs. Everything
that Python or a tensor itself can be asked for in C++ is one comparison there: structure apart, the arguments' looks
and aliases, settings, numbers and objects, the state's looks and gradients. What it does not know as unchanged it does
not serve: then the recording is looked at as ever, and if it serves the call, the steady replay is made of what is
there now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimizations import torch_internals
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.steady import precision_now
from optimizations.torch_internals.argument_guard import same_call

if TYPE_CHECKING:
    from optimizations.capture.step.recording import Recording

MISSED = object()
"""What a steady replay gives for a call that it does not serve. Nothing was done then."""

WORTH = 64
"""Calls that one must have served to be made again at once."""


class SteadyReplay:
    """The steady replay of one recording, and when it is made.

    Attributes:
        serve: takes the recording, the positional and the named arguments of a call, and gives its results or `MISSED`.
            It may raise `NotCarried`, as `Recording.launch` does. None while there is none. It does not hold the
            recording, whose graph is freed when nothing else holds it.
    """

    def __init__(self) -> None:
        self.serve: _Serve | None = None
        self._made_at = 0
        self._next = 1
        self._wait = WORTH

    def served_otherwise(self, recording: Recording, tensors: Sequence[torch.Tensor], rates: LearningRates) -> None:
        """To be told that the recording has served a call with these tensors in the full way.

        What is there now is what is steady from then on. Making a steady replay looks at everything, so one that soon
        missed is made again after so many calls, twice as many each time.
        """
        if self.serve is not None:
            self._wait = WORTH if recording.replays - self._made_at > self._wait else 2 * self._wait
            self._next = recording.replays if self._wait == WORTH else recording.replays + self._wait
            self.serve = None
        if recording.replays >= self._next:
            self._made_at = recording.replays
            self.serve = _made(recording, tensors, rates)


_Serve = Callable[["Recording", tuple[Any, ...], dict[str, Any]], Any]


def _made(recording: Recording, tensors: Sequence[torch.Tensor], rates: LearningRates) -> _Serve | None:
    """The function of a recording whose last launch was a moment ago; None where its calls bring gradients."""
    expected, leaves = recording.gradients.steady()
    if expected is None:
        return None
    arguments, watch, inputs, outputs = recording.arguments, recording.watch, recording.inputs, recording.outputs
    take, inference, precision, other = arguments.beside_guards()
    same, rest = same_call(
        tensors,
        watch.tensors,
        watch.held(),
        recording.gradients.parameters if expected else (),
        expected,
        distinct=arguments.distinct,
        no_modes=arguments.no_modes,
    )
    unchanged = watch.rest_unchanged()
    in_inference, precision_is = torch.is_inference_mode_enabled, precision_now
    region, bound, written, mutated = recording.region, bool(recording.bound), recording.written, recording.mutated
    rare: list[Callable[[Recording, list[torch.Tensor]], bool]] = []
    if other is not None:
        rare.append(lambda recording, found: other(found))
    if region is not None:
        rare.append(lambda recording, found: region.lasts())
    if bound:
        rare.append(lambda recording, found: recording.results_fit())
    holds_one_at = recording.written_memory.holds_one_at
    moved = inputs.moved if inputs.in_place else None
    bind_at = inputs.bind_at
    prepare, take_results, replay = outputs.prepare, outputs.take, recording.graph.replay
    only = outputs.only()
    allocate, write_to = (None, None) if only is None else only
    before = rates.write if rates.standing else None
    leave = recording.gradients.leave if leaves else None
    count_up = torch_internals.increment_version

    def serve(recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = take(args, kwargs)
        if found is None or not same((tuple(found), rest)):
            return MISSED
        if in_inference() is not inference or precision_is() != precision:
            return MISSED
        for one in rare:
            if not one(recording, found):
                return MISSED
        addresses = [tensor.data_ptr() for tensor in found]
        lie_elsewhere = addresses != inputs.bound_at
        if lie_elsewhere:
            if recording.shares(found) if written else holds_one_at(found, addresses):
                return MISSED
            if moved is not None and moved(found):
                return MISSED
        if not unchanged():
            return MISSED

        # From here on as `Recording.launch`.
        if allocate is None or write_to is None:
            fresh = prepare()
        else:
            write_to(result := allocate())
        if lie_elsewhere:
            bind_at(found, addresses)
        if before is not None:
            before()
        replay()
        if written:
            inputs.give_back(found, written)
        if leave is not None:
            leave()
        if mutated:
            count_up(mutated)
        recording.replays += 1
        if write_to is not None:
            return result
        results = take_results(found, fresh)
        return recording.bind_results(results) if bound else results

    return serve
