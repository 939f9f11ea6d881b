"""Plain functions replace AOTAutograd's for most graphs; each reason to need its wrapper keeps it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import optimizations
from optimizations import torch_internals
from optimizations.calls import shortcut
from optimizations.calls import trained as plain_function
from optimizations.calls.shortcut import FULL_CALLS, needed
from optimizations.torch_internals import wrappers

X = torch.arange(8.0).reshape(2, 4)

PLAIN: dict[str, Any] = {
    "num_mutated_inp_runtime_indices": 0,
    "num_outputs_aliased": 0,
    "num_unsafe_view_outputs": 0,
    "num_intermediate_bases": 0,
    "num_symints_saved_for_bw": 0,
    "num_opaque_objects_saved_for_bw": None,
    "dynamic_saved_tensors_idxs": {},
    "num_graphsafe_rng_states": 0,
    "is_rng_op_functionalized": False,
    "tokens": {},
    "num_backward_tokens": 0,
}


def metadata(**changed: Any) -> Any:
    plain = SimpleNamespace(output_type=torch_internals.OutputType.non_alias)
    return SimpleNamespace(**{**PLAIN, "num_forward_returns": 1, "output_info": [plain], **changed})


def test_graph_with_special_needs_keeps_aotautograds_methods() -> None:
    assert wrappers._is_plain(metadata())
    for name in PLAIN:
        assert not wrappers._is_plain(metadata(**{name: {0: 1}})), name
    assert not wrappers._is_plain(metadata(num_forward_returns=2))
    view = SimpleNamespace(output_type=torch_internals.OutputType.custom_function_view)
    assert not wrappers._is_plain(metadata(output_info=[view]))


class Program(nn.Module):
    """Two results with gradients, of which one is also saved, and two without."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * self.weight).sin(), self.weight.exp(), x > 3, (x + self.weight).detach()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect AOTAutograd's methods that were called since the calls took the shortcut."""
    seen: list[str] = []
    stock = plain_function._backward

    def backward(function: Any, plain: Any, own: Callable[..., Any], **keywords: Any) -> Any:
        return stock(function, plain, lambda *given: (seen.append("backward"), own(*given))[1], **keywords)

    monkeypatch.setattr(plain_function, "_backward", backward)
    return seen


def gradients(program: nn.Module, call: Callable[..., Any], *tangents: torch.Tensor | None, **keywords: Any) -> Any:
    outputs = call(X)
    chosen = [(output, tangent) for output, tangent in zip(outputs, tangents, strict=False) if tangent is not None]
    return torch.autograd.grad(
        [output for output, _ in chosen], [program.weight], [tangent for _, tangent in chosen], **keywords
    )


@pytest.fixture
def without_a_compiler(fresh_encore: None) -> Iterator[None]:
    """Inductor calls ATen for every operator."""
    with torch_internals.inductor_config.patch({"fallback_by_default": True}):
        yield


@pytest.mark.usefixtures("without_a_compiler")
def test_backward_equals_eager_and_rare_cases_use_aotautograd(left: list[str]) -> None:
    program = Program()
    eager = Program()
    run = torch.compile(program, backend="encore", fullgraph=True)
    ones, row = torch.ones(2, 4), torch.arange(4.0)
    for _ in range(FULL_CALLS + 2):
        gradients(program, run, ones, row)
    assert left == []
    function = run(X)[0].grad_fn._forward_cls
    assert function.forward.__module__ == plain_function.__name__

    for given in ((ones, row), (ones.t().contiguous().t(), row), (torch.ones(1, 1).expand(2, 4), row)):
        for mine, theirs in zip(gradients(program, run, *given), gradients(eager, eager, *given), strict=True):
            torch.testing.assert_close(mine, theirs)
    outputs = run(X)
    assert [output.requires_grad for output in outputs] == [True, True, False, False]
    for mine, theirs in zip(outputs, eager(X), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert left == []

    assert torch.equal(gradients(program, run, None, row)[0], eager.weight.detach().exp() * row)
    assert left == [], "autograd gives zeros for the other"
    outputs = run(X)
    for _ in range(2):
        (found,) = torch.autograd.grad(outputs[1], [program.weight], row, retain_graph=True)
        assert torch.equal(found, eager.weight.detach().exp() * row)
    assert left == ["backward"] * 2
    left.clear()
    (found,) = gradients(program, run, ones, row, create_graph=True)
    assert left == ["backward"] and found.requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        found.sum().backward()
    left.clear()
    outputs = run(X)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda tangent: torch.autograd.grad(outputs[1], [program.weight], tangent))(torch.ones(2, 4))
    assert left == ["backward"]
    left.clear()
    with pytest.raises(RuntimeError, match="tensor subclass"):
        torch.autograd.grad(run(X)[1], [program.weight], nn.Parameter(row))
    assert left == ["backward"]


@pytest.mark.usefixtures("without_a_compiler")
def test_backward_after_enabling_determinism_is_an_error(left: list[str]) -> None:
    weight = nn.Parameter(torch.ones(4))
    run = torch.compile(lambda x: x * weight, backend="encore", fullgraph=True)
    for _ in range(FULL_CALLS + 2):
        run(X).sum().backward()
    out = run(X)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert left == ["backward"]


@pytest.mark.usefixtures("without_a_compiler")
def test_dynamo_skips_frames_of_a_backward_in_compiled_code(left: list[str]) -> None:
    """A loop compiled with its backward breaks the graph there."""
    weight = nn.Parameter(torch.ones(4))

    def step(x: torch.Tensor) -> torch.Tensor:
        out = (x * weight).sin()
        torch._dynamo.graph_break()
        out.sum().backward()
        return x + 1

    run = torch.compile(step, backend="encore")
    frames, after = torch_internals.dynamo_utils.counters["frames"], []
    for _ in range(FULL_CALLS + 4):
        weight.grad = None
        run(X)
        after.append(frames["total"])
        torch.testing.assert_close(weight.grad, (X * X.cos()).sum(0))
    assert len(set(after)) == 1 and left == []


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True
    seen: list[str] = []  # noqa: RUF012

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * 2

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        cls.seen.append("own")
        return super().apply(*arguments)


def test_transforms_call_the_functions_own_apply() -> None:
    apply = plain_function._apply(Doubled)
    Doubled.seen.clear()
    escaped: list[torch.Tensor] = []
    assert torch.equal(torch.vmap(apply)(torch.ones(3)), torch.full((3,), 2.0))
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(torch.ones(3))
    assert Doubled.seen == ["own"]
    assert torch.equal(apply(escaped[0]), torch.full((3,), 2.0))
    assert Doubled.seen == ["own"] * 2


# Each reason to need AOTAutograd's wrapper keeps it.


pytestmark = pytest.mark.usefixtures("fresh_encore")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the metadata that was checked."""
    seen: list[Any] = []
    monkeypatch.setattr(shortcut, "needed", lambda metadata: (seen.append(metadata), needed(metadata))[1])
    return seen


def compiled(program: Callable[..., Any], x: torch.Tensor, asked: list[Any]) -> Any:
    """Return PyTorch's metadata of this program."""
    torch.compile(program, backend="encore", fullgraph=True)(x)
    (found,) = asked
    return found


NEEDS = {
    "num_mutated_inp_runtime_indices": (1, "the graph changes inputs"),
    "num_outputs_aliased": (1, "outputs share memory with inputs or with each other"),
    "num_intermediate_bases": (1, "outputs share memory with inputs or with each other"),
    "dynamic_outputs": (True, "sizes of outputs differ from call to call"),
    "is_rng_op_functionalized": (True, "the state of random numbers is an argument"),
    "tokens": ({"an effect": torch.ones(1)}, "operators with side effects are kept in order"),
    "grad_enabled_mutation": (False, "the graph changes the grad mode"),
}


@torch.no_grad()
def test_each_need_alone_keeps_the_wrappers(asked: list[Any]) -> None:
    """Change one field of the metadata of a graph without needs."""
    metadata = compiled(lambda x: x * 2, X, asked)
    assert needed(metadata) is None
    for name, (value, reason) in NEEDS.items():
        changed = copy.copy(metadata)
        assert not getattr(changed, name), name
        changed.__dict__[name] = value
        assert needed(changed) == reason, name


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    torch._C._set_grad_enabled(False)
    return x * 2


def test_graph_that_switches_gradients_off_leaves_them_off() -> None:
    run = torch.compile(without_gradients, backend="encore", fullgraph=True)
    for _ in range(FULL_CALLS + 3):
        with torch.enable_grad():
            assert torch.equal(run(X), X * 2)
            assert not torch.is_grad_enabled()
    (report,) = optimizations.report()
    assert report.shortcut is not None
    assert report.shortcut.kept == "the graph changes the grad mode"
