"""The backend: found by name, checked options, untouched pass-through, and placement joined to its feeds."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from simulated_gpu.placement import CPU, bits, fake_cuda, graphs_of, runner
from torch import nn

import optimizations
from optimizations import UnsupportedTorch, compiled_graph, torch_internals
from optimizations.backend import checked, encore
from optimizations.placement import Feeds
from optimizations.report import GraphReport
from optimizations.torch_internals.cpu_results import marked
from optimizations.torch_internals.left_out import OPERATORS

pytestmark = pytest.mark.usefixtures("fresh_encore")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask = torch.tensor([1.0, 0.0, 2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.mask.to(x.device)


def test_model_without_cuda_tensors_uses_plain_inductor() -> None:
    module = Masked().eval()
    x = torch.randn(2, 3)
    state = bits(list(module.state_dict().values()))
    with torch.no_grad():
        expected = module(x)
        compiled = torch.compile(module, backend="encore", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
        (report,) = optimizations.report()
        assert report.placement.untouched.startswith("no tensor is on a GPU; without one, the suite's `encore explain")
        assert [piece.direction for piece in report.compiled] == ["inference"]
        assert report.compiled[0].partitions == 0
        module.mask = module.mask * 2
        torch.testing.assert_close(compiled(x), expected * 2)
        # The module stays what it was.
        assert bits(list(module.state_dict().values())) == state
        assert bits(copy.deepcopy(module)(x)) == bits(module(x))
        assert bits(pickle.loads(pickle.dumps(module))(x)) == bits(module(x))  # noqa: S301 our own bytes
        torch.testing.assert_close(module.to(torch.float64)(x.double()).float(), expected * 2)


def test_backward_is_reported_compiled_or_from_the_cache() -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch_internals.fresh_cache():
        for _ in range(2):
            torch_internals.reset_dynamo()
            optimizations.reset()
            torch.compile(lambda x: (x * 2).sin().sum(), backend="encore")(weight).backward()
            (report,) = optimizations.report()
            assert sorted(piece.direction for piece in report.compiled) == ["backward", "forward"]


@pytest.mark.parametrize("supported", [("1.0", "2.0"), ("3.0", "4.0")])
def test_unknown_pytorch_compiles_with_stock(supported: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch_internals, "SUPPORTED", supported)
    stock = torch_internals.compile_fx.compile_fx

    def compile_fx(graph_module: Any, inputs: Any, **keywords: Any) -> Any:
        if "config_patches" in keywords:  # it calls itself without them
            compiled.append(keywords["config_patches"]["triton.cudagraphs"])
        return stock(graph_module, inputs, **keywords)

    monkeypatch.setattr(torch_internals.compile_fx, "compile_fx", compile_fx)
    x = torch.ones(4)
    low, high = supported
    expected = rf"PyTorch 2\.\S+ is not supported: Encore knows PyTorch {low} up to but not including {high}"
    with pytest.warns(UserWarning, match=expected) as warned:
        for function in (lambda x: x + 1, lambda x: x * 2):
            assert torch.equal(torch.compile(function, backend="encore")(x), function(x))
    assert compiled == [True, True]
    assert len([one for one in warned if "is not supported" in str(one.message)]) == 1
    assert optimizations.report() == ()


def test_unknown_pytorch_is_refused_by_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "SUPPORTED", ("1.0", "2.0"))
    with pytest.raises(UnsupportedTorch, match=r"knows PyTorch 1\.0 up to but not including 2\.0"):
        torch_internals.require_supported()


def test_missing_internal_is_named_with_its_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.NAMES, "detect_fake_mode", "torch._guards:gone")
    with pytest.raises(UnsupportedTorch, match=r"no torch\._guards\.gone, which Encore needs to place the values"):
        torch_internals.resolve("detect_fake_mode")


def _traced(module: nn.Module) -> tuple[torch.fx.GraphModule, list[Any]]:
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        module = copy.deepcopy(module)
        for name, parameter in list(module.linear.named_parameters()):
            setattr(module.linear, name, nn.Parameter(fake_cuda(parameter.detach(), mode)))
        ((graph_module, inputs),) = graphs_of(module, fake_cuda(torch.randn(2, 3), mode), mode=mode)
    return graph_module, inputs


def assert_computes(run: Callable[..., Any], module: nn.Module) -> None:
    """Check that a function that was compiled of a module computes on new values what the module does."""
    with torch.no_grad():
        x = torch.randn(2, 3)
        ((_, arguments),) = graphs_of(module, x)
        assert bits(list(run(*arguments))) == bits([module(x)])


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace Inductor by execution on the CPU, the device of all feeds. Return the arguments of its calls."""
    asked: list[dict[str, Any]] = []

    def compile_fx(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        asked.append({"graph": graph_module, "inputs": inputs, **settings})
        return runner(graph_module, inputs)

    monkeypatch.setattr(torch_internals, "compile_fx", SimpleNamespace(compile_fx=compile_fx), raising=False)
    monkeypatch.setattr(
        compiled_graph, "Feeds", lambda plan, original: Feeds(dataclasses.replace(plan, device=CPU), original)
    )
    return asked


def test_placed_graphs_get_current_attribute_values(on_cpu: list[dict[str, Any]]) -> None:
    module = Masked().eval()
    graph_module, inputs = _traced(module)
    run = encore(graph_module, inputs, options={"inductor": {"max_autotune": True}})
    (asked,) = on_cpu
    asks_for = {"triton.cudagraphs": True, "max_autotune": True, "custom_should_partition_ops": list(OPERATORS)}
    assert asked["config_patches"] == marked(asks_for)
    assert [node.name for node in asked["graph"].graph.nodes if node.op == "placeholder"][-1] == "encore_hoisted_0"
    for factor in (1.0, 1.0, 3.0):
        module.mask.mul_(factor)
        assert_computes(run, module)


@pytest.mark.parametrize("overload", [True, False])
def test_placed_graphs_run_backwards_of_operators_here(on_cpu: list[dict[str, Any]], overload: bool) -> None:
    """The call holds a lock of the graph. Note [Backwards inside of functions] in `calls.turns`."""
    found: list[bool] = []

    def operator(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_internals.is_multithreading_enabled())
        return x.clone()

    made = torch.library.custom_op(f"own::op_{overload}", operator, mutates_args=())
    made.register_fake(torch.empty_like)
    packet = getattr(torch.ops.own, f"op_{overload}")

    class WithOperator(Masked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (packet.default if overload else packet)(super().forward(x))
            return result

    for module in (WithOperator().eval(), Masked().eval()):
        run = encore(*_traced(module))
        with torch.no_grad():
            x = torch.randn(2, 3)
            ((_, arguments),) = graphs_of(module, x)
            found.clear()
            assert bits(list(run(*arguments))) == bits([Masked.forward(module, x)])
            assert found == ([False] if type(module) is WithOperator else [])
    assert torch_internals.is_multithreading_enabled()


def test_graph_runs_unchanged_in_a_capture_of_the_program(
    on_cpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays would read the memory that it was fed with; later calls write it. Captures of Encore's steps are fed."""
    module = Masked().eval()
    graph_module, inputs = _traced(module)
    served: list[str] = []
    as_it_was = runner(graph_module, inputs)
    monkeypatch.setattr(graph_module, "forward", lambda *given: (served.append("as it was"), as_it_was(*given))[1])
    bind = Feeds.bind
    monkeypatch.setattr(Feeds, "bind", lambda self, *given: (served.append("fed"), bind(self, *given))[1])
    for captured, rests in ((False, False), (True, False), (True, True), (False, False)):
        monkeypatch.setattr(Feeds, "inside_a_capture", lambda self, captured=captured: captured)
        monkeypatch.setattr(compiled_graph.hook, "at_rest_now", int(rests))
        assert_computes(encore(graph_module, inputs, options={"lean": False}), module)
    assert served == ["fed", "as it was", "fed", "fed"]


def test_compiled_functions_do_not_share_placed_values(on_cpu: list[dict[str, Any]]) -> None:
    modules = [Masked().eval(), Masked().eval()]
    modules[1].mask = modules[1].mask + 1
    runs = [encore(*_traced(module)) for module in modules]
    for _ in range(3):
        for module, run in zip(modules, runs, strict=True):
            assert_computes(run, module)
            module.mask.add_(1)
    assert [report.index for report in optimizations.report()] == [0, 1]


def test_reset_clears_reports_and_frees_memory(on_cpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    module = Masked().eval()
    graph_module, inputs = _traced(module)
    run = encore(graph_module, inputs)
    (report,) = optimizations.report()
    assert isinstance(report, GraphReport)
    assert [hoisted.attributes for hoisted in report.placement.hoisted] == [("self.mask",)]
    assert_computes(run, module)
    optimizations.reset()
    assert optimizations.report() == ()
    assert_computes(run, module)


@pytest.mark.parametrize(
    ("error", "attempts"), [(RuntimeError("trace again"), 2), (torch_internals.RestartAnalysis(), 1)]
)
def test_graph_that_fails_to_compile_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, error: Exception, attempts: int
) -> None:
    """Dynamo compiles some graphs twice: the first attempt ends with a signal to trace again, which is not caught."""
    refusing = Mock(side_effect=error)
    monkeypatch.setattr(torch_internals, "compile_fx", SimpleNamespace(compile_fx=refusing), raising=False)
    with pytest.raises(type(error)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encore(*_traced(Masked().eval()))
    assert refusing.call_count == attempts
    assert optimizations.report() == ()


def test_failure_in_placement_disables_placement_only(
    on_cpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(*arguments: Any, **settings: Any) -> Any:
        raise KeyError("node")

    monkeypatch.setattr(compiled_graph, "place", defective)
    graph_module, inputs = _traced(Masked().eval())
    with pytest.warns(UserWarning, match="placement failed: KeyError"):
        encore(graph_module, inputs)
    assert on_cpu[0]["graph"] is graph_module
    assert "KeyError" in (optimizations.report()[0].placement.untouched or "")


def test_placed_graph_that_fails_to_compile_is_compiled_unplaced(
    on_cpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph_module, inputs = _traced(Masked().eval())
    compile_as_given = torch_internals.compile_fx.compile_fx

    def compile_fx(given: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if given is not graph_module:
            raise TypeError("Unknown type: <class 'tuple'>\nand what it was doing")
        return compile_as_given(given, inputs, **settings)

    monkeypatch.setattr(torch_internals, "compile_fx", SimpleNamespace(compile_fx=compile_fx), raising=False)
    with pytest.warns(UserWarning, match="after placement: TypeError: Unknown type: <class 'tuple'>$"):
        run = encore(graph_module, inputs)
    (asked,) = on_cpu
    assert asked["graph"] is graph_module
    (report,) = optimizations.report()
    assert "after placement: TypeError" in (report.placement.untouched or "")
    assert report.placement.copies_after == report.placement.copies_before != ()
    for _ in range(2):
        assert_computes(run, Masked().eval())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_inductor_modes_are_applied_with_cuda_graphs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile_fx(graph_module: Any, example_inputs: Any, *, config_patches: dict[str, Any], **ignored: Any) -> Any:
        seen.append(config_patches)
        return graph_module.forward

    monkeypatch.setattr(torch_internals.compile_fx, "compile_fx", compile_fx)
    x = torch.ones(2)
    assert torch.equal(torch.compile(lambda x: x + 1, backend="encore", mode=mode)(x), x + 1)
    (settings,) = seen
    assert settings["triton.cudagraphs"] is True
    assert settings.get("max_autotune", False) is mode.startswith("max-autotune")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_autotun": True}, "unknown option 'max_autotun' for Inductor.*did you mean max_autotune"),
        ({"qqqq": True}, "unknown option 'qqqq' for Inductor.*list_options"),
        ({"max_autotune": "yes"}, "'max_autotune' for Inductor must be of type bool, not 'yes'"),
    ],
)
def test_wrong_options_for_inductor_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(lambda x: x + 1, backend="encore", options={"inductor": given})(torch.ones(2))


def test_inductor_options_may_have_hyphens() -> None:
    assert checked({"max-autotune": True, "triton.cudagraphs": False}) == {
        "max_autotune": True,
        "triton.cudagraphs": False,
    }


MISSING_NAME = """
import warnings
import torch
from optimizations import torch_internals
for name in list(torch_internals.NAMES):
    if name not in ("inductor_config", "list_mode_options", "compile_fx"):
        torch_internals.NAMES[name] = "torch:gone"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        compiled = torch.compile(lambda x: x + 1, backend="encore")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
said = [str(one.message) for one in said if "Encore" in str(one.message)]
assert len(said) == 1 and "Inductor's own CUDA graphs: PyTorch" in said[0] and "which Encore needs to" in said[0], said
"""


def test_missing_internal_compiles_with_stock() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MISSING_NAME], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
