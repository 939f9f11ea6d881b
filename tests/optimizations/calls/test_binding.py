"""Parameters are bound once: calls pass modules instead of their tensors, and never a replaced tensor."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from binding_programs import EXCHANGES, Layer, Model, one_parameter, other
from bound_calls import HELD, Runner, X, binding, bound, compiled, reads, runner, same, serve
from torch import nn

import optimizations
from optimizations.calls.bound import READS_BEFORE, release_bindings

__all__ = ["reads", "runner"]

pytestmark = pytest.mark.usefixtures("runner")


def test_call_passes_the_module_and_no_parameter(reads: list[Any], runner: Runner) -> None:
    model, run = bound()
    serve(run, model)
    assert (binding().tensors, binding().untouched) == (HELD, None)
    assert _loaded(Model) == ["self", "x"]
    # Read for as long as it may be the only call, and once for the comparison; then never again.
    assert reads == [model] * (READS_BEFORE + 1)
    # The graph still gets every argument, at its place, in each call.
    held = {id(t) for t in (*model.parameters(), *model.buffers())}
    assert {len(call) for call in runner.calls} == {HELD + 1}
    assert all(len(held & set(call)) == HELD for call in runner.calls)


def _loaded(kind: type[nn.Module]) -> list[str]:
    """Locals that the code Dynamo generated for a module's forward loads before it calls the graph."""
    import dis

    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    (entry,) = _debug_get_cache_entry_list(kind.forward.__code__)
    arguments = set(kind.forward.__code__.co_varnames[: kind.forward.__code__.co_argcount])
    loads = [step for step in dis.get_instructions(entry.code) if step.opname.startswith("LOAD_FAST")]
    return sorted({step.argval for step in loads if step.argval in arguments})


def test_exchanged_tensor_is_never_passed_again(reads: list[Any]) -> None:
    model, run = bound()
    for exchange in EXCHANGES * 2:
        release_bindings()
        serve(run, model, READS_BEFORE + 1)
        reads.clear()
        before = run(X).clone()
        assert reads == [], "an exchange has to meet a comparison"
        exchange(model)
        assert not same(model(X), before), exchange
        serve(run, model)
    assert len(optimizations.report()) == 1, "what stock does not compile again for must not be compiled again"


def test_changed_dtype_is_left_to_guards() -> None:
    model, run = bound()
    model.double()
    serve(run, model, 4, X.double())
    model.float()
    serve(run, model, 4)


def test_instances_share_code_and_keep_their_own_tensors(reads: list[Any]) -> None:
    models, runs = zip(*(bound(Model(seed).eval()) for seed in (0, 10, 20)), strict=True)
    reads.clear()
    for index in range(12):
        model, run = models[index % 3], runs[index % 3]
        if index == 6:
            one_parameter(models[1])
        assert same(run(X), model(X))
    assert {id(module) for module in reads} == {id(models[1])}
    assert len(optimizations.report()) == 1


def test_shallow_copy_shares_bound_tensors() -> None:
    model, run = bound()
    _, twin_run = bound(copy.copy(model))
    one_parameter(model)
    serve(twin_run, model)
    serve(run, model)


LAYERS = [Layer(5).eval(), Layer(6).eval()]


def test_modules_in_globals_closures_and_arguments_are_roots() -> None:
    inner = Layer(7).eval()

    def program(x: torch.Tensor, last: nn.Module) -> torch.Tensor:
        for layer in LAYERS:
            x = layer(x)
        return last(inner(x))

    last = Layer(8).eval()
    run = compiled(program)
    for _ in range(READS_BEFORE + 1):
        run(X, last)
    assert binding().tensors == 4 * 8
    for exchanged in (LAYERS[0], LAYERS[1], inner, last):
        exchanged.scale = nn.Parameter(other(exchanged.scale))
        for _ in range(3):
            assert same(run(X, last), program(X, last))
    another = Layer(9).eval()
    for _ in range(READS_BEFORE + 2):
        assert same(run(X, another), program(X, another))
        assert same(run(X, last), program(X, last))


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(2, 4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.cache
        self.cache = y * 0.5
        return y


def test_buffer_replaced_on_every_call_is_passed_correctly(reads: list[Any]) -> None:
    model = Caching()
    eager = copy.deepcopy(model)
    run = compiled(model)
    for _ in range(50):
        assert same(run(X), eager(X))
    assert reads == [model] * 50
    # Comparisons that never hold are not made again and again: the program's results are its own.
    for _ in range(10):
        cache = weakref.ref(model.cache.untyped_storage())
        run(X)
        assert cache() is None


def test_each_graph_after_a_graph_break_is_bound_separately() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(1), Layer(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            self.second.scale = nn.Parameter(self.second.scale.detach() + 1)
            torch._dynamo.graph_break()
            return self.second(x)

    model = Broken().eval()
    eager = copy.deepcopy(model)
    serve(torch.compile(model, backend="encore"), eager, 6)
    assert sum(report.binding.tensors for report in optimizations.report() if report.binding) >= 16
