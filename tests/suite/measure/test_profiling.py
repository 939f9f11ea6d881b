"""Kineto traces are analysed, differing and empty ones handled, and generated kernels have sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizations import torch_internals
from suite.measure import profiling
from suite.measure.profiling import KernelSources, UnevenIterations, analyse


def event(category: str, name: str, correlation: int, us: float = 2.0, **facts: Any) -> dict[str, Any]:
    facts = {"External id": correlation, "stream": 7, "correlation": correlation, **facts}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": 3.0, "dur": us, "args": facts}


def call(name: str, correlation: int, category: str = "cuda_runtime") -> dict[str, Any]:
    return event(category, name, correlation, cbid=211)


def kernel(name: str, correlation: int, us: float = 2.0, **more: Any) -> dict[str, Any]:
    return event("kernel", name, correlation, us, grid=[16, 1, 1], block=[128, 1, 1], **more)


def memcpy(what: str, correlation: int, moved_bytes: int) -> dict[str, Any]:
    return event("gpu_memcpy", f"Memcpy {what}", correlation, 1.5, bytes=moved_bytes)


def memset(correlation: int) -> dict[str, Any]:
    return event("gpu_memset", "Memset (Device)", correlation, bytes=4)


def trace(*events: dict) -> dict:
    """With what else stands in a trace: metadata, flow and CPU events, which must not be counted."""
    rest = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "pid": 4242, "tid": 4242, "ts": 10.0, "cat": "ac2g", "name": "ac2g"},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 1, "tid": 1, "ts": 9.0, "dur": 1.0,
         "args": {"cbid": 165, "correlation": 9999}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 99.0,
         "args": {"Op count": 0}},
    ]  # fmt: skip
    return {"schemaVersion": 1, "traceEvents": [*rest, *events]}


def test_kernels_are_counted_by_their_launching_call():
    profile = analyse(
        trace(
            call("cudaGraphLaunch", 1),
            kernel("triton_poi_fused_0", 1, us=3.0),
            kernel("sm90_xmma_gemm", 1, us=5.0),
            memcpy("DtoD (Device -> Device)", 1, 640),
            memset(1),
            call("cudaLaunchKernel", 2),
            kernel("multi_tensor_apply_kernel", 2, us=1.0),
            call("cudaMemsetAsync", 3),
            memset(3),
        ),
        iterations=1,
    )
    coverage = profile.coverage
    assert (coverage.graph_kernels, coverage.eager_kernels, coverage.graph_launches) == (2, 1, 1)
    assert coverage.percent == pytest.approx(200 / 3)
    assert (coverage.graph_memcpys, coverage.eager_memcpys) == (1, 0)
    assert (coverage.graph_memsets, coverage.eager_memsets) == (1, 1)
    assert profile.kernel_time_us == 9.0


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        *((name, 1) for name in ("cudaGraphLaunch", "cudaGraphLaunch_v10000", "cudaGraphLaunch_ptsz", "cuGraphLaunch")),
        *((name, 0) for name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel")),
        *((name, 0) for name in ("cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphInstantiate")),
    ],
)
def test_only_launches_of_graphs_count_as_such(name, launches):
    """Without a record of the launch, a graph node's id marks its kernels."""
    category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
    coverage = analyse(trace(call(name, 1, category), kernel("k", 1)), 1).coverage
    assert (coverage.percent, coverage.graph_launches) == (100.0 * launches, launches)
    node = {"graph node id": 8589934593} if launches else {}
    assert analyse(trace(kernel("k", 77, **node)), 1).coverage.percent == 100.0 * launches
    assert analyse(trace(), 1).coverage.percent is None


def steady(iteration: int) -> list[dict]:
    number = 10 * iteration
    return [
        call("cudaGraphLaunch", number),
        kernel("a", number, us=4.0),
        kernel("b", number, us=2.0 * (iteration + 1)),
        call("cudaMemcpyAsync", number + 1),
        memcpy("HtoD (Pageable -> Device)", number + 1, 64),
    ]


def test_like_iterations_are_averaged_exactly():
    profile = analyse(trace(*steady(0), *steady(1), *steady(2)), 3)
    assert (profile.coverage.graph_kernels, profile.coverage.graph_launches) == (2, 1)
    assert profile.coverage.profiled_iterations == 3
    assert profile.kernel_time_us == pytest.approx(4.0 + (2 + 4 + 6) / 3)


@pytest.mark.parametrize(
    ("stray", "named"),
    [
        ([call("cudaLaunchKernel", 90), kernel("c", 90)], "kernel events outside of graphs"),
        ([call("cudaGraphLaunch", 90)], "graph launches"),
        ([memcpy("HtoD (Pinned -> Device)", 91, 6)], "gpu_memcpy"),
    ],
)
def test_iterations_that_differ_are_not_averaged(stray, named):
    with pytest.raises(UnevenIterations, match=named):
        analyse(trace(*steady(0), *steady(1), *stray), 2)


@pytest.fixture
def sessions(monkeypatch):
    """Profiler sessions that see as many kernels as the list `seen` says, in turn; their lengths are in `asked`."""
    seen: list[int] = []
    asked: list[int] = []

    def scripted(iterate, iterations: int) -> dict:
        asked.append(iterations)
        return trace(*(kernel("k", number) for number in range(seen[len(asked) - 1])))

    monkeypatch.setattr(profiling, "trace", scripted)
    return seen, asked


def test_first_session_is_thrown_away(sessions):
    seen, asked = sessions
    seen += [99, 6, 99, 6]
    profiling.load_profiler(lambda index: None)
    profile = profiling.profile_iterations(lambda index: None)
    assert profile is not None
    assert asked == [1, 3]
    assert (profile.coverage.eager_kernels, profile.coverage.profiled_iterations) == (2, 3)
    assert profile.kernel_time_us == 4.0
    kernels = profiling.kernels_of(lambda index: None)
    assert kernels == {"k 16x1x1 128x1x1": 6}
    assert asked == [1, 3, 1, 1]


def test_iterations_that_differ_are_profiled_alone(sessions, capsys):
    seen, asked = sessions
    seen += [7, 4]
    profile = profiling.profile_iterations(lambda index: None)
    assert profile is not None
    assert asked == [3, 1]
    assert (profile.coverage.eager_kernels, profile.coverage.profiled_iterations) == (4, 1)
    assert "7 kernel events outside of graphs in 3 iterations" in capsys.readouterr().out


def test_profile_without_kernels_is_an_error(sessions):
    seen, _ = sessions
    seen += [0]
    assert profiling.profile_iterations(lambda index: None) is None


MODULE = """
class Compiler:
    def triton(self, name, source, device_str):
        return name

async_compile = Compiler()
{name} = async_compile.triton('{name}', \'\'\'
def {name}(in_ptr0, out_ptr0):
    {body}
\'\'\', device_str='cuda')
"""


def load(name: str, body: str) -> str:
    module = torch_internals.PyCodeCache.load(MODULE.format(name=name, body=body))
    assert getattr(module, name) == name and module.__file__
    return str(module.__file__)


def test_kernels_of_one_source_have_one_digest() -> None:
    first, second = KernelSources(), KernelSources()
    load("triton_poi_fused_add_0", "first body")
    load("triton_poi_fused_add_4", "first body")
    load("triton_poi_fused_add_7", "second body")
    found = first.digests()
    assert set(found) == {"triton_poi_fused_add_0", "triton_poi_fused_add_4", "triton_poi_fused_add_7"}
    assert found["triton_poi_fused_add_0"] == found["triton_poi_fused_add_4"] != found["triton_poi_fused_add_7"]
    assert second.digests() == found
    load("triton_poi_fused_add_7", "of another graph")
    assert set(second.digests()) == {"triton_poi_fused_add_0", "triton_poi_fused_add_4"}, "which one is not known"


def test_earlier_and_unreadable_sources_do_not_count() -> None:
    load("triton_per_fused_max_2", "of the trial")
    sources = KernelSources()
    load("triton_per_fused_max_2", "of the real compilation")
    gone = load("triton_per_fused_max_3", "of a folder that is gone")
    assert set(sources.digests()) == {"triton_per_fused_max_2", "triton_per_fused_max_3"}
    Path(gone).unlink()
    assert set(sources.digests()) == {"triton_per_fused_max_2"}
