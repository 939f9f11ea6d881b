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

Note [Lifetimes]. The search for memory that no argument names needs the storages that were alive at a launch. A storage
was alive from the launch before which it was first seen to the last one that got it. Whether it was freed is only asked
before the next launch: Inductor's code frees tensors right after their last use. Storages that were still alive then,
and not when the capture ended, may or may not have been alive in between.

Note [Nodes of a kernel]. A Triton kernel adds one node, and none only if a tensor of it has no elements. So nodes that
others added before it are noticed after it: the whole is a barrier then.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.order import Launch, Span
from optimizations.graph.memory import size_bytes
from optimizations.graph.pools import used_blocks
from optimizations.graph.read import captured_nodes
from optimizations.stack_trace import one_line
from optimizations.torch_internals.generated_modules import current_place
from optimizations.written_operands import tensors_in, written

SWITCHED_OFF = "the option concurrency is 'off'"
IS_NARROW = "too few of its kernels are independent of others for branches to make it 3 % faster"

LEAST_WIDTH = 1.2
"""Launches of a graph over those on its longest path, below which branches are not tried. No graph of 38 workloads with
less than 1.24 became 3 % faster."""

HAS_COLLECTIVES = "the function has collectives, which must run in the same order on all ranks"

KEPT_SHARE = 0.02
"""The share of PyTorch's reserved memory that a recording may keep from reuse, up to an eighth of the free device
memory. Note [Memory that is kept]."""

LARGEST_KEPT_BYTES = 1 << 20
"""The largest tensor for which PyTorch's allocator has segments of their own (2 MiB)."""

LEAST_KEPT = 8
"""At least this many tensors fit into the memory that is kept. Note [Memory that is kept]."""

OTHER_NODES = "its nodes came from neither an operator of PyTorch nor a kernel of Inductor"

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
        own_bytes: most memory that an operator allocated for itself; None for a kernel.
        is_given_moving: whether it gets an input that is not at a fixed address; `writes_moving`: whether it writes it.
        freed: inputs without a fixed address that were freed by then. Other tensors may be in their memory.
        given: for an operator, the arguments as the caller of `operator` passed them.
    """

    launch: Launch
    is_operator: bool
    own_bytes: int | None = None
    is_given_moving: bool = False
    writes_moving: bool = False
    freed: tuple[Span, ...] = ()
    given: frozenset[int] = frozenset()


@dataclass(slots=True)
class Lifetime:
    """Hold during which launches a storage was alive. Note [Lifetimes].

    Attributes:
        span: its memory.
        first: the first launch at which it may have been alive.
        last: the last launch at which it certainly was, from `first` on; less than `first` if at none.
        gone: the first launch at which it certainly was not any more; None if that is not known.
        is_freed: returns whether it is freed now. While this weak reference exists, no other storage has its number.
        is_given: whether it is an input of the function; `is_moving`: whether it is not at a fixed address.
    """

    span: Span
    first: int
    last: int
    gone: int | None = None
    is_freed: Callable[[], bool] = lambda: False
    is_given: bool = False
    is_moving: bool = False


_Touched = tuple[Lifetime, torch.UntypedStorage, Span | None]
"""A tensor's storage, and the memory that a launch may touch of it."""


class LaunchLog:
    """Hold the launches of one capture. Only launches of the thread that is `noting` are noted.

    Args:
        count: returns how many nodes the captured graph has by now.
        given: the function's inputs. Note [Extents]. None: any tensor may be an input, and what autograd's threads
            launch is noted, too.
        moving: those of them that are not at a fixed address. Note [Inputs that move] in `hidden_memory`.
        keep_bytes: most memory freed during the capture that is kept from reuse. Note [Memory that is kept].
        allocated_bytes: returns how much was ever allocated on the device.
        device_type: the type of the device whose memory counts.
        notes_memory: whether memory is noted (reads, writes and lifetimes), which takes time.

    Attributes:
        logged: the launches so far.
        inputs: the storages of the function's inputs.
        lifetimes: of the storages of all tensors that were noted.
        kept_bytes: most memory that was kept at one time.
        never_freed: blocks of the capture's pool that were in use at its end, as the caller sets them.
        failure: why the log is unusable, so that nothing more is noted; None if it is usable.
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
        self._count = count
        self._allocated_bytes = allocated_bytes
        self._device_type = device_type
        self._thread: int | None = None
        self._last = 0
        self._depth = 0
        self._notes_memory = notes_memory
        self._all_given = given is None
        self._storages: dict[int, Lifetime] = {}
        self._recent: list[Lifetime] = []
        self._keep_bytes = keep_bytes
        self._largest_kept = min(LARGEST_KEPT_BYTES, keep_bytes // LEAST_KEPT)
        self._kept: dict[int, tuple[Lifetime, torch.UntypedStorage]] = {}
        self._kept_now = 0
        self.kept_bytes = 0
        self.failure: str | None = None
        self.never_freed: Sequence[Span] = ()
        self.logged: list[Logged] = []
        self.lifetimes: list[Lifetime] = []
        self._freed: tuple[Span, ...] = ()
        for one in given or ():
            self._lifetime(one.untyped_storage()).is_given = True
        self.inputs = tuple(one.span for one in self.lifetimes)
        for one in moving:
            self._lifetime(one.untyped_storage()).is_moving = True
        self._moving = [one for one in self.lifetimes if one.is_moving]

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
        try:
            self.note_others("before the function")
            with _NotingOperators(self) if operators else contextlib.nullcontext():
                yield
            self.note_others("at the end")
        finally:
            for module, name, kernel in kernels:
                module[name] = kernel
            self._thread = None
            for one in self.lifetimes:
                if one.gone is None and not one.is_freed():
                    one.last = len(self.logged)
            self._kept.clear()
            self._kept_now = 0

    def _fail(self, error: Exception) -> None:
        """End the log, so that the error does not end the capture."""
        self.failure = self.failure or one_line(error)

    @property
    def is_narrow(self) -> bool:
        """Return whether the longest path leaves too few launches that can overlap with others: `LEAST_WIDTH`.

        Only conflicts over equal spans are counted, and no memory that arguments do not name. All others make the path
        longer.
        """
        wrote, accessed = dict[Span, int](), dict[Span, int]()  # the longest path to the last launch that did so
        barrier = longest = 0
        for launch in (one.launch for one in self.logged):
            before = [wrote.get(span, 0) for span in launch.reads] + [accessed.get(span, 0) for span in launch.writes]
            length = 1 + max((barrier, *before) if launch.barrier is None else (longest,))
            longest = max(longest, length)
            if launch.barrier is not None:
                barrier = length
            accessed.update((span, max(length, accessed.get(span, 0))) for span in (*launch.reads, *launch.writes))
            wrote.update(dict.fromkeys(launch.writes, length))
        return len(self.logged) < LEAST_WIDTH * longest

    # Called by the dispatch mode and the kernels' stand-ins

    def is_noted(self) -> bool:
        """Return whether a call is to be noted: it comes from the capture's thread and is not part of another."""
        if self._depth or self._thread is None or self.failure is not None:
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
        try:
            reads, writes, barrier = operator_memory(func, arguments, keywords)
        except Exception as error:
            self._fail(error)
            return call()
        return self.note(_name_and_barrier(func)[0], call, reads, writes, barrier, is_operator=True, given=given)

    def note(
        self,
        name: str,
        call: Callable[[], Any],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        barrier: str | None = None,
        *,
        is_operator: bool,
        given: Iterable[int] = (),
    ) -> Any:
        """Run `call`, note the nodes that it adds, and return its result. All of `writes` are in `reads`, too."""
        touched: dict[int, _Touched] = {}
        measured = is_operator and self._notes_memory
        allocated = 0
        try:
            # Note [Nodes of a kernel].
            if is_operator or barrier is not None or not all(one.numel() for one in reads):
                self.note_others(f"before {name}")
            if self._notes_memory:
                self._note_freed()
                touched = self._touched(reads)
            if measured:
                allocated = self._allocated_bytes()
        except Exception as error:
            self._fail(error)
        self._depth += 1
        try:
            result = call()
        finally:
            self._depth -= 1
        if self.failure is not None:
            return result
        try:
            known, made, own_bytes = len(self.lifetimes), dict[int, _Touched](), None
            if measured:
                allocated = self._allocated_bytes() - allocated
                made = self._touched(tensors_in(result), is_whole=True)
                new = self.lifetimes[known:]
                own_bytes = max(0, allocated - sum(end - start for start, end in (one.span for one in new)))
            now, index = self._count(), len(self.logged)
            if now > self._last:
                if not is_operator and now - self._last > 1:
                    barrier = barrier or OTHER_NODES
                written = [touched[id(one)] for one in writes if id(one) in touched]
                for one, _, _ in touched.values():
                    one.last = index
                for one in self.lifetimes[known:]:
                    one.first, one.last = index + 1, index
                is_given_moving = any(one.is_moving for one, _, _ in touched.values())
                launch = Launch(
                    name,
                    self._last,
                    now - self._last,
                    tuple([span for _, _, span in touched.values() if span is not None]),
                    tuple([span for _, _, span in (*written, *made.values()) if span is not None]),
                    barrier,
                    current_place() if self._notes_memory else None,
                )
                writes_moving = is_given_moving and any(one.is_moving for one, _, _ in written)
                self.logged.append(
                    Logged(
                        launch, is_operator, own_bytes, is_given_moving, writes_moving, self._freed, frozenset(given)
                    )
                )
                self._last = now
                self._keep((*touched.values(), *made.values()))
                if own_bytes:
                    self._keep_workspace(own_bytes)
        except Exception as error:
            self._fail(error)
        return result

    def note_others(self, when: str) -> None:
        """Note the nodes that came from neither an operator nor a kernel since the last launch."""
        if self.failure is not None:
            return
        try:
            now = self._count()
        except Exception as error:
            self._fail(error)
            return
        if now > self._last:
            launch = Launch(f"unknown, {when}", self._last, now - self._last, barrier=OTHER_NODES)
            self.logged.append(Logged(launch, False))
            self._last = now

    def _touched(self, tensors: Iterable[torch.Tensor], *, is_whole: bool = False) -> dict[int, _Touched]:
        """Return, for each tensor, what a launch may touch: the whole storage, or less. Note [Extents]."""
        found: dict[int, _Touched] = {}
        is_whole = is_whole or self._all_given
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_nested or tensor._is_zerotensor():
                continue
            if tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            lifetime = self._lifetime(storage)
            span: Span | None = None
            if size := tensor.nbytes:
                if is_whole or lifetime.is_given:
                    span = lifetime.span
                else:
                    start = tensor.data_ptr()
                    span = start, start + (size if tensor.is_contiguous() else size_bytes(tensor))
            found[id(tensor)] = lifetime, storage, span
        return found

    def _lifetime(self, storage: torch.UntypedStorage) -> Lifetime:
        """Return the lifetime of a storage, which is seen now and belongs to the next launch."""
        key, start = storage._cdata, storage.data_ptr()
        span = start, start + storage.nbytes()
        found = self._storages.get(key)
        if found is None or found.span != span:
            index, reference = len(self.logged), torch_internals.cudagraph_trees.StorageWeakRef(storage)
            made = Lifetime(span, index, index - 1, is_freed=reference.expired)
            if found is not None:  # it was given other memory
                made.is_given, made.is_moving = found.is_given, found.is_moving
                found.gone = index
            self._storages[key] = found = made
            self.lifetimes.append(found)
        if not found.is_given:
            self._recent.append(found)
        return found

    def _note_freed(self) -> None:
        """Note which storages were freed before the next launch. Note [Lifetimes]."""
        index = len(self.logged)
        for one in self._recent:
            if one.gone is None and one.is_freed():
                one.gone = index
        self._recent.clear()
        if freed := {one.span for one in self._moving if one.is_freed()}:
            self._freed += (*freed,)
            self._moving = [one for one in self._moving if one.span not in freed]

    def _keep(self, touched: Iterable[_Touched]) -> None:
        if not self._keep_bytes:
            return
        for lifetime, storage, _ in touched:
            key, size = storage._cdata, lifetime.span[1] - lifetime.span[0]
            if key in self._kept:
                self._kept[key] = self._kept.pop(key)  # the latest use counts
            elif size <= self._largest_kept and not lifetime.is_given:
                self._kept[key] = lifetime, storage
                self._kept_now += size
        while self._kept_now > self._keep_bytes:
            lifetime, storage = self._kept.pop(next(iter(self._kept)))
            self._kept_now -= lifetime.span[1] - lifetime.span[0]
            lifetime.last = len(self.logged) - 1
            del storage
            self._recent.append(lifetime)
        self.kept_bytes = max(self.kept_bytes, self._kept_now)

    def _keep_workspace(self, size_bytes: int) -> None:
        """Allocate the freed memory of an operator's workspace, so that the next operator gets another one."""
        if size_bytes <= self._largest_kept:
            self._depth += 1
            try:
                taken = torch.empty(size_bytes, dtype=torch.uint8, device=self._device_type)
            finally:
                self._depth -= 1
            self._keep(self._touched([taken]).values())


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
        int(min(KEPT_SHARE * _bytes(device, "reserved", "current"), torch.cuda.mem_get_info(device)[0] / 8)),
        functools.partial(allocated_bytes, device),
    )


def allocated_bytes(device: int) -> int:
    """Return how much memory was ever allocated on a device."""
    return _bytes(device, "allocated", "allocated")


def _bytes(device: int, kind: str, what: str) -> int:
    """Return one of the allocator's statistics; `torch.cuda.memory_stats` takes longer, as it flattens them all."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)[f"{kind}_bytes"]["all"][what])


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
        tensors = (value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor))
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
        kind = _kind(name)
        if kind is None:
            return reads, writes, f"the generated code does not name its argument {name or position} as read or written"
        reads.append(value)
        if kind != "in_ptr" or name in mutated:
            writes.append(value)
    return reads, writes, None


@functools.cache
def _kind(name: str) -> str | None:
    """Return how a generated kernel uses an argument: `in_ptr`, `out_ptr`, `in_out_ptr` or `ws_ptr`; else None."""
    found = _ARGUMENT.match(name)
    return found and found[1]


def operator_memory(
    func: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor], str | None]:
    """Return which tensors an operator reads, which it writes, and why it is a barrier (None: it is none)."""
    _, barrier = _name_and_barrier(func)
    reads = list(tensors_in((*arguments, *keywords.values())))
    writes = list(tensors_in(list(written(func, arguments, keywords))))
    for one in reads:
        if one.layout is not torch.strided or one.is_nested:
            barrier = MADE_OF_OTHERS
    return reads, writes, barrier


@functools.cache
def _name_and_barrier(func: Any) -> tuple[str, str | None]:
    name, barrier = str(func), None
    if func.namespace not in torch_internals.PURE_OPERATORS:
        barrier = "it is a custom operator, which may write what it does not declare"
    elif _POINTERS_IN_DEVICE_MEMORY.search(name):
        barrier = "its library may keep addresses in the memory of the device"
    return name, barrier


class _NotingOperators(torch_internals.TorchDispatchMode):
    """Note PyTorch's operators in a log while this dispatch mode is active."""

    def __init__(self, log: LaunchLog) -> None:
        super().__init__()
        self._log = log

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise guards of compiled code would fail under the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        return self._log.operator(func, args, keywords, lambda: func(*args, **keywords))
