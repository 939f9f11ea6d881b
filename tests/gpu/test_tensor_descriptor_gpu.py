"""A Triton kernel that is given a tensor descriptor by the host: a tensor map of 128 bytes in a kernel's parameters.

Needs an NVIDIA GPU with tensor maps.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from indirection_on_gpu import Searched, call, encore, recordings, said
from triton.tools.tensor_descriptor import TensorDescriptor

from optimizations.graph.device import TENSOR_MAP_CAPABILITY
from optimizations.graph.records import KernelNode
from optimizations.graph.tensor_map import TENSOR_MAP_BYTES

pytestmark = pytest.mark.gpu

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


def test_a_descriptor_follows_its_tensor(searched: list[Searched]) -> None:
    if torch.cuda.get_device_capability() < TENSOR_MAP_CAPABILITY:
        pytest.skip("this GPU has no tensor maps")
    compiled = encore(doubled)
    kept: deque[Any] = deque(maxlen=5)
    for step in range(40):
        x = torch.full((SIDE, SIDE), float(step), device="cuda") + torch.eye(SIDE, device="cuda")
        kept.append(x)
        (result,) = call(compiled, x)
        assert torch.equal(result, 2 * x), f"step {step}\n{said()}"
    (report,) = recordings()
    assert searched, report
    graph = searched[0][0].graph
    sizes = [one.size for _, node in graph.walk() if isinstance(node, KernelNode) for one in node.parameters]
    assert TENSOR_MAP_BYTES in sizes, sizes
    (given,) = report.inputs
    assert given.indirect, report
