"""Random programs give eager's results after placement; and the fuzzer finds what it is there to find."""

from __future__ import annotations

import pytest

from fuzz.compare import fuzz, through_inductor
from fuzz.programs import build, draw, text
from fuzz.reversions import DEFECTS, found_after

SHARDS = 2
PROGRAMS = 600 // SHARDS
SEED = 0


@pytest.mark.parametrize("shard", range(SHARDS))
def test_placed_programs_are_eagers(shard: int) -> None:
    outcome = fuzz(SEED, range(shard * PROGRAMS, (shard + 1) * PROGRAMS), stop_at=1)
    assert not outcome.failures, str(outcome.failures[0])
    # Without this a generator that makes nothing but trivial programs would pass.
    assert outcome.seen["compared"] >= PROGRAMS * 3 / 4
    for what in ("rewritten", "kept", "literal", "staged", "before", "after", "left"):
        assert outcome.seen[what] >= PROGRAMS / 125, f"{what}: {outcome.seen}"


def test_placed_programs_through_inductor_are_eagers() -> None:
    compiled = 0
    for number in range(200):
        found = through_inductor(draw(SEED, number))
        assert not found, f"{found}\n{text(draw(SEED, number), repeat='')}"
        compiled += found is None
        if compiled == 3:
            return
    raise AssertionError(f"only {compiled} programs could be compiled")


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_defect_that_is_put_back_is_found(name: str) -> None:
    assert found_after(name, seed=SEED, count=400) is not None


def test_program_is_drawn_from_its_seed_in_under_30_lines() -> None:
    assert draw(7, 3) == draw(7, 3) != draw(7, 4)
    for number in range(60):
        program = draw(SEED, number)
        printed = text(program, repeat="python -m tests.fuzz --seed 0 --only 0")
        compile(printed, "program", "exec")
        assert len(printed.splitlines()) < 30, printed
        graph = build(program).graph_module.graph
        assert str(graph) == str(build(program).graph_module.graph)
