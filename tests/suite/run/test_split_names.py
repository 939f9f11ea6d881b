"""Workloads split over GPUs: their names, and the commands that accept them."""

from __future__ import annotations

import pytest

from models.registry import UnknownWorkload, find
from suite.run.matrix import parse_degrees, split_names


def test_degrees_and_names_are_checked() -> None:
    assert parse_degrees("1, 2,4,2") == (1, 2, 4)
    assert split_names(["xlnet-i"], (1, 2), None) == ["XLNET-I@tp1", "XLNET-I@tp2"]
    everything = split_names([], (2,), None)
    assert everything == [f"{name}@tp2" for name in ("DALLE2", "DECODER", "ST", "VM", "XLNET-I")]


def test_split_workload_is_a_row_of_its_own() -> None:
    row = find("xlnet-i@tp4")
    assert (row.acronym, row.tp, row.batch, row.sets) == ("XLNET-I@tp4", 4, 128, ())
    assert find("DALLE2@tp1").batch == 2
    for name in ("EOS@tp2", "XLNET-I@tp0", "XLNET-I@tp", "XLNET-I@tpx", "NONE@tp2"):
        with pytest.raises(UnknownWorkload):
            find(name)


def test_more_gpus_than_there_are_is_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from suite.cli.main import main
    from suite.run import launch

    monkeypatch.setattr(launch, "find_gpu", lambda: None)
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["0", "1"])
    with pytest.raises(SystemExit) as ended:
        main(["run", "XLNET-I", "--tp", "2,4"])
    assert ended.value.code == 2
    assert "XLNET-I@tp4: 2 GPUs can be used here" in capsys.readouterr().err
