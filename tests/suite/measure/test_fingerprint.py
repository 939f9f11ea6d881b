"""A tensor's fingerprint is equal for equal bytes, and different for results of wrong programs."""

from __future__ import annotations

import itertools

import pytest
import torch

from suite.measure import fingerprint as module
from suite.measure.fingerprint import sketch, sketched_error, texts, words


def fingerprint(tensor: torch.Tensor) -> str:
    return texts([words(tensor)])[0]


def values(dtype: torch.dtype, count: int = 4099) -> torch.Tensor:
    made = torch.randn(count, generator=torch.Generator().manual_seed(3)) * 50
    return made > 0 if dtype is torch.bool else made.to(dtype)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_digest_depends_on_bytes_only(dtype: torch.dtype) -> None:
    tensor = values(dtype)
    expected = fingerprint(tensor)
    assert len(expected) == 32
    apart = torch.zeros(2 * tensor.numel() + 1, dtype=dtype)[1::2]
    apart.copy_(tensor)
    assert fingerprint(apart) == fingerprint(tensor.clone()) == fingerprint(tensor.reshape(1, -1)) == expected


def test_lazily_negative_or_conjugated_tensor_counts_by_value() -> None:
    tensor = torch.view_as_complex(torch.randn(64, 2))
    assert fingerprint(tensor.conj()) == fingerprint(tensor.conj().resolve_conj())
    assert fingerprint(tensor.conj().imag) == fingerprint(tensor.conj().imag.resolve_neg())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_changes_for_wrong_results(dtype: torch.dtype) -> None:
    tensor = values(dtype)
    changed = {
        "zeros": torch.zeros_like(tensor),
        "negated": ~tensor if dtype is torch.bool else -tensor,
        "reversed": tensor.flip(0),
        "rolled": tensor.roll(1),
        "shorter": tensor[:-1],
        "one more zero": torch.cat((tensor, torch.zeros(1, dtype=dtype))),
        "two swapped": tensor.clone(),
        "last one other": tensor.clone(),
    }
    first, second = next(
        (one, two) for one, two in itertools.combinations(range(len(tensor)), 2) if tensor[one] != tensor[two]
    )
    changed["two swapped"][[first, second]] = tensor[[second, first]]
    changed["last one other"][-1] = not tensor[-1] if dtype is torch.bool else tensor[-1] + 1
    found = [fingerprint(tensor), *(fingerprint(each) for each in changed.values())]
    assert len(set(found)) == len(found)


def test_digest_detects_changes_of_high_bits() -> None:
    """Signs of an even number of words: what a plain weighted sum modulo 2**64 does not notice."""
    tensor = values(torch.float64, 64)
    found = {fingerprint(tensor)}
    for one, two in itertools.combinations(range(64), 2):
        flipped = tensor.clone()
        flipped[[one, two]] *= -1
        found.add(fingerprint(flipped))
    assert len(found) == 1 + 64 * 63 // 2


def test_digest_is_independent_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(torch.uint8, 1003)
    expected = fingerprint(tensor)
    for count in (1, 7, 125, 126):
        monkeypatch.setattr(module, "CHUNK_WORDS", count)
        assert fingerprint(tensor) == expected
    assert fingerprint(tensor[:0]) == "0" * 32
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))


def test_error_of_a_tensor_is_estimated_from_sketches() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(3000, generator=generator, dtype=torch.float64)
    found = []
    for size in (1e-6, 1e-2, 1.0, 100.0):
        for _ in range(50):
            noise = torch.randn(3000, generator=generator, dtype=torch.float64)
            error = size * float(noise.norm() / reference.norm())
            found.append(sketched_error(sketch(reference + size * noise), sketch(reference)) / error)
    assert 0.2 < min(found) < 1.0 < max(found) < 5.0


def test_sketch_of_a_wrong_result_differs_strongly() -> None:
    tensor = values(torch.float32)
    for wrong in (torch.zeros_like(tensor), -tensor, tensor.flip(0), tensor.roll(1), 2 * tensor):
        assert sketched_error(sketch(wrong), sketch(tensor)) > 0.2
    assert sketched_error(sketch(tensor), sketch(torch.zeros_like(tensor))) == float("inf")
    assert sketched_error(sketch(torch.zeros(3)), sketch(torch.zeros(3))) == 0.0
    broken = torch.where(tensor == tensor.max(), float("nan"), tensor)
    assert not sketched_error(sketch(broken), sketch(tensor)) <= 1.0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_sketch_depends_on_values_only(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(dtype)
    apart = torch.zeros(2 * tensor.numel() + 1, dtype=dtype)[1::2]
    apart.copy_(tensor)
    expected = sketch(tensor)
    assert len(expected) == module.SKETCH < 2 * len(set(expected))
    assert sketch(apart) == expected
    monkeypatch.setattr(module, "CHUNK_WORDS", 1000)
    assert sketch(tensor) == pytest.approx(expected)
