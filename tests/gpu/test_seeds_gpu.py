"""Ways to run a backward of memory-efficient attention without a graph after a forward with one, and the opposite.

Usage: python tests/gpu/test_seeds_gpu.py WAY. Each step is compared with the same step in eager mode. The last line of
the output is what the tests read, as JSON. A seed at the wrong place is a segmentation fault or an illegal address, so
each way runs in a process of its own.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import optimizations
from optimizations import torch_internals
from optimizations.trees import readable_seeds
from optimizations.trees.containers import managers
from optimizations.trees.hook import at_rest
from optimizations.trees.reasons import FORWARD_UNCAPTURED, KEPT

if __name__ != "__main__":  # as a script it finds no other modules of the tests
    from gpu_harness import run_script

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HEADS, WIDTH = 2, 32, 4, 64
KNOWN = 6
"""Steps after which graphs are replayed."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.into(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts.unbind(0), dropout_p=0.25)
        return self.out(mixed.transpose(1, 2).flatten(2)).tanh()  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Two functions that are compiled apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)  # type: ignore[no-any-return]


def drawn(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(BATCH, length, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


class Pair:
    """A module in eager mode and a copy of it that is compiled, which take the same steps."""

    def __init__(self, module: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.eager = (module or Attention()).cuda()
        self.module = copy.deepcopy(self.eager)
        self.call = torch.compile(self.module, backend="encore", **options)
        self.compared = 0

    def forwards(self, seed: int, length: int = LENGTH) -> list[torch.Tensor]:
        """The results of both."""
        found = []
        for call in (self.eager, self.call):
            torch.manual_seed(seed)
            found.append(call(drawn(seed, length)))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        return found

    def backwards(self, results: list[torch.Tensor], seed: int, **options: bool) -> None:
        """Run the backwards of both, and compare their gradients."""
        gradients = []
        for module, result in zip((self.eager, self.module), results, strict=True):
            found = torch.autograd.grad(result, list(module.parameters()), drawn(-1 - seed, result.shape[1]), **options)
            gradients.append([one.clone() for one in found])
        self.compare(*gradients)

    def compare(self, expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        assert all(one.abs().sum() > 0 for one in expected)
        self.compared += 1

    def step(self, seed: int, length: int = LENGTH) -> None:
        self.backwards(self.forwards(seed, length), seed)

    def only_forwards(self, length: int = LENGTH) -> None:
        """Run forwards whose backwards never come, until they replay a graph."""
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            self.forwards(seed, length)
        torch.compiler.cudagraph_mark_step_begin()

    def steps(self, count: int = KNOWN, begin: int = 0) -> None:
        for seed in range(begin, begin + count):
            self.step(seed)


# Backwards without a graph after forwards with one


def weights_move() -> Pair:
    pair, kept = Pair(Stack()), []
    for seed in range(24):
        pair.step(seed)
        with torch.no_grad():
            for module in (pair.eager, pair.module):
                for parameter in module.parameters():
                    kept.append(parameter.data)
                    parameter.data = parameter.data * 0.999
    return pair


def result_is_held() -> Pair:
    pair = Pair()
    pair.steps()
    first = pair.forwards(10)
    pair.backwards(first, 10, retain_graph=True)
    second = pair.forwards(11)
    pair.backwards(first, 10)
    pair.backwards(second, 11)
    return pair


def backward_is_late() -> Pair:
    """The first backward comes after the forward was recorded."""
    pair = Pair()
    pair.only_forwards()
    pair.step(4)
    return pair


def graphs_are_dropped(drop: Callable[[], Any]) -> Pair:
    pair = Pair()
    pair.steps()
    results = pair.forwards(10)
    forgotten.append(replays())  # `reset` forgets reports
    forgotten_reasons.update(reasons())
    drop()
    pair.backwards(results, 10)
    return pair


forgotten: list[int] = []
"""Replays of recordings whose reports a way had forgotten."""

forgotten_reasons: dict[str, int] = {}
"""Calls without a graph of these reports, by reason."""


def replays() -> int:
    return sum(one.replays for one in optimizations.recordings())


def reasons() -> dict[str, int]:
    return {one.reason: one.calls for report in optimizations.report() for one in report.uncaptured}


def inside_a_function() -> Pair:
    """An operator of another compiled function runs the backward."""
    pair = Pair()
    pair.steps()
    results = pair.forwards(10)

    @torch.library.custom_op("seeds::backward", mutates_args=())
    def run_backward(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            pair.backwards(results, 10)
        return x.clone()

    @run_backward.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with torch.no_grad():
        torch.compile(lambda x: run_backward(x) + 1, backend="encore")(torch.ones(8, device="cuda"))
    return pair


def inside_a_capture(*, late: bool = False) -> Pair:
    """The program captures the backward: its seeds stay on the GPU. `late`: nothing of it was recorded before."""
    pair, stream = Pair(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pair.steps()
        if late:
            optimizations.reset()
            pair.only_forwards()
        results = pair.forwards(10)
        gradient = drawn(-11)
        eager, compiled = (list(module.parameters()) for module in (pair.eager, pair.module))
        expected = torch.autograd.grad(results[0], eager, gradient)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = torch.autograd.grad(results[1], compiled, gradient)
        graph.replay()
        torch.cuda.synchronize()
        pair.compare(list(expected), list(found))
    return pair


def at_rest_between() -> Pair:
    pair = Pair()
    pair.steps()
    results = pair.forwards(10)
    with at_rest():
        pair.backwards(results, 10)
    return pair


def accumulation() -> Pair:
    """The program that showed it: BERT, three micro-batches between optimizer steps, gradients kept as buffers."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=300,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=128,
        max_position_embeddings=64,
        num_labels=4,
    )
    pair = Pair(BertForSequenceClassification(config).train())
    modules = pair.eager, pair.module
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in modules]
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    mask = torch.ones(4, 48, dtype=torch.long, device="cuda")
    mask[1, 30:] = 0
    for step in range(40):
        for micro in range(3):
            losses = []
            for call in (pair.eager, pair.call):
                torch.manual_seed(step * 10 + micro)
                tokens = torch.randint(0, 300, (4, 48), device="cuda")
                labels = torch.randint(0, 4, (4,), device="cuda")
                loss = call(input_ids=tokens, attention_mask=mask, labels=labels).loss / 3
                loss.backward()
                losses.append(loss.detach().clone())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
        gradients = [[one.grad.clone() for one in module.parameters()] for module in modules]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-2, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return pair


# Backwards with a graph after forwards without one


def forward_was_at_rest() -> Pair:
    pair = Pair()
    pair.steps()
    for seed in range(10, 13):
        with at_rest():
            results = pair.forwards(seed)
        pair.backwards(results, seed)
    return pair


def _leave_pool() -> None:
    for one in managers():
        one.leave_pool()


MOVED: dict[str, Callable[[], Pair]] = {
    "result_is_held": result_is_held,
    "backward_is_late": backward_is_late,
    "reset_between": lambda: graphs_are_dropped(optimizations.reset),
    "compiler_reset_between": lambda: graphs_are_dropped(torch.compiler.reset),
    "inside_a_function": inside_a_function,
    "at_rest_between": at_rest_between,
}
"""Ways in which seeds have to be moved to the host."""

OTHERS: dict[str, Callable[[], Pair]] = {
    "weights_move": weights_move,
    "accumulation": accumulation,
    "inside_a_capture": inside_a_capture,
    "inside_a_capture_and_late": lambda: inside_a_capture(late=True),
    "pool_left_between": lambda: graphs_are_dropped(_leave_pool),
    "forward_was_at_rest": forward_was_at_rest,
}
"""Ways in which they need not be, or must not be captured."""

AT_REST, LATE = "forward_was_at_rest", "inside_a_capture_and_late"
"""The way in which a backward runs without a graph because its seeds lie on the host; the one in which no graph of
Encore's is replayed."""


def run_way(way: str, is_taken: Callable[[Any], bool]) -> Any:
    """Run a way, and once more if a result was held.

    A thread of autograd may release a result after the backward has returned. Then the next call has no graph.
    """
    found = run_script(Path(__file__), way)
    if not is_taken(found) and KEPT in found["reasons"]:
        found = run_script(Path(__file__), way)
    return found


@pytest.mark.parametrize("way", MOVED)
def test_uncaptured_backward_reads_its_seeds(way: str) -> None:
    """The program compares its results with eager's."""
    found = run_way(way, lambda found: found["moved"] > 0)
    assert found["moved"] > 0, f"the way was not taken: {found}"
    assert found["replays"] > 0, f"the forward had no graph: {found}"


@pytest.mark.parametrize("way", OTHERS)
def test_backward_of_an_uncaptured_forward_is_not_captured(way: str) -> None:
    found = run_way(way, lambda found: way != AT_REST or FORWARD_UNCAPTURED in found["reasons"])
    assert found["replays"] > 0 or way == LATE
    if way == AT_REST:
        assert found["reasons"].get(FORWARD_UNCAPTURED, 0) > 0, f"the way was not taken: {found}"


def main(way: str) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    moved, original = 0, readable_seeds.to_host

    def counted(seed: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        moved += 1
        return original(seed)

    readable_seeds.to_host = counted
    # Dropout draws eager's numbers; buffers that a backward may write over are PyTorch's reason against retain_graph.
    functorch = torch._functorch.config.patch(donated_buffer=False)
    with torch_internals.inductor_config.patch(fallback_random=True), functorch:
        pair = (MOVED | OTHERS)[way]()
        moved_by_the_way = moved
        if way != "accumulation":
            pair.steps(3, begin=20)  # the program goes on
    torch.cuda.synchronize()
    found = {"moved": moved_by_the_way, "compared": pair.compared, "replays": replays() + sum(forgotten)}
    print(json.dumps({**found, "reasons": {**forgotten_reasons, **reasons()}}))


if __name__ == "__main__":
    main(sys.argv[1])
