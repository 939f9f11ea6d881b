"""What only a GPU can show of indirection: real captures, real updates, results bit for bit those of stock's graphs.

`ENCORE_CAPTURES=DIR` keeps the real captures that are compared here, as JSON for tests without a GPU: the folder is
`tests/data/captures` as it should be afterwards.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from indirection_on_gpu import (
    SEED,
    Function,
    Searched,
    allocated,
    assert_like_stock,
    call,
    different,
    drawn,
    encore,
    forget,
    recordings,
    said,
    same,
    save_captures,
    stock,
)
from recorded_captures import load_captures

import optimizations
from optimizations import torch_internals
from optimizations.graph.device import TENSOR_MAP_CAPABILITY
from optimizations.graph.pointers import find_pointer_uses
from optimizations.graph.tensor_map import driver_replace_address
from optimizations.in_place.session import OTHER_USES, Session
from optimizations.trees.containers import managers

pytestmark = pytest.mark.gpu

OF_OTHER_OPERATORS = ("attention", "sort")
"""Programs whose input is read by an operator that may reach it through memory."""

CHOICES = ("auto", "host", "prelude")
# What kernels there are, and every updater on them.

WEIGHTS: dict[str, Any] = {}


@pytest.fixture
def weights() -> Iterator[dict[str, Any]]:
    torch.manual_seed(SEED)
    bf16 = torch.bfloat16
    WEIGHTS.update(
        wide=torch.randn(1024, 1024, device="cuda", dtype=bf16),
        single=torch.randn(512, 512, device="cuda"),
        convolution=torch.nn.Conv2d(16, 16, 3, padding=1).cuda().to(bf16).requires_grad_(False),
    )
    yield WEIGHTS
    WEIGHTS.clear()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], list[torch.Tensor]]:
    def make(step: int) -> list[torch.Tensor]:
        return [torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(step)).to(dtype)]

    return make


def indices(step: int) -> list[torch.Tensor]:
    return [torch.randint(1, 512, (64,), device="cuda", generator=torch.Generator("cuda").manual_seed(step))]


PROGRAMS: dict[str, tuple[Function, Callable[[int], Sequence[Any]]]] = {
    "pointwise": (lambda x: torch.softmax(x * 2 + 1, -1).relu(), randn(128, 256)),
    "matmul bf16": (lambda x: x @ WEIGHTS["wide"], randn(512, 1024, dtype=torch.bfloat16)),
    "matmul fp32": (lambda x: x @ WEIGHTS["single"], randn(256, 512)),
    "batched matmul": (lambda x: torch.bmm(x, x.transpose(1, 2)), randn(8, 128, 64, dtype=torch.bfloat16)),
    "convolution": (lambda x: WEIGHTS["convolution"](x), randn(4, 16, 32, 32, dtype=torch.bfloat16)),
    "attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        randn(2, 4, 128, 64, dtype=torch.bfloat16),
    ),
    "clone": (lambda x: [x.clone(), x + 1], randn(1 << 16)),
    "views": (lambda x: x[16:48] * 2 + x[3], randn(64, 64)),
    "sort": (lambda x: x.sort()[0], randn(4096)),
    "indexing": (lambda x: WEIGHTS["single"].index_select(0, x), indices),
    "many nodes": (
        lambda x: [(x * float(n)).sum(-1) @ WEIGHTS["single"][:64, :64] for n in range(1, 17)],
        randn(8, 64, 8),
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_kind_of_kernel_follows_its_inputs(program: str, choice: str, weights: dict[str, Any]) -> None:
    function, make = PROGRAMS[program]
    assert_like_stock(function, make, choice)
    assert len(recordings()) == 1, said()
    (report,) = recordings()
    if program in OF_OTHER_OPERATORS:
        assert all(one.reasons == (OTHER_USES,) for one in report.inputs), said()
    else:
        assert report.off is None
        assert all(one.indirect for one in report.inputs), said()


@pytest.mark.parametrize("choice", CHOICES)
def test_the_applier_asked_for_is_the_one_that_works(choice: str, weights: dict[str, Any]) -> None:
    """A Triton kernel and a kernel of a library in one graph: nothing is copied, whoever does it. Both are read in
    place: the input, and the weight of the product, which is known to be used by that alone."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) + x @ WEIGHTS["single"]

    assert_like_stock(function, randn(256, 512), choice)
    (report,) = recordings()
    assert report.off is None
    assert all(one.indirect for one in report.inputs), said()
    expected = {"auto": {"host"}, "host": {"host"}, "prelude": {"prelude"}}[choice]
    assert {updater for one in report.inputs for updater in one.updaters} <= expected | {"host"}, report.fallbacks


@pytest.mark.parametrize("choice", ["auto", "prelude"])
def test_a_driver_too_old_for_the_prelude_costs_the_prelude_only(
    choice: str, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) + x @ WEIGHTS["single"]

    def cuGraphKernelNodeSetAttribute(*_: Any) -> tuple[Any, ...]:
        return (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,)

    forget()  # what was found out about the driver before
    monkeypatch.setattr(driver, "cuGraphKernelNodeSetAttribute", cuGraphKernelNodeSetAttribute)
    assert_like_stock(function, randn(256, 512), choice)
    (report,) = recordings()
    assert {updater for one in report.inputs for updater in one.updaters} == {"host"}
    refused = [reason for reason in report.fallbacks if "cuGraphKernelNodeSetAttribute failed" in reason]
    assert bool(refused) == (choice != "auto"), report.fallbacks


# Inputs of all sorts.


def test_view_of_a_written_buffer_is_copied_as_by_stock() -> None:
    class Averaging(torch.nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4096, device="cuda"))

        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            self.mean[places] = x.tanh().sum() * 0.1
            return x * self.mean.sum()  # reads `x` after that

    net, twin = Averaging(), Averaging()
    function, reference = encore(net), stock(twin)
    places = torch.arange(0, 4096, 3, device="cuda")
    kept = []
    for step in range(32):
        kept.append(torch.randn(4096, generator=torch.Generator("cuda").manual_seed(step), device="cuda"))
        assert same(call(function, kept[-1], places), call(reference, kept[-1].clone(), places)), step
    assert any(one.indirect for recording in recordings() for one in recording.inputs), said()
    for step in range(4):
        assert same(call(function, net.mean.view(4096), places), call(reference, twin.mean.clone(), places)), step
        assert torch.equal(net.mean, twin.mean)


def test_swapped_weights_become_ordinary_inputs(weights: dict[str, Any]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    compiled = encore(module)
    states = [{name: torch.randn_like(value) for name, value in module.state_dict().items()} for _ in range(7)]
    x = torch.randn(32, 64, device="cuda")
    held = []
    for step in range(60):
        module.load_state_dict({name: value.clone() for name, value in states[step % 7].items()}, assign=True)
        held += [torch.empty_like(value) for value in states[0].values()]  # the memory of the weights before
        module.requires_grad_(False)
        (result,) = call(compiled, x)
        assert (
            torch.equal(result, call(stock(module), x)[0])
            if step % 20 == 19
            else torch.allclose(result, module(x), atol=1e-4)
        ), step
    assert [len(one.inputs) for one in recordings()] == [1, 1, 5]
    assert not any(graph.uncaptured for graph in optimizations.report())


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(x)))


def test_layers_that_share_a_block_have_a_recording_each(weights: dict[str, Any]) -> None:
    """Each call begins an iteration in inference. Stock records the block once for each layer's weights."""
    layers = torch.nn.Sequential(*(Block() for _ in range(24))).cuda().requires_grad_(False)
    for layer in layers:
        layer.compile(backend="encore")
    for step in range(40):
        x = expected = torch.randn(8, 256, device="cuda")
        with torch.no_grad():
            for layer in layers:
                x, expected = layer(x), layer.forward(expected)
        assert torch.allclose(x, expected, atol=1e-4), step
    assert len(recordings()) == 24
    assert all(one.copied_bytes <= 8 * 256 * 4 for one in recordings()), "no weight is copied"
    assert all(one.replays for one in recordings())


# Programs of all sorts.


def test_forward_and_backward_are_those_of_stock(weights: dict[str, Any]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()

    def train(compiled: Function, x: torch.Tensor, tangent: torch.Tensor) -> list[torch.Tensor]:
        module.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        output = compiled(x)
        output.backward(tangent)
        return [output.detach().clone(), *(one.grad.clone() for one in module.parameters() if one.grad is not None)]

    reference, indirect = stock(module), encore(module)
    for step in range(32):
        x, tangent = torch.randn(32, 64, device="cuda"), torch.randn(32, 8, device="cuda")
        found, expected = train(indirect, x, tangent), train(reference, x.clone(), tangent.clone())
        assert same(found, expected), f"{step}\n{said()}\n{different(found, expected)}\n{drawn()}"
    assert {report.direction for report in recordings()} == {"forward", "backward"}
    backward = next(report for report in recordings() if report.direction == "backward")
    assert backward.copied_bytes == 0, said()


@pytest.mark.parametrize("ends", [torch.compiler.reset, torch_internals.cudagraph_trees.reset_cudagraph_trees])
def test_encore_goes_on_after_stocks_graphs_were_ended(ends: Callable[[], None], weights: dict[str, Any]) -> None:
    """In the middle of training: with results of the last step alive, and another function recorded after it."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    compiled = encore(module)

    def step(x: torch.Tensor) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        output = compiled(x)
        output.sum().backward()
        return output

    kept = [step(torch.randn(32, 64, device="cuda")) for _ in range(4)]
    ends()
    before = len(recordings())
    for size in (32, 32, *[16] * 10, 32):
        x = torch.randn(size, 64, device="cuda")
        kept.append(step(x))
        assert torch.allclose(kept[-1], module(x), atol=1e-4), size
    assert len(recordings()) > before, "graphs were recorded after it"
    assert any(list(manager.nodes()) for manager in managers())


# Memory and the end.


@pytest.mark.alone
def test_ten_thousand_replays_take_no_memory() -> None:
    function = encore(lambda x: torch.softmax(x, -1) * 2)
    inputs = [torch.randn(256, 256, device="cuda") for _ in range(7)]
    for x in inputs * 4:
        call(function, x)
    assert optimizations.settled()

    def used() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        gc.collect()
        resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free, resident_bytes

    def replay(count: int) -> None:
        for step in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                function(inputs[step % len(inputs)])

    replay(500)
    before = used()
    replay(10_000)
    allocated, device, resident = (now - then for now, then in zip(used(), before, strict=True))
    assert (allocated, device) == (0, 0)
    assert resident < 8 * 2**20


@pytest.mark.alone
@pytest.mark.parametrize("recording", [True, False])
def test_recording_and_replaying_take_the_memory_of_stock(recording: bool) -> None:
    shape = (64, 2**20)

    def peak(compile_it: Callable[[Function], Function]) -> int:
        function = compile_it(lambda x: x.sum(-1))
        for _ in range(1 if recording else 12):
            call(function, torch.ones(shape, device="cuda"))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call(function, torch.ones(shape, device="cuda"))
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_reserved()
        del function
        forget()
        return found

    # The first of each tunes its kernels, and the memory for that stays in the pool.
    for compile_it in (encore, stock):
        peak(compile_it)
    assert peak(encore) <= 1.05 * peak(stock)


@pytest.mark.parametrize("choice", CHOICES)
def test_reset_frees_everything_and_functions_go_on(choice: str, weights: dict[str, Any]) -> None:
    function = encore(lambda x: torch.softmax(x @ WEIGHTS["single"], -1), choice)
    torch.cuda.synchronize()
    before = allocated()
    for rounds in range(2):
        for _ in range(4):
            call(function, torch.randn(2048, 512, device="cuda"))
        gc.collect()
        gc.disable()
        try:
            optimizations.reset()
            assert managers() == []
            assert allocated() <= before, f"round {rounds}: a cycle, or a reference, keeps memory"
        finally:
            gc.enable()
    x = torch.randn(2048, 512, device="cuda")
    assert torch.allclose(call(function, x)[0], torch.softmax(x @ WEIGHTS["single"], -1), atol=1e-6)


def test_triton_only_input_is_read_in_place_without_recapture(searched: list[Searched]) -> None:
    """Two kernels, the second writing where the first one's dead input may have been."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) * 2 + y, -1).cumsum(0) + y

    compiled = encore(function)
    kept = []
    for step in range(16):
        x, y = (torch.randn(256, 512, device="cuda") for _ in range(2))
        kept.append((x, y))
        assert torch.allclose(call(compiled, x, y)[0], function(x, y), rtol=1e-4, atol=1e-4), f"step {step}\n{said()}"
    assert searched == [], "nothing was captured once more"
    (report,) = recordings()
    assert [one.indirect for one in report.inputs] == [True, True], report


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in ("attention", "sort", "indexing")])
def test_real_captures_are_worth_keeping(
    program: str, weights: dict[str, Any], tmp_path: Path, searched: list[Searched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved, loaded and analysed again, they give what was found when they were live."""
    monkeypatch.setattr(Session, "_take_by_name", lambda self, refusal: False)
    function, make = PROGRAMS[program]
    compiled = encore(function)
    for step in range(5):
        call(compiled, *make(step))
    path = Path(os.environ.get("ENCORE_CAPTURES") or tmp_path) / f"{program.replace(' ', '_')}.json"
    save_captures(program, searched[-1], path)
    loaded = load_captures(path)
    replace = driver_replace_address(driver) if torch.cuda.get_device_capability() >= TENSOR_MAP_CAPABILITY else None
    first, second, control, repeat = searched[-1]
    found = find_pointer_uses(first, second, further=[control, repeat], replace_address=replace)
    again = find_pointer_uses(
        loaded.first, loaded.second, further=[loaded.control, loaded.repeat], replace_address=replace
    )
    assert again == found
    assert all(verdict.uses for verdict in found.verdicts), "every program here uses its input"
