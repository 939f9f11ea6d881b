"""Random programs give eager's results after placement. `tests/mutation` has defects that the fuzzer must find."""

from __future__ import annotations

import pytest

from fuzz.compare import fuzz
from fuzz.programs import draw, text

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


def test_program_is_drawn_from_its_seed() -> None:
    assert draw(7, 3) == draw(7, 3) != draw(7, 4)
    assert text(draw(7, 3), repeat="again").startswith("# again; before later calls")
