from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from suite.cli.main import app
from suite.micro import feeds
from suite.micro import host as micro_host
from suite.micro.feeds import FeedRun, measure_steady_feeds
from suite.results.errors import WrongUse


def test_each_guard_costs_time() -> None:
    few = measure_steady_feeds(scalars=1, tensors=0, kept=10, rounds=5, calls=300)
    many = measure_steady_feeds(scalars=24, tensors=0, kept=10, rounds=5, calls=300)
    assert 0 < few.bare_us < few.host_us < many.host_us
    assert few.fastest_us <= few.host_us <= few.slowest_us


def test_command_writes_costs_with_their_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = iter([(0, 0), (6, 1)])

    def quick() -> object:
        return (measure_steady_feeds(scalars=s, tensors=t, kept=4, rounds=3, calls=50) for s, t in points)

    monkeypatch.setattr(feeds, "measure", quick)
    done = CliRunner().invoke(app, ["micro", "feeds", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    run = FeedRun.model_validate_json((tmp_path / "feeds.json").read_text())
    assert [(cost.scalars, cost.tensors) for cost in run.costs] == [(0, 0), (6, 1)]
    assert run.environment.cpu.model
    assert f"{run.costs[1].host_us:.2f}" in done.output


@pytest.mark.parametrize("name", ["feeds", "host"])
def test_where_nothing_can_be_written_nothing_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*arguments: object) -> object:
        raise AssertionError("measured before it is known where results go")

    monkeypatch.setattr(feeds, "measure", measured)
    monkeypatch.setattr(micro_host, "measure", measured)
    in_the_way, full = tmp_path / "file", tmp_path / "folder"
    in_the_way.write_text("mine")
    full.mkdir()
    (full / f"{name}.json").write_text("{}")
    device = () if name == "feeds" else ("--device", "cpu")
    for folder, words in (
        (in_the_way, "a file is in the way"),
        (in_the_way / "deeper", "in the way"),
        (full, "already"),
    ):
        done = CliRunner().invoke(app, ["micro", name, *device, "--out", str(folder)])
        assert isinstance(done.exception, WrongUse) and words in str(done.exception)
    assert in_the_way.read_text() == "mine"
    assert (full / f"{name}.json").read_text() == "{}"


def test_the_sweep_has_the_sizes_of_the_speech_transformer() -> None:
    assert {6, 12} <= set(feeds.SCALARS)
    assert 1 in feeds.TENSORS
