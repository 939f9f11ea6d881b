"""Measurements on a GPU: real replays, captures and profiler traces, and eager's random numbers."""

from __future__ import annotations

import pytest
import torch
from tiny_workloads import WholeCell, normal_inputs, workload_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from models import registry
from models.registry import Inputs
from optimizations import torch_internals
from suite.measure.eager_random import eager_random_numbers
from suite.measure.gpu import gpu_reader
from suite.measure.launches import least_graph
from suite.measure.profiling import PROFILED_ITERATIONS
from suite.measure.timing import CudaTimer, measure_block
from suite.results.schema import Metrics
from suite.worker.protocol import CellSpec, Measure
from tests.suite.measure.test_eager_random import PROGRAMS, both

pytestmark = pytest.mark.gpu


@pytest.fixture
def cell(monkeypatch, tmp_path):
    """A function that prepares the cell of a small module in a mode on the GPU."""
    registry.workloads()

    def make(build, mode="graph", inputs=normal_inputs(32, 64), *, spec=(), **fields) -> WholeCell:  # noqa: B008
        monkeypatch.setitem(registry._REGISTRY, "TINY", workload_of(build, inputs, **fields))
        options = {
            "workload": "TINY", "variant": "published", "size": "tiny", "mode": mode, "device": "cuda",
            "with_optimizer": False, "seed": 7, "input_sets": 4, "warm_up": 8, "check_inputs": 2, "cpu_threads": 2,
            "cache_dir": str(tmp_path), "warm_cache": False, **dict(spec),
        }  # fmt: skip
        return WholeCell(CellSpec(**options), lambda phase: None)

    yield make
    torch.compiler.reset()
    torch.set_float32_matmul_precision("highest")


def metrics_of(live: WholeCell) -> Metrics:
    live.prepare()
    return live.once.take("metrics")


class Mlp(torch.nn.Module):
    """Two matmuls with pointwise kernels between and after them, and a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        return torch.softmax(self.second(self.first(x).relu()), -1)


class WeightsAlone(torch.nn.Module):
    """No input at all, so that nothing is copied before a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self) -> torch.Tensor:
        return torch.softmax(self.weight @ self.weight, -1)


def test_graph_without_inputs_is_covered_completely(cell):
    coverage = metrics_of(cell(WeightsAlone, inputs=lambda variant, size, generator: Inputs())).coverage
    assert coverage is not None
    assert coverage.percent == 100.0
    assert (coverage.eager_kernels, coverage.graph_launches) == (0, 1)
    assert coverage.graph_kernels >= 2
    assert coverage.profiled_iterations == PROFILED_ITERATIONS


@pytest.mark.parametrize("mode", ["graph", "graph-unpartitioned"])
def test_input_is_copied_into_its_placeholder_by_one_copy(cell, mode):
    metrics = metrics_of(cell(Mlp, mode))
    assert metrics.copies is not None and metrics.coverage is not None and metrics.graphs is not None
    assert (metrics.copies.placeholder_bytes, metrics.copies.placeholder_tensors) == (32 * 64 * 4, 1)
    assert metrics.coverage.eager_kernels + metrics.coverage.eager_memcpys == 1
    assert metrics.coverage.graph_launches == 1
    assert metrics.coverage.graph_kernels > 0
    assert (metrics.graphs.fx_graphs, metrics.graphs.partitions, metrics.graphs.cuda_graphs) == (1, 1, 1)
    assert metrics.graphs.not_captured == []


class TableOnTheCpu(torch.nn.Module):
    """A CPU attribute of rank 1 that goes over in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.table = torch.randn(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table.to(x.device)  # the line that the reason must name


def test_copy_to_the_gpu_is_reported_with_the_users_line(cell):
    metrics = metrics_of(cell(TableOnTheCpu))
    assert metrics.coverage is not None and metrics.graphs is not None
    assert metrics.coverage.eager_memcpys >= 1
    assert metrics.graphs.not_captured
    assert any("self.table.to(x.device)" in (each.source_line or "") for each in metrics.graphs.not_captured)
    assert metrics.graphs.partitions is not None and metrics.graphs.partitions >= 1


@pytest.mark.alone
def test_device_time_counts_work_within_host_time():
    square = torch.randn(4096, 4096, device="cuda")

    def iterate(inputs: Inputs) -> None:
        for _ in range(10):
            square @ square

    block = measure_block(
        iterate,  # type: ignore[arg-type]
        [Inputs(), Inputs()],
        CudaTimer(),
        index=0,
        turn=0,
        samples=10,
        read_gpu=gpu_reader(f"GPU-{torch.cuda.get_device_properties(0).uuid}"),
    )
    assert block.device_us is not None and len(block.device_us) == 10
    for host_us, device_us in zip(block.host_us, block.device_us, strict=True):
        assert 500 < device_us < host_us * 1.02  # 1.4 TFLOP take more than 0.5 ms on any GPU of today
    assert block.gpu_before is not None and block.gpu_after is not None


@pytest.mark.alone
def test_cell_reports_memory_and_compile_time(cell):
    live = cell(Mlp)
    prepared = live.prepare()
    assert prepared.compile.first_call_s > 0.1
    memory = live.once.take("metrics").memory
    assert memory is not None
    weights = 4 * (64 * 128 + 128 + 128 * 16 + 16)
    for peak in (memory.compile_peak_allocated_bytes, memory.replay_peak_allocated_bytes):
        assert peak is not None and peak > weights + 4 * 32 * 64 * 4
    assert memory.replay_peak_reserved_bytes is not None
    block = live.measure(Measure(index=0, turn=0, samples=4))
    assert block.device_us is not None and all(us > 0 for us in block.device_us)


def test_smallest_graph_writes_no_memory_of_the_program() -> None:
    launch = least_graph()
    taken = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(1000)]
    launch()
    assert not torch.cat(taken).any()


# On a GPU too, compiled programs draw eager's random numbers in eager's order.


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_draws_are_in_eagers_order(name: str) -> None:
    program, side = PROGRAMS[name]
    w = torch.randn(side, side, generator=torch.Generator().manual_seed(1)).cuda() / side**0.5
    with torch_internals.inductor_config.patch(force_disable_caches=True), eager_random_numbers():
        eager, compiled = both(program, w)
    torch.testing.assert_close(compiled, eager, rtol=1e-2, atol=1e-2)


def attended(heads: torch.Tensor) -> torch.Tensor:
    """Transformers 5 passes a mask that hides nothing while traced, and none at other times."""
    traced = torch.compiler.is_compiling()
    mask = heads.new_ones(1, 1, 128, 1, dtype=torch.bool).expand(8, 1, 128, 128) if traced else None
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.5)


def gradients(heads: torch.Tensor) -> list[torch.Tensor]:
    """Those of eager and of the compiled program, from the same seed."""
    torch.compiler.reset()
    found = []
    for call in (attended, torch.compile(attended)):
        torch.manual_seed(3)
        leaf = heads.clone().requires_grad_()
        call(leaf).square().sum().backward()
        found.append(leaf.grad)
    return found


def test_attention_dropout_is_equal_with_and_without_a_mask() -> None:
    heads = torch.randn(8, 4, 128, 64, generator=torch.Generator().manual_seed(1)).half().cuda()
    with torch_internals.inductor_config.patch(force_disable_caches=True), eager_random_numbers():
        with sdpa_kernel(SDPBackend.MATH):
            eager, compiled = gradients(heads)
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)
        # That they drop others by themselves is what makes it a test.
        eager, compiled = gradients(heads)
    assert (compiled - eager).norm() > 0.1 * eager.norm()
