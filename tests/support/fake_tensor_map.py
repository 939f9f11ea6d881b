"""Stand for tensor maps and `cuTensorMapReplaceAddress` in tests.

`make_tensor_map` gives what NVIDIA's libraries hand to kernels on an H200 (`data/captures`, `test_real_captures`): the
address is the first word as it is, the rest of the first 64 bytes describes the tensor, and nothing depends on the
address but that word. The other 64 bytes are unused: the libraries put the next map there. Nor does the driver tell a
map from other bytes: on that GPU it answered `CUDA_SUCCESS` for windows of parameters that hold none.

NVIDIA publishes none of this and another GPU may do otherwise, so `make_hidden_map` keeps the address out of sight.
"""

from __future__ import annotations

import hashlib

KEY = 0x5A5A_1234_9876_A5A5
ADDRESS_ALIGNMENT = 16
ADDRESS_BYTES = 8

FIELDS = bytes.fromhex(
    "2265040080000000 0000000000000010 0000000000000000 ff030000ff030000 0000000000000000 000000000000003f"
    "3f00000000000000"
)
"""After the address, in the map of a contiguous bf16 matrix of 1024 x 1024 that is loaded in boxes of 64 x 64."""

LAST_COLUMN = slice(32, 36)
"""The size of the innermost dimension less 1."""


def make_tensor_map(address: int, shape: int = 1024) -> bytes:
    """128 bytes: the map of a matrix at `address` with `shape` columns."""
    live = bytearray(address.to_bytes(ADDRESS_BYTES, "little") + FIELDS)
    live[LAST_COLUMN] = (shape - 1).to_bytes(4, "little")
    return bytes(live) + bytes(64)


def replace_address(window: bytes, address: int) -> bytes | None:
    """The 128 bytes with another address, whatever they are; None for a misaligned address."""
    assert len(window) == 128
    if address % ADDRESS_ALIGNMENT:
        return None
    return address.to_bytes(ADDRESS_BYTES, "little") + window[ADDRESS_BYTES:]


def make_hidden_map(address: int, shape: int = 7) -> bytes:
    """128 bytes: two scrambled halves of the address apart from one another, and a digest over everything."""
    scrambled = (address ^ KEY) & (2**64 - 1)
    body = bytearray(112)
    body[0:4] = (scrambled & 0xFFFFFFFF).to_bytes(4, "little")
    body[8:16] = shape.to_bytes(8, "little")
    body[40:44] = (scrambled >> 32).to_bytes(4, "little")
    return bytes(body) + hashlib.sha256(body).digest()[:16]


def replace_hidden_address(window: bytes, address: int) -> bytes | None:
    """The hidden map with another address; None for bytes that are no such map and for a misaligned address."""
    assert len(window) == 128
    if hashlib.sha256(window[:112]).digest()[:16] != window[112:] or address % ADDRESS_ALIGNMENT:
        return None
    return make_hidden_map(address, int.from_bytes(window[8:16], "little"))
