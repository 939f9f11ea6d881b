"""The prelude's kernel: it is compiled on this machine, sets addresses before a launch, and is checked once."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import cuda.pathfinder
import pytest
import torch
from cuda.bindings import driver as real
from hypothesis import given
from hypothesis import strategies as st
from simulated_gpu.driver import SimulatedDriver, SimulatedTools
from triton import knobs

from optimizations.graph import device, prelude, prelude_check
from optimizations.graph.driver import CudaCallFailed, KernelUnavailable, compile_cubin
from optimizations.graph.plan import Slot
from optimizations.graph.prelude import (
    KERNEL_NAME,
    ParameterUpdate,
    build_prelude,
    pack_tables,
)
from optimizations.graph.prelude_check import failed_prelude
from optimizations.graph.table import CAPACITIES


def told(path: Path, tool: Any, *options: str) -> str:
    """Return what one of the binary tools that come with Triton prints of a cubin."""
    return subprocess.run([tool.path, *options, path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_prelude_compiles_and_links(tmp_path: Path, target: str) -> None:
    cubin = tmp_path / "prelude.cubin"
    cubin.write_bytes(build_prelude(target))
    symbols = told(cubin, knobs.nvidia.cuobjdump, "--dump-elf-symbols")
    assert set(re.findall(r"STT_FUNC\s+STB_GLOBAL\s+STO_ENTRY\s+(\S+)", symbols)) == {KERNEL_NAME}
    sass = told(cubin, knobs.nvidia.nvdisasm)
    assert sass.startswith(f"\t.target\t{target}\n")
    assert "cudaGraphKernelNodeSetParam" in sass, "the device runtime is linked in"


C_TYPES = {"cudaGraphDeviceNode_t": ctypes.c_uint64, "unsigned": ctypes.c_uint32}


def declared(name: str) -> type[ctypes.Structure]:
    """The structure of this name as the kernel's source declares it, by the C rules of ctypes."""
    body = re.search(rf"struct {name} {{(.*?)}};", prelude.SOURCE, re.DOTALL)
    assert body is not None
    fields = [(field, C_TYPES[kind]) for kind, field in re.findall(r"(\w+) (\w+);", body.group(1))]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


offsets = st.integers(0, 2**32 - 1)
updates = st.builds(
    ParameterUpdate,
    buffer_offset=offsets,
    slot=st.builds(
        Slot, offset_bytes=offsets, input=st.just(0), delta=st.just(0), tensor_map=st.none() | st.just(bytes(128))
    ),
)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.lists(updates, max_size=4)), max_size=300))
def test_tables_contain_what_the_kernel_reads(nodes: list[tuple[int, list[ParameterUpdate]]]) -> None:
    packed_nodes, packed_updates = pack_tables(nodes)
    node_type, update_type = declared("Node"), declared("Update")
    read_nodes = (node_type * len(nodes)).from_buffer_copy(packed_nodes)
    count = sum(len(updates) for _, updates in nodes)
    read_updates: Any = (update_type * count).from_buffer_copy(packed_updates)
    found = []
    for node in read_nodes:
        own = read_updates[node.first_update : node.first_update + node.update_count]
        found.append((node.handle, [(u.buffer_offset, u.slot_offset, u.size_bytes) for u in own]))
    assert found == [
        (handle, [(u.buffer_offset, u.slot.offset_bytes, 8 if u.slot.tensor_map is None else 128) for u in updates])
        for handle, updates in nodes
    ]


def test_kernels_are_built_once_and_early(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build(target: str, *arguments: Any) -> bytes:
        built.append((target, *arguments))
        if not arguments:
            raise KernelUnavailable("no linker")
        return b"cubin"

    monkeypatch.setattr(prelude_check, "build_prelude", build)
    monkeypatch.setattr(prelude_check, "build_table_kernel", build)
    monkeypatch.setattr(prelude_check, "target_of", lambda device: "sm_1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "_CUBINS", {})
    before = set(threading.enumerate())
    for _ in range(2):
        prelude_check.build_early.__wrapped__()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    tables = [("sm_1", capacity) for capacity in CAPACITIES]
    assert [device.cubin(build, *one) for one in tables] == [b"cubin"] * len(tables)
    assert sorted(one for one in built if one[1:]) == tables
    with pytest.raises(KernelUnavailable, match="no linker"):
        device.cubin(build, "sm_1")
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    prelude_check.build_early.__wrapped__()


def test_unknown_target_fails_with_the_compilers_message() -> None:
    with pytest.raises(KernelUnavailable, match=r"NVRTC for sm_1: nvrtcCompileProgram failed.*invalid value"):
        build_prelude("sm_1")


def test_missing_device_runtime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise cuda.pathfinder.StaticLibNotFoundError(f"no {name} anywhere")

    monkeypatch.setattr(cuda.pathfinder, "find_static_lib", missing)
    with pytest.raises(KernelUnavailable, match=r"libcudadevrt\.a, which come .* \(no cudadevrt anywhere\)"):
        build_prelude("sm_90")


def test_damaged_device_runtime_fails_with_the_linkers_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    junk = tmp_path / "libcudadevrt.a"
    junk.write_bytes(b"no archive")
    monkeypatch.setattr(cuda.pathfinder, "find_static_lib", lambda name: str(junk))
    with pytest.raises(KernelUnavailable, match="nvJitLink for sm_90: ERROR"):
        build_prelude("sm_90")


# Errors of NVRTC.


KERNEL = 'extern "C" __global__ void set(int* place) { *place = 1; }'


def test_compiled_kernel_with_an_empty_log_keeps_the_process() -> None:
    compiled = compile_cubin(KERNEL, "set.cu", "sm_90")
    assert compiled.startswith(b"\x7fELF")
    # Note [Buffers NVRTC writes to]: what `encode` gives here is one object for the whole process. (The compiler would
    # fold an expression of literals, and never look.)
    space = chr(32)
    assert list(space.encode()) == [32]


def test_nvrtc_log_is_in_the_error() -> None:
    with pytest.raises(KernelUnavailable, match=r"sm_90.*set\.cu\(1\): error"):
        compile_cubin("no declaration", "set.cu", "sm_90")


# The check that a prelude works on a device, on a simulated driver.


def tells_failure(table: bytes, nodes: bytes, updates: bytes, count: bytes, status: bytes) -> None:
    ctypes.memmove(int.from_bytes(status, "little"), (98).to_bytes(4, "little"), 4)


def does_nothing(*parameters: bytes) -> None:
    pass


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, None),
        (tells_failure, "the prelude could not update a node (cudaError_t 98)"),
        (does_nothing, "a graph with a prelude did not read the new address"),
    ],
)
def test_prelude_that_does_not_update_is_found(body: Any, expected: str | None) -> None:
    driver = SimulatedDriver()
    if body is not None:
        driver.functions[driver.prelude_function].body = body
    assert failed_prelude(driver, SimulatedTools(driver), real.CUstream(0)) == expected
    assert not driver.graphs and not driver.executables


def test_graph_of_the_check_is_destroyed_after_a_failure() -> None:
    driver = SimulatedDriver()
    driver.failing = {"cuGraphUpload"}
    with pytest.raises(CudaCallFailed, match="cuGraphUpload"):
        failed_prelude(driver, SimulatedTools(driver), real.CUstream(0))
    assert not driver.graphs and not driver.executables
