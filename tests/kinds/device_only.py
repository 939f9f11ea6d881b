"""Use what only a GPU has: kernels of the user's own in Triton, narrow matrix products, streams, events, offloading."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kinds.world import STEPS, World, kind

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of PyTorch for the CPU
    triton = None

if triton is not None:

    @triton.jit
    def _scale_kernel(x, out, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        kept = at < n
        tl.store(out + at, tl.load(x + at, mask=kept) * factor, mask=kept)

    @triton.jit
    def _add_kernel(into, x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        kept = at < n
        tl.store(into + at, tl.load(into + at, mask=kept) + tl.load(x + at, mask=kept), mask=kept)

    @torch.library.triton_op("kinds_of_programs::scaled_by_triton", mutates_args={})
    def _scaled_by_triton(x: torch.Tensor, factor: float) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(_scale_kernel)[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), factor, BLOCK=64)
        return out


@kind(gradients=False, on_cpu=False)
def kernels_of_the_users_own(world: World) -> None:
    def program(x: torch.Tensor, into: torch.Tensor) -> Any:
        x = x.contiguous()
        out = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 64),)
        _scale_kernel[grid](x, out, x.numel(), 2.5, BLOCK=64)
        _add_kernel[grid](into, out, x.numel(), BLOCK=64)
        return out.sin(), into * 2

    run = world.compile(program)
    for step in range(2 * STEPS):
        rows = 3 + step % 2
        base = world.values(step, rows, 5)  # 20 bytes a row: some are not aligned as others
        into = world.values(step + 30, rows, 4)
        world.note(run(base[:, 1:], into), into)


@kind(on_cpu=False)
def kernels_inside_operators(world: World) -> None:
    table = torch.arange(4.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = torch.ops.kinds_of_programs.scaled_by_triton(x + table.to(x.device), 1.5)
        return scaled + 1

    run = world.compile(program)
    world.infer(run, between=lambda: table.add_(1))


@kind(gradients=False, on_cpu=False)
def narrow_matrix_products(world: World) -> None:
    weight = world.values(80, 32, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.5, device=world.device)

    def program(x: torch.Tensor, of_x: torch.Tensor) -> torch.Tensor:
        narrow = (x / of_x).to(torch.float8_e4m3fn)
        return torch._scaled_mm(narrow, weight.t(), scale_a=of_x, scale_b=scale, out_dtype=torch.bfloat16).float()

    run = world.compile(program)
    for step in range(STEPS):
        x = world.values(step, 16, 64)
        world.note(run(x, x.abs().max() / 448))
        scale.mul_(1.5)


@kind(gradients=False, on_cpu=False)
def streams_inside_and_outside(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run, side = world.compile(net), torch.cuda.Stream()
    for step in range(2 * STEPS):
        x = world.values(step)
        if step % 3 == 2:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = run(x)
            torch.cuda.current_stream().wait_stream(side)
            world.note(found)
        else:
            world.note(run(x))


@kind(gradients=False, on_cpu=False)
def weights_that_stream_from_pinned_memory(world: World) -> None:
    resident = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)).pin_memory() for i in range(3)]

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight.to(x.device, non_blocking=True))

    run = world.compile(program)
    for step in range(STEPS):
        x = world.values(step)
        for weight in resident:
            x = run(x, weight).clone()
        world.note(x)
        torch.cuda.synchronize()
        resident[step % 3].mul_(1.1)


@kind(gradients=False, on_cpu=False)
def events_around_calls(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(net)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(STEPS):
        start.record()
        found = run(world.values(step))
        end.record()
        end.synchronize()
        world.note(found, start.elapsed_time(end) >= 0)


@kind(on_cpu=False)
def alternating_graphs_of_stock_and_of_the_backend(world: World) -> None:
    """Results of one are inputs of the other; each has graphs and memory of its own."""
    first, second = (world.module(nn.Linear(4, 4)) for _ in range(2))
    stock, run = torch.compile(first, mode="reduce-overhead"), world.compile(second)
    for step in range(2 * STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            world.note(run(stock(world.values(step)).clone()), stock(run(world.values(step + 20)).clone()))
        torch.compiler.cudagraph_mark_step_begin()
        world.train(run(stock(world.values(step))), first, second)
