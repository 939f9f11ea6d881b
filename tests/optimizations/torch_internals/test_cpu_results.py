"""Results on the CPU are computed there although CUDA graphs are requested."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from optimizations import torch_internals
from optimizations.torch_internals import cpu_results

SCALAR, VECTOR = (), (3,)


def traced(program: Callable[..., Any], *cpu_shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    """A graph of a GPU input of three numbers and of inputs on the CPU."""
    mode = FakeTensorMode()
    with mode:
        on_cpu = [torch.empty(shape) for shape in cpu_shapes]
        on_gpu = FakeTensor(mode, torch.empty(3, device="meta"), torch.device("cuda:0"))
        return make_fx(program, tracing_mode="real")(on_gpu, *on_cpu)


def devices(graph_module: torch.fx.GraphModule) -> list[str]:
    """Devices of the results, as fake tensors compute them from the inputs. Raises where devices are mixed."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [node.meta["val"] for node in placeholders]
    mode = inputs[0].fake_mode
    with mode:
        results = torch.fx.Interpreter(graph_module).run(*inputs)
    return [one.device.type for one in results]


def copied_to_gpu(graph_module: torch.fx.GraphModule) -> bool:
    return bool(graph_module.graph.find_nodes(op="call_function", target=torch.ops.prims.device_put.default))


def counted(x: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor]:
    """As a compiled optimizer does."""
    more = steps + 1
    torch.ops.aten.copy_.default(steps, more)
    return (x / (1 - 0.9**more),)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], bool]] = {
    # name: program, shapes of its CPU inputs, whether all that is computed from the latter is for the GPU
    "made there": (lambda x: (x * 2, torch.zeros(3)), (), False),
    "computed there": (lambda x: (x * 2, torch.arange(3) + 1), (), False),
    "a scalar": (lambda x, s: (x * 2, s.sin()), (SCALAR,), False),
    "a scalar and a vector": (lambda x, s, v: (x * 2, v + s.sin()), (SCALAR, VECTOR), False),
    "scalars": (lambda x, s, t: (x * 2, torch.stack([s, t])), (SCALAR, SCALAR), False),
    "a scalar of both": (lambda x, s: (x * s, s + 1), (SCALAR,), False),
    "an input": (lambda x, s: (x * s, s), (SCALAR,), False),
    "written and returned": (lambda x, s: (x * 2, s.add_(1)), (SCALAR,), False),
    "only for the GPU": (lambda x, s: (x * s,), (SCALAR,), True),
    "written, and for the GPU": (counted, (SCALAR,), True),
    "arithmetic for the GPU": (lambda x, s, t: (x * (s + t),), (SCALAR, SCALAR), True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_on_the_programs_devices(name: str) -> None:
    program, shapes, moved = PROGRAMS[name]
    graph_module = traced(program, *shapes)
    expected = devices(graph_module)
    cpu_results.corrected_mover()("cuda", allow_inputs=True)(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    assert devices(graph_module) == expected
    assert copied_to_gpu(graph_module) == moved


def test_mark_is_added_to_metadata_of_the_program() -> None:
    for settings, patches in (({cpu_results.SETTING: {"a": "b"}}, {}), ({}, {cpu_results.SETTING: {"a": "b"}})):
        with torch_internals.inductor_config.patch(patches):
            found = cpu_results.marked(settings)[cpu_results.SETTING]
        assert found == {"a": "b", **cpu_results._MARK}


@pytest.mark.parametrize("marked", [False, True])
def test_inductor_runs_the_corrected_pass_for_marked_graphs(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps what it made of them in its cache, apart."""
    post_grad, found = torch_internals.holder_of("move_constructors_to_gpu")[0], []
    stock = post_grad.move_constructors_to_gpu
    mover = cpu_results.corrected_mover()
    monkeypatch.setattr(mover, "__call__", lambda self, graph: found.append(self.allow_inputs))
    settings: dict[str, Any] = {"triton.cudagraphs": True, "fx_graph_cache": True}
    marked_settings = cpu_results.marked(settings)

    def inner(*arguments: Any, **given: Any) -> Any:
        with torch_internals.Replacing({"move_constructors_to_gpu": cpu_results.corrected}):
            return torch_internals.compile_fx_inner(*arguments, **given)

    with torch_internals.fresh_cache():
        for chosen in (settings, marked_settings) if marked else (settings,):
            for _ in range(2):
                torch_internals.reset_dynamo()
                compile_fx = functools.partial(torch_internals.compile_fx.compile_fx, inner_compile=inner)
                run = torch.compile(lambda x: x.sin() + 1, backend=functools.partial(compile_fx, config_patches=chosen))
                torch.testing.assert_close(run(torch.ones(3)), torch.ones(3).sin() + 1)
    assert found == ([True] if marked else [])
    assert post_grad.move_constructors_to_gpu is stock
