"""Settings of PyTorch, modes, and the program's own classes of batches: exactly their changes are noticed."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches
from torch.utils._python_dispatch import TorchDispatchMode

from models.precision import precision_kept
from optimizations.capture.step.graphed_step import GraphedStep


class Holder:
    """A container of one value."""

    def __init__(self) -> None:
        self.weight = 2.0


def test_batch_that_is_a_parameter_is_refused() -> None:
    def step(given: torch.Tensor) -> torch.Tensor:
        return given * (3.0 if isinstance(given, torch.nn.Parameter) else 2.0)

    call = GraphedStep(step, device=CpuDevice())
    for index in range(20):
        x = torch.randn(3)
        given = torch.nn.Parameter(x, requires_grad=False) if index % 2 else x
        assert torch.equal(call(given), step(given))
    assert (call.report().replays, len(call.report().recordings)) == (10 - 3, 1)
    assert ["is a Parameter" in one.reason for one in call.report().refusals] == [True]


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "vmap": lambda function, x: torch.vmap(function)(x.expand(4, 3)),
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).sum())(x),
    "forward mode": lambda function, x: torch.func.jvp(function, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_transformed_step_runs_uncaptured(name: str) -> None:
    weight = torch.randn(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).square()

    call = GraphedStep(step, device=CpuDevice())
    for _ in range(5):
        call(torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(TRANSFORMS[name](call, x), TRANSFORMS[name](step, x))
    call(x)
    assert call.report().replays == 3


class Counting(TorchDispatchMode):
    """Observe what runs, as a counter of floating-point operations does."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_around_a_call_observe_operators() -> None:
    calls = batches("cpu", 8)
    step = GraphedStep(lambda batch: batch["x"].sum() * 2, device=CpuDevice())
    for batch in calls[:6]:
        step(*batch)
    assert step.report().replays == 3
    for _ in range(4):
        with Counting() as counting:
            step(*calls[6])
        assert counting.seen >= 2
    step(*calls[7])
    assert step.report().replays == 4


def test_saved_tensor_hooks_may_replace_tensors() -> None:
    weight = torch.nn.Parameter(torch.arange(3.0))

    def train(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (x * weight).sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    step = GraphedStep(train, device=CpuDevice())
    for _ in range(6):
        assert torch.equal(step(torch.ones(3)), torch.ones(3))
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (seen.append(one), one)[1], lambda one: one * 2):
        assert torch.equal(step(torch.ones(3)), 2 * torch.ones(3))
    assert seen
    replays = step.report().replays
    assert torch.equal(step(torch.ones(3)), torch.ones(3)) and step.report().replays == replays + 1


def test_changed_default_device_is_noticed() -> None:
    step = GraphedStep(lambda batch: (batch["x"] * 2, torch.ones(2)), device=CpuDevice())
    calls = batches("cpu", 8)
    for batch in calls[:6]:
        step(*batch)
    torch.set_default_device("meta")
    try:
        _, ones = step(*calls[6])
        assert ones.device.type == "meta"
    finally:
        torch.set_default_device(None)


def test_anomaly_detection_finds_nan_in_the_backward() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = (weight * x).sqrt().sum()
        loss.backward()
        return loss.detach()

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(6):
        graphed(torch.full((3,), index + 1.0))
    assert graphed.report().replays == 3
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
        graphed(torch.full((3,), -1.0))
    graphed(torch.ones(3))
    assert graphed.report().replays == 4


@pytest.fixture
def precision() -> Iterator[None]:
    with precision_kept():
        yield
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True


Setting = tuple[Callable[[], Any], Callable[[Any], Any], Any]
"""A function that reads a setting, one that sets it, and another value of it."""


def of(owner: Any, name: str, value: Any) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value), value


def autocast_dtype(device: str, value: torch.dtype) -> Setting:
    return lambda: torch.get_autocast_dtype(device), lambda value: torch.set_autocast_dtype(device, value), value


CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn
SETTINGS: dict[str, Setting] = {
    **{
        f"cudnn {name}": of(CUDNN, name, not getattr(CUDNN, name)) for name in ("enabled", "benchmark", "deterministic")
    },
    "flash": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, False),
    "efficient": (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, False),
    "math": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp, False),
    "cudnn": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp, False),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "only warned of": (
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda value: torch.use_deterministic_algorithms(value, warn_only=value),
        True,
    ),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
    "half": (CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp, True),
    "products": of(CUDA.matmul, "fp32_precision", "tf32"),
    "all products": of(torch.backends, "fp32_precision", "tf32"),
    "reductions": of(CUDA.matmul, "allow_fp16_reduced_precision_reduction", False),
    "convolutions": of(CUDNN.conv, "fp32_precision", "ieee"),
    "recurrent layers": of(CUDNN.rnn, "fp32_precision", "ieee"),
    "regions on the CPU": autocast_dtype("cpu", torch.float16),
    "regions on the GPU": autocast_dtype("cuda", torch.bfloat16),
}


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_each_setting_has_its_own_graph(name: str) -> None:
    """It chooses kernels, or the dtype of regions of autocast in the step."""
    ask, tell, other = SETTINGS[name]
    torch.backends.cuda.matmul.fp32_precision = "none"
    before = ask()
    assert before != other
    step = GraphedStep(lambda x: x * 2, device=CpuDevice())
    try:
        for index in range(16):
            tell(before if index < 6 or index >= 12 else other)
            x = torch.full((3,), float(index))
            assert torch.equal(step(x), x * 2)
    finally:
        tell(before)
    report = step.report()
    assert (report.refusals, len(report.recordings), report.replays) == ((), 2, 16 - 3 - 2)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_step_that_leaves_gradients_disabled_is_refused() -> None:
    def step(x: torch.Tensor, train: bool) -> torch.Tensor:
        torch.set_grad_enabled(train)
        return x * 2

    graphed = GraphedStep(step, device=CpuDevice())
    try:
        for index in range(20):
            train = index % 5 < 3
            graphed(torch.ones(3), train)
            assert torch.is_grad_enabled() is train
    finally:
        torch.set_grad_enabled(True)
    report = graphed.report()
    assert "leaves a setting of PyTorch other than it found it" in report.refusals[0].reason
    assert report.replays > 0


@pytest.mark.parametrize("kind", [list, lambda proxies: dict(enumerate(proxies))], ids=["list", "dict"])
def test_proxy_of_a_freed_object_is_none(kind: Any) -> None:
    held = Holder()
    proxies = kind([weakref.proxy(held)])
    del held

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * len(proxies)

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(5):
        assert graphed(torch.full((1,), float(index))).item() == index


# Batches of the program's own classes: attributes next to their entries are compared.


CALLS, CHANGED = 14, 6


class Keyed(dict):
    of_class = 2.0


class Listed(list):
    pass


BATCHES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "a dict": (lambda x: Keyed(x=x), lambda batch: batch["x"]),
    "a mapping": (lambda x: collections.UserDict(x=x), lambda batch: batch["x"]),
    "a list": (lambda x: Listed([x]), lambda batch: batch[0]),
}


@pytest.mark.parametrize("kind", [lambda members: members[1], list, tuple])
@pytest.mark.parametrize("name", sorted(BATCHES))
def test_attributes_of_a_container_are_compared(name: str, kind: Callable[[Any], Any]) -> None:
    make, read = BATCHES[name]

    def run(batch: Any) -> Any:
        return read(batch) * (batch.scale if isinstance(batch.scale, float) else batch.scale[1])

    step = GraphedStep(run, device=CpuDevice())
    for index in range(CALLS):
        batch = make(torch.randn(3))
        batch.scale = kind((1.0, 2.0 if index < CHANGED else 3.0))
        assert torch.equal(step(batch), run(batch))
    assert step.report().refusals == () and step.report().replays > CHANGED - 3


def test_class_attribute_of_a_batch_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    step = GraphedStep(lambda batch: batch["x"] * batch.of_class, device=CpuDevice())
    for index in range(CALLS):
        if index == CHANGED:
            monkeypatch.setattr(Keyed, "of_class", 3.0)
        x = torch.randn(3)
        assert torch.equal(step(Keyed(x=x)), x * (2.0 if index < CHANGED else 3.0))
    assert step.report().refusals == () and step.report().replays >= 3 + 4


def test_object_inside_of_an_argument_is_compared() -> None:
    held = Holder()
    call = GraphedStep(lambda given: given["x"] * given["inner"][0].weight, device=CpuDevice())
    for index in range(14):
        if index == 6:
            held.weight = 5.0
        x = torch.randn(3)
        assert torch.equal(call({"x": x, "inner": [held]}), x * held.weight)
    assert 3 + 4 <= call.report().replays <= 3 + 6 and call.report().refusals == ()
