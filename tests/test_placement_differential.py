"""Random programs give the same bits before and after placement, call after call, whatever changes in between."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from placement_on_cpu import bits, placed_runner, runner
from placement_programs import INPUTS, Program, fresh_arguments, programs

from optimizations.placement import place

PROGRAMS = 800
_seen: Counter[str] = Counter()


@settings(
    max_examples=PROGRAMS,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_placed_program_gives_the_same_bits(program: Program) -> None:
    placement = place(program.graph_module, program.inputs)
    original = runner(program.graph_module, program.inputs)
    placed = placed_runner(placement, program.inputs)
    try:
        expected = _calls(original, program.used)
    except (RuntimeError, IndexError):
        # Fake tensors let pass what real ones refuse, such as writes to overlapping memory: no program.
        reject()
    _count(placement)
    found = _calls(placed, program.used)
    assert found == expected, f"{program.graph_module.graph}\n{placement.graph_module.graph}"


def _calls(run: Any, used: tuple[int, ...]) -> list[Any]:
    """Results and inputs after four calls, all looked at only when the last is done, as a caller may do."""
    first = fresh_arguments(1)
    results = []
    for seed in (1, 2, 3, 4):
        arguments = fresh_arguments(seed)
        for position, entry in enumerate(INPUTS):
            if entry.attribute and seed < 3 and not entry.made_per_call:
                # Unchanged at first: the very tensor of the first call.
                arguments[position] = first[position]
            elif entry.attribute and seed < 3:
                arguments[position] = fresh_arguments(1)[position]
            elif entry.attribute and seed == 3 and not entry.made_per_call:
                # Changed in place, and replaced by another tensor in the call after.
                arguments[position] = first[position].copy_(arguments[position])
        arguments = [arguments[position] for position in used]
        torch.manual_seed(seed)
        results.append((run(*arguments), arguments))
    return [(bits([list(values), arguments]), _shared([*values, *arguments])) for values, arguments in results]


def _shared(values: list[Any]) -> list[tuple[int, int]]:
    """Which results and arguments share memory: a caller that writes to one would see it in the other."""
    storages = [value.untyped_storage().data_ptr() for value in values]
    pairs = itertools.combinations(range(len(values)), 2)
    return [(one, other) for one, other in pairs if storages[one] == storages[other] and values[one].numel()]


def _count(placement: Any) -> None:
    report = placement.report
    _seen["rewritten"] += placement.feeds is not None
    _seen["programs"] += 1
    for what in ("hoisted", "staged", "moved", "cpu_outputs", "left"):
        _seen[what] += bool(getattr(report, what))
    for form in {entry.form for entry in report.hoisted}:
        _seen[form] += 1
    for left in report.left:
        _seen[left.reason.split(":")[0]] += 1


def test_the_programs_cover_what_placement_does() -> None:
    """Without this a generator that makes nothing but trivial programs would pass."""
    if _seen["programs"] < PROGRAMS / 2:
        pytest.skip("runs after the differential test")
    for what in ("rewritten", "hoisted", "staged", "moved", "cpu_outputs", "left", "kept", "literal", "rebuilt"):
        assert _seen[what] >= PROGRAMS / 50, f"{what}: {_seen[what]} of {_seen['programs']}"
