"""Run rewritten graphs: evaluate CPU operations before and after the graph, and supply its inputs on the GPU.

Note [Steady state]
A call in which no attribute changed compares each guarded attribute with its recorded value, by prepared tuples, and
does nothing else for hoisted values. The host waits for the device in two cases only: if it evaluates operations after
the graph on the graph's results, and if the program copies from pinned memory and may change that memory once its copy
has completed.

Note [Overwriting in place]
A hoisted value that changed is overwritten at its address, because a new address makes CUDA graphs record again. This
requires that nothing else needs the old value. On the device, the stream orders the work, and a change of stream makes
the new stream wait. Autograd, a saved-tensor hook, or AOTAutograd may have saved the tensor for a later backward. This
shows in the reference count of the tensor, its storage, or the Python object; then the value gets new memory.

Note [Threads]
The next call overwrites the memory of fed values, and the graph reads it when it is launched. So a lock is held from
feeding to launching. The evaluations before and after the graph need no lock.

Note [Captures of the program's own]
A CUDA graph that the program captures by hand repeats copies from the captured addresses, and reads the captured device
memory, and later calls overwrite both. So a call inside of such a capture does not come here: the graph runs uncompiled
and without placement, as eager PyTorch does in a capture. A step that is captured by Encore relies on this memory: it
compares CPU values before each launch.

Note [Errors]
Operations on the CPU raise the same errors as in eager PyTorch, before the graph is launched. The call then has had no
effect, and the state here is unchanged: the next call starts from the beginning.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.graph.memory import storage_of
from optimizations.placement.feed_plan import Evaluation, FeedPlan, HoistedGroup, Source, TensorLayout
from optimizations.placement.guards import Checks, checks_for, is_pinned
from optimizations.placement.staging import Staging, copy_in_stream_order
from optimizations.torch_internals.geometry import FixedGeometry, Geometry
from optimizations.torch_internals.gpu_state import is_capturing, is_pytorchs


class Feeds:
    """Call a rewritten graph in place of its original. The first call allocates memory on the device.

    One instance belongs to one compiled graph. `original` is the graph before placement, as a function: it is called
    instead if arguments share memory that did not share memory when the graph was compiled.

    Attributes:
        turn: the lock to hold from `bind` until the graph is launched. Note [Threads].
    """

    def __init__(self, plan: FeedPlan, original: Callable[..., Any] | None = None) -> None:
        self.turn = threading.RLock()
        self._plan = plan
        self._on_gpu = plan.device.type == "cuda"
        self._original = original
        self._kept = _picker(plan.kept)
        self._passed = _picker(plan.passed)
        self._groups = [_Group(group, plan.device) for group in plan.hoisted]
        self._staging = Staging(plan) if plan.staged else None
        self._stream = _StreamOrder(plan.device, self._device_memory)
        self._hoisted: tuple[torch.Tensor, ...] | None = None
        self._checks = Checks()
        self._geometry: FixedGeometry | None = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes this graph keeps on the device between calls, as far as known at compile time."""
        return self._plan.device_bytes

    @property
    def is_plain(self) -> bool:
        """Return whether a call only needs `bind`."""
        plan = self._plan
        return not (plan.before or plan.results is not None or plan.apart)

    def inside_a_capture(self) -> bool:
        """Return whether the caller's stream is being captured. Note [Captures of the program's own]."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def call(self, compiled: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return what the original graph returns for `arguments`. `compiled` is the rewritten graph.

        Raises:
            Exception: what the program's CPU operations raise.
            RuntimeError: an attribute has another shape or dtype than the graph was compiled for.
        """
        if self._plan.apart and self._original is not None and _overlap(self._plan.apart, arguments):
            return self._original(*arguments)
        values = self.before(arguments)
        with self.turn:
            results = compiled(*self.bind(arguments, values))
        return self.results(arguments, values, results)

    def before(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values that are evaluated on the CPU before the graph."""
        part = self._plan.before
        if part is None:
            return ()
        return _evaluated(part, {"argument": arguments})

    def bind(self, arguments: tuple[Any, ...], values: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """Return the rewritten graph's arguments for this call; `values` are those of `before`.

        Raises:
            RuntimeError: an attribute has another shape or dtype than the graph was compiled for.
        """
        self._stream.follow()
        self._compare_geometry(arguments)
        # The old values must not get a name here: it would count as a reference.
        if self._hoisted is None or self._checks.fail(arguments):
            self._refresh(arguments)
        hoisted = self._hoisted or ()
        bound = self._kept(arguments)
        if values:
            bound += self._passed(values)
        if self._staging is None:
            return bound + hoisted
        return bound + hoisted + self._staging.stage(arguments, values)

    def results(self, arguments: tuple[Any, ...], values: tuple[Any, ...], results: Sequence[Any]) -> Any:
        """Return what the caller gets: the graph's results, and values that are evaluated before and after it."""
        plan = self._plan
        if plan.results is None:
            return results
        places = {"argument": arguments, "before": values, "graph": results}
        if plan.after is not None:
            places["after"] = _evaluated(plan.after, places)
        return tuple(_found(source, places) for source in plan.results)

    def release(self) -> None:
        """Free the device memory; the next call allocates it again."""
        with self.turn:
            self._hoisted = None
            for group in self._groups:
                group.release()
            if self._staging is not None:
                self._staging.release()

    def _compare_geometry(self, arguments: Sequence[Any]) -> None:
        """Check shapes, strides and dtypes of attributes, also at unchanged addresses.

        Attributes with changed strides have changed values, which are recomputed. But the graph was compiled for their
        shapes and dtypes. Note [Geometry at an unchanged address] in `torch_internals.geometry`.

        Raises:
            RuntimeError: an attribute has another shape or another dtype.
        """
        if not self._plan.attributes:
            return
        if self._geometry is not None:
            if self._geometry.holds(arguments):
                return
            text = dict(self._plan.attributes)
            for index, before, now in self._geometry.changes(arguments):
                if now is None or now[:2] != before[:2]:
                    raise RuntimeError(_other_geometry(text[index], before, now))
        for group in self._groups:
            group.checks = None
        self._hoisted = None
        self._geometry = FixedGeometry(arguments, [index for index, _ in self._plan.attributes])

    def _refresh(self, arguments: Sequence[Any]) -> None:
        self._hoisted = None  # its references would count; and an exception must not leave a partial state
        self._stream.overwrite()
        for group in self._groups:
            if group.checks is None or group.checks.fail(arguments):
                group.refresh(arguments)
        self._checks = Checks.joined([group.checks for group in self._groups if group.checks is not None])
        self._hoisted = tuple(tensor for group in self._groups for tensor in group.tensors)

    def _device_memory(self) -> list[torch.Tensor]:
        staged = self._staging.buffers() if self._staging is not None else []
        return [*(self._hoisted or ()), *staged]


class _Group:
    """Keep hoisted values that depend on the same attributes on the device."""

    def __init__(self, group: HoistedGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.tensors: list[torch.Tensor] = []
        self.checks: Checks | None = None

    def refresh(self, arguments: Sequence[Any]) -> None:
        """Compute the values on the CPU, as the original graph would, and copy them to the device."""
        self.checks = None
        attributes = [arguments[index] for index in self._group.attributes]
        # The tensors must work in later calls under any mode, so they are not made under this call's mode.
        with torch_internals.InferenceMode(False):  # Note [Guards and interrupts] in `trees.liveness`
            torch_internals.set_grad_enabled(False)  # until the guard ends
            # Before the values: a concurrent write to an attribute then fails the checks of the next call.
            checks = checks_for(zip(self._group.attributes, attributes, strict=True))
            values = self._group.compute.forward(*attributes)
            for position, (value, layout) in enumerate(zip(values, self._group.layouts, strict=True)):
                self._upload(position, value, layout)
        self.checks = checks

    def release(self) -> None:
        self.tensors = []
        self.checks = None

    def _upload(self, position: int, value: torch.Tensor, layout: TensorLayout) -> None:
        """Copy one value to the device. See Note [Overwriting in place]."""
        if position == len(self.tensors):
            self.tensors.append(_device_tensor(layout, self._device))
        elif _is_used_elsewhere(self.tensors, position):
            self.tensors[position] = _device_tensor(layout, self._device)
        # Pageable memory has been read when the copy returns. Pinned memory is read in stream order, after copies into
        # it that are in flight; the host waits only if the program may change it at once.
        awaited = not self._group.awaited or self._group.awaited[position]
        copy_in_stream_order(self.tensors[position], value, wait=awaited and is_pinned(value))


class _StreamOrder:
    """Keep work on shared device memory in order when the caller changes the stream between calls."""

    def __init__(self, device: torch.device, memory: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._device = device
        self._memory = memory
        self._on_gpu = device.type == "cuda"
        self._raw: int | None = None
        self._last: torch.cuda.Stream | None = None
        self._seen: dict[int, torch.cuda.Stream] = {}

    def follow(self) -> None:
        """Make the current stream wait, on the device, for the stream of the last call if it differs.

        Do nothing while a step is captured: a capture must not wait for uncaptured work, and the device was idle.
        """
        if self._on_gpu and torch_internals.current_raw_stream(self._device.index) != self._raw:
            current = torch.cuda.current_stream(self._device)
            if is_capturing(current):
                return
            if self._last is not None:
                if not is_capturing(self._last):
                    current.wait_stream(self._last)
                for tensor in self._memory():
                    tensor.record_stream(current)
            self._last, self._raw = current, current.cuda_stream
            self._seen = {raw: stream for raw, stream in self._seen.items() if is_pytorchs(stream)}
            self._seen[self._raw] = current

    def overwrite(self) -> None:
        """Make the current stream wait for all streams of earlier calls.

        A backward may have been launched on each of them, and may read the memory that is about to be overwritten.
        """
        if self._last is None or len(self._seen) == 1:
            return
        current = torch.cuda.current_stream(self._device)
        if is_capturing(current):
            return
        for raw, stream in self._seen.items():
            if raw != self._raw and not is_capturing(stream):
                current.wait_stream(stream)


def _evaluated(part: Evaluation, places: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
    inputs = [_found(source, places) for source in part.inputs]
    # In the program's grad mode: views that the caller gets record whether gradients were enabled.
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        # `forward`: hooks and checks of a module's call are not the program's.
        found: tuple[Any, ...] = part.compute.forward(*inputs)
    return found


def _found(source: Source, places: Mapping[str, Sequence[Any]]) -> Any:
    return source.constant if source.where == "constant" else places[source.where][source.index]


def _other_geometry(text: str, before: Geometry, now: Geometry | None) -> str:
    found = "no strides" if now is None else f"shape {tuple(now[1])} and dtype {now[0]}"
    return (
        f"{text} has {found} now; the compiled graph that reads it was made for shape {tuple(before[1])} and dtype "
        f"{before[0]}. Assign another tensor to {text} instead of changing this one in place: then it is compiled anew."
    )


def _device_tensor(layout: TensorLayout, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def _overlap(pairs: Sequence[tuple[int, int]], arguments: Sequence[Any]) -> bool:
    """Return whether the memory of any of these pairs of arguments overlaps."""
    return any(storage_of(arguments[one]).overlaps(storage_of(arguments[other])) for one, other in pairs)


def _picker(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the elements at `indices` of a tuple, as fast as Python can."""
    if not indices:
        return lambda values: ()
    first, last = indices[0], indices[-1]
    if tuple(indices) == tuple(range(first, last + 1)):
        return operator.itemgetter(slice(first, last + 1))
    return operator.itemgetter(*indices)


def _is_used_elsewhere(tensors: list[torch.Tensor], position: int) -> bool:
    """Return whether anything but the list references the tensor or its memory, such as a pending backward."""
    if _python_references(tensors, position) > _UNUSED:
        return True
    tensor = tensors[position]
    storage = tensor.untyped_storage()
    # One reference is the Python object's, one of the memory belongs to the local name.
    return torch_internals.tensor_use_count(tensor) > 1 or torch_internals.storage_use_count(storage._cdata) > 2


def _python_references(values: list[Any], position: int) -> int:
    return sys.getrefcount(values[position])


_UNUSED = _python_references([object()], 0)
"""The reference count of an object that only a list references, in this Python version."""
