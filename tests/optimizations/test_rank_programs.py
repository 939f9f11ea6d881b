"""Compiled programs of several processes on the CPU: the same results as uncompiled, through the backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks_on_cpu import run_ranks


def play(folder: Path, program: str, mode: str, **variables: str) -> list[dict[str, Any]]:
    script = f"import sys\nsys.argv[1:] = [{program!r}, {mode!r}]\nimport rank_programs\nrank_programs.main()\n"
    outputs = run_ranks(folder, script, **variables)
    return [json.loads(output.rpartition("FOUND ")[2].splitlines()[0]) for output in outputs]


def test_split_layers_compiled_by_encore_are_correct(tmp_path: Path) -> None:
    for found in play(tmp_path, "replays", "encore", CALLS="13"):
        assert (found["calls"], found["wrong"]) == (13, 0)


def test_compiled_decoder_split_by_pytorch_is_correct(tmp_path: Path) -> None:
    for found in play(tmp_path, "split", "encore", CALLS="7", LAYERS="1", WIDTH="16"):
        assert 0 < found["worst"] < 1e-5


@pytest.mark.parametrize("program", ["ddp", "fsdp"])
def test_compiled_training_on_several_ranks_is_correct(tmp_path: Path, program: str) -> None:
    found = play(tmp_path, program, "eager,encore", STEPS="3", TIMED="0", LAYERS="1", WIDTH="16")
    for rank in found:
        assert rank["encore"]["losses"] == pytest.approx(rank["eager"]["losses"], rel=1e-4)
    assert found[0]["eager"]["losses"] != found[1]["eager"]["losses"], "each has data of its own"
