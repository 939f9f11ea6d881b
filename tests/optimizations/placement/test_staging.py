"""Staging, with the CPU as the device: one copy per call, aligned views, and no buffer reused while it is in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimizations.placement import staging as staging_module
from optimizations.placement.feed_plan import FeedPlan, Source, Staged, TensorLayout
from optimizations.placement.staging import ALIGNMENT_BYTES, BUFFERS_LIMIT, LAYOUTS_LIMIT, Staging

CPU = torch.device("cpu")


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


def test_evaluated_values_are_staged_like_arguments() -> None:
    first, second = torch.rand(3), torch.rand(2)
    staged = (Staged(Source("before", 1), _layout(second)), Staged(Source("argument", 0), _layout(first)))
    staging = Staging(FeedPlan(CPU, (), staged=staged))
    found = staging.stage((first,), (torch.zeros(1), second))
    assert torch.equal(found[0], second)
    assert torch.equal(found[1], first)


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


def test_buffer_in_flight_is_not_written(late_events: list[_LateEvent]) -> None:
    staging = _staging(_layout(torch.rand(3)))
    for number in range(BUFFERS_LIMIT):
        staging.stage((torch.full((3,), float(number)),))
    assert len(late_events) == BUFFERS_LIMIT
    assert not any(event.waited for event in late_events)
    hosts = [host.views[0].tolist()[0] for host in staging._fixed._ring]  # type: ignore[union-attr]
    assert hosts == [float(number) for number in range(BUFFERS_LIMIT)]


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


def test_released_staging_works_again() -> None:
    value = torch.rand(3)
    staging = _staging(_layout(value))
    staging.stage((value,))
    staging.release()
    assert staging.buffers() == []
    assert torch.equal(staging.stage((value,))[0], value)


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
