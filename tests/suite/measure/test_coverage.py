"""Kineto traces are analysed: launches by graphs, copies, and blocking calls."""

from __future__ import annotations

import pytest

from suite.measure.profiling import UnevenIterations, analyse


def call(name: str, correlation: int, category: str = "cuda_runtime") -> dict:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 4242, "tid": 4242, "ts": 10.0 * correlation, "dur": 4.5,
        "args": {"External id": correlation, "cbid": 211, "correlation": correlation},
    }  # fmt: skip


def kernel(name: str, correlation: int, us: float = 2.0, **more: object) -> dict:
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 10.0 * correlation + 5, "dur": us,
        "args": {
            "External id": correlation, "queued": 0, "device": 0, "context": 1, "stream": 7,
            "correlation": correlation, "registers per thread": 32, "shared memory": 0, "blocks per SM": 0.1,
            "warps per SM": 0.4, "grid": [16, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 1, **more,
        },
    }  # fmt: skip


def memcpy(what: str, correlation: int, moved_bytes: int) -> dict:
    return {
        "ph": "X", "cat": "gpu_memcpy", "name": f"Memcpy {what}", "pid": 0, "tid": 7, "ts": 3.0, "dur": 1.5,
        "args": {
            "device": 0, "context": 1, "stream": 7, "correlation": correlation, "bytes": moved_bytes,
            "memory bandwidth (GB/s)": 1.0,
        },
    }  # fmt: skip


def memset(correlation: int) -> dict:
    return {
        "ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, "ts": 3.0, "dur": 1.0,
        "args": {"device": 0, "context": 1, "stream": 7, "correlation": correlation, "bytes": 4},
    }  # fmt: skip


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
    assert profile.device_to_device_bytes == 640


@pytest.mark.parametrize("name", ["cudaGraphLaunch", "cudaGraphLaunch_v10000", "cudaGraphLaunch_ptsz"])
def test_graph_launches_of_the_runtime_api_are_counted(name):
    assert analyse(trace(call(name, 1), kernel("k", 1)), 1).coverage.percent == 100.0


def test_graph_launches_of_the_driver_api_are_counted():
    profile = analyse(trace(call("cuGraphLaunch", 1, "cuda_driver"), kernel("k", 1)), 1)
    assert (profile.coverage.percent, profile.coverage.graph_launches) == (100.0, 1)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("cudaLaunchKernel", "cuda_runtime"),
        ("cudaLaunchKernelExC", "cuda_runtime"),
        ("cudaLaunchCooperativeKernel", "cuda_runtime"),
        ("cuLaunchKernel", "cuda_driver"),
        ("cuLaunchKernelEx", "cuda_driver"),
        ("cudaGraphInstantiate", "cuda_runtime"),
    ],
)
def test_any_other_call_launches_outside_of_graphs(name, category):
    profile = analyse(trace(call(name, 1, category), kernel("k", 1)), 1)
    assert (profile.coverage.percent, profile.coverage.graph_launches) == (0.0, 0)


def test_graph_node_id_marks_kernels_without_a_launch_record():
    profile = analyse(trace(kernel("k", 77, **{"graph node id": 8589934593}), kernel("k", 78)), 1)
    assert (profile.coverage.graph_kernels, profile.coverage.eager_kernels) == (1, 1)


def test_without_a_kernel_there_is_no_percentage():
    assert analyse(trace(), 1).coverage.percent is None


def test_host_to_device_copies_block_from_pageable_memory():
    profile = analyse(
        trace(
            call("cudaMemcpyAsync", 1),
            memcpy("HtoD (Pageable -> Device)", 1, 256),
            call("cudaMemcpyAsync", 2),
            memcpy("HtoD (Pageable -> Device)", 2, 44),
            call("cudaMemcpyAsync", 3),
            memcpy("HtoD (Pinned -> Device)", 3, 8),
            memcpy("DtoH (Device -> Pinned)", 4, 1000),
            memcpy("DtoD (Device -> Device)", 5, 4096),
        ),
        1,
    )
    pageable, pinned = profile.host_to_device
    assert (pageable.memory, pageable.copied_bytes, pageable.count, pageable.blocking) == ("pageable", 300, 2, True)
    assert (pinned.memory, pinned.copied_bytes, pinned.count, pinned.blocking) == ("pinned", 8, 1, False)
    assert profile.device_to_device_bytes == 4096
    assert profile.coverage.eager_memcpys == 5


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
    assert profile.host_to_device[0].copied_bytes == 64
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


def test_kernels_are_distinguished_by_name_and_launch():
    twice = [kernel("triton_poi_fused_add_3", number) for number in (1, 2)]
    profile = analyse(trace(*(call("cuLaunchKernel", number, "cuda_driver") for number in (1, 2)), *twice), 2)
    assert profile.kernels == {"triton_poi_fused_add 16x1x1 128x1x1": 1}
