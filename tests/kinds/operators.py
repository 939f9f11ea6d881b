"""Operators that hold graphs of their own, torch.func, custom operators, and what only a GPU has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kinds.world import STEPS, World, kind


@kind()
def branches_by_a_tensor(world: World) -> None:
    weight = world.values(50, 4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ weight, lambda x: (x - 1).cos(), (x,)) + x

    world.infer(world.compile(program))


@kind()
def branches_by_a_cpu_tensor(world: World) -> None:
    """The predicate is on the CPU, and the branches close over tensors there and on the device."""
    weight, shift = world.values(51, 4, 4), torch.arange(4.0)

    def program(x: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
        moved = shift.to(x.device)
        return torch.cond(switch, lambda x: x @ weight + moved, lambda x: x - moved, (x,))

    world.infer(world.compile(program), inputs=lambda step: (world.values(step), torch.tensor(step % 3 == 0)))


@kind()
def branches_that_are_trained(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: net(x).relu(), lambda x: net(x) * 2, (x,)).sum()

    run = world.compile(program)
    for _, x in world.steps():
        world.train(run(x), net)


@kind(on_cpu=False)
def loops_while(world: World) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def program(x: torch.Tensor, limit: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < limit, lambda i, x: (i + 1, x * 1.5 - 0.1), (torch.zeros_like(limit), x))

    run = world.compile(program)
    for step, x in world.steps():
        world.note(run(x, world.moved(torch.tensor(step % 3 + 1))))


@kind(on_cpu=False)
def scans(world: World) -> None:
    from torch._higher_order_ops.scan import scan

    def program(x: torch.Tensor, start: torch.Tensor) -> Any:
        return scan(lambda carry, row: (carry + row, carry * row), start, x, dim=0)

    world.infer(world.compile(program), inputs=lambda step: (world.values(step, 5, 4), world.values(step + 60, 4)))


@kind()
def scans_associatively(world: World) -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    def program(x: torch.Tensor) -> torch.Tensor:
        return associative_scan(lambda one, other: one * 0.5 + other, x, 0, combine_mode="generic") * 2

    world.infer(world.compile(program), inputs=lambda step: (world.values(step, 8, 4),))


@kind(on_cpu=False)
def maps_over_rows(world: World) -> None:
    from torch._higher_order_ops.map import map as map_over

    weight = world.values(52, 4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return map_over(lambda row: row @ weight + row, x)

    world.infer(world.compile(program))


@kind(on_cpu=False)
def attention_with_a_score_function(world: World) -> None:
    """The score closes over a table that is written between calls and replaced once."""
    from torch.nn.attention.flex_attention import flex_attention

    slopes = [world.values(53, 2).abs()]

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        table = slopes[0]
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - table[h] * (i - j).abs()) + 1

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(*(world.values(10 * step + i, 1, 2, 128, 16) for i in range(3))))
        slopes[0].add_(0.5)
        if step == 3:
            slopes[0] = slopes[0] * 0.1


@kind(on_cpu=False)
def attention_with_masks_that_change(world: World) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=mask) * 2

    run = world.compile(program)
    for step in range(STEPS):
        window = world.moved(torch.tensor(16 * (step % 3 + 1)))
        mask = create_block_mask(
            lambda b, h, i, j, w=window: (i >= j) & (i - j < w), 1, 1, 256, 256, device=world.device
        )
        world.note(run(*(world.values(10 * step + i, 1, 2, 256, 16) for i in range(3)), mask))


@kind(on_cpu=False)
def attention_that_is_trained(world: World) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    bias = world.values(54, 128, grad=True)

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j]).square().mean()

    run = world.compile(program)
    for step in range(STEPS):
        inputs = [world.values(10 * step + i, 1, 2, 128, 16, grad=True) for i in range(3)]
        loss = run(*inputs)
        loss.backward()
        world.note(loss, [one.grad for one in inputs], bias.grad)
        bias.grad = None


@kind(captured=False)
def checkpoints(world: World) -> None:
    first, second = world.module(nn.Linear(4, 8)), world.module(nn.Linear(8, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: torch.dropout(first(x).sin(), 0.5, True), x, use_reentrant=False)
        return second(x).square().mean()

    run = world.compile(program)
    for step in range(STEPS):
        torch.manual_seed(step)
        world.train(run(world.values(step)), first, second)


@kind()
def compiled_blocks_in_reentrant_checkpoints(world: World) -> None:
    blocks = [world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(3)]
    runs = [world.compile(block) for block in blocks]
    for _, x in world.steps(grad=True):
        y = x * 1
        for run in runs:
            y = checkpoint(run, y, use_reentrant=True)
        world.train(y, *blocks)
        world.note(x.grad)


@kind()
def a_checkpoint_with_cpu_attributes(world: World) -> None:
    """A checkpoint's second run, in the backward, reads a CPU table, which is written between calls."""
    linear, table = world.module(nn.Linear(4, 4)), torch.arange(4.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: linear(x * table.to(x.device)).tanh(), x, use_reentrant=False).sum()

    run = world.compile(program)
    for step in range(STEPS):
        world.train(run(world.values(step)), linear)
        table.add_(1)


@kind()
def vmap_grad_and_jvp(world: World) -> None:
    weight, shift = world.values(20, 4), torch.arange(4.0)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) * w).sum() ** 2

    def program(x: torch.Tensor) -> Any:
        x = x + shift.to(x.device)
        rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
        value, tangent = torch.func.jvp(lambda x: torch.sin(x) * weight, (x,), (torch.ones_like(x),))
        return rows, value, tangent

    world.infer(world.compile(program), between=lambda: shift.mul_(1.5))


@kind()
def parameters_passed_by_functional_call(world: World) -> None:
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    own = dict(net.named_parameters())
    run = world.compile(lambda parameters, x: torch.func.functional_call(net, parameters, (x,)))
    for step in range(STEPS):
        swapped = {name: (p * (step + 1)).detach().requires_grad_() for name, p in own.items()}
        found = run(swapped if step % 3 else own, world.values(step))
        found.sum().backward()
        world.note(found, [p.grad for p in (swapped if step % 3 else own).values()])
        net.zero_grad()


LIBRARY = torch.library.Library("kinds_of_programs", "FRAGMENT")
LIBRARY.define("add_into(Tensor(a!) into, Tensor x) -> ()")
LIBRARY.define("scaled(Tensor x, float by) -> Tensor")
LIBRARY.define("scaled_back(Tensor x, float by) -> Tensor")
LIBRARY.define("last_row(Tensor(a) x) -> Tensor(a)")


@torch.library.impl(LIBRARY, "add_into", "CompositeExplicitAutograd")
def _add_into(into: torch.Tensor, x: torch.Tensor) -> None:
    into.add_(x * 2)


@torch.library.impl(LIBRARY, "scaled", "CompositeExplicitAutograd")
@torch.library.impl(LIBRARY, "scaled_back", "CompositeExplicitAutograd")
def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.impl(LIBRARY, "last_row", "CompositeExplicitAutograd")
def _last_row(x: torch.Tensor) -> torch.Tensor:
    return x[-1]


@torch.library.register_fake("kinds_of_programs::scaled", lib=LIBRARY)
def _fake_scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_autograd(
    "kinds_of_programs::scaled",
    lambda ctx, gradient: (torch.ops.kinds_of_programs.scaled_back(gradient, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
    lib=LIBRARY,
)


@kind(gradients=False, captured=False)
def custom_operators_that_write(world: World) -> None:
    total = world.values(22)

    def program(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch.ops.kinds_of_programs.add_into(into, y)
        torch.ops.kinds_of_programs.add_into(total, x)
        torch.ops.kinds_of_programs.add_into(y, x)
        return y + into

    run = world.compile(program)
    for step in range(STEPS):
        into = world.values(step + 30)
        world.note(run(world.values(step), into), into, total)


@kind()
def custom_operators_that_are_trained(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: torch.ops.kinds_of_programs.scaled(net(x), 2.5).tanh().sum())
    for _, x in world.steps():
        world.train(run(x), net)


@kind(gradients=False, captured=False, unlike_eager="AOTAutograd takes no custom operators that return views")
def custom_operators_that_return_views(world: World) -> None:
    def program(x: torch.Tensor) -> Any:
        row = torch.ops.kinds_of_programs.last_row(x * 1)
        return row + 1, torch.ops.kinds_of_programs.last_row(x)

    run = world.compile(program)
    for _, x in world.steps():
        _, view = found = run(x)
        world.note(found)
        view.add_(1)
        world.note(x)


@torch.library.custom_op("kinds_of_programs::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_counted.register_fake(torch.empty_like)


@kind()
def custom_operators_next_to_cpu_tables(world: World) -> None:
    table = torch.arange(4.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        on_cpu = torch.ops.kinds_of_programs.counted(table)
        return torch.ops.kinds_of_programs.counted(x + table.to(x.device)) + on_cpu.to(x.device)

    world.infer(world.compile(program), between=lambda: table.add_(1))


_FAILING = [False]


@torch.library.custom_op("kinds_of_programs::failing", mutates_args=())
def _failing(x: torch.Tensor) -> torch.Tensor:
    if _FAILING[0]:
        raise MemoryError("as planned")
    return x * 2


_failing.register_fake(torch.empty_like)


_failing.register_autograd(lambda ctx, gradient: torch.ops.kinds_of_programs.failing(gradient))


@kind()
def operators_that_fail_at_first(world: World) -> None:
    """Memory runs short: the program catches the error and goes on, with gradients and without."""
    net = world.module(nn.Linear(4, 4))
    for failing in (0, 1):
        torch.compiler.reset()
        run = world.compile(lambda x: torch.ops.kinds_of_programs.failing(net(x)))
        for step in range(STEPS + 2):
            try:
                _FAILING[0] = step == failing
                y = run(world.values(step))
                _FAILING[0] = step == failing + 2
                world.train(y, net)
            except MemoryError as error:
                world.note(str(error))
            finally:
                _FAILING[0] = False
            with torch.no_grad():
                world.note(run(world.values(step + 20)))


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

    world.infer(world.compile(program), between=lambda: table.add_(1))


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
    for step, x in world.steps(2 * STEPS):
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
    for step, x in world.steps():
        for weight in resident:
            x = run(x, weight).clone()
        world.note(x)
        torch.cuda.synchronize()
        resident[step % 3].mul_(1.1)


@kind(gradients=False, on_cpu=False)
def events_around_calls(world: World) -> None:
    _, run = world.compiled(nn.Linear(4, 4))
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
