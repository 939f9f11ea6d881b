"""The trial of a plan on the device: what `proof.prove` decides on.

Both graphs are clones of the captured one, launched by the driver, so that nothing of the recording is changed before
its outcome is known, and so that the generator is not advanced: two runs see the same captured random state and draw
the same numbers.

Note [What a run destroys]. A graph may reuse the memory of an input that is dead: of a result of an earlier graph, or
of a placeholder in the pool. It also writes what the function mutates. All of that is put back before each run, and
once more at the end.

Note [What an earlier run left]. Both graphs write the same memory, so a node of the indirected one that did nothing
would leave the right result of the run before it. So the captured graph runs on other data in between.

Note [The second set of data]. Values must be ones the program could pass: an index out of range stops the process. The
first set is the caller's data, the second the same with floating-point values halved and shifted by a quarter, which
leaves indices that are stored as floats in range, and what is no number as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimizations.appliers.applied import AppliedPlan, ApplierTools
from optimizations.captured.driver import check
from optimizations.captured.editing import EditableGraph
from optimizations.captured.placeholders import OutsidePlaceholder, data_of, poison
from optimizations.indirection.plan import Plan

DATA_SETS = 2

SAMPLE_BYTES = 1 << 16

ARITHMETIC_BYTES = 2
"""Floating-point types narrower than this have no arithmetic in PyTorch."""


class TrialTools(ApplierTools, Protocol):
    """What a trial needs of a device beside what the appliers do."""

    driver: Any

    def stream(self) -> Any:
        """The current stream (`CUstream`)."""

    def synchronize(self) -> None:
        """Wait for the device."""


@dataclass(frozen=True, slots=True)
class RecordedState:
    """Memory that a run may change, and what of it counts as outcome.

    Attributes:
        destroyed: uint8 tensors over all memory that a run may change and the next one reads.
        written: inputs at fixed addresses that the function mutates.
        outputs: what the function returned.
    """

    destroyed: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


class DeviceTrial:
    """See `proof.Trial`. To be closed; a context manager.

    Args:
        graph: the graph as captured.
        plan: what is tried.
        placeholders: of all inputs that lie outside of the pool, by input.
        caller: the tensors that the caller passed for these.
        mutated: which of them the function writes.
        state: the rest of what a run touches; saved here, restored by `close`.

    Raises:
        torch.OutOfMemoryError: no memory for copies of inputs, state and outcome.
        CudaCallFailed: a call of the driver failed.
    """

    data_sets = DATA_SETS

    def __init__(
        self,
        graph: EditableGraph,
        plan: Plan,
        tools: TrialTools,
        placeholders: Mapping[int, OutsidePlaceholder],
        caller: Mapping[int, torch.Tensor],
        mutated: Collection[int],
        state: RecordedState,
    ) -> None:
        self._tools = tools
        self._placeholders = placeholders
        self._caller = caller
        self._mutated = sorted(set(mutated) & set(placeholders))
        self._state = state
        self._indirect = [one.input for one in plan.inputs if one.indirect]
        self._saved = [memory.clone() for memory in state.destroyed]
        self._elsewhere = [
            {index: torch.empty_like(placeholders[index].data) for index in self._indirect}
            for _ in range(self.data_sets)
        ]
        self._kept: list[torch.Tensor] = []
        self._graphs: list[Any] = []
        self._executables: list[Any] = []
        try:
            self._reference_run = self._instantiate(self._clone(graph))
            changed = self._clone(graph)
            self._applied = AppliedPlan(changed, plan, tools)
            self._indirect_run = self._instantiate(changed)
            self._applied.instantiated(self._indirect_run, tools.stream())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DeviceTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the state back and destroy both graphs."""
        self._tools.synchronize()
        self._restore()
        for executable in self._executables:
            check(self._tools.driver.cuGraphExecDestroy, executable)
        for graph in self._graphs:
            check(self._tools.driver.cuGraphDestroy, graph)
        self._executables, self._graphs = [], []
        self._tools.synchronize()

    def reference(self, data: int) -> None:
        """See `proof.Trial`."""
        self._run_captured(data, values_of)
        self._kept = [tensor.clone() for tensor in self._outcome(self._in_placeholders())]

    def repeat(self, data: int) -> list[float]:
        """See `proof.Trial`."""
        self._run_captured(data, values_of)
        return self._deviations(self._in_placeholders())

    def indirect(self, data: int, moved: Collection[int]) -> list[float]:
        """See `proof.Trial`."""
        self._run_captured(data, other_values_of)  # Note [What an earlier run left]
        self._restore()
        where = self._in_placeholders()
        for index, placeholder in self._placeholders.items():
            values = values_of(self._caller[index], data)
            if index in moved:
                where[index] = self._elsewhere[data][index]
                placeholder.data.copy_(poison(values, self._caller[index].dtype))
            where[index].copy_(values)
        self._applied.point({index: where[index].data_ptr() for index in self._indirect})
        self._launch(self._indirect_run)
        return self._deviations(where)

    def failure(self) -> str | None:
        """See `proof.Trial`."""
        return self._applied.failure()

    def _clone(self, graph: EditableGraph) -> EditableGraph:
        copy = graph.clone()
        self._graphs.append(copy.graph)
        return copy

    def _instantiate(self, graph: EditableGraph) -> Any:
        executable = check(self._tools.driver.cuGraphInstantiate, graph.graph, 0)
        self._executables.append(executable)
        return executable

    def _run_captured(self, data: int, values: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self._restore()
        for index, placeholder in self._placeholders.items():
            placeholder.data.copy_(values(self._caller[index], data))
        self._launch(self._reference_run)

    def _launch(self, executable: Any) -> None:
        check(self._tools.driver.cuGraphLaunch, executable, self._tools.stream())
        self._tools.synchronize()

    def _restore(self) -> None:
        for memory, saved in zip(self._state.destroyed, self._saved, strict=True):
            memory.copy_(saved)

    def _in_placeholders(self) -> dict[int, torch.Tensor]:
        return {index: placeholder.data for index, placeholder in self._placeholders.items()}

    def _outcome(self, where: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Everything that must come out the same; `where` the data of each input lay."""
        mutated = [where[index].view(self._caller[index].dtype) for index in self._mutated]
        return [*self._state.outputs, *self._state.written, *mutated]

    def _deviations(self, where: Mapping[int, torch.Tensor]) -> list[float]:
        return [deviation(kept, now) for kept, now in zip(self._kept, self._outcome(where), strict=True)]


def values_of(tensor: torch.Tensor, data: int) -> torch.Tensor:
    """The bytes of an input in a set of data. Note [The second set of data]."""
    values, dtype = data_of(tensor), tensor.dtype
    if data and dtype.is_floating_point and dtype.itemsize >= ARITHMETIC_BYTES:
        return (values.view(dtype) * 0.5 + 0.25).view(torch.uint8)
    return values


def other_values_of(tensor: torch.Tensor, data: int) -> torch.Tensor:
    """Bytes of other values than in a set of data, as far as there are any that are safe: see `placeholders.poison`."""
    if tensor.dtype.is_floating_point:
        return values_of(tensor, (data + 1) % DATA_SETS)
    if tensor.dtype is torch.bool or tensor.dtype.is_complex:
        return data_of(tensor)
    return torch.zeros_like(data_of(tensor))


def blind_reason(tensor: torch.Tensor) -> str | None:
    """Why a read of this input's poisoned placeholder could go unnoticed in a trial; None where it could not."""
    for data in range(DATA_SETS):
        values = values_of(tensor, data)
        for part in (values[:SAMPLE_BYTES], values):  # the beginning will do for almost every input
            if deviation(part.view(tensor.dtype), poison(part, tensor.dtype).view(tensor.dtype)) > math.ulp(0.0):
                return None
    return "its values are those that poison has as well, so a use that was missed would not show"


def deviation(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one dtype and shape, as `proof.Trial` defines it."""
    if torch.equal(_bits(first), _bits(second)):
        return 0.0
    one, other = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (first, second))
    if one.dtype.is_floating_point and one.dtype.itemsize < ARITHMETIC_BYTES:
        one, other = one.float(), other.float()
    same = (one == other) | ((one != one) & (other != other))
    distance = (one.double() - other.double()).abs().masked_fill(same, 0.0)
    largest = float(torch.nan_to_num(distance, nan=math.inf, posinf=math.inf).max())
    return largest if largest > 0.0 else math.ulp(0.0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, in words as wide as they can be: comparing them takes a byte of memory for each."""
    dense = tensor.detach().contiguous().reshape(-1)
    for word in (torch.int64, torch.int32, torch.int16):
        if (dense.numel() * dense.element_size()) % word.itemsize == dense.data_ptr() % word.itemsize == 0:
            return dense.view(torch.uint8).view(word)
    return dense.view(torch.uint8)
