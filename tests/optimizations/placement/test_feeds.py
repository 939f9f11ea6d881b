"""Placement at run time, with the CPU as the device: values follow attributes and are not overwritten early."""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from interrupts import interrupted_after

from optimizations.placement.feed_plan import FeedPlan, HoistedGroup, TensorLayout
from optimizations.placement.feeds import Feeds

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


def test_attributes_with_gaps_and_overlaps_are_compared_whole() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view, written in ((base[:, ::2], (2, 2)), (base[:1].expand(3, 4), (0, 3)), (base.t(), (2, 3))):
        feeds = _feeds(_group([0], torch.clone, torch.empty_like(view)))
        assert torch.equal(feeds.bind((view,))[0], view)
        base.numpy()[written] += 1
        assert torch.equal(feeds.bind((view,))[0], view)


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
