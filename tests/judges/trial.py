"""Run a sample under one compiler, and compare what it computes with eager."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from forced_branches import concurrency
from torch.utils import _pytree as pytree
from worker_pool import DeviceGone

from optimizations import torch_internals

from .cases import Case, seed_all

COMPILERS: Mapping[str, Mapping[str, Any]] = {
    "compile": {},
    "stock": {"mode": "reduce-overhead"},
    "encore": {"backend": "encore", "options": {"selection": "off", "concurrency": concurrency()}},
}
"""Keywords of `torch.compile`. With Encore's rules functions of few kernels, which most samples are, would run without
a graph."""

INDUCTOR = {"fallback_random": True}
"""Random numbers are eager's."""

MESSAGE_CHARACTERS = 400


@dataclass(frozen=True)
class Leaf:
    """A tensor or another value that a call gave, copied before the next call."""

    value: Any
    facts: tuple[Any, ...] = ()

    @staticmethod
    def of(value: Any) -> Leaf:
        if not isinstance(value, torch.Tensor):
            return Leaf(value)
        facts = value.dtype, value.layout, tuple(value.shape), value.requires_grad
        if value.layout is not torch.strided:
            return Leaf(value.detach().to_dense().clone(), facts)
        return Leaf(value.detach().clone().resolve_conj().resolve_neg(), (*facts, value.stride(), value.is_conj()))


@dataclass
class Outcome:
    """Hold the results of calls, in order; `error` is what ended them.

    `replays`: graphs launched in the last call.
    """

    calls: list[list[Leaf]] = field(default_factory=list)
    error: str | None = None
    replays: int = 0
    seconds: float = 0.0


class Recorder:
    """Run the session of one outcome. `replays` returns how many graphs this process has launched."""

    def __init__(self, device: str, compile_: Callable[[Any], Any], replays: Callable[[], int]) -> None:
        self.device = device
        self.compile = compile_
        self.calls: list[list[Leaf]] = []
        self._replays = replays
        self._before = 0

    def begin(self, call: int) -> None:
        self.calls.append([])
        self._before = self._replays()
        torch.compiler.cudagraph_mark_step_begin()
        seed_all(1000 + call)

    def note(self, *values: Any) -> None:
        self.calls[-1] += map(Leaf.of, pytree.tree_leaves(values))

    def replayed(self) -> int:
        """Return the number of graphs launched since the last call began."""
        return self._replays() - self._before


def run(program: Case, device: str, compile_: Callable[[Any], Any], launched: Callable[[], int]) -> Outcome:
    """Run a sample. Raises DeviceGone if the error leaves the device unusable."""
    recorder = Recorder(device, compile_, launched)
    begun = time.perf_counter()
    error = None
    try:
        program(recorder)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as raised:
        error = described(raised)
        if is_lost(raised):
            raise DeviceGone(error) from None
    replays = recorder.replayed() if recorder.calls else 0
    return Outcome(recorder.calls, error, replays, time.perf_counter() - begun)


def is_lost(error: BaseException) -> bool:
    """Return whether an error leaves the device unusable to this process."""
    return any(words in str(error) for words in ("CUDA error", "CUDA driver error"))


def eager(target: Any) -> Any:
    """Return `target`, which is not compiled."""
    return target


def described(error: BaseException) -> str:
    """Return the error's type and its first line that names neither a backend nor a place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("backend=")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MESSAGE_CHARACTERS]


@contextlib.contextmanager
def counted_replays() -> Iterator[Callable[[], int]]:
    """Count all launches of CUDA graphs through `torch.cuda.CUDAGraph`."""
    count = 0
    stock = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        nonlocal count
        count += 1
        stock(graph)

    with torch_internals.replaced_attribute(torch.cuda.CUDAGraph, "replay", replay):
        yield lambda: count


def difference(found: Outcome, expected: Outcome, rtol: float | None, atol: float | None) -> str | None:
    """Return how an outcome differs from eager's beyond the tolerances; None if it does not."""

    def unlike(mine: Leaf, theirs: Leaf) -> str | None:
        try:
            _compare(mine, theirs, rtol, atol)
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            return described(error)
        return None

    return _first(found, expected, unlike)


def unlike_bits(found: Outcome, expected: Outcome) -> str | None:
    """Return the first value that is not the same bit for bit, with the same strides; None if all are."""

    def unlike(mine: Leaf, theirs: Leaf) -> str | None:
        if mine.facts != theirs.facts:
            return f"{mine.facts}, not {theirs.facts}"
        is_other = isinstance(mine.value, torch.Tensor) and not _same_bits(mine.value, theirs.value)
        return "other bits" if is_other else None

    return _first(found, expected, unlike)


def _first(found: Outcome, expected: Outcome, unlike: Callable[[Leaf, Leaf], str | None]) -> str | None:
    """Return the first difference of two outcomes, with its place."""
    if found.error or expected.error:
        return None if found.error == expected.error else found.error or f"no error, but eager has {expected.error}"
    for number, (one, other) in enumerate(zip(found.calls, expected.calls, strict=True)):
        if len(one) != len(other):
            return f"call {number}: {len(one)} values, eager {len(other)}"
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if (what := unlike(mine, theirs)) is not None:
                return f"call {number}, value {place}: {what}"
    return None


def _compare(mine: Leaf, theirs: Leaf, rtol: float | None, atol: float | None) -> None:
    assert type(mine.value) is type(theirs.value), f"a {type(mine.value).__name__}, not a {type(theirs.value).__name__}"
    assert mine.facts[:3] == theirs.facts[:3], f"{mine.facts[:3]}, not {theirs.facts[:3]}"
    if isinstance(mine.value, (torch.Tensor, int, float, complex)):
        torch.testing.assert_close(mine.value, theirs.value, rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(mine.value, (str, tuple, torch.dtype, torch.Size)) or mine.value is None:
        assert mine.value == theirs.value, f"{mine.value!r}, not {theirs.value!r}"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_quantized or not one.numel():
        return True
    # A copy: the stride of a dimension of one element may be anything, and `view` minds it.
    flat = (
        torch.empty(part.numel(), dtype=part.dtype, device=part.device).copy_(part.reshape(-1)) for part in (one, other)
    )
    return torch.equal(*(part.view(torch.uint8) for part in flat))
