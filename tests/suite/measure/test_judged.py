"""Whose results are as right as those that were compared with eager."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import pytest

from suite.measure.correctness import Agreement
from suite.measure.judged import Judged, JudgedResults

RIGHT = Judged(
    bits=({"output": "a", "gradient w": "b", "uncompared output": "u"}, {"output": "c", "gradient w": "d"}),
    errors=({"output": 0.001, "gradient w": 0.08}, {"output": 0.002, "gradient w": 0.07}),
    verdict=Agreement(True, 2, 0.08, "gradient w", 0.3, undecided=True, widened_error=1e-6),
)


def verdict(folder: Path, change: dict[tuple[int, str], float], tolerance: float = 0.02) -> Agreement | None:
    """On results of which some tensors have other bits, and these errors."""
    bits = [dict(one) for one in RIGHT.bits]
    for place, name in change:
        bits[place][name] = "other"

    def errors(place: int, names: Collection[str]) -> dict[str, float]:
        assert set(names) == {name for where, name in change if where == place}, "what has the bits is not looked at"
        return {name: change[place, name] for name in names}

    found = JudgedResults(folder).as_right(bits, errors, tolerance)
    return found.verdict if found is not None else None


def test_the_same_bits_have_the_same_verdict(tmp_path: Path) -> None:
    assert verdict(tmp_path / "none", {}) is None
    JudgedResults(tmp_path).add(RIGHT)
    assert verdict(tmp_path, {}) == RIGHT.verdict


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({(0, "output"): 0.02}, True),
        ({(0, "output"): 0.021}, False),
        ({(0, "gradient w"): 0.09, (1, "gradient w"): 0.03}, True),
        ({(1, "gradient w"): 0.09}, False),
        ({(1, "output"): math.inf}, False),
        ({(1, "output"): math.nan}, False),
        ({(0, "uncompared output"): 0.0}, False),
    ],
)
def test_other_bits_pass_within_tolerance_or_slightly_beyond(
    tmp_path: Path, change: dict[tuple[int, str], float], passed: bool
) -> None:
    JudgedResults(tmp_path).add(RIGHT)
    assert verdict(tmp_path, change) == (RIGHT.verdict if passed else None)


def test_result_near_eager_needs_no_earlier_result(tmp_path: Path) -> None:
    """Eager itself, in a dtype that does not decide: its row says nothing of what compiling changes."""
    JudgedResults(tmp_path).add(RIGHT)
    change = {(0, "output"): 0.0, (0, "gradient w"): 0.0, (1, "output"): 0.01, (1, "gradient w"): 0.0}
    assert verdict(tmp_path, change) == Agreement(True, 2, 0.01, "output", None)


def test_no_error_of_what_was_found_right_excuses_zeros(tmp_path: Path) -> None:
    wild = Judged(RIGHT.bits, ({"output": 400.0, "gradient w": 400.0},) * 2, RIGHT.verdict)
    JudgedResults(tmp_path).add(wild)
    assert verdict(tmp_path, {(0, "output"): 0.45}) is not None
    assert verdict(tmp_path, {(0, "output"): 1.0}) is None


def test_other_tensors_are_other_results(tmp_path: Path) -> None:
    JudgedResults(tmp_path).add(RIGHT)
    for bits in (RIGHT.bits[:1], [RIGHT.bits[0], {"output": "c"}], [*RIGHT.bits, RIGHT.bits[0]]):
        assert JudgedResults(tmp_path).as_right(bits, lambda place, names: {}, 1.0) is None


def test_several_results_may_be_right(tmp_path: Path) -> None:
    JudgedResults(tmp_path).add(RIGHT)
    JudgedResults(tmp_path).add(Judged(({"output": "e"},), ({"output": 0.0},), Agreement(True, 1, 0.0, "output", None)))
    assert verdict(tmp_path, {}) == RIGHT.verdict
    found = JudgedResults(tmp_path).as_right([{"output": "e"}], lambda place, names: {}, 0.0)
    assert found is not None and found.verdict.compared_tensors == 1


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_what_has_most_bits_in_common_is_looked_at_first(tmp_path: Path, names: str) -> None:
    """Comparing takes seconds for gigabytes of gradients, and a mode has most bits of one program or of another."""
    agreement = Agreement(True, 2, 0.01, "output", None)
    for name in names:  # files have the names of what is in them
        bits = {"output": f"{name} output", "gradient w": f"{name} w", "gradient v": f"{name} v"}
        JudgedResults(tmp_path).add(Judged((bits,), (dict.fromkeys(bits, 0.01),), agreement))
    asked = []
    for name in names:
        own = {"output": f"{name} output", "gradient w": f"{name} w", "gradient v": "varies"}
        errors = lambda place, others: asked.append(list(others)) or dict.fromkeys(others, 0.01)  # noqa: E731
        assert JudgedResults(tmp_path).as_right([own], errors, 0.02) is not None
    assert asked == [["gradient v"]] * 2


def test_accepted_result_is_compared_once_and_excuses_nothing(tmp_path: Path) -> None:
    """Four modes of one program have the same bits, other ones than the first mode's."""
    others = JudgedResults(tmp_path)
    others.add(RIGHT)

    def own(gradient: str) -> list[dict[str, str]]:
        return [{**RIGHT.bits[0], "gradient w": gradient}, dict(RIGHT.bits[1])]

    def as_right(gradient: str, error: float | None) -> Judged | None:
        def errors(place: int, names: Collection[str]) -> dict[str, float]:
            assert error is not None, "its bits are known"
            return dict.fromkeys(names, error)

        return others.as_right(own(gradient), errors, 0.02)

    found = as_right("second", 0.099)
    assert found is not None and found.verdict == RIGHT.verdict
    others.add(found)
    again = as_right("second", None)
    assert again is not None and again.verdict == found.verdict and again.errors[0]["gradient w"] == 0.099
    assert as_right("third", 0.12) is None, "as near to the second as that is to the first"
    near = as_right("near", 0.001)
    assert near is not None and near.verdict == RIGHT.verdict, "the other input set has the first one's error"


def test_a_folder_that_cannot_be_written_to_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    JudgedResults(tmp_path / "file" / "judged").add(RIGHT)
    assert "not kept for other processes" in capsys.readouterr().out
