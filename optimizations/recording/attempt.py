"""What a node needs only while it records: the inputs, their placeholders, and what the graph does to their memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimizations import torch_internals
from optimizations.appliers.device import RecordingTools, device_tools
from optimizations.appliers.triton_kernels import triton_kernels
from optimizations.capture.trees.function import Capturable
from optimizations.captured.graph import MemoryRange
from optimizations.captured.placeholders import size_bytes
from optimizations.captured.recapture import pool_memory, recapture
from optimizations.recording.description import CopiedOrNot, describe
from optimizations.recording.session import IndirectRecording, Outcome, RecordedInputs
from optimizations.recording.trial import RecordedState
from optimizations.replay.addresses import OwnedMemory


class Node(Protocol):
    """What is read of the node that records (`node.EncoreNode`, most of it stock's)."""

    device: int
    stream: torch.cuda.Stream
    cuda_graphs_pool: Any
    graph: Any
    wrapped_function: Any
    cudagraph_managed_idxs: Sequence[int]
    non_static_input_idx: Sequence[int]

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def borrowed_storage(self, tensor: torch.Tensor) -> torch.Tensor: ...


def ineligible_reason(value: torch.Tensor, device: int) -> str | None:
    """Why an input is no candidate for indirection on this CUDA device; None if it is one."""
    if value.device != torch.device("cuda", device):
        return f"it lies on {value.device}, not on cuda:{device}"
    if size_bytes(value) == 0:
        return "it holds no bytes, so there is nothing to gain"
    return None


@dataclass(frozen=True, slots=True)
class Memory:
    """The recording inputs' memory, noted before the function drops them.

    Attributes:
        again: inputs for one more capture at the same addresses.
        candidates: where the candidates' data lies, by input.
        destroyed, written: see `trial.RecordedState`.
    """

    again: Sequence[Any]
    candidates: dict[int, MemoryRange]
    destroyed: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]


class Attempt:
    """One recording of a node on `inputs`. Makes the scout capture, if an input may be indirected.

    Attributes:
        function: the node's `WrappedFunction`.
        recording: None where nothing can be indirected.
        first_inputs: what the first replay reads in place, by input; to be kept until it is enqueued.
    """

    def __init__(self, node: Node, inputs: Sequence[Any]) -> None:
        self.function = node.wrapped_function
        self._capturable: Capturable = self.function.model
        self._mutated = frozenset(self.function.mutated_input_idxs)
        self._input_count = len(inputs)
        self._inputs = list(self._described(node, inputs))
        owned = OwnedMemory(pool_memory(node.cuda_graphs_pool))
        candidates = {one.index: inputs[one.index] for one in self._inputs if one.ineligible is None}
        self._caller = {
            # What lies in the pool is overwritten by the very graph that is about to read it.
            index: torch_internals.clone_preserve_strides(tensor) if tensor.data_ptr() in owned else tensor
            for index, tensor in candidates.items()
        }
        self.first_inputs: list[Any] = [self._caller.get(index) for index in range(self._input_count)]
        self._off: str | None = None
        self._write_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.recording = self._begin(node, inputs) if self._caller else None

    @property
    def outside(self) -> dict[int, torch.Tensor]:
        """The recording inputs that lie outside of the pool, by input."""
        return self.recording.outside if self.recording is not None else {}

    def note_memory(self, node: Node, recording_inputs: Sequence[Any]) -> Memory:
        """To be called right before the function is recorded on these inputs."""
        outside = self.outside
        tensors = {index: value for index, value in enumerate(recording_inputs) if isinstance(value, torch.Tensor)}
        in_pool = {index for index in node.cudagraph_managed_idxs if index in tensors}
        in_pool |= {index for index in self._caller if index not in outside}
        written = [index for index in sorted(self._mutated) if index in tensors and index not in outside]
        changed = {
            tensors[index].untyped_storage().data_ptr(): tensors[index] for index in sorted(in_pool.union(written))
        }
        candidates = self.recording.candidates if self.recording is not None else ()
        return Memory(
            again=[node.borrowed(value) if index in in_pool else value for index, value in enumerate(recording_inputs)],
            candidates={
                index: MemoryRange(address=tensors[index].data_ptr(), size_bytes=size_bytes(tensors[index]))
                for index in candidates
            },
            destroyed=[node.borrowed_storage(tensor) for address, tensor in changed.items() if address],
            written=[node.borrowed(tensors[index]) for index in written],
        )

    def complete(self, node: Node, memory: Memory, outputs: Iterable[Any]) -> Outcome:
        """Turn what was recorded into a graph that reads its inputs in place, as far as that is proven; and report."""
        if self.recording is None:
            outcome = Outcome(off=self._off)
        else:
            state = RecordedState(
                memory.destroyed, memory.written, [value for value in outputs if isinstance(value, torch.Tensor)]
            )
            recorded = RecordedInputs(memory.again, memory.candidates, pool_memory(node.cuda_graphs_pool), state)
            with torch.cuda.device(node.device):
                outcome = self.recording.complete(node.graph, recorded, self._input_count)
        report = describe(outcome, self._inputs, self._capturable.direction)
        self._capturable.report(report)
        for index in sorted(self._mutated & outcome.held.keys()):
            self._write_back.append((self._caller[index], outcome.held[index].tensor))
            reasons = next(one.reasons for one in report.inputs if one.index == index)
            self._capturable.mutation_refused = "; ".join(reasons)
        return outcome

    def first_replay_enqueued(self) -> None:
        """Complete the recorded call: what the function wrote into a placeholder belongs to the caller."""
        for original, copy in self._write_back:
            original.copy_(copy)

    def _described(self, node: Node, inputs: Sequence[Any]) -> Iterable[CopiedOrNot]:
        for index in node.non_static_input_idx:
            value = inputs[index]
            if isinstance(value, torch.Tensor):
                yield CopiedOrNot(
                    index=index,
                    name=self.function.placeholders[index].name,
                    data_bytes=size_bytes(value),
                    mutated=index in self._mutated,
                    ineligible=ineligible_reason(value, node.device),
                )

    def _begin(self, node: Node, inputs: Sequence[Any]) -> IndirectRecording | None:
        generated = self._capturable.generated
        try:
            tools = RecordingTools(device_tools(node.device), triton_kernels(generated, node.device))
        except ImportError as error:
            self._off = f"cuda.bindings is missing ({error}); it comes with torch's CUDA wheels"
            return None
        managed = set(node.cudagraph_managed_idxs)
        arguments = [node.borrowed(value) if index in managed else value for index, value in enumerate(inputs)]
        # Refers to neither the attempt nor the node: a cycle would keep placeholders and the caller's tensors.
        capture = functools.partial(
            recapture, self._capturable, device=node.device, stream=node.stream, driver=tools.driver
        )
        mutated = self._mutated & self._caller.keys()
        try:
            return IndirectRecording(self._capturable.choice, self._caller, mutated, arguments, capture, tools)
        except torch.OutOfMemoryError as error:
            if mutated:
                raise
            self._off = f"no memory for placeholders outside of the pool: {error}".splitlines()[0]
            return None
