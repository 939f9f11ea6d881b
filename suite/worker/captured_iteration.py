"""Run iterations of modes that capture more than `torch.compile` does: all of it, the module with its loss, or by hand.

The kernels are those of mode `compile`, whose compiled module runs inside. An iteration that cannot be captured is not
timed as something else: its cell ends as unsupported, with the reason.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, Literal

import torch

import optimizations
from models.instance import Instance
from models.nests import map_tensors, tensors_of
from models.registry import Inputs, Workload
from suite.measure.iteration import Iterate, IterationOutput, iteration
from suite.measure.modes import Mode
from suite.measure.results import named_tensors
from suite.results.schema import Copies
from suite.worker.protocol import Unsupported


def captured_iteration(
    mode: Mode,
    instance: Instance,
    call: Callable[..., Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    outputs: bool = True,
) -> CapturedIteration:
    """Return the iteration of `instance` through `call`, captured as `mode` says. `outputs`: it returns the module's.

    Raises:
        Unsupported: the workload does not train.
    """
    if instance.workload.task != "training":
        raise Unsupported(f"mode {mode.name} captures training iterations, and this workload is for inference")
    if mode.captures in ("step", "by hand"):
        iterate = iteration(instance, call, marks_steps=False, optimizer=optimizer)
        if mode.captures == "by hand":
            return HandIteration(iterate, list(instance.module.parameters()))
        return StepIteration(iterate, outputs=outputs, host_draws=host_draws(instance.workload))
    if instance.workload.is_step:
        raise Unsupported(
            f"mode {mode.name} captures a module and its loss, and this program is a step: name mode step"
        )
    return CallableIteration(instance, call, optimizer, outputs=outputs)


def host_draws(workload: Workload) -> Literal["refused", "unused"]:
    """Return the value of `host_draws` that the workload declares for its random numbers."""
    return "unused" if workload.host_draws_unused else "refused"


class Outputs:
    """Return the tensors of a module's output from a capture, and rebuild outputs of the same structure from them.

    Outputs may hold objects that no graph returns, such as caches of keys and values. The last output is stored in an
    object of Python's standard library, which a capture does not search for a loop's state.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._last: contextlib.nullcontext[Any] = contextlib.nullcontext()

    def taken_apart(self, output: Any) -> list[torch.Tensor]:
        """Return the tensors of an output, in order; none where no outputs are wanted."""
        if not self._wanted:
            return []
        tensors = {id(tensor): tensor for _, tensor in named_tensors(output, numbers=False)}
        self._last.enter_result = (output, list(tensors.values()))
        return list(tensors.values())

    def put_together(self, tensors: list[torch.Tensor]) -> Any:
        """Return the last output with these tensors in the place of its own."""
        if not self._wanted:
            return None
        output, last = self._last.enter_result
        places = {id(old): new for old, new in zip(last, tensors, strict=True)}
        return copy.deepcopy(output, places)


class StepIteration:
    """Capture forward, loss, backward and the optimizer's step as one graph, in its first calls.

    As of the other captured iterations: `require_replays` raises `Unsupported` where calls run without the graphs that
    the mode is about, `graphs` counts them, and `copies` counts what is copied into their placeholders in one iteration
    and the pointers that are written.
    """

    def __init__(
        self, iterate: Iterate, *, outputs: bool, host_draws: Literal["refused", "unused"] = "refused"
    ) -> None:
        taken = self._outputs = Outputs(wanted=outputs)

        def step(*args: Any, **kwargs: Any) -> tuple[list[torch.Tensor], torch.Tensor | None]:
            outcome = iterate(Inputs(args, kwargs))
            return taken.taken_apart(outcome.output), outcome.loss

        self._graphed = optimizations.graph_step(step, host_draws=host_draws, check_every=None)

    def __call__(self, inputs: Inputs) -> IterationOutput:
        tensors, loss = self._graphed(*inputs.args, **inputs.kwargs)
        return IterationOutput(self._outputs.put_together(tensors), loss)

    def require_replays(self) -> None:
        report = self._graphed.report()
        if report.refusals or not report.replays:
            raise Unsupported("; ".join(map(str, report.refusals)) or "nothing was recorded")

    def graphs(self) -> int:
        return len(self._graphed.report().recordings)

    def copies(self) -> Copies:
        recording = max(self._graphed.report().recordings, key=lambda found: found.replays)
        return _copies(recording.copied_bytes, recording.copied_tensors)

    def close(self) -> None:
        self._graphed.close()


class CallableIteration:
    """Capture the module and its loss as a forward and a backward graph; autograd and the optimizer run as they are."""

    def __init__(
        self,
        instance: Instance,
        call: Callable[..., Any],
        optimizer: torch.optim.Optimizer | None,
        *,
        outputs: bool,
    ) -> None:
        taken = self._outputs = Outputs(wanted=outputs)
        autocast, loss_of = instance.autocast, instance.loss

        def forward(inputs: Inputs) -> tuple[list[torch.Tensor], torch.Tensor]:
            with autocast():
                output = call(*inputs.args, **inputs.kwargs)
                return taken.taken_apart(output), loss_of(output)

        self._forward = forward
        self._host_draws = host_draws(instance.workload)
        self._parameters = list(instance.module.parameters())
        self._optimizer = optimizer
        self._graphed: Any = None

    def __call__(self, inputs: Inputs) -> IterationOutput:
        if self._graphed is None:
            try:
                self._graphed = optimizations.graph_callables(self._forward, [(inputs,)], host_draws=self._host_draws)
            except RuntimeError as error:
                raise Unsupported(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        for parameter in self._parameters:
            parameter.grad = None
        tensors, loss = self._graphed[0](inputs)
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        return IterationOutput(self._outputs.put_together(tensors), loss)

    def require_replays(self) -> None:
        if self._graphed is None or self._graphed.calls_without_graph or not all(r.replays for r in self._reports()):
            raise Unsupported("calls of the module run without its graphs: their shapes or modes are others each time")

    def graphs(self) -> int:
        return 0 if self._graphed is None else len(self._reports())

    def copies(self) -> Copies:
        reports = self._reports()
        return _copies(sum(one.copied_bytes for one in reports), sum(one.copied_tensors for one in reports))

    def close(self) -> None:
        if self._graphed is not None:
            self._graphed.close()

    def _reports(self) -> Any:
        return self._graphed.report()


class HandIteration:
    """Capture the whole iteration as PyTorch's notes on CUDA graphs describe, and replay it.

    The first calls run on a side stream; the next one is recorded on static inputs and launched. Later calls copy
    their inputs there. Nothing is checked, so no general solution can be faster with these kernels.
    """

    WARM_UP = 3
    """Calls before the one that is recorded: `CALLS_TO_CAPTURE` counts that one too."""

    def __init__(self, iterate: Iterate, parameters: list[torch.nn.Parameter]) -> None:
        self._iterate = iterate
        self._parameters = parameters
        self._calls = 0
        self._stream: Any = None
        self._graph: Any = None
        self._inputs: Inputs
        self._outcome: IterationOutput
        self._gradients: list[torch.Tensor | None] = []

    def __call__(self, inputs: Inputs) -> IterationOutput:
        self._calls += 1
        if self._calls <= self.WARM_UP:
            return self._with_others(inputs)
        if self._graph is None:
            self._record(inputs)
        else:
            self._copy(inputs)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._outcome

    def _with_others(self, inputs: Inputs) -> IterationOutput:
        """Run the iteration on the stream that is captured later."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outcome = self._iterate(inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return outcome

    def _record(self, inputs: Inputs) -> None:
        """Record the iteration. It does not run meanwhile.

        Raises:
            Unsupported: something in it cannot be recorded.
        """
        self._inputs = Inputs(*map_tensors((inputs.args, inputs.kwargs), torch.Tensor.clone))
        for parameter in self._parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._outcome = self._iterate(self._inputs)
        except RuntimeError as error:
            raise Unsupported(f"it cannot be captured by hand: {str(error).splitlines()[0]}") from error
        self._graph = graph
        self._gradients = [parameter.grad for parameter in self._parameters]

    def _copy(self, inputs: Inputs) -> None:
        for mine, given in zip(_tensors(self._inputs), _tensors(inputs), strict=True):
            mine.copy_(given, non_blocking=True)

    def require_replays(self) -> None:
        if self._graph is None:
            raise Unsupported("nothing was recorded")

    def graphs(self) -> int:
        return int(self._graph is not None)

    def copies(self) -> Copies:
        given = _tensors(self._inputs)
        return _copies(sum(tensor.nbytes for tensor in given), len(given))

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()


def _copies(copied_bytes: int, tensors: int) -> Copies:
    return Copies(placeholder_bytes=copied_bytes, placeholder_tensors=tensors, pointer_bytes=0)


def _tensors(inputs: Inputs) -> list[torch.Tensor]:
    return list(tensors_of((inputs.args, inputs.kwargs)))


CapturedIteration = StepIteration | CallableIteration | HandIteration
"""Run an iteration that is captured in its first calls. It returns no output unless one was requested."""
