"""Programs of several processes that train or run compiled modules, for GPUs (NCCL) and for CPUs (gloo).

Run as `rank_programs.py PROGRAM MODE[,MODE]`, under torchrun or with its variables set; prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from rank_ends import leave
from torch import Tensor, nn
from torch.nn import functional

from models.networks.decoder import Decoder, DecoderConfig

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compile": {"backend": "inductor"},
    "graph": {"backend": "inductor", "options": {"triton.cudagraphs": True}},
    "encore": {"backend": "encore"},
}


def compiled(module: Any, mode: str) -> Any:
    settings = MODES[mode]
    return module if settings is None else torch.compile(module, **settings)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


class Reducing(nn.Module):
    """A layer split over all processes: [8, 64] -> [8, 64], with two all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        distributed.all_reduce(y)
        z = self.second(y)
        distributed.all_reduce(z)
        return z + 1


def replays(mode: str) -> dict[str, Any]:
    """1,000 calls with other data on each rank, and zeros on one in every third, each compared with eager."""
    torch.manual_seed(3)
    module = Reducing().to(DEVICE)
    call, wrong, worst = compiled(module, mode), 0, 0.0
    generator = torch.Generator(DEVICE).manual_seed(RANK)
    calls = int(os.environ.get("CALLS", "1000"))
    with torch.no_grad():
        for step in range(calls):
            x = torch.randn(8, 64, device=DEVICE, generator=generator)
            if RANK == 0 and step % 3 == 0:
                x = torch.zeros_like(x)
            torch.compiler.cudagraph_mark_step_begin()
            got = call(x).clone()
            if step % 10 == 0 or step < 12:
                expected = module(x)
                error = float((got - expected).norm() / expected.norm())
                worst = max(worst, error)
                wrong += not error < 1e-5
    synchronize()
    return {"calls": calls, "wrong": wrong, "worst": worst, **_report(mode)}


def split(mode: str) -> dict[str, Any]:
    """A decoder split by `parallelize_module`, other tokens in each call, and its weights exchanged once."""
    from torch.distributed.device_mesh import init_device_mesh

    from models.sharding.decoder import shard

    model, whole = _model().eval(), _model().eval()
    shard(model, init_device_mesh(DEVICE.type, (WORLD,)))
    call, worst = compiled(model, mode), 0.0
    generator = torch.Generator(DEVICE).manual_seed(7)
    with torch.no_grad():
        for step in range(int(os.environ.get("CALLS", "40"))):
            if step == 4:
                for module in (model, whole):
                    module.norm.weight = nn.Parameter(2 * module.norm.weight)
                    module.blocks[0].attention_norm.weight.mul_(0.5)
            tokens = torch.randint(64, (2, 32), device=DEVICE, generator=generator)
            torch.compiler.cudagraph_mark_step_begin()
            got, expected = call(tokens).clone(), whole(tokens)
            worst = max(worst, float((got - expected).norm() / expected.norm()))
    synchronize()
    return {"worst": worst, **_report(mode)}


def fails_on_one(mode: str) -> dict[str, Any]:
    """A rank cannot record: as under stock its error ends it, and the launcher ends the others."""
    from optimizations.trees import manager

    if RANK == 1:

        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError("this recording fails as planned")

        manager.EncoreManager._record_function = refuse  # type: ignore[method-assign]
    return replays(mode)


def _train(module: nn.Module, call: Any) -> dict[str, Any]:
    """STEPS whose losses count, UNTIMED in which graphs settle, TIMED; as many on all ranks."""
    numbers = {"STEPS": 8, "UNTIMED": 0, "TIMED": 30}
    steps, untimed, timed = (int(os.environ.get(name, default)) for name, default in numbers.items())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    generator = torch.Generator(DEVICE).manual_seed(100 + RANK)
    losses, times = [], []
    for step in range(steps + untimed + timed):
        tokens = torch.randint(64, (4, 32), device=DEVICE, generator=generator)
        synchronize()
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = call(tokens)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        synchronize()
        times.append(time.perf_counter() - began)
        if step < steps:
            losses.append(float(loss.detach()))
    return {"losses": losses, "step_us": 1e6 * statistics.median(times[-timed:]) if timed else None}


def _model() -> Decoder:
    torch.manual_seed(11)
    width = int(os.environ.get("WIDTH", "64"))
    layers = int(os.environ.get("LAYERS", "2"))
    shape = DecoderConfig(vocabulary=64, width=width, layers=layers, heads=4, feedforward=2 * width, longest=32)
    return Decoder(shape).to(DEVICE)


def ddp(mode: str) -> dict[str, Any]:
    """Training with DistributedDataParallel around the module, compiled as a whole."""
    model = nn.parallel.DistributedDataParallel(_model(), device_ids=[DEVICE.index] if ON_GPU else None)
    return _train(model, compiled(model, mode))


def fsdp(mode: str) -> dict[str, Any]:
    """Training with FSDP2, each block sharded and compiled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    model = _model()
    settings = MODES[mode]
    for block in model.blocks:
        if settings is not None:
            block.compile(**settings)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model, model)


def ends(mode: str) -> dict[str, Any]:
    """Replay a few times; then end as ENDING requests."""
    os.environ["CALLS"] = "20"
    found = replays(mode)
    ending = os.environ["ENDING"]
    print(f"READY {RANK}", flush=True)
    if ending == "raises on one":
        if RANK == 1:
            raise ValueError("rank 1 fails as planned")
        call, x = compiled(Reducing().to(DEVICE), mode), torch.ones(8, 64, device=DEVICE)
        with torch.no_grad():
            call(x)
        synchronize()
    elif ending == "is interrupted":
        call, x = compiled(Reducing().to(DEVICE), mode), torch.ones(8, 64, device=DEVICE)
        with torch.no_grad():
            while True:
                torch.compiler.cudagraph_mark_step_begin()
                call(x)
    return found


PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "replays": replays, "split": split, "fails_on_one": fails_on_one, "ddp": ddp, "fsdp": fsdp, "ends": ends,
}  # fmt: skip


def _report(mode: str) -> dict[str, Any]:
    if mode != "encore":
        return {}
    from optimizations.trees.containers import managers

    nodes = [node for manager in managers() for node in manager.nodes()]
    return {"recordings": len(nodes), "replayed": sum(node.replays for node in nodes)}


def main() -> None:
    program, mode = sys.argv[1:3]
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    method = os.environ.get("RENDEZVOUS")
    distributed.init_process_group(
        "nccl" if ON_GPU else "gloo",
        init_method=f"file://{method}" if method else "env://",
        rank=RANK,
        world_size=WORLD,
        timeout=timedelta(seconds=60 if ON_GPU else 180),  # on a CPU, ranks compile at different times
        device_id=DEVICE if ON_GPU else None,
    )
    found = {one: PROGRAMS[program](one) for one in mode.split(",")}
    line = "FOUND " + json.dumps({"rank": RANK, **(found if "," in mode else found[mode])}) + "\n"
    print(line, end="", flush=True)  # in one piece: the other ranks write too
    if "graph" in mode.split(","):  # stock's graphs may hold collectives, and then this would not return
        distributed.barrier()
        os._exit(0)
    if program != "ends" and not ON_GPU:
        leave()
    if os.environ.get("ENDING") != "never destroys":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
