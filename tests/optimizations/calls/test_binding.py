"""Parameters are bound once: calls pass modules instead of their tensors, and never a replaced tensor."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from binding_programs import EXCHANGES, Layer, Model, one_parameter, other, state_assigned
from bound_calls import HELD, ONE, Runner, Scaled, X, binding, bound, compiled, reads, runner, same, serve
from torch import nn

import optimizations
from optimizations import backend, compiled_graph
from optimizations.calls import bound as bound_module
from optimizations.calls.bound import PATIENCE, READS_BEFORE, WORTH, release_bindings
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites
from optimizations.torch_internals.identity_guard import same_tensors

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


# Bound parameters are released with their owners, and a failure in binding disables only the binding.


def test_exchanged_weight_is_released_by_every_graph() -> None:
    model, run = bound()
    serve(run, model, READS_BEFORE + 1, torch.cat([X, X, X]))
    assert len(optimizations.report()) == 2
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    assert all(storage() is not None for storage in storages)
    state_assigned(model)
    run(X)  # The graph for the other size is not called again.
    gc.collect()
    assert [storage() for storage in storages] == [None] * len(storages)


def test_exchanged_weight_is_freed_before_the_graph_runs(runner: Runner) -> None:
    """Recordings for the weight's address are checked then: a live weight counts as one that may come back."""
    model, run = bound()
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    state_assigned(model)
    alive: list[bool] = []
    runner.calls = Noting(lambda: alive.append(any(storage() is not None for storage in storages)))  # type: ignore[assignment]
    run(X)
    assert alive == [False]


class Noting(list[Any]):
    def __init__(self, noted: Callable[[], None]) -> None:
        super().__init__()
        self.noted = noted

    def append(self, call: Any) -> None:
        self.noted()


def test_reset_releases_bindings_and_calls_keep_working(reads: list[Any]) -> None:
    model, run = bound()
    reads.clear()
    optimizations.reset()
    storage = weakref.ref(model.layers[0].scale.untyped_storage())
    model.layers[0].scale = nn.Parameter(torch.zeros(4))
    assert storage() is None
    serve(run, model, READS_BEFORE + 3)
    assert reads == [model] * (READS_BEFORE + 1)


def test_backend_around_this_one_may_call_with_all_arguments() -> None:
    checked = []

    def checking(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        function = backend.encore(graph_module, inputs)
        checked.append(same(function(*inputs)[0], graph_module(*inputs)[0]))
        return function

    model = Model().eval()
    run = torch.compile(model, backend=checking)
    serve(run, model, READS_BEFORE + 2)
    one_parameter(model)
    serve(run, model)
    assert checked == [True]


def test_graph_not_called_by_dynamo_is_not_bound() -> None:
    def copying(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return backend.encore(copy.deepcopy(graph_module), inputs)

    model = Model().eval()
    serve(torch.compile(model, backend=copying), model)
    assert binding().untouched == "Dynamo does not call this graph as it is"


def test_failure_in_binding_disables_binding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def defective(*arguments: Any) -> Any:
        raise KeyError("node")

    monkeypatch.setattr(compiled_graph, "bind", defective)
    model = Model().eval()
    with pytest.warns(UserWarning, match="binding failed: KeyError"):
        serve(compiled(model), model)
    assert "KeyError" in str(binding().untouched)


class Tracking(dict[str, Any]):
    """A dictionary of another kind than modules have."""


def test_module_with_its_own_storage_is_left_to_dynamo() -> None:
    model = Model().eval()
    model.layers[0].linear.__dict__["_parameters"] = Tracking(model.layers[0].linear._parameters)
    run = compiled(model)
    for _ in range(READS_BEFORE + 4):
        assert same(run(X), model(X))
        one_parameter(model)
    assert binding().tensors == HELD - 2, "all but those of the linear layer"


def test_module_that_changes_its_storage_is_read_on_every_call(
    reads: list[Any], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Dynamo's guards would notice, but a program may skip them. Whether C++ can compare is checked once."""
    asked: list[int] = []
    stock = bound_module.same_tensors
    monkeypatch.setattr(bound_module, "same_tensors", lambda *given: (asked.append(1), stock(*given))[1])
    model = Model().eval()
    run = compiled(model)
    run(X)
    linear = model.layers[0].linear
    linear.__dict__["_parameters"] = Tracking(linear._parameters)
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        serve(run, model, READS_BEFORE + 4)
        linear._parameters["weight"] = nn.Parameter(linear.weight.detach() * 3)
        serve(run, model, 4)
    assert len(reads) == 1 + READS_BEFORE + 4 + 4
    assert asked == [1]
    assert not [one for one in recwarn if "parameters are read in each call" in str(one.message)]


def test_failure_in_comparing_disables_comparison_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def defective(*arguments: Any) -> Any:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(bound_module, "same_tensors", defective)
    with pytest.warns(UserWarning, match="comparing them in C\\+\\+ failed: TypeError"):
        model, run = bound()
    for _ in range(2):
        one_parameter(model)
        assert same(run(X), model(X))


def test_threads_never_get_an_exchanged_tensor() -> None:
    """Two threads call, a third replaces weights: a result uses the weights at its beginning or at its end."""
    model, run = bound(Scaled(), ONE)
    wrong: list[tuple[float, float, float]] = []
    stop = threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                before = model.scale.item()
                result = run(ONE).item()
                after = model.scale.item()
                if not before <= result <= after:
                    wrong.append((before, result, after))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(300):
        model.scale = nn.Parameter(torch.tensor([float(step)]))
        model.shift = nn.Parameter(torch.zeros(1))
        time.sleep(0.0005)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_model_that_references_itself_is_collected() -> None:
    """Its dictionaries are referenced until the second full collection after its last call."""
    model = Model().eval()
    model.layers[0].parents = [model]
    run = torch.compile(lambda module: module(X), backend="encore")
    for _ in range(READS_BEFORE + 4):
        run(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    gc.collect()
    assert gone() is None


def test_idle_binding_is_read_again(reads: list[Any]) -> None:
    model, run = bound()
    for _ in range(3):
        run(X)
        gc.collect()
    reads.clear()
    run(X)
    assert reads == [], "it is in use"
    gc.collect()
    gc.collect()
    serve(run, model)
    assert reads == [model]


def test_each_choice_of_modules_is_bound_separately(reads: list[Any]) -> None:
    """Two modules alternate in front of the same last one, and neither is read again."""
    firsts, last = [Layer(1).eval(), Layer(2).eval()], Layer(3).eval()

    def program(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
        result: torch.Tensor = last(first(x))
        return result

    run = compiled(program)
    for number in range(READS_BEFORE + 5):
        if number == READS_BEFORE + 1:
            reads.clear()
        for first in firsts:
            assert same(run(X, first, last), program(X, first, last))
    assert reads == []


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def exchange(model: nn.Module) -> None:
    model.scale = type(model.scale)(model.scale + 1)


@pytest.mark.parametrize("served", [3, WORTH])
def test_reading_lasts_longer_after_useless_comparisons(reads: list[Any], served: int) -> None:
    model, run = bound(Scaled(), ONE)
    for losses in (1, 2, 3):
        reads.clear()
        serve(run, model, served, ONE)
        assert reads == []
        exchange(model)
        expected = 1 + (WORTH if served == WORTH else WORTH << losses)
        serve(run, model, expected + 3, ONE)
        assert abs(len(reads) - expected) <= 1


@pytest.mark.parametrize("kind", [Scaled, Buffered])
def test_comparison_stops_for_buffers_but_not_for_parameters(reads: list[Any], kind: type[nn.Module]) -> None:
    """Buffers may be results of a graph, which the binding would keep alive."""
    model, run = bound(kind(), ONE)
    for losses in range(1, PATIENCE + 2):
        exchange(model)
        serve(run, model, 3 + (WORTH << losses), ONE)
    reads.clear()
    serve(run, model, 3, ONE)
    assert len(reads) == (3 if kind is Buffered else 0)
    before = weakref.ref(model.scale.untyped_storage())
    exchange(model)
    assert before() is None or kind is Scaled


def test_failing_comparison_without_an_exchange_is_renewed(reads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(*arguments: Any) -> Any:
        made.append(same_tensors(*arguments))
        return made[-1] if len(made) > 1 else ComparedAfterWrites(lambda dictionaries: False, ())

    monkeypatch.setattr(bound_module, "same_tensors", make)
    model, run = bound(Scaled(), ONE)
    serve(run, model, 4 * WORTH, ONE)
    reads.clear()
    serve(run, model, 4, ONE)
    assert reads == [] and len(made) == 2
