"""Record the memory that each launch of a function reads and writes, while it is captured on one stream.

For Inductor's Triton kernels the argument names give this, for PyTorch's operators the schemas. The nodes of the graph
are counted around each launch, so every node belongs to a launch. Nodes from neither source form a launch of their own,
which is a barrier (Note [Barriers] in `order`).

Note [Extents]. For memory that the function allocated, the extent of the passed tensor counts: Inductor passes a whole
buffer, or a tensor over a part of it. An input of the function may be a view, and a kernel may read more of its storage
than the view covers. So for an input the whole storage counts. The same holds for results of operators: attention
returns a part of a padded tensor, and writes the padding too.

Note [Memory that is kept]. The allocator reuses freed memory: the next operator of the same kind would get the same
workspace and wait for the first, and a freed tensor's memory would make an unrelated launch wait. So recently freed
memory, and as much as an operator's workspace, is kept from reuse, within a limit. Only small tensors are kept, which
PyTorch's allocator places in segments of their own. Otherwise a tensor that does not find the kept memory splits a
large free block, and the next large tensor takes a new segment: a summarization model reserved 1.7 times the memory.
Besides, a few large tensors would exhaust the limit, and the remaining reuse makes longer chains than no limit at all.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.order import Launch, Span
from optimizations.graph.memory import memory_of, storage_of
from optimizations.graph.pools import used_blocks
from optimizations.graph.read import captured_nodes
from optimizations.stack_trace import one_line
from optimizations.torch_internals.generated_modules import current_line
from optimizations.written_operands import operands, tensors_in, written

SWITCHED_OFF = "the option concurrency is 'off'"
HAS_COLLECTIVES = "the function has collectives, which must run in the same order on all ranks"

KEPT_SHARE = 0.02
"""The share of PyTorch's reserved memory that a recording may keep from reuse, up to an eighth of the free device
memory. Note [Memory that is kept]."""

LARGEST_KEPT_BYTES = 1 << 20
"""The largest tensor for which PyTorch's allocator has segments of their own (2 MiB)."""

LEAST_KEPT = 8
"""At least this many tensors fit into the memory that is kept. Note [Memory that is kept]."""

MOST_LIVE = 1_000_000
"""Most storages noted as live, over all launches. Beyond that, hidden memory counts as the whole segment."""

MADE_OF_OTHERS = "it is given a tensor that is made of others"
"""Why an operator on sparse or nested tensors is a barrier."""

_POINTERS_IN_DEVICE_MEMORY = re.compile(
    r"linalg|cholesky|lu_|triangular_solve|ormqr|orgqr|geqrf|svd|eigh?|lstsq|fft|_rnn"
)
"""Parts of names of operators whose libraries keep workspace addresses in device memory, not in kernel parameters."""

_ARGUMENT = re.compile(r"(in_out_ptr|out_ptr|in_ptr|ws_ptr)\d*$")
"""How Inductor names the arguments of the kernels that it writes."""


@dataclass(frozen=True, slots=True)
class Logged:
    """Hold a launch, and what is needed to search its nodes for memory that its arguments do not name.

    Attributes:
        launch: with the memory of its arguments and results.
        is_operator: whether it is an operator of PyTorch, not a kernel of Inductor.
        live: storages that were live when it ran, as spans, ascending.
        own_bytes: most memory that an operator allocated for itself; None for a kernel.
        is_given_moving: whether it gets an input that is not at a fixed address; `writes_moving`: whether it writes it.
        freed: inputs without a fixed address that were freed by then. Other tensors may be in their memory.
        given: for an operator, the arguments as the caller of `operator` passed them.
    """

    launch: Launch
    is_operator: bool
    live: tuple[Span, ...] = ()
    own_bytes: int | None = None
    is_given_moving: bool = False
    writes_moving: bool = False
    freed: tuple[Span, ...] = ()
    given: frozenset[int] = frozenset()


class LaunchLog:
    """Hold the launches of one capture. Only launches of the thread that is `noting` are noted.

    Args:
        count: returns how many nodes the captured graph has by now.
        given: the function's inputs. Note [Extents]. None: any tensor may be an input, and what autograd's threads
            launch is noted, too.
        moving: the inputs that are not at a fixed address. Note [Inputs that move] in `hidden_memory`.
        keep_bytes: most memory freed during the capture that is kept from reuse. Note [Memory that is kept].
        allocated_bytes: returns how much was ever allocated on the device.
        device_type: the type of the device whose memory counts.
        notes_memory: whether memory is noted (reads, writes and live storages), which takes time.

    Attributes:
        logged: the launches so far.
        inputs: the storages of the function's inputs.
        kept_bytes: most memory that was kept at one time.
        never_freed: blocks of the capture's pool that were in use at its end, as the caller sets them.
        failure: why the log is unusable; None if it is usable.
    """

    def __init__(
        self,
        count: Callable[[], int],
        given: Sequence[torch.Tensor] | None = (),
        moving: Iterable[torch.Tensor] = (),
        keep_bytes: int = 0,
        allocated_bytes: Callable[[], int] = lambda: 0,
        device_type: str = "cuda",
        notes_memory: bool = True,
    ) -> None:
        self._count_nodes = count
        self._allocated_bytes = allocated_bytes
        self._device_type = device_type
        self._thread: int | None = None
        self._last = 0
        self._depth = 0
        self._notes_memory = notes_memory
        self._all_given = given is None
        self._given = {one.untyped_storage()._cdata: _weak(one) for one in given or ()}
        self._moving = {one.untyped_storage()._cdata: (_weak(one), storage_of(one).span) for one in moving}
        self._live: dict[int, tuple[Any, Span]] = {}
        self._noted_live = 0
        self._keep_bytes = keep_bytes
        self._largest_kept = min(LARGEST_KEPT_BYTES, keep_bytes // LEAST_KEPT)
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._kept_now = 0
        self.kept_bytes = 0
        self.failure: str | None = None
        self.inputs = tuple(storage_of(one).span for one in given or ())
        self.never_freed: Sequence[Span] = ()
        self.logged: list[Logged] = []

    @contextlib.contextmanager
    def noting(self, *modules: dict[str, Any], operators: bool = True) -> Iterator[None]:
        """Note what runs in the block.

        Args:
            modules: the globals of generated modules. During the block, objects replace their Triton kernels:
                they note each launch and call the kernel.
            operators: whether PyTorch's operators are noted. If not, the caller's dispatch mode calls `operator`.
        """
        kernels = [
            (module, name, value)
            for module in modules
            for name, value in module.items()
            if isinstance(value, torch_internals.CachingAutotuner)
        ]
        for module, name, kernel in kernels:
            module[name] = _NotingKernel(kernel, self)
        self._thread = threading.get_ident()
        self.note_others("before the function")
        try:
            with _operators(self) if operators else contextlib.nullcontext():
                yield
            self.note_others("at the end")
        finally:
            for module, name, kernel in kernels:
                module[name] = kernel
            self._thread = None
            self._kept.clear()
            self._kept_now = 0
            self._live.clear()

    def _count(self) -> int:
        """Return the number of nodes so far. If the driver fails, the log ends and the capture continues."""
        with self._sparing_the_capture():
            if self.failure is None:
                return self._count_nodes()
        return self._last

    @contextlib.contextmanager
    def _sparing_the_capture(self) -> Iterator[None]:
        """Let an error in the block end the log, and not the capture."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or one_line(error)

    # Called by the dispatch mode and the kernels' stand-ins

    def is_noted(self) -> bool:
        """Return whether a call is to be noted: it comes from the capture's thread and is not part of another."""
        if self._depth or self._thread is None:
            return False
        in_autograd = self._all_given and torch_internals.current_autograd_node() is not None
        return threading.get_ident() == self._thread or in_autograd

    def operator(
        self,
        func: Any,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        call: Callable[[], Any],
        given: Iterable[int] = (),
    ) -> Any:
        """Run `call`, an operator on these arguments, and note it. `given` is only read if it adds nodes."""
        if not self.is_noted():
            return call()
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        barrier = None
        with self._sparing_the_capture():
            reads, writes, barrier = operator_memory(func, arguments, keywords)
        return self.note(str(func), call, reads, writes, barrier, is_operator=True, given=given)

    def note(
        self,
        name: str,
        call: Callable[[], Any],
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        barrier: str | None = None,
        *,
        is_operator: bool,
        given: Iterable[int] = (),
    ) -> Any:
        """Run `call`, note the nodes that it adds, and return its result."""
        live: tuple[Span, ...] = ()
        freed: tuple[Span, ...] = ()
        before = 0
        reads, writes = (list(reads), list(writes)) if self._notes_memory else ([], [])
        notes_allocations = is_operator and self._notes_memory
        with self._sparing_the_capture():
            self.note_others(f"before {name}")
            live = self._spans_of_live(chain(reads, writes)) if notes_allocations else ()
            freed = tuple(span for storage, span in self._moving.values() if storage.expired())
            before = self._allocated_bytes() if notes_allocations else 0
        self._depth += 1
        try:
            result = call()
        finally:
            self._depth -= 1
        with self._sparing_the_capture():
            made = list(tensors_in(result)) if notes_allocations else []
            own_bytes = None
            if notes_allocations:
                own_bytes = max(0, self._allocated_bytes() - before - self._new_bytes(made))
            now = self._count()
            if now > self._last:
                launch = Launch(
                    name,
                    self._last,
                    now - self._last,
                    tuple(span for one in reads if (span := self._span(one))),
                    (
                        *(span for one in writes if (span := self._span(one))),
                        *(span for one in made if (span := self._span(one, is_whole=True))),
                    ),
                    barrier,
                    current_line() if self._notes_memory else None,
                )
                self.logged.append(
                    Logged(
                        launch,
                        is_operator,
                        live,
                        own_bytes,
                        any(map(self._is_moving, chain(reads, writes))),
                        any(map(self._is_moving, writes)),
                        freed,
                        frozenset(given),
                    )
                )
                self._last = now
                self._keep(chain(reads, writes, made))
                if own_bytes:
                    self._keep_workspace(own_bytes)
            self._note_live(made)
        return result

    def note_others(self, when: str) -> None:
        """Note the nodes that came from neither an operator nor a kernel since the last launch."""
        now = self._count()
        if now > self._last:
            reason = "its nodes came from neither an operator of PyTorch nor a kernel of Inductor"
            self.logged.append(Logged(Launch(f"unknown, {when}", self._last, now - self._last, barrier=reason), False))
            self._last = now

    def _counts(self, tensor: torch.Tensor) -> bool:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        return is_dense and tensor.device.type == self._device_type and not tensor._is_zerotensor()

    def _span(self, tensor: torch.Tensor, *, is_whole: bool = False) -> Span | None:
        """Return the memory of a tensor that a launch may touch: the whole storage, or less. Note [Extents]."""
        if not self._counts(tensor) or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        is_whole = is_whole or self._all_given or storage._cdata in self._given
        return storage_of(tensor).span if is_whole else memory_of(tensor).span

    def _is_moving(self, tensor: torch.Tensor) -> bool:
        return self._counts(tensor) and tensor.untyped_storage()._cdata in self._moving

    def _spans_of_live(self, tensors: Iterable[torch.Tensor]) -> tuple[Span, ...]:
        self._note_live(tensors)
        if self._noted_live >= MOST_LIVE:
            return ()
        gone = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in gone:
            del self._live[key]
        self._noted_live += len(self._live)
        return tuple(sorted(span for _, span in self._live.values()))

    def _note_live(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self._counts(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live and storage.nbytes():
                self._live[key] = _weak(tensor), storage_of(tensor).span

    def _new_bytes(self, made: Iterable[torch.Tensor]) -> int:
        """Return the size of the storages that an operator allocated."""
        found = {one.untyped_storage()._cdata: one.untyped_storage() for one in made if self._counts(one)}
        return sum(storage.nbytes() for key, storage in found.items() if key not in self._live)

    def _keep(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._counts(tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key in self._kept:
                    self._kept[key] = self._kept.pop(key)  # the latest use counts
                elif key not in self._given and storage.nbytes() <= self._largest_kept:
                    self._kept[key] = storage
                    self._kept_now += storage.nbytes()
        while self._kept_now > self._keep_bytes:
            oldest = next(iter(self._kept))
            self._kept_now -= self._kept.pop(oldest).nbytes()
        self.kept_bytes = max(self.kept_bytes, self._kept_now)

    def _keep_workspace(self, size_bytes: int) -> None:
        """Allocate the freed memory of an operator's workspace, so that the next operator gets another one."""
        if size_bytes <= self._largest_kept:
            self._depth += 1
            try:
                taken = torch.empty(size_bytes, dtype=torch.uint8, device=self._device_type)
            finally:
                self._depth -= 1
            self._keep([taken])


def log_of_capture(inputs: Sequence[Any], moving: Iterable[int], device: int, driver: Any) -> LaunchLog:
    """Return a log for one capture.

    Args:
        inputs: the recording's inputs; `moving` are the positions of those that are not at fixed addresses.
        device: the index of the CUDA device.
        driver: the module `cuda.bindings.driver`.
    """
    return LaunchLog(
        lambda: captured_nodes(driver, driver.CUstream(torch_internals.current_raw_stream(device))),
        [one for one in inputs if _is_on(one, device)],
        [inputs[index] for index in moving if _is_on(inputs[index], device)],
        int(min(KEPT_SHARE * torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0] / 8)),
        lambda: int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["allocated"]),
    )


def noted(log: LaunchLog, model: Callable[[list[Any]], Any], generated: Any, pool: Any) -> Callable[[list[Any]], Any]:
    """Return a function that runs `model` and notes its launches. `generated` is the function that Inductor made."""
    kernels: dict[str, Any] = getattr(getattr(generated, "__func__", generated), "__globals__", {})

    def run(inputs: list[Any]) -> Any:
        with log.noting(kernels):
            outputs = model(inputs)
        try:
            log.never_freed = [one.span for one in used_blocks(pool)] if log.logged else ()
        except Exception as error:
            log.failure = log.failure or one_line(error)
        return outputs

    return run


def _is_on(value: Any, device: int) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and value.device.index == device


class _NotingKernel:
    """Replace a Triton kernel in the generated module by one that notes its launches."""

    def __init__(self, kernel: Any, log: LaunchLog) -> None:
        self._kernel = kernel
        self._log = log
        # A kernel of the program's own may call an argument `in_ptr` and write it.
        is_generated = getattr(kernel, "custom_kernel", True) is False
        self._names = tuple(kernel.triton_meta.get("signature", ())) if is_generated else ()
        self._mutated = frozenset(kernel.mutated_arg_names or ())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        kernel, log = self._kernel, self._log
        if not log.is_noted():
            return kernel.run(*arguments, **keywords)
        reads, writes, barrier = kernel_memory(self._names, arguments, self._mutated)
        tensors = [value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)]
        return log.note(
            str(kernel.fn.__name__),
            lambda: kernel.run(*arguments, **keywords),
            reads,
            writes,
            barrier,
            is_operator=False,
            given=(one.untyped_storage().data_ptr() for one in tensors),
        )


def kernel_memory(
    names: Sequence[str], arguments: Sequence[Any], mutated: frozenset[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor], str | None]:
    """Return which arguments a Triton kernel reads, which it writes, and why it is a barrier (None: it is none).

    Args:
        names: its arguments, in order; in Inductor's kernels `in_ptr0`, `out_ptr0`, `in_out_ptr0`, `ws_ptr0`, ...
        mutated: names that Inductor found to be written.
    """
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for position, value in enumerate(arguments):
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            continue
        if not isinstance(value, torch.Tensor):
            return reads, writes, f"it is given a {type(value).__name__}, which may hold addresses"
        name = names[position] if position < len(names) else ""
        kind = _ARGUMENT.match(name)
        if kind is None:
            return reads, writes, f"the generated code does not name its argument {name or position} as read or written"
        reads.append(value)
        if kind[1] != "in_ptr" or name in mutated:
            writes.append(value)
    return reads, writes, None


def operator_memory(
    func: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor], str | None]:
    """Return which tensors an operator reads, which it writes, and why it is a barrier (None: it is none)."""
    barrier = None
    name = str(func)
    if func.namespace not in torch_internals.PURE_OPERATORS:
        barrier = "it is a custom operator, which may write what it does not declare"
    elif _POINTERS_IN_DEVICE_MEMORY.search(name):
        barrier = "its library may keep addresses in the memory of the device"
    reads = list(tensors_in(operands(func, arguments, keywords)))
    writes = list(tensors_in(list(written(func, arguments, keywords))))
    if any(one.layout is not torch.strided or one.is_nested for one in reads):
        barrier = MADE_OF_OTHERS
    return reads, writes, barrier


def _operators(log: LaunchLog) -> Any:
    """Return a dispatch mode that notes PyTorch's operators."""

    class Noting(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keywords = kwargs or {}
            return log.operator(func, args, keywords, lambda: func(*args, **keywords))

    return Noting()


def _weak(tensor: torch.Tensor) -> Any:
    """Return a weak reference to a storage. While it exists, no other storage has the same number."""
    return torch_internals.cudagraph_trees.StorageWeakRef(tensor.untyped_storage())
