"""Random programs give the same bits before and after placement, call after call, whatever changes in between."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from placement_on_cpu import bits, placed_runner, runner
from placement_programs import INPUTS, Program, fresh_arguments, programs

from optimizations.placement import place
from optimizations.report import PlacementReport

PROGRAMS = 800


def test_placed_programs_give_the_same_bits_and_alias_the_same() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=PROGRAMS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def same(program: Program) -> None:
        placement = place(program.graph_module, program.inputs)
        try:
            expected = _calls(runner(program.graph_module, program.inputs), program.used)
        except (RuntimeError, IndexError):
            # Fake tensors let pass what real ones refuse, such as writes to overlapping memory: no program.
            reject()
        seen.update(_kinds(placement.report))
        found = _calls(placed_runner(program.graph_module, placement, program.inputs), program.used)
        assert found == expected, f"{program.graph_module.graph}\n{placement.graph_module.graph}"

    same()
    assert seen["programs"] >= 500
    # Without this a generator that makes nothing but trivial programs would pass.
    for kind in ("rewritten", "kept", "literal", "rebuilt", "staged", "before", "after", "cpu_outputs", "left"):
        assert seen[kind] >= PROGRAMS / 50, f"{kind}: {seen}"


def _calls(run: Callable[..., Any], used: tuple[int, ...]) -> list[Any]:
    """Results and inputs after four calls, all looked at only when the last is done, as a caller may do."""
    first = fresh_arguments(1)
    results = []
    for seed in (1, 2, 3, 4):
        arguments = fresh_arguments(seed)
        for position, entry in enumerate(INPUTS):
            if not entry.attribute:
                continue
            if seed < 3:
                # Unchanged at first: the very tensor of the first call, or one of the same value.
                arguments[position] = fresh_arguments(1)[position] if entry.made_per_call else first[position]
            elif seed == 3 and not entry.made_per_call:
                # Changed in place; in the call after, another tensor.
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


def _kinds(report: PlacementReport) -> set[str]:
    """What placement did with a program."""
    kinds = {"programs", *(hoisted.form for hoisted in report.hoisted)}
    kinds.update(
        what for what in ("staged", "before", "after", "moved", "cpu_outputs", "left") if getattr(report, what)
    )
    return kinds | ({"rewritten"} if report.untouched is None else set())
