"""`graph_callables`: modules and functions as forward and backward CUDA graphs, in the order of a schedule.

For any callables it does what Transformer Engine's `make_graphed_callables` does for its own modules, and
`torch.cuda.make_graphed_callables` for one micro-batch. Differences that users notice: what the warm-up changed
(buffers, the random state) is put back; a call that the graphs do not fit runs as it is; a call out of order is an
error; gradients may be accumulated over micro-batches; functions may use parameters that are not their arguments.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from optimizations.capture.callables.arguments import (
    Sample,
    arguments_of,
    called,
    device_of,
    has_hooks,
    modes_of,
    parameters_of,
    samples_of,
    taken_apart,
    unknown_object,
)
from optimizations.capture.callables.graphed import Graphed, Slot
from optimizations.capture.callables.memory_plan import pools
from optimizations.capture.callables.order import Event, Follower, WrongOrder, default_order, events, expanded
from optimizations.capture.callables.results import HandedOut
from optimizations.capture.callables.warm_up import Forbidding, refuse_changes, warmed_up
from optimizations.capture.copy_nodes import NotCarried
from optimizations.capture.device import Device
from optimizations.capture.inputs import CopiedInputs, copy_all
from optimizations.capture.signature import flatten, refused_tensor, replaced, signature
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.reach import reach
from optimizations.capture.step.watch import Watch
from optimizations.report.steps import CallableReport, Refusal

_groups: weakref.WeakSet[GraphedCallables] = weakref.WeakSet()


class GraphedCallables(Sequence[Callable[..., Any]]):
    """What `graph_callables` returns: the graphed callables, in the order they were given."""

    def __init__(
        self,
        callables: Sequence[Callable[..., Any]],
        samples: Sequence[Sample],
        order: Sequence[Event],
        *,
        warm_up: int,
        outputs: Literal["static", "copied"],
        after_step: Callable[[], None] | None,
        device: Device,
    ) -> None:
        self._callables = list(callables)
        self._device = device
        self._order = order
        self._outputs = outputs
        self._follower = Follower(order)
        self._training = any(event.direction == "backward" for event in order)
        self._parameters = [parameters_of(function) for function in callables]
        self._keys = [signature(sample, []) for sample in samples]
        self._carries = True
        self._arguments = [arguments_of(sample) for sample in samples]
        self._as_captured = [False for _ in callables]
        self._modes = [modes_of(function) for function in callables]
        self._slots: dict[tuple[int, int], Slot] = {}
        self._update: Any = None
        self.calls_without_graph = 0
        self._closed = False
        self._warned: set[int] = set()
        self.updates = 0
        self._as_was = [
            function.forward if isinstance(function, torch.nn.Module) else function for function in self._callables
        ]
        self._check(samples)
        self._warm_up(samples, after_step, warm_up)
        self._states = [reach([(f"callable {number}", one)]) for number, one in enumerate(self._callables, start=1)]
        before = [state.snapshot() for state in self._states]
        try:
            self._capture(samples, after_step)
        except BaseException:
            self.close()
            raise
        finally:
            for state, content in zip(self._states, before, strict=True):
                state.restore(content)
        self._watches = [self._watch(number) for number in range(1, len(self._callables) + 1)]
        self._install()
        _groups.add(self)

    def __len__(self) -> int:
        return len(self._callables)

    def __getitem__(self, index: Any) -> Any:
        return self._graphed[index]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._graphed)

    def _install(self) -> None:
        """Modules run their graphs when they are called, wherever they stand; functions are returned as new ones."""
        self._graphed: list[Callable[..., Any]] = []
        for number, function in enumerate(self._callables, start=1):
            graphed = functools.partial(self._call, number)
            if isinstance(function, torch.nn.Module):
                function.forward = graphed
                self._graphed.append(function)
            else:
                self._graphed.append(graphed)

    def _watch(self, number: int) -> Watch:
        """What the graphs of a callable were made with: they serve it as long as that stands."""
        bound = {
            (id(entry.container.held), entry.key)
            for slot in self._slots.values()
            if slot.number == number
            for entry, _ in slot.bound
        }
        return Watch(
            self._states[number - 1],
            lambda held, key: (id(held), key) in bound,
            lambda tensor: True,
            (),
            own_forwards=False,  # modules get one here
        )

    def restart(self) -> None:
        """Begin the order from its first event, after an iteration that was left early."""
        self._follower.restart()

    def close(self) -> None:
        """Free the graphs. Calls run as they are from then on."""
        self._closed = True
        self._device.wait()
        for function in self._callables:
            if isinstance(function, torch.nn.Module) and isinstance(vars(function).get("forward"), functools.partial):
                del function.forward
        for slot in self._slots.values():
            slot.forward.reset()
            if slot.backward is not None:
                slot.backward.reset()
        if self._update is not None:
            self._update.reset()
        self._slots.clear()

    def report(self) -> tuple[CallableReport, ...]:
        """The graphs, in the order of the schedule."""
        found = []
        for event in self._order:
            if (slot := self._slots.get((event.callable, event.micro_batch))) is not None:
                forward = event.direction == "forward"
                tangents = sum(tensor.nbytes for tensor in slot.tangents)
                found.append(
                    CallableReport(
                        callable=event.callable,
                        micro_batch=event.micro_batch,
                        direction=event.direction,
                        pool=slot.pool,
                        copied_bytes=slot.inputs.copied_bytes if forward else tangents,
                        replays=slot.forwards if forward else slot.backwards,
                    )
                )
        return tuple(found)

    # Calls.

    def _call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        function = self._as_was[number - 1]
        outside = self._closed or self._device.is_capturing() or torch.is_grad_enabled() != self._training
        if outside:  # validation between steps is not part of the order
            return function(*args, **kwargs)
        arguments = self._arguments[number - 1]
        tensors = arguments.tensors_of(args, kwargs)
        if tensors is None:
            tensors = []
            fits = signature((args, kwargs), tensors) == self._keys[number - 1] and self._in_mode(number)
            if fits:
                arguments.renew(tensors)
        else:
            fits = True
        if fits and not self._watches[number - 1].unchanged():
            fits = False
            if self._in_mode(number):
                self._warn_of_change(number)
        micro_batch = self._follower.forward(number, skip=not fits)
        if not fits:
            self.calls_without_graph += 1
            return function(*args, **kwargs)
        slot = self._slots[number, micro_batch]
        results = Graphed.apply(slot, len(tensors), *tensors, *slot.parameters)
        if self._outputs == "static":
            slot.results.remember(results)
        if not self._training:
            self._end_of_step()
        return replaced(slot.nest, iter(results))

    def _in_mode(self, number: int) -> bool:
        """Whether training or evaluation, and autocast, are those of the capture."""
        return modes_of(self._callables[number - 1]) == self._modes[number - 1]

    def _warn_of_change(self, number: int) -> None:
        if number not in self._warned:
            self._warned.add(number)
            warnings.warn(
                f"callable {number} runs without its graphs: it uses other tensors or numbers than those they were "
                "captured with; write new values into the same tensors, or call close() and graph_callables again",
                stacklevel=4,
            )

    def _end_of_step(self) -> None:
        """Behind the last launch of a step: update what is updated once per step."""
        if self._update is not None and self._follower.at_start:
            self._update.replay()
            self.updates += 1

    # Capture.

    def _check(self, samples: Sequence[Sample]) -> None:
        """Refuse what cannot be captured.

        Raises:
            StepRefused: a module has hooks, or an argument is not a tensor on the GPU.
        """
        for number, (function, sample) in enumerate(zip(self._callables, samples, strict=True), start=1):
            if isinstance(function, torch.nn.Module):
                for name, module in function.named_modules():
                    if has_hooks(module):
                        raise StepRefused(
                            Refusal(
                                f"callable {number} has hooks on {name or 'itself'}",
                                "a graph runs no Python: register them after graph_callables, on what it returns",
                            )
                        )
            tensors: list[torch.Tensor] = []
            flatten(sample, tensors)
            for index, tensor in enumerate(tensors):
                refusal = refused_tensor(f"tensor {index} of callable {number}", tensor.detach(), self._device.holds)
                if refusal is not None:
                    raise StepRefused(refusal)

    def _warm_up(self, samples: Sequence[Sample], after_step: Callable[[], None] | None, warm_up: int) -> None:
        """Run everything on the side stream, then put back what that changed."""
        states = self._device.random_states()
        state = reach((f"callable {number}", function) for number, function in enumerate(self._callables, start=1))
        if after_step is not None:
            state.tensors.update(reach([("after_step", after_step)]).tensors)
        kept = [(tensor, tensor.detach().clone()) for tensor in state.tensors.values() if not tensor.requires_grad]
        grads = [(parameter, parameter.grad) for parameter in state.parameters()]
        try:
            for number, arguments in enumerate(zip(self._callables, samples, self._parameters, strict=True)):
                run = functools.partial(self._run_once, *arguments)
                self._as_captured[number] = warmed_up(self._device, run, state, warm_up)
            if after_step is not None:
                with self._device.warming_up():
                    after_step()
        finally:
            with torch.no_grad():
                copy_all([tensor for tensor, _ in kept], [old for _, old in kept])
            for parameter, gradient in grads:
                parameter.grad = gradient
            self._device.restore_random_states(states)

    def _run_once(self, function: Callable[..., Any], sample: Sample, parameters: Sequence[torch.Tensor]) -> None:
        tensors: list[torch.Tensor] = []
        with torch.set_grad_enabled(self._training):
            flatten(called(function, sample), tensors)
            outputs = [tensor for tensor in tensors if tensor.requires_grad]
            inputs: list[torch.Tensor] = []
            flatten(sample, inputs)
            wanted = [tensor for tensor in [*inputs, *parameters] if tensor.requires_grad]
            if outputs and wanted:
                tangents = [torch.zeros_like(output) for output in outputs]
                torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)

    def _capture(self, samples: Sequence[Sample], after_step: Callable[[], None] | None) -> None:
        plan = pools(self._order)
        handles = {pool: self._device.new_pool() for pool in sorted(set(plan.values()))}
        states = self._device.random_states()
        open_outputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        shared: dict[int, list[torch.Tensor | None]] = {}
        for event in self._order:
            key = event.callable, event.micro_batch
            number = plan[key]
            if event.direction == "forward":
                slot, outputs = self._capture_forward(event, samples[event.callable - 1], number, handles[number])
                self._slots[key] = slot
                open_outputs[key] = outputs
            else:
                self._capture_backward(self._slots[key], open_outputs.pop(key), handles[number], shared)
        if after_step is not None:
            self._update = self._device.new_graph()
            pool = self._device.new_pool()
            with self._device.capturing(self._update, pool), self._forbidding(), torch.no_grad():
                after_step()
        self._device.restore_random_states(states)

    def _forbidding(self, number: int | None = None) -> Forbidding:
        """For a capture of callable `number`, counted from 1."""
        as_captured = number is not None and self._as_captured[number - 1]
        return Forbidding(self._device, compiled=any(state.compiled for state in self._states), as_captured=as_captured)

    def _capture_forward(self, event: Event, sample: Sample, pool: int, handle: Any) -> tuple[Slot, list[torch.Tensor]]:
        """The graph copies its inputs itself where that is possible. See `copy_nodes`."""
        if self._carries:
            try:
                return self._captured_forward(event, sample, pool, handle)
            except NotCarried:
                self._carries = False
        return self._captured_forward(event, sample, pool, handle)

    def _captured_forward(
        self, event: Event, sample: Sample, pool: int, handle: Any
    ) -> tuple[Slot, list[torch.Tensor]]:
        function = self._callables[event.callable - 1]
        tensors: list[torch.Tensor] = []
        flatten(sample, tensors)
        with self._device.here():
            given = [tensor.detach() for tensor in tensors]
            inputs = CopiedInputs(given)
        for tensor, placeholder in zip(tensors, inputs.recording_inputs, strict=True):
            placeholder.requires_grad_(tensor.requires_grad)
        graph, forbidding = self._device.new_graph(), self._forbidding(event.callable)
        state = self._states[event.callable - 1]
        snapshot = state.snapshot()
        torch.clear_autocast_cache()
        to_carry = inputs.to_carry(given) if self._carries else {}
        with torch.set_grad_enabled(self._training), self._device.capturing(graph, handle):
            inputs.capture_copies({index: (of, to.detach()) for index, (of, to) in to_carry.items()})
            with forbidding:
                nest = called(function, replaced(sample, iter(inputs.recording_inputs)))
        torch.clear_autocast_cache()
        if to_carry:
            try:
                nodes = self._device.copies(graph, list(to_carry.values()))
                inputs.carry(dict(zip(to_carry, nodes, strict=True)), given)
            except NotCarried:
                graph.reset()
                raise
        bound = refuse_changes(state, snapshot, forbidding.observer)
        outputs: list[torch.Tensor] = []
        if (strange := unknown_object(flatten(nest, outputs))) is not None:
            raise StepRefused(
                Refusal(
                    f"callable {event.callable} returns a {type(strange).__qualname__}",
                    "return tensors, numbers, and containers of such: what an object holds would be overwritten",
                )
            )
        static = [output.detach() for output in outputs]
        slot = Slot(
            number=event.callable,
            micro_batch=event.micro_batch,
            pool=pool,
            forward=graph,
            inputs=inputs,
            parameters=self._parameters[event.callable - 1],
            nest=replaced(nest, iter(static)),
            results=HandedOut(static),
            differentiable=[output.requires_grad for output in outputs],
            begins=self._follower.backward,
            ended=self._end_of_step,
            copied=self._outputs == "copied",
            bound=[(entry, entry.new.detach()) for entry in bound],
        )
        return slot, outputs

    def _capture_backward(
        self, slot: Slot, outputs: list[torch.Tensor], handle: Any, shared: dict[int, list[torch.Tensor | None]]
    ) -> None:
        given = [output for output in outputs if output.requires_grad]
        slot.tangents = [torch.zeros_like(output) for output in given]
        surface = [*slot.inputs.recording_inputs, *slot.parameters]
        wanted = [tensor for tensor in surface if tensor.requires_grad]
        slot.backward = self._device.new_graph()
        count = len(slot.inputs.recording_inputs)
        with self._device.capturing(slot.backward, handle), self._forbidding(slot.number):
            found: Sequence[torch.Tensor | None] = ()
            if given and wanted:
                found = torch.autograd.grad(given, wanted, slot.tangents, allow_unused=True)
            by_id = dict(zip(map(id, wanted), found, strict=True)) if found else {}
            gradients = [by_id.get(id(tensor)) for tensor in surface]
            # All micro-batches of a callable write the gradients of its parameters to the memory of the first.
            own = shared.setdefault(slot.number, gradients[count:])
            pairs = [
                (there, here)
                for there, here in zip(own, gradients[count:], strict=True)
                if there is not None and here is not None and there is not here
            ]
            copy_all([there for there, _ in pairs], [here for _, here in pairs])
        slot.gradients = [*gradients[:count], *own]


def graph_callables(
    callables: Any,
    sample_args: Sequence[Any],
    *,
    order: Sequence[int] | None = None,
    warm_up: int = 3,
    sample_kwargs: Sequence[Mapping[str, Any]] | None = None,
    outputs: Literal["static", "copied"] = "static",
    after_step: Callable[[], None] | None = None,
    device: Device | None = None,
) -> GraphedCallables:
    """`optimizations.graph_callables`, where it is documented."""
    if outputs not in ("static", "copied"):
        raise ValueError(f"outputs={outputs!r} is unknown; allowed are 'static', 'copied'")
    if warm_up < 1:
        raise ValueError(f"warm_up={warm_up}: libraries must run once before a capture")
    flat, sizes = taken_apart(callables)
    samples = samples_of(sample_args, sample_kwargs, len(flat))
    entries = default_order(len(sizes), training=torch.is_grad_enabled()) if order is None else list(order)
    planned = events(expanded(entries, sizes), len(flat))
    return GraphedCallables(
        flat,
        samples,
        planned,
        warm_up=warm_up,
        outputs=outputs,
        after_step=after_step,
        device=device or device_of(samples),
    )


def release_callables() -> None:
    """Free the graphs of all graphed callables."""
    for group in list(_groups):
        group.close()


__all__ = ["GraphedCallables", "WrongOrder", "graph_callables"]
