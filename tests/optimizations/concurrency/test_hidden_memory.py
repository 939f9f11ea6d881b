"""Memory that only parameters of nodes name is found, and covers what a launch may touch there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_tensor_map import make_hidden_map, make_tensor_map
from hypothesis import given
from hypothesis import strategies as st

from optimizations.concurrency.hidden_memory import with_hidden_memory
from optimizations.concurrency.launch_log import Lifetime, Logged
from optimizations.concurrency.order import Launch, Span
from optimizations.graph.records import (
    CapturedGraph,
    KernelNode,
    MemcpyEnd,
    MemcpyNode,
    OtherNode,
    Parameter,
)
from tests.optimizations.concurrency.test_order import SPANS, overlap


def kernel_node(*words: int) -> KernelNode:
    data = b"".join(word.to_bytes(8, "little") for word in words)
    return KernelNode(
        name="gemm", function=1, grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0,
        parameters=(Parameter(offset=0, size=len(data), data=data),),
    )  # fmt: skip


POOL = [(0x1000, 0x9000)]


RESULT = 0x2000


def test_scratch_of_a_triton_kernel_counts_as_the_segment() -> None:
    """Triton frees it after the launch, so a smaller block may be at its address when the capture ends."""
    logged = [Logged(Launch("triton_poi_fused_0", 0, writes=((RESULT, 0x2100),)), False)]
    captured = CapturedGraph(nodes=(kernel_node(RESULT, 0x6000),), edges=())
    (found,) = with_hidden_memory(logged, captured, POOL, ((0x6000, 0x6200),), (), [Lifetime((0x4000, 0x4100), 0, 0)])
    assert found.writes == ((RESULT, 0x2100), POOL[0]) and found.barrier is None
    (plain,) = with_hidden_memory(logged, CapturedGraph(nodes=(kernel_node(),), edges=()), POOL, ())
    assert plain.writes == ((RESULT, 0x2100),)


@given(st.data())
def test_memory_around_an_address_covers_that_of_exact_lifetimes(data: st.DataObject) -> None:
    """Storages live at random times; the log knows when launches got them, and of some when they were freed."""
    is_exact = data.draw(st.booleans())
    exact: list[tuple[Span, int, int]] = []
    lifetimes = []
    for span in data.draw(st.lists(SPANS, min_size=1, max_size=4)):
        born = data.draw(st.integers(0, 3))
        used = born + data.draw(st.integers(-1, 2))
        died = used + (1 if is_exact else data.draw(st.integers(1, 4)))
        if not any(overlap((span,), (other,)) and born < end and start < died for other, start, end in exact):
            exact.append((span, born, died))
            lifetimes.append(Lifetime(span, born, used, died if is_exact else data.draw(st.sampled_from([None, died]))))
    address, index = data.draw(st.integers(*lifetimes[0].span)), data.draw(st.integers(0, 6))
    own_bytes, blocks = data.draw(st.sampled_from([None, 0, 2, 9])), data.draw(st.lists(SPANS, max_size=1))
    live = [span for span, born, died in exact if born <= index < died]
    tensors = [span for span in live if span[0] <= address < span[1]]
    block = next((span for span in blocks if span[0] <= address < span[1]), None)
    if block is not None and own_bytes == 0:
        needed = block
    elif tensors:
        needed = tensors[0]
    else:
        start = max([0, *(end for _, end in live if end <= address), address - (own_bytes or 99)])
        end = min([32, *(start for start, _ in live if start > address), address + (own_bytes or 99)])
        needed = (start, end) if block is None else (min(start, block[0]), max(end, block[1]))
    logged = [Logged(Launch("aten.mm.out", place), True, own_bytes) for place in range(index + 1)]
    graph = CapturedGraph(nodes=tuple(kernel_node(address) for _ in logged), edges=())
    (found,) = with_hidden_memory(logged, graph, [(0, 32)], blocks, (), lifetimes)[index].writes
    assert found[0] <= needed[0] and needed[1] <= found[1]
    assert found == needed or not is_exact


def test_address_in_an_input_not_passed_counts() -> None:
    launch = Launch("aten.mm.out", 0, writes=((0x2000, 0x2100),))
    graph = CapturedGraph(nodes=(kernel_node(0x2000, 0xA010),), edges=())
    (found,) = with_hidden_memory([Logged(launch, True)], graph, POOL, (), [(0xA000, 0xB000)])
    assert (found.reads, found.writes) == (((0xA000, 0xB000),), (*launch.writes, (0xA000, 0xB000)))


def kernel_with_map(make: Callable[[int], bytes]) -> KernelNode:
    """A kernel that gets its input as an address, and its result in a tensor map."""
    data = (0x1000).to_bytes(8, "little") + make(0x2000)
    return kernel_node().model_copy(update={"parameters": (Parameter(offset=0, size=len(data), data=data),)})


HOST, DEVICE = (MemcpyEnd(memory=memory, address=1) for memory in ("host", "device"))


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((kernel_node(RESULT), kernel_node(7, 0xFF0000)), "no parameter of gemm is a known address"),
        ((kernel_with_map(make_tensor_map),), None),  # its plain address is found
        ((kernel_with_map(make_hidden_map),), "address of a result"),
        ((OtherNode(type_name="GRAPH"),), "a node of it is of the kind GRAPH"),
        ((OtherNode(type_name="HOST"),), "a node of it is of the kind"),
        ((MemcpyNode(source=HOST, destination=DEVICE, width_bytes=4, height=1, depth=1),), "copies between"),
    ],
)
def test_operator_whose_nodes_hide_memory_is_a_barrier(nodes: tuple[Any, ...], said: str | None) -> None:
    launch = Launch("aten.mm.out", 0, len(nodes), reads=((0x1000, 0x1100),), writes=((RESULT, 0x2100),))
    (found,) = with_hidden_memory([Logged(launch, True)], CapturedGraph(nodes=nodes, edges=()), POOL, ())
    assert found.barrier is None if said is None else said in str(found.barrier)
