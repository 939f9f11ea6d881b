"""Tensor maps on a GPU: the driver acts as its simulation, and what a user's descriptor describes is copied."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cuda.bindings import driver
from fake_tensor_map import replace_address
from gpu_harness import call, copy_reasons, encore, recordings
from triton.tools.tensor_descriptor import TensorDescriptor

from optimizations.graph.device import TENSOR_MAP_CAPABILITY
from optimizations.graph.records import KernelNode
from optimizations.graph.tensor_map import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, driver_replace_address
from optimizations.in_place.session import OTHER_USES
from tests.optimizations.graph.test_real_captures import FILES, load

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, BOX = 256, 512, 64


@pytest.fixture(autouse=True)
def context() -> None:
    if torch.cuda.get_device_capability() < TENSOR_MAP_CAPABILITY:
        pytest.skip("this GPU has no tensor maps")
    torch.cuda.synchronize()


def encode(address: int) -> bytes:
    """The tensor map of a bf16 matrix; by ctypes, for the driver wants its place aligned, which no binding promises."""
    buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    place = -(-ctypes.addressof(buffer) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(COLUMNS, ROWS),
        (ctypes.c_uint64 * 1)(2 * COLUMNS),
        (ctypes.c_uint32 * 2)(BOX, BOX),
        (ctypes.c_uint32 * 2)(1, 1),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    assert status == int(driver.CUresult.CUDA_SUCCESS)
    return ctypes.string_at(place, TENSOR_MAP_BYTES)


def test_new_tensor_map_begins_with_its_address() -> None:
    memory = torch.empty(2, ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    first, second = memory[0].data_ptr(), memory[1].data_ptr()
    before, after = encode(first), encode(second)
    assert before[:8] == first.to_bytes(8, "little")
    assert [int.from_bytes(before[place : place + 4], "little") + 1 for place in (32, 36)] == [COLUMNS, ROWS]
    assert driver_replace_address(driver)(before, second) == after == replace_address(before, second)


def windows() -> Iterator[bytes]:
    """Return every 128 bytes that the search would check in real captures; none of them is a whole map."""
    for name in FILES:
        for node in load(name).first.graph.nodes:
            for parameter in node.parameters if isinstance(node, KernelNode) else ():
                for start in range(0, parameter.size - TENSOR_MAP_BYTES + 1, TENSOR_MAP_ALIGNMENT):
                    yield parameter.data[start : start + TENSOR_MAP_BYTES]


def test_driver_replaces_addresses_as_the_simulated_one() -> None:
    """The first word must be a possible address: of others the driver keeps the highest byte."""
    replace, address = driver_replace_address(driver), torch.empty(1, device="cuda").data_ptr()
    found = [one for one in windows() if one[6:8] == bytes(2)]
    assert len(found) > 50
    assert [replace(one, address) for one in found] == [replace_address(one, address) for one in found]


def test_unaligned_address_is_refused() -> None:
    address = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16).data_ptr()
    for shift in (1, 4, 8):
        assert driver_replace_address(driver)(encode(address), address + shift) is None
        assert replace_address(encode(address), address + shift) is None


SIDE = 32


@triton.jit
def double_tile(source, destination, side: tl.constexpr):  # type: ignore[no-untyped-def]
    """destination = 2 * source, of a square tile that the host describes."""
    tile = source.load([0, 0])
    places = tl.arange(0, side)
    tl.store(destination + places[:, None] * side + places[None, :], tile * 2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    double_tile[(1,)](TensorDescriptor.from_tensor(x, [SIDE, SIDE]), out, side=SIDE)
    return out


def test_tensor_that_a_descriptor_describes_is_copied() -> None:
    """A kernel of the user's may reach it through memory, so it is not read in place."""
    compiled = encore(doubled)
    kept: deque[Any] = deque(maxlen=5)
    for step in range(40):
        x = torch.full((SIDE, SIDE), float(step), device="cuda") + torch.eye(SIDE, device="cuda")
        kept.append(x)
        (result,) = call(compiled, x)
        assert torch.equal(result, 2 * x), f"step {step}\n{copy_reasons()}"
    (report,) = recordings()
    (given,) = report.inputs
    assert not given.indirect and report.off == OTHER_USES, report
