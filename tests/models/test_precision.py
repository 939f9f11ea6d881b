"""The precision of float32 arithmetic is restored after a block, for every earlier setting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from models.precision import precision_kept
from suite.measure.iteration import full_precision

CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul
SETTINGS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "older, high": lambda: torch.set_float32_matmul_precision("high"),
    "older, none for convolutions": lambda: setattr(CUDNN, "allow_tf32", False),
    "newer, products": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "newer, everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "newer, convolutions": lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"),
}


RAISES = "raises"


def seen() -> list[Any]:
    """Read the setting by the newer interface, then by the older one, which may raise."""
    places: tuple[Any, ...] = (torch.backends, MATMUL, CUDNN, CUDNN.conv, CUDNN.rnn)
    found: list[Any] = [place.fp32_precision for place in places]
    for ask in (torch.get_float32_matmul_precision, lambda: CUDNN.allow_tf32):
        try:
            found.append(ask())
        except RuntimeError:
            found.append(RAISES)
    return found


def assert_as(expected: list[Any]) -> None:
    """A setting that the older interface could not express need not raise now: it returns the later one."""
    assert [now for now, then in zip(seen(), expected, strict=True) if then != RAISES] == [
        then for then in expected if then != RAISES
    ]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with precision_kept():
        yield


@pytest.mark.parametrize("inside", SETTINGS)
@pytest.mark.parametrize("before", SETTINGS)
def test_precision_is_restored(before: str, inside: str) -> None:
    SETTINGS[before]()
    expected = seen()
    with contextlib.suppress(ZeroDivisionError), precision_kept():
        SETTINGS[inside]()
        raise ZeroDivisionError
    assert_as(expected)


@pytest.mark.parametrize("before", SETTINGS)
def test_reference_has_full_precision_under_any_setting(before: str) -> None:
    SETTINGS[before]()
    expected = seen()
    with full_precision():
        assert MATMUL.fp32_precision == "ieee"
        assert "tf32" not in (CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision)
    assert_as(expected)
