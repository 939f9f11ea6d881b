"""Find tensor maps (TMA descriptors) in kernel parameters.

A tensor map is 128 opaque bytes, aligned to 64, that hold an address in an encoding NVIDIA does not publish.
`cuTensorMapReplaceAddress` proves it: 128 bytes are a tensor map over an address in input i exactly if replacing that
address by its counterpart in the second capture turns the first capture's bytes into the second's. (CUDA Driver API,
"Tensor Map Object Management"; compute capability 9.0 and up.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from optimizations.graph.driver import CudaCallFailed, check
from optimizations.graph.moves import Moves, Origin, changed_items
from optimizations.graph.records import WORD_BYTES

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64

ReplaceAddress = Callable[[bytes, int], bytes | None]
"""The bytes of a tensor map with its address replaced; None if they are not a tensor map, or the address is refused."""


class AddressRefused(RuntimeError):
    """The driver does not take this address in a tensor map."""


def find_tensor_maps(
    first: bytes, second: bytes, unsettled: Sequence[int], moves: Moves, replace: ReplaceAddress
) -> tuple[tuple[int, Origin], ...]:
    """Return the proven tensor maps over moved inputs in one kernel parameter: where each begins, and its address.

    Args:
        first, second: the parameter's bytes in the two captures, of the same length.
        unsettled: the offsets of words that are not in the graph's own memory (`Moves.unsettled`). A map over an input
            changes such a word.
        moves: the inputs' placeholders in both captures.
        replace: `cuTensorMapReplaceAddress`, or a fake in tests.

    Tensor maps do not overlap. If the bytes prove more than one origin, there is one entry for each of them.
    """
    found: list[tuple[int, Origin]] = []
    offset = 0
    while offset + TENSOR_MAP_BYTES <= len(first):
        before, after = (data[offset : offset + TENSOR_MAP_BYTES] for data in (first, second))
        is_open = any(offset <= word < offset + TENSOR_MAP_BYTES for word in unsettled)
        proven = _proven(before, after, moves, replace) if is_open else []
        found += [(offset, origin) for origin in proven]
        offset += TENSOR_MAP_BYTES if proven else TENSOR_MAP_ALIGNMENT
    return tuple(found)


def _proven(before: bytes, after: bytes, moves: Moves, replace: ReplaceAddress) -> list[Origin]:
    """Return the origins for which one window of 128 bytes is proven to be a tensor map.

    Most windows are no tensor map, or one over the graph's own memory. Where the driver wrote the address as a word,
    the second capture has the only address at that place that can be proven.
    """
    proven: list[Origin] = []
    possible: int | None = None
    for origin in _candidates(before, after, moves):
        address = moves.second_address(origin)
        if possible not in (None, address):
            continue
        replaced = replace(before, address)
        if replaced == after:
            proven.append(origin)
        elif replaced is not None and possible is None:
            word = address.to_bytes(WORD_BYTES, "little")
            places = [start for start in range(0, TENSOR_MAP_BYTES, WORD_BYTES) if replaced[start:].startswith(word)]
            if len(places) == 1 and not before[places[0] :].startswith(word):
                possible = int.from_bytes(after[places[0] : places[0] + WORD_BYTES], "little")
    return proven


def _candidates(before: bytes, after: bytes, moves: Moves) -> Iterator[Origin]:
    """Yield candidate origins: the start of every moved input, and every address that a word of the window holds."""
    seen = set(moves.moved_starts)
    for offset in changed_items(before, after, WORD_BYTES):
        words = (int.from_bytes(data[offset : offset + WORD_BYTES], "little") for data in (before, after))
        seen.update(moves.origins(*words))
    yield from sorted(seen, key=lambda origin: (origin.input, origin.delta))


class TensorMapCell:
    """Hold the captured tensor map with a replaced address (`host`, Note [Places of addresses]).

    Args:
        place: the memory for the 128 bytes.
        captured: the tensor map that was captured.
    """

    def __init__(self, place: int, captured: bytes, replace: ReplaceAddress | None) -> None:
        self._place = place
        self._captured = captured
        self._replace = replace

    @property
    def value(self) -> bytes:
        """Return the current 128 bytes. Setting an address writes the captured map with that address.

        Raises:
            AddressRefused: the driver rejects the address that is set.
        """
        return ctypes.string_at(self._place, TENSOR_MAP_BYTES)

    @value.setter
    def value(self, address: int) -> None:
        replaced = self._replace(self._captured, address) if self._replace else None
        if replaced is None:
            raise AddressRefused(f"the driver does not take address {address:#x} in a tensor map")
        ctypes.memmove(self._place, replaced, TENSOR_MAP_BYTES)


def driver_replace_address(driver: Any) -> ReplaceAddress:
    """Return a function that calls `cuTensorMapReplaceAddress` of `cuda.bindings.driver` on a copy of the bytes.

    The driver writes descriptors only at addresses aligned to 64 bytes, which an object of the bindings need not be.
    It returns `CUDA_ERROR_INVALID_VALUE` for bytes or an address it does not accept; any other failure is raised as a
    `CudaCallFailed`.
    """

    def replace(window: bytes, address: int) -> bytes | None:
        buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
        aligned = -(-ctypes.addressof(buffer) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
        ctypes.memmove(aligned, window, TENSOR_MAP_BYTES)
        try:
            check(driver.cuTensorMapReplaceAddress, driver.CUtensorMap(aligned), address)
        except CudaCallFailed as error:
            if error.code == int(driver.CUresult.CUDA_ERROR_INVALID_VALUE):
                return None
            raise
        return ctypes.string_at(aligned, TENSOR_MAP_BYTES)

    return replace
