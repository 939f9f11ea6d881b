"""Placement at run time: values follow attributes, are staged by one copy, and not overwritten while they are read."""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx
from interrupts import interrupted_after
from simulated_gpu.allocator import EXTERNAL, Workspaces

from optimizations.placement import feeds, guards
from optimizations.placement import staging as staging_module
from optimizations.placement.feed_plan import FeedPlan, HoistedGroup, Source, Staged, TensorLayout
from optimizations.placement.feeds import Feeds
from optimizations.placement.guards import checks_for
from optimizations.placement.staging import ALIGNMENT_BYTES, BUFFERS_LIMIT, LAYOUTS_LIMIT, Staging

CPU = torch.device("cpu")


def _group(
    attributes: list[int],
    compute: Callable[..., Any],
    example: torch.Tensor,
    calls: list[int] | None = None,
) -> HoistedGroup:
    """A group of one value, which counts in `calls` how often it is computed."""

    def counted(*values: torch.Tensor) -> Any:
        if calls is not None:
            calls.append(1)
        return compute(*values)

    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"attribute_{position}") for position in range(len(attributes))]
    graph.output((graph.call_function(counted, tuple(inputs)),))
    layout = TensorLayout(tuple(example.shape), tuple(example.stride()), example.dtype)
    return HoistedGroup(torch.fx.GraphModule(torch.nn.Module(), graph), tuple(attributes), (layout,))


def _feeds(*groups: HoistedGroup) -> Feeds:
    return Feeds(FeedPlan(CPU, kept=(), hoisted=groups))


def test_interrupted_refresh_restores_settings() -> None:
    mask = torch.ones(2, 2)
    feeds = _feeds(_group([0], torch.neg, mask))
    places = 0
    for number in range(1000):
        mask.fill_(number)
        files = "/feeds.py", "/grad_mode.py"
        with contextlib.suppress(KeyboardInterrupt), torch.no_grad(), interrupted_after(number, *files) as where:
            feeds.bind((mask,))
        assert torch.is_grad_enabled(), where
        assert not torch.is_inference_mode_enabled(), where
        assert torch.equal(feeds.bind((mask,))[0], -mask), where
        if not where:
            break
        places += 1
    assert places > 5


def _given_other_data(mask: torch.Tensor) -> None:
    mask.data = mask * 2


def _written_by_address(mask: torch.Tensor) -> None:
    """Another process, a collective or a fused optimizer writes so."""
    ctypes.c_float.from_address(mask.data_ptr() + 4).value = 12.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda mask: mask.mul_(2),
    "by other data": _given_other_data,
    "through a view": lambda mask: mask[0].fill_(7),
    "through data": lambda mask: mask.data[1, 1].fill_(5.0),
    "by NumPy": lambda mask: mask.numpy()[2].fill(-3.0),
    "by apply": lambda mask: mask.apply_(lambda value: value + 1),
    "by map": lambda mask: mask.map_(torch.ones_like(mask), lambda one, other: one + 2 * other),
    "as storage": lambda mask: mask.untyped_storage().copy_(torch.full_like(mask, 3.5).untyped_storage()),
    "by address": _written_by_address,
}


@pytest.mark.parametrize("change", [*CHANGES, "replaced"])
@pytest.mark.parametrize("scale", [1, 60])  # compared in Python, and by the C library
def test_changed_attribute_shows_at_the_same_address(change: str, scale: int) -> None:
    mask = torch.rand(3 * scale, 2 * scale)
    feeds = _feeds(_group([0], operator.neg, mask))
    (before,) = feeds.bind((mask,))
    address = before.data_ptr()
    del before
    if change == "replaced":
        mask = mask * 2
    else:
        CHANGES[change](mask)
    (after,) = feeds.bind((mask,))
    assert torch.equal(after, -mask)
    assert after.data_ptr() == address


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(float("nan")), torch.tensor(1.0)),
        (torch.tensor(1, dtype=torch.int8), torch.tensor(2, dtype=torch.int8)),
        (torch.tensor(False), torch.tensor(True)),
        (torch.tensor(1 + 2j), torch.tensor(1 - 2j)),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16)),
    ],
)
def test_values_are_compared_bit_by_bit(old: torch.Tensor, new: torch.Tensor) -> None:
    calls: list[int] = []
    feeds = _feeds(_group([0], torch.clone, old, calls))
    for value, computed in ((old, 1), (old.clone(), 1), (new, 2), (new.clone(), 2), (old, 3)):
        (fed,) = feeds.bind((value,))
        assert (
            fed.view(torch.uint8).tolist() == value.reshape(fed.shape).view(torch.uint8).tolist() if fed.dim() else True
        )
        assert torch.equal(fed, value) or torch.isnan(value).any()
        assert len(calls) == computed


@pytest.mark.parametrize("keeper", ["python", "detached", "graph"])
def test_referenced_value_is_not_overwritten(keeper: str) -> None:
    """AOTAutograd stores some values as its own attributes, and saved-tensor hooks may store any."""
    scale = torch.tensor([2.0])
    feeds = _feeds(_group([0], torch.clone, scale))
    (value,) = feeds.bind((scale,))
    address = value.data_ptr()
    weight = torch.ones(1, requires_grad=True)
    kept: Any = {"python": [value], "detached": value.detach(), "graph": weight * value}[keeper]
    del value
    scale.fill_(5.0)
    (value,) = feeds.bind((scale,))
    assert value.data_ptr() != address
    found = {"python": lambda: kept[0], "detached": lambda: kept, "graph": lambda: kept}[keeper]()
    assert found.tolist() == [2.0]
    address = value.data_ptr()
    del value
    scale.fill_(6.0)
    (value,) = feeds.bind((scale,))
    assert (value.data_ptr(), value.tolist()) == (address, [6.0])


def test_values_cross_inference_mode_both_ways() -> None:
    mask = torch.ones(2)
    feeds = _feeds(_group([0], operator.neg, mask))
    with torch.inference_mode():
        feeds.bind((mask,))
    mask.add_(1)
    (value,) = feeds.bind((mask,))
    assert value.tolist() == [-2.0, -2.0]
    weight = torch.ones(2, requires_grad=True)
    (weight * value).sum().backward()
    mask.add_(1)
    with torch.inference_mode():
        assert feeds.bind((mask,))[0].tolist() == [-3.0, -3.0]


def test_fast_path_runs_no_tensor_operation() -> None:
    """One dispatched operator per call would cost more than all guards."""
    mask, scale = torch.ones(2, 2), torch.tensor(3.0)
    feeds = _feeds(_group([0], operator.neg, mask), _group([1], torch.clone, scale))
    feeds.bind((mask, scale))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        feeds.bind((mask, scale))
    assert [event.name for event in profile.events() if event.name.startswith("aten::")] == []


# Staging, with the CPU as the device: one copy per call, aligned views, and no buffer reused while it is in flight.


def _layout(tensor: torch.Tensor) -> TensorLayout:
    dense = torch.empty_like(tensor)
    return TensorLayout(tuple(dense.shape), tuple(dense.stride()), dense.dtype)


def _staging(*layouts: TensorLayout, keep_addresses: bool = True) -> Staging:
    staged = tuple(Staged(Source("argument", index), layout) for index, layout in enumerate(layouts))
    return Staging(FeedPlan(CPU, (), staged=staged, keep_addresses=keep_addresses))


TENSORS = (
    torch.tensor(3),
    torch.arange(5, dtype=torch.int8),
    torch.rand(2, 3),
    torch.rand(4, 2).t(),
    torch.zeros(0, 7),
    torch.tensor([True, False, True]),
    torch.rand(3, dtype=torch.float64),
    torch.tensor([1 + 2j]),
    torch.rand(3).to(torch.bfloat16),
    torch.rand(2, 3)[:, 1:],
    torch.rand(3, 1).expand(3, 4),
)


@pytest.mark.parametrize("keep_addresses", [True, False])
def test_each_call_stages_its_values_in_dense_layout(keep_addresses: bool) -> None:
    staging = _staging(*map(_layout, TENSORS), keep_addresses=keep_addresses)
    for _ in range(3):
        tensors = tuple(torch.rand(tensor.shape).mul(3).to(tensor.dtype) for tensor in TENSORS)
        for staged, tensor, given in zip(staging.stage(tensors), tensors, TENSORS, strict=True):
            assert torch.equal(staged, tensor)
            assert staged.stride() == torch.empty_like(given).stride()
            assert staged.dtype == given.dtype


def test_every_staged_tensor_is_aligned_relative_to_the_buffer() -> None:
    staging = _staging(*map(_layout, TENSORS))
    staged = staging.stage(TENSORS)
    (buffer,) = staging.buffers()
    for tensor in staged:
        assert (tensor.data_ptr() - buffer.data_ptr()) % ALIGNMENT_BYTES == 0 or tensor.numel() == 0


def test_all_arguments_are_staged_by_one_copy() -> None:
    staging = _staging(*map(_layout, TENSORS))
    staging.stage(TENSORS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        staging.stage(TENSORS)
    names = [event.name for event in profile.events()]
    # One copy of each into the buffer on the host, one of the buffer to the device.
    assert names.count("aten::_foreach_copy_") == 1
    assert sum(name == "aten::copy_" for name in names) == len(TENSORS) + 1


def test_addresses_are_reused_only_for_unreferenced_values() -> None:
    value = torch.rand(3)
    fixed = _staging(_layout(value))
    assert fixed.stage((value,))[0] is fixed.stage((value,))[0]
    fresh = _staging(_layout(value), keep_addresses=False)
    (first,) = fresh.stage((torch.ones(3),))
    fresh.stage((torch.zeros(3),))
    assert first.tolist() == [1.0, 1.0, 1.0]


def test_sizes_that_differ_between_calls_get_a_buffer_each() -> None:
    mode_symbol = object()
    layout = TensorLayout((mode_symbol,), (1,), torch.float32)
    staging = _staging(layout)
    for size in (3, 5, 3, 0, 5):
        value = torch.rand(size)
        assert torch.equal(staging.stage((value,))[0], value)
    assert len(staging.buffers()) == 3
    for size in range(10, 10 + 2 * LAYOUTS_LIMIT):
        staging.stage((torch.rand(size),))
    assert len(staging.buffers()) == LAYOUTS_LIMIT


def test_changing_layouts_do_not_accumulate_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "LAYOUTS_LIMIT_BYTES", 1000)
    staging = _staging(TensorLayout((object(),), (1,), torch.float32))
    for size in (64, 100, 128, 300, 64):
        value = torch.rand(size)
        assert torch.equal(staging.stage((value,))[0], value)
        assert sum(buffer.nbytes for buffer in staging.buffers()) <= 1000


def test_large_buffers_have_a_short_ring(monkeypatch: pytest.MonkeyPatch, late_events: list[_LateEvent]) -> None:
    monkeypatch.setattr(staging_module, "PINNED_LIMIT_BYTES", 300)
    staging = _staging(_layout(torch.rand(16)))
    for number in range(8):
        staging.stage((torch.full((16,), float(number)),))
    assert len(late_events) == 300 // 64


class _LateEvent:
    """An event that completes on request."""

    made: list[_LateEvent]

    def __init__(self) -> None:
        self.passed = True
        self.waited = 0
        self.made.append(self)

    def record(self, stream: Any) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waited += not self.passed
        self.passed = True


@pytest.fixture
def late_events(monkeypatch: pytest.MonkeyPatch) -> list[_LateEvent]:
    """Copies that stay in flight until a wait, for host buffers of a simulated GPU."""
    _LateEvent.made = []
    made = staging_module._HostBuffer.__init__
    monkeypatch.setattr(torch.cuda, "Event", _LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    on_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(
        staging_module._HostBuffer, "__init__", lambda buffer, memory, views, _: made(buffer, memory, views, on_gpu)
    )
    return _LateEvent.made


def test_only_a_full_ring_waits_for_its_oldest_buffer(late_events: list[_LateEvent]) -> None:
    staging = _staging(_layout(torch.rand(3)))
    for number in range(BUFFERS_LIMIT + 1):
        staging.stage((torch.full((3,), float(number)),))
    assert [event.waited for event in late_events] == [1] + [0] * (BUFFERS_LIMIT - 1)


def test_completed_buffer_is_reused(late_events: list[_LateEvent]) -> None:
    staging = _staging(_layout(torch.rand(3)))
    for _ in range(5):
        staging.stage((torch.rand(3),))
        for event in late_events:
            event.passed = True
    assert len(late_events) == 1


def test_default_device_changes_nothing() -> None:
    value = torch.rand(3)
    with torch.device("meta"):
        (staged,) = _staging(_layout(value)).stage((value,))
    assert torch.equal(staged, value)


def test_staging_in_inference_mode_can_be_used_outside() -> None:
    value = torch.rand(3)
    staging = _staging(_layout(value))
    with torch.inference_mode():
        staging.stage((value,))
    (staged,) = staging.stage((value * 2,))
    assert torch.equal(staged, value * 2)
    assert not staged.is_inference()


# Guards check that attributes have their earlier values if tensors are at new addresses.


def test_pinned_scalar_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into it may be in flight, so equal bytes are no evidence."""
    pinned: set[int] = set()
    asked: list[int] = []

    def is_pinned(tensor: torch.Tensor) -> bool:
        asked.append(tensor.data_ptr())
        return tensor.data_ptr() in pinned

    monkeypatch.setattr(guards, "is_pinned", is_pinned)
    first, second, third = (torch.tensor(2.5) for _ in range(3))
    checks = checks_for([(0, first)])

    for _ in range(3):
        assert not checks.fail([first])
        assert not checks.fail([second])
    assert asked == [first.data_ptr(), second.data_ptr()], "each address is checked once"

    pinned.add(third.data_ptr())
    for _ in range(2):
        assert checks.fail([third])
    assert not checks.fail([first])


# Memory that placement keeps on the GPU is read and overwritten in order on any streams.


@pytest.fixture
def streams(workspaces: Workspaces) -> Workspaces:
    workspaces.stream = 1
    return workspaces


def test_overwritten_memory_has_no_reader_on_any_stream(streams: Workspaces) -> None:
    used: list[tuple[str, int]] = []
    kept: Any = SimpleNamespace(record_stream=lambda stream: used.append(("kept", stream.cuda_stream)))
    order = feeds._StreamOrder(torch.device("cuda", 0), lambda: [kept])
    order.overwrite()
    order.follow()
    order.overwrite()
    assert streams.waited == [], "one stream keeps its own order"
    streams.stream = 2
    order.follow()
    assert (streams.waited, used) == ([(2, 1)], [("kept", 2)])
    order.follow()
    assert len(streams.waited) == 1
    order.overwrite()
    assert streams.waited[1:] == [(2, 1)], "work may have come there since"
    streams.stream = 3
    order.follow()
    order.overwrite()
    assert streams.waited[2:] == [(3, 2), (3, 1), (3, 2)]


def test_possibly_destroyed_stream_is_awaited_once(streams: Workspaces) -> None:
    order = feeds._StreamOrder(torch.device("cuda", 0), list)
    order.follow()
    streams.stream = EXTERNAL
    order.follow()
    streams.stream = 2
    order.follow()
    assert streams.waited == [(EXTERNAL, 1), (2, EXTERNAL)]
    order.overwrite()
    assert streams.waited[2:] == [(2, 1)]


def test_capture_of_a_step_waits_for_no_outside_stream(streams: Workspaces) -> None:
    order = feeds._StreamOrder(torch.device("cuda", 0), list)
    order.follow()
    streams.stream, streams.capturing = 7, {7}
    order.follow()
    order.overwrite()
    assert streams.waited == []
    streams.stream, streams.capturing = 2, set()
    order.follow()
    order.overwrite()
    assert streams.waited == [(2, 1), (2, 1)], "of what was captured nothing ran"


def test_nothing_waits_for_a_stream_another_thread_captures_on(streams: Workspaces) -> None:
    order = feeds._StreamOrder(torch.device("cuda", 0), list)
    for streams.stream in (1, 2, 3):
        order.follow()
    streams.given.clear()
    streams.capturing = {2}
    order.overwrite()
    assert streams.waited == [(3, 1)]
    streams.stream, streams.capturing = 1, {3}
    order.follow()
    order.overwrite()
    assert streams.waited == [(3, 1), (1, 2)]
