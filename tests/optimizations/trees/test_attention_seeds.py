"""Random state of memory-efficient attention is found in generated code and moved to the device that reads it."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimizations import torch_internals
from optimizations.in_place.generated import read_function
from optimizations.options import Options
from optimizations.trees import readable_seeds
from optimizations.trees.graphed_function import EncoreMaker

GPU = torch.device("meta")
"""Stands for the GPU: what lies there is not on the host."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readable_seeds, "is_on_host", lambda seed: seed.device.type == "cpu")
    monkeypatch.setattr(readable_seeds, "to_host", lambda seed: torch.zeros_like(seed, device="cpu"))


def test_seeds_are_found_in_inductors_code() -> None:
    """Calls of both operators are compiled, because schemas and generated calls belong to PyTorch."""

    def padded(
        grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, seed: Any, offset: Any
    ) -> tuple[torch.Tensor, ...]:
        kept = [True, True, True, False]
        operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        return tuple(operator(grad, q, k, v, None, out, sums, seed, offset, 0.1, kept, scale=0.5)[:3])

    def ragged(
        grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, seed: Any, offset: Any
    ) -> tuple[torch.Tensor, ...]:
        operator = torch.ops.aten._efficient_attention_backward
        return tuple(operator(grad, q, k, v, None, out, None, None, 8, 8, sums, 0.1, seed, offset, 0, False)[:3])

    mode = torch_internals.FakeTensorMode()
    for program, shape in ((padded, (2, 4, 8, 16)), (ragged, (2, 8, 4, 16))):
        with mode:
            scalars = [torch.empty((), dtype=torch.long) for _ in range(2)]
            inputs = [*(torch.empty(shape) for _ in range(5)), torch.empty(2, 4, 32), *scalars]
            graph = torch.fx.experimental.proxy_tensor.make_fx(program)(*inputs)
        with torch_internals.fresh_cache():
            compiled = torch_internals.compile_fx_inner(graph, inputs)
        functions = [one for one in ast.walk(ast.parse(compiled.source_code)) if isinstance(one, ast.FunctionDef)]
        (call,) = [one for one in functions if one.name == "call"]
        assert read_function(call, {}).seeds == (6, 7), program.__name__


FLASH = """
def call(args):
    grad, q, k, v, out, sums, seed, offset = args
    buf0 = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, sums, None, None, 8, 8, 0.1, False, seed, offset, scale=0.5)
"""
"""Flash attention has arguments of the same name, and reads them on the GPU in every case."""
OWN_SEEDS = """
def call(args):
    grad, q, k, v, out, sums = args
    buf0 = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)
    seed = buf0[2]
    buf1 = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, None, out, sums, seed, buf0[3], 0.1, [True, True, True, False])
"""
VIEWS_AND_NAMES = """
def partition_0(args):
    grad, q, offset, seed = args
    buf1 = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, q, q, None, q, q, reinterpret_tensor(seed, (), (), 0), philox_offset=offset, dropout_p=0.1)
"""


@pytest.mark.parametrize(("source", "seeds"), [(FLASH, ()), (OWN_SEEDS, ()), (VIEWS_AND_NAMES, (2, 3))])
def test_only_passed_seeds_of_efficient_attention_are_found(source: str, seeds: tuple[int, ...]) -> None:
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    assert read_function(definition, {}).seeds == seeds


CALL = "torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(a, a, a, a, None, a, a, seed, offset)"
WHOLE = f"""
class Runner:
    def call(self, args):
        offset, a, seed = args
        return {CALL}
"""
PARTITIONED = f"""
def partition_0(args):
    seed, a, offset = args
    return {CALL}

class Runner:
    def call(self, args):
        offset, a, seed = args
        return self.partitions[0]([seed, a, offset])
"""


class CompiledGraph(SimpleNamespace):
    """As much of a `CompiledFxGraph` as is read. `seen` holds the devices that each function was called with."""

    def __init__(self, source: str, partitions: int) -> None:
        self.seen: list[list[str]] = []
        self.partitions = [self.note for _ in range(partitions)]
        super().__init__(
            source_code=source,
            partition_maps=[None] * partitions,
            current_callable=self.note,
            fx_kwargs={"is_backward": True},
        )

    def note(self, inputs: list[Any]) -> None:
        self.seen.append([one.device.type for one in inputs])

    def recursively_apply_fns(self, functions: list[Any]) -> None:
        self.partitions = [make(run) for make, run in zip(functions, self.partitions, strict=True)]

    def run_all(self) -> None:
        """Call everything with three tensors on the GPU."""
        for run in (self.current_callable, *self.partitions):
            run([torch.empty((), device=GPU) for _ in range(3)])


@pytest.mark.parametrize(
    ("source", "partitions", "graphed", "seen"),
    [
        (WHOLE, 0, False, [["cpu", "meta", "cpu"]]),
        (WHOLE, 0, True, [["meta", "meta", "meta"]]),
        (WHOLE, 1, True, [["cpu", "meta", "cpu"], ["meta", "meta", "meta"]]),
        (PARTITIONED, 1, False, [["meta", "meta", "meta"], ["cpu", "meta", "cpu"]]),
        (PARTITIONED, 1, True, [["meta", "meta", "meta"], ["meta", "meta", "meta"]]),
        (WHOLE.replace("efficient", "flash"), 0, False, [["meta", "meta", "meta"]]),
    ],
)
def test_uncaptured_functions_read_seeds_on_the_host(
    source: str, partitions: int, graphed: bool, seen: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor may leave a backward without graphs whose forward has one, or an operator outside of its partitions."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    graph = CompiledGraph(source, partitions)
    EncoreMaker(Options(), print).compiled(graph, graphed=graphed)
    graph.run_all()
    assert graph.seen == seen
