"""CUDAGraph Trees without a GPU: stock's own code, with the few calls that need CUDA replaced by ones on host memory.

What stays real: `CUDAGraphTreeManager`, `CUDAGraphNode`, the containers, weak references and liveness, PyTorch's
thread-local state. What is replaced: streams, devices, memory pools, captures (which build graphs on the simulated
driver) and tensors over a raw address.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optimizations import torch_internals
from optimizations.graph.memory import size_bytes
from optimizations.in_place import budget, description, examination, session, without_placeholder
from optimizations.in_place.generated import GeneratedCode
from optimizations.trees import containers, graphed_function, streams
from optimizations.trees import node as node_module
from simulated_gpu.allocator import aligned
from simulated_gpu.driver import SimulatedDriver, SimulatedGraph, SimulatedTools

QUICK = {"triton.slow_path_cudagraph_asserts": False, "triton.fast_path_cudagraph_asserts": False}


ALL_MEMORY = [{"address": 0, "total_size": 2**63, "segment_pool_id": (0, 0)}]
"""The memory of the allocator, as queries return it."""


class FakeStream:
    def __init__(self, cuda_stream: int = 7) -> None:
        self.cuda_stream = cuda_stream
        self.device = 0

    def wait_stream(self, other: Any) -> None:
        pass


class CurrentStream(FakeStream):
    """Waits for what captures enqueued on theirs: see `optimizations.graph.pools`."""

    def __init__(self, cuda: CudaOnCpu) -> None:
        super().__init__()
        self._cuda = cuda

    def wait_stream(self, other: Any) -> None:
        self._cuda.may_overtake = False


class CudaOnCpu:
    """The fake side. `memory` holds the tensors of each pool, `capturing` the graph that is being captured.

    `may_overtake`: what PyTorch enqueued for a capture may come after what is enqueued for the next replay.
    """

    def __init__(self) -> None:
        self.driver = SimulatedDriver()
        self.driver.begin_capture = self.begin_capture
        self.driver.end_capture = self.end_capture
        self.allocating_to: Any = None
        self.tools = SimulatedTools(self.driver)
        self.memory: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.capturing: FakeGraph | None = None
        self.captures = 0
        self.replays = 0
        self.pools = itertools.count(1)
        self.generators: list[Any] = []
        self.stream = 1
        self.inside_capture = False
        self.ended: list[Any] = []
        self.waits: list[int] = []
        self.may_overtake = False
        self.have_handles: set[int] = set()  # threads that asked for a handle of cuBLAS

    def new_pool(self) -> tuple[int, int]:
        return (0, next(self.pools))

    def allocate(self, elements: int) -> torch.Tensor:
        """Float memory of the pool of the graph that is being captured. The pool keeps it, not the tensor."""
        assert self.capturing is not None
        block = aligned(elements)
        self.memory[self.capturing.pool()].append(block)
        return at_address(block.data_ptr(), block.numel() * 4, torch.float32)

    def static_input(self, like: torch.Tensor) -> torch.Tensor:
        """Stock's placeholder: in a pool, which keeps the memory when the tensor is gone."""
        block = aligned(size_bytes(like) // 4 + 1)
        self.memory["placeholders"].append(block)
        storage = at_address(block.data_ptr(), size_bytes(like), torch.uint8).untyped_storage()
        return tensor_over(storage, like.dtype, like.shape, like.stride())

    def is_placeholder(self, tensor: torch.Tensor) -> bool:
        """Return whether it lies in memory that `static_input` returned."""
        return any(block.data_ptr() == tensor.data_ptr() for block in self.memory["placeholders"])

    def segments(self, pool: Any) -> list[dict[str, int]]:
        return [{"address": block.data_ptr(), "total_size": block.numel() * 4} for block in self.memory[tuple(pool)]]

    def begin_allocating(self, device: int, pool: Any) -> None:
        self.allocating_to = pool

    def begin_capture(self) -> None:
        """Begin a capture by the driver, unknown to PyTorch."""
        self._begin(type("BoundGraph", (FakeGraph,), {"cuda": self})(keep_graph=True), self.allocating_to)

    def _begin(self, graph: FakeGraph, pool: Any) -> None:
        assert self.capturing is None, "one capture at a time"
        graph.begin(pool)
        self.capturing = graph
        self.captures += 1

    def end_capture(self) -> int:
        graph, self.capturing = self.capturing, None
        assert graph is not None
        return graph.graph

    @contextlib.contextmanager
    def capture(
        self, graph: FakeGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self._begin(graph, pool or self.new_pool())
        self.may_overtake = True
        try:
            yield
        finally:
            self.capturing = None


class FakeGraph(SimulatedGraph):
    """`torch.cuda.CUDAGraph`."""

    cuda: CudaOnCpu

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(self.cuda.driver, 0)
        self.keep_graph = keep_graph
        self._pool: Any = None

    def begin(self, pool: Any) -> None:
        self._pool = pool
        self.graph = self.driver.new_graph()

    def pool(self) -> Any:
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        self.cuda.generators.append((self, generator))

    def raw_cuda_graph(self) -> int:
        assert self.keep_graph
        return super().raw_cuda_graph()

    def replay(self) -> None:
        if self.executable is None:
            self.instantiate()
        assert not self.cuda.may_overtake
        self.cuda.replays += 1
        super().replay()

    def reset(self) -> None:
        self.graph = 0


def at_address(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one dimension over `size` bytes that it does not own."""
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def tensor_over(storage: Any, dtype: torch.dtype, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def constructed(metadata: dict[str, Any], storage: Any) -> torch.Tensor:
    """`torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata`."""
    return tensor_over(storage, *(metadata[name] for name in ("dtype", "size", "stride", "storage_offset")))


class TorchOfTrees:
    """`torch` of the module of CUDAGraph Trees, which accepts CPU tensors. Programs see the real one: Dynamo recognizes
    `torch._check` by its identity."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _check(condition: Any, message: Any) -> None:
        if not condition and "cuda" not in str(message()):
            torch._check(condition, message)


def played_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnCpu]:
    """Replace what needs CUDA, and end all managers afterwards: the fixture's body, for programs of their own."""
    cuda = CudaOnCpu()
    graph_class = type("BoundGraph", (FakeGraph,), {"cuda": cuda})
    trees = torch_internals.cudagraph_trees

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    for owner, name, value in (
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "is_current_stream_capturing", lambda: cuda.inside_capture),
        (torch.cuda, "current_stream", lambda *_: CurrentStream(cuda)),
        (torch.cuda, "current_blas_handle", lambda: cuda.have_handles.add(threading.get_ident())),
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "device", nothing),
        (torch.cuda, "CUDAGraph", graph_class),
        (torch.cuda, "stream", nothing),
        (torch_internals, "begin_allocating", cuda.begin_allocating),
        (torch_internals, "end_allocating", lambda device, pool: cuda.ended.append(pool)),
        (torch_internals, "release_pool", lambda *_: None),
        (torch.cuda, "graph", cuda.capture),
        (torch.cuda, "graph_pool_handle", cuda.new_pool),
        (torch.cuda, "memory_snapshot", lambda pool=None, **_: cuda.segments(pool) if pool else ALL_MEMORY),
        (trees, "torch", TorchOfTrees()),
        (trees, "_use_cuda_memory_pool_manager", nothing),
        (trees, "clear_cublas_manager", nothing),
        (trees, "disable_conv_cache_emptying", nothing),
        (trees, "get_history_recording", nothing),
        (trees, "get_cudagraph_segments", cuda.segments),
        (trees, "static_input", cuda.static_input),
        (torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", constructed),
        (node_module, "device_tools", lambda index: cuda.tools),
        (examination, "ineligible_reason", ineligible),
        (session, "ineligible_reason", ineligible),
        (description, "ineligible_reason", ineligible),
        (without_placeholder, "ineligible_reason", ineligible),
        (graphed_function, "read_generated", lambda model: getattr(model, "code", KNOWN)),
        (budget, "MOST_WORK", 1e9),
        (budget, "FEWEST_REPLAYS", 1),
        (streams, "make_context_current", lambda device: None),
        (streams, "wait_for_stream", lambda stream, device: cuda.waits.append(stream)),
        (streams, "stream_of", lambda stream, device: FakeStream(stream)),
        (torch_internals, "current_raw_stream", lambda device: cuda.stream),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCheckpointState", lambda *_: object())
    for name in (
        "_cuda_setCheckpointPoolState",
        "_cuda_cudaCachingAllocator_raw_delete",
        "_free_And_Remove_DeleterFn",
    ):
        monkeypatch.setattr(torch._C, name, lambda *_: None)
    # `QUICK` switches this off in one thread only where settings belong to threads (since PyTorch 2.12).
    monkeypatch.setattr(torch_internals.cudagraph_trees, "check_memory_pool", lambda *_: None)
    monkeypatch.setattr(torch._C, "_has_Standard_Deleter", lambda storage: True)
    with torch_internals.inductor_config.patch(QUICK):
        yield cuda
        containers.free_all()


KNOWN = GeneratedCode(None, products=frozenset(range(1024)))
"""Code of functions whose inputs are known to be parameters of kernels alone, as those of products are."""


def ineligible(value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return "it is not a tensor"
    return None if size_bytes(value) else "it holds no bytes"
