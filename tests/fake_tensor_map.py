"""What stands for `cuTensorMapReplaceAddress` in tests: opaque bytes with the address scattered, and a checksum."""

from __future__ import annotations

import hashlib

KEY = 0x5A5A_1234_9876_A5A5
ADDRESS_ALIGNMENT = 16


def make_tensor_map(address: int, shape: int = 7) -> bytes:
    """128 bytes: two scrambled halves of the address apart from one another, and a digest over everything."""
    scrambled = (address ^ KEY) & (2**64 - 1)
    body = bytearray(112)
    body[0:4] = (scrambled & 0xFFFFFFFF).to_bytes(4, "little")
    body[8:16] = shape.to_bytes(8, "little")
    body[40:44] = (scrambled >> 32).to_bytes(4, "little")
    return bytes(body) + hashlib.sha256(body).digest()[:16]


def replace_address(window: bytes, address: int) -> bytes | None:
    """The descriptor with another address; None for bytes that are no descriptor and for a misaligned address."""
    assert len(window) == 128
    if hashlib.sha256(window[:112]).digest()[:16] != window[112:] or address % ADDRESS_ALIGNMENT:
        return None
    return make_tensor_map(address, int.from_bytes(window[8:16], "little"))
