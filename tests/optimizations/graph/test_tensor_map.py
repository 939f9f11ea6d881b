"""Tensor maps are recognized if replacing the address gives all 128 bytes of the other capture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from fake_tensor_map import make_hidden_map, make_tensor_map, replace_address, replace_hidden_address
from hypothesis import given
from hypothesis import strategies as st

from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.moves import Moves, Origin
from optimizations.graph.records import Capture, CapturedGraph, MemoryRange, Placeholder
from optimizations.graph.tensor_map import (
    ReplaceAddress,
    driver_replace_address,
    find_tensor_maps,
)

FIRST = (0x7F12_3400_0000, 0x7F12_3500_0000)
SECOND = (0x7F15_0000_1000, 0x7F19_0000_0000)
SIZE_BYTES = 4096


def capture(addresses: tuple[int, ...]) -> Capture:
    placeholders = tuple(
        Placeholder(input=index, memory=MemoryRange(address=address, size_bytes=SIZE_BYTES))
        for index, address in enumerate(addresses)
    )
    return Capture(graph=CapturedGraph(nodes=(), edges=()), placeholders=placeholders)


MOVES = Moves(capture(FIRST), capture(SECOND))


def find(first: bytes, second: bytes, moves: Moves, replace: ReplaceAddress) -> tuple[tuple[int, Origin], ...]:
    return find_tensor_maps(first, second, moves.unsettled([(first, second)]).get(0, []), moves, replace)


@pytest.mark.parametrize(
    ("first", "second"),
    [(b"\1" * 128, b"\2" * 128), (make_tensor_map(0x7F00_0000_0000), make_tensor_map(0x7F01_0000_0000))],
    ids=["no map", "map over other memory"],
)
def test_window_without_an_input_is_tried_once(first: bytes, second: bytes) -> None:
    """However many inputs moved: each trial is a call of the driver, and products have a window for each operand."""
    tried: list[int] = []

    def replace(window: bytes, address: int) -> bytes | None:
        tried.append(address)
        return replace_address(window, address)

    addresses = tuple(range(0x7F12_3400_0000, 0x7F12_3500_0000, 0x10_0000))
    moves = Moves(capture(addresses), capture(tuple(0x1_0000_0000 + 2 * one for one in addresses)))
    assert find(first, second, moves, replace) == ()
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("make", "replace"), [(make_tensor_map, replace_address), (make_hidden_map, replace_hidden_address)]
)
@given(
    inputs=st.lists(st.none() | st.integers(0, 1), max_size=4),
    lead=st.integers(0, 3),
    tail=st.binary(max_size=70),
)
def test_exactly_the_maps_at_aligned_offsets_are_found(
    make: Callable[[int], bytes], replace: ReplaceAddress, inputs: list[int | None], lead: int, tail: bytes
) -> None:
    expected, first, second = [], bytearray(64 * lead), bytearray(64 * lead)
    for index in inputs:
        if index is None:
            first += b"\1" * 64
            second += b"\2" * 64
        else:
            expected.append((len(first), Origin(index, 0)))
            first += make(FIRST[index])
            second += make(SECOND[index])
    found = find(bytes(first) + tail, bytes(second) + tail, MOVES, replace)
    assert found == tuple(expected)


@given(st.lists(st.tuples(st.sampled_from(range(9)), st.sampled_from(range(9))), max_size=12), st.integers(0, 7))
def test_only_words_in_own_memory_both_times_are_settled(words: list[tuple[int, int]], tail: int) -> None:
    """A word that moved like an input is not settled either, nor are the bytes after the last word."""
    own = MemoryRange(address=0x7F12_2000_0000, size_bytes=4096), MemoryRange(address=0x7F20_0000_0000, size_bytes=4096)
    moves = Moves(
        *(capture(at).model_copy(update={"owned": (one,)}) for at, one in zip((FIRST, SECOND), own, strict=True))
    )
    values = [
        *(one.address + offset for one in own for offset in (0, 4088, 4096)),
        *(own[0].address + 16, own[0].address + 16 + moves.displacement[0], 7),
    ]
    first, second = (
        b"".join(values[pair[place]].to_bytes(8, "little") for pair in words) + bytes([place] * tail)
        for place in (0, 1)
    )
    expected = [
        8 * index
        for index, (one, other) in enumerate((values[before], values[after]) for before, after in words)
        if one != other and not (one in own[0] and other in own[1] and other - one not in moves.displacement.values())
    ]
    expected += [8 * len(words)] if tail else []
    assert moves.unsettled([(b"", b""), (first, second), (first, first)]) == ({1: expected} if expected else {})


def test_map_with_other_changes_is_not_evidence() -> None:
    first, second = make_tensor_map(FIRST[0], shape=7), make_tensor_map(SECOND[0], shape=8)
    assert find(first, second, MOVES, replace_address) == ()


def test_unchanged_map_does_not_refer_to_a_moved_input() -> None:
    same = make_tensor_map(FIRST[0])
    assert find(same, same, MOVES, replace_address) == ()


def test_maps_at_unaligned_offsets_are_not_searched() -> None:
    first, second = (bytes(32) + make_tensor_map(address) + bytes(32) for address in (FIRST[0], SECOND[0]))
    assert find(first, second, MOVES, replace_address) == ()


def test_map_into_an_input_is_found_by_its_address() -> None:
    def plain(window: bytes, address: int) -> bytes | None:
        return window[:16] + address.to_bytes(8, "little") + window[24:] if window[:4] == b"TMAP" else None

    first, second = (
        b"TMAP" + bytes(12) + (address + 512).to_bytes(8, "little") + bytes(104) for address in (FIRST[1], SECOND[1])
    )
    assert find(first, second, MOVES, plain) == ((0, Origin(1, 512)),)


def test_bytes_that_prove_two_inputs_are_reported_for_both() -> None:
    together = Moves(capture(FIRST), capture(tuple(address + 4096 for address in FIRST)))

    def careless(window: bytes, address: int) -> bytes | None:
        return b"\2" * 128

    found = find(b"\1" * 128, b"\2" * 128, together, careless)
    assert found == ((0, Origin(0, 0)), (0, Origin(1, 0)))


class FakeDriver:
    """Answers `cuTensorMapReplaceAddress` on the bindings' own structure; `result` overrides its return code."""

    CUresult = cuda.CUresult
    CUtensorMap = cuda.CUtensorMap

    def __init__(self, result: Any = cuda.CUresult.CUDA_SUCCESS) -> None:
        self.result = result

    def cuTensorMapReplaceAddress(self, tensor_map: Any, address: int) -> tuple[Any]:
        location = int(tensor_map.getPtr())
        assert location % 64 == 0, "the driver refuses descriptors that are not aligned to 64 bytes"
        if self.result != cuda.CUresult.CUDA_SUCCESS:
            return (self.result,)
        replaced = replace_address(ctypes.string_at(location, 128), address)
        if replaced is None:
            return (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
        ctypes.memmove(location, replaced, 128)
        return (cuda.CUresult.CUDA_SUCCESS,)


def test_driver_replaces_addresses_in_a_copy() -> None:
    replace = driver_replace_address(FakeDriver())
    original = make_tensor_map(FIRST[0])
    assert replace(original, SECOND[0]) == make_tensor_map(SECOND[0])
    assert original == make_tensor_map(FIRST[0])


def test_refused_map_is_no_map_and_other_failures_are_raised() -> None:
    assert driver_replace_address(FakeDriver())(make_tensor_map(FIRST[0]), SECOND[0] + 1) is None
    assert driver_replace_address(FakeDriver(cuda.CUresult.CUDA_ERROR_INVALID_VALUE))(bytes(128), 0) is None
    with pytest.raises(CudaCallFailed, match="cuTensorMapReplaceAddress failed: CUDA_ERROR_NOT_INITIALIZED"):
        driver_replace_address(FakeDriver(cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED))(bytes(128), 0)
