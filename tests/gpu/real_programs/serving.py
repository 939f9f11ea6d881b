"""Many callers of one compiled model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from real_programs.pieces import batches, built, mlp, normal, served, transformer
from real_programs.record import Body, Setting, program


@program(calls=4)
def pool_of_threads(setting: Setting) -> Body:
    """A model warmed up in the main thread and served from eight threads of a pool."""
    width = setting.pick(256, 16)
    call = setting.compile(built(setting, lambda: transformer(width, setting.pick(4, 1))).eval())
    inputs = batches(16, lambda generator: normal(setting, generator, 2, setting.pick(16, 4), width))
    with torch.no_grad():
        for _ in range(3):
            call(inputs[0])
    pool = ThreadPoolExecutor(setting.pick(8, 2))

    def serve(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return call(x).cpu()

    def step(i: int) -> Any:
        return list(pool.map(serve, inputs[i % 4 :]))

    return Body(step)


@program(calls=8)
def models_in_turns(setting: Setting) -> Body:
    """Three compiled models that one process serves in changing order, each reading the result of the one before."""
    width = setting.pick(256, 16)
    models = [
        setting.compile(built(setting, lambda: mlp(width, depth), seed=depth).eval())  # noqa: B023, called at once
        for depth in (2, 3, 4)
    ]
    orders = ((0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1))
    inputs = batches(3, lambda generator: normal(setting, generator, setting.pick(64, 4), width))

    def step(i: int) -> Any:
        x = inputs[i % 3]
        for index in orders[i % len(orders)]:
            x = models[index](x)
        return x

    return served(step)


@program(calls=8)
def side_stream(setting: Setting) -> Body:
    """A model called on a stream of the user's own, its input copied there from pinned memory."""
    width, batch = setting.pick((256, 64), (16, 4))
    call = setting.compile(built(setting, lambda: mlp(width, 4)).eval())
    on_gpu = setting.device.type == "cuda"
    host = batches(3, lambda generator: torch.randn(batch, width, generator=generator))
    if on_gpu:
        host = [x.pin_memory() for x in host]
    stream = torch.cuda.Stream() if on_gpu else None

    def step(i: int) -> Any:
        if stream is None:
            return call(host[i % 3])
        with torch.cuda.stream(stream):
            result = call(host[i % 3].to(setting.device, non_blocking=True))
        torch.cuda.current_stream().wait_stream(stream)
        return result

    return served(step)
