"""Inputs read in place on a GPU: bits of stock's graphs, and no memory of the pool for large inputs."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from gpu_harness import (
    SEED,
    Function,
    allocated,
    assert_like_stock,
    call,
    copy_reasons,
    encore,
    forget,
    recordings,
    stock,
)

import optimizations
from optimizations.in_place.session import OTHER_USES
from optimizations.trees.containers import managers

pytestmark = pytest.mark.gpu

OF_OTHER_OPERATORS = ("attention", "sort")
"""Programs whose input is read by an operator that may reach it through memory."""

CHOICES = ("auto", "host", "prelude")
# What kernels there are, and every updater on them.

WEIGHTS: dict[str, Any] = {}


@pytest.fixture
def weights() -> Iterator[dict[str, Any]]:
    torch.manual_seed(SEED)
    bf16 = torch.bfloat16
    WEIGHTS.update(
        wide=torch.randn(1024, 1024, device="cuda", dtype=bf16),
        single=torch.randn(512, 512, device="cuda"),
        convolution=torch.nn.Conv2d(16, 16, 3, padding=1).cuda().to(bf16).requires_grad_(False),
    )
    yield WEIGHTS
    WEIGHTS.clear()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], list[torch.Tensor]]:
    def make(step: int) -> list[torch.Tensor]:
        return [torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(step)).to(dtype)]

    return make


def indices(step: int) -> list[torch.Tensor]:
    return [torch.randint(1, 512, (64,), device="cuda", generator=torch.Generator("cuda").manual_seed(step))]


PROGRAMS: dict[str, tuple[Function, Callable[[int], Sequence[Any]]]] = {
    "pointwise": (lambda x: torch.softmax(x * 2 + 1, -1).relu(), randn(128, 256)),
    "matmul bf16": (lambda x: x @ WEIGHTS["wide"], randn(512, 1024, dtype=torch.bfloat16)),
    "matmul fp32": (lambda x: x @ WEIGHTS["single"], randn(256, 512)),
    "batched matmul": (lambda x: torch.bmm(x, x.transpose(1, 2)), randn(8, 128, 64, dtype=torch.bfloat16)),
    "convolution": (lambda x: WEIGHTS["convolution"](x), randn(4, 16, 32, 32, dtype=torch.bfloat16)),
    "attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        randn(2, 4, 128, 64, dtype=torch.bfloat16),
    ),
    "clone": (lambda x: [x.clone(), x + 1], randn(1 << 16)),
    "views": (lambda x: x[16:48] * 2 + x[3], randn(64, 64)),
    "sort": (lambda x: x.sort()[0], randn(4096)),
    "indexing": (lambda x: WEIGHTS["single"].index_select(0, x), indices),
    "many nodes": (
        lambda x: [(x * float(n)).sum(-1) @ WEIGHTS["single"][:64, :64] for n in range(1, 17)],
        randn(8, 64, 8),
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_kind_of_kernel_reads_moved_inputs(program: str, choice: str, weights: dict[str, Any]) -> None:
    function, make = PROGRAMS[program]
    assert_like_stock(function, make, choice)
    assert len(recordings()) == 1, copy_reasons()
    (report,) = recordings()
    if program in OF_OTHER_OPERATORS:
        assert all(one.reasons == (OTHER_USES,) for one in report.inputs), copy_reasons()
    else:
        assert report.off is None
        assert all(one.indirect for one in report.inputs), copy_reasons()


# Memory and the end.


@pytest.mark.alone
def test_ten_thousand_replays_allocate_no_memory() -> None:
    function = encore(lambda x: torch.softmax(x, -1) * 2)
    inputs = [torch.randn(256, 256, device="cuda") for _ in range(7)]
    for x in inputs * 4:
        call(function, x)
    assert optimizations.settled()

    def used() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        gc.collect()
        resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free, resident_bytes

    def replay(count: int) -> None:
        for step in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                function(inputs[step % len(inputs)])

    replay(500)
    before = used()
    replay(10_000)
    allocated, device, resident = (now - then for now, then in zip(used(), before, strict=True))
    assert (allocated, device) == (0, 0)
    assert resident < 8 * 2**20


@pytest.mark.alone
@pytest.mark.parametrize("recording", [True, False])
def test_recording_and_replaying_use_as_much_memory_as_stock(recording: bool) -> None:
    shape = (64, 2**20)

    def peak(compile_it: Callable[[Function], Function]) -> int:
        function = compile_it(lambda x: x.sum(-1))
        for _ in range(1 if recording else 12):
            call(function, torch.ones(shape, device="cuda"))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call(function, torch.ones(shape, device="cuda"))
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_reserved()
        del function
        forget()
        return found

    # The first of each tunes its kernels, and the memory for that stays in the pool.
    for compile_it in (encore, stock):
        peak(compile_it)
    assert peak(encore) <= 1.05 * peak(stock)


@pytest.mark.parametrize("choice", CHOICES)
def test_reset_frees_everything_and_functions_keep_working(choice: str, weights: dict[str, Any]) -> None:
    function = encore(lambda x: torch.softmax(x @ WEIGHTS["single"], -1), choice)
    torch.cuda.synchronize()
    before = allocated()
    for rounds in range(2):
        for _ in range(4):
            call(function, torch.randn(2048, 512, device="cuda"))
        gc.collect()
        gc.disable()
        try:
            optimizations.reset()
            assert managers() == []
            assert allocated() <= before, f"round {rounds}: a cycle, or a reference, keeps memory"
        finally:
            gc.enable()
    x = torch.randn(2048, 512, device="cuda")
    assert torch.allclose(call(function, x)[0], torch.softmax(x @ WEIGHTS["single"], -1), atol=1e-6)


# A large input read in place uses no memory of the graph's pool, and every call is correct.

ROWS, COLUMNS = 2**14, 2**12


INPUT_BYTES = ROWS * COLUMNS * 4  # 256 MiB


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w).sum(1, keepdim=True)
    for _ in range(4):
        y = torch.relu(y @ y.new_ones(1, 64)).sum(1, keepdim=True) * 0.01
    return y


def compiled(backend: str, **options: Any) -> Callable[..., torch.Tensor]:
    forget()
    keywords: dict[str, Any] = {"options": options} if options else {}
    if backend == "stock":
        return torch.compile(program, mode="reduce-overhead")
    return torch.compile(program, backend="encore", **keywords)


def reserved_beyond(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> int:
    """Return the memory that is reserved for a function after as many calls as a recording takes to settle."""
    before = torch.cuda.memory_reserved()
    for _ in range(60):
        torch.compiler.cudagraph_mark_step_begin()
        function(x, w)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - before


@pytest.mark.alone
@pytest.mark.parametrize("concurrency", ["auto", "off"])
def test_pool_shrinks_by_the_size_of_the_input(concurrency: str) -> None:
    w = torch.randn(COLUMNS, device="cuda")
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    with torch.no_grad():
        encore = reserved_beyond(compiled("encore", concurrency=concurrency), x, w)
        (recording,) = optimizations.recordings()
        stock = reserved_beyond(compiled("stock"), x, w)
    print(f"reserved: stock {stock / 2**20:.0f} MiB, encore {encore / 2**20:.0f} MiB")
    (large,) = (one for one in recording.inputs if one.data_bytes == INPUT_BYTES)
    assert large.indirect and not large.has_placeholder
    assert encore <= stock - 0.9 * INPUT_BYTES
    assert recording.stage == "done" and recording.total_copied_bytes < INPUT_BYTES
