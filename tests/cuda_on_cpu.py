"""CUDAGraph Trees without a GPU: stock's own code, with the few calls that need CUDA replaced by ones on host memory.

What stays real: `CUDAGraphTreeManager`, `CUDAGraphNode`, the containers, weak references and liveness, PyTorch's
thread-local state. What is replaced: streams, devices, memory pools, captures (which build graphs on the simulated
driver) and tensors over a raw address.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from simulated_cuda import SimulatedDriver, SimulatedTools
from simulated_work import aligned

from optimizations import torch_internals
from optimizations.capture.trees import containers, manager
from optimizations.captured.placeholders import size_bytes
from optimizations.recording import attempt

QUICK = {"triton.slow_path_cudagraph_asserts": False, "triton.fast_path_cudagraph_asserts": False}


class FakeStream:
    def wait_stream(self, other: Any) -> None:
        pass


class FakeDeviceTools(SimulatedTools):
    """`tools.DeviceTools` over the simulated driver."""

    def rewritten(self, kernel: Any, node: Any, shared_bytes: int) -> Any:
        raise AssertionError("no PTX is at hand here")


class CudaOnCpu:
    """The fake side. `memory` holds the tensors of each pool, `capturing` the graph that is being captured."""

    def __init__(self) -> None:
        self.driver = SimulatedDriver()
        self.tools = FakeDeviceTools(self.driver)
        self.memory: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.capturing: FakeGraph | None = None
        self.captures = 0
        self.replays = 0
        self.pools = itertools.count(1)
        self.generators: list[Any] = []

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
        return tensor_at(
            {
                "data_ptr": block.data_ptr(),
                "nbytes": size_bytes(like),
                "dtype": like.dtype,
                "size": like.shape,
                "stride": like.stride(),
                "storage_offset": 0,
            }
        )

    def segments(self, pool: Any) -> list[dict[str, int]]:
        return [{"address": block.data_ptr(), "total_size": block.numel() * 4} for block in self.memory[tuple(pool)]]

    @contextlib.contextmanager
    def capture(
        self, graph: FakeGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        assert self.capturing is None, "one capture at a time"
        assert capture_error_mode == "thread_local"
        graph.begin(pool or self.new_pool())
        self.capturing = graph
        self.captures += 1
        try:
            yield
        finally:
            self.capturing = None


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    cuda: CudaOnCpu

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph
        self.graph = 0
        self._pool: Any = None
        self._executable: int | None = None

    def begin(self, pool: Any) -> None:
        self._pool = pool
        self.graph = self.cuda.driver.new_graph()

    def pool(self) -> Any:
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        self.cuda.generators.append((self, generator))

    def raw_cuda_graph(self) -> int:
        assert self.keep_graph
        return self.graph

    def instantiate(self) -> None:
        # Past the driver object, which counts calls: this is PyTorch's own.
        _, executable = SimulatedDriver.cuGraphInstantiate(self.cuda.driver, real.CUgraph(self.graph), 0)
        self._executable = int(executable)

    def raw_cuda_graph_exec(self) -> int:
        assert self._executable is not None
        return self._executable

    def replay(self) -> None:
        if self._executable is None:
            self.instantiate()
        assert self._executable is not None
        self.cuda.replays += 1
        self.cuda.driver.launch(self._executable)

    def reset(self) -> None:
        self.graph = 0


def at_address(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one dimension over `size` bytes that it does not own."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def tensor_at(metadata: dict[str, Any]) -> torch.Tensor:
    """What `CUDAGraphNode._reconstruct_from_tensor_metadata` makes."""
    flat = at_address(metadata["data_ptr"], metadata["nbytes"], metadata["dtype"])
    return flat.as_strided(metadata["size"], metadata["stride"], metadata["storage_offset"])


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnCpu]:
    """See the module."""
    cuda = CudaOnCpu()
    graph_class = type("BoundGraph", (FakeGraph,), {"cuda": cuda})
    trees = torch_internals.cudagraph_trees

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    for owner, name, value in (
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_: FakeStream()),
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "device", nothing),
        (torch.cuda, "CUDAGraph", graph_class),
        (torch.cuda, "graph", cuda.capture),
        (torch.cuda, "graph_pool_handle", cuda.new_pool),
        (torch, "_check", lambda *_: None),
        (trees, "_use_cuda_memory_pool_manager", nothing),
        (trees, "clear_cublas_manager", nothing),
        (trees, "disable_conv_cache_emptying", nothing),
        (trees, "get_history_recording", nothing),
        (trees, "get_cudagraph_segments", cuda.segments),
        (trees, "static_input", cuda.static_input),
        (trees.CUDAGraphNode, "create_storage", lambda self, metadata: None),
        (
            trees.CUDAGraphNode,
            "_reconstruct_from_tensor_metadata",
            lambda self, metadata, storage=None: tensor_at(metadata),
        ),
        (attempt, "device_tools", lambda index: cuda.tools),
        (attempt, "triton_kernels", lambda model, device: {}),
        (attempt, "ineligible_reason", ineligible),
        (manager, "ineligible_reason", ineligible),
    ):
        monkeypatch.setattr(owner, name, value)
    for name in (
        "_cuda_getCheckpointState",
        "_cuda_setCheckpointPoolState",
        "_cuda_cudaCachingAllocator_raw_delete",
        "_free_And_Remove_DeleterFn",
    ):
        monkeypatch.setattr(torch._C, name, lambda *_: None)
    with torch_internals.inductor_config.patch(QUICK):
        yield cuda
    containers.shut_down()


def ineligible(value: torch.Tensor, device: int) -> str | None:
    return None if size_bytes(value) else "it holds no bytes"
