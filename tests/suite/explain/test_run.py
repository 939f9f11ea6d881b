"""Targets run in their own processes, which contain their failures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from suite.explain.records import Explanation
from suite.explain.run import explain_many, file_name
from suite.explain.targets import Target
from suite.results.errors import WrongUse

PROGRAMS = Path(__file__).parents[2] / "support"
TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def in_the_programs_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROGRAMS)


def test_failing_programs_do_not_end_the_others(tmp_path: Path) -> None:
    targets = [Target(f"explain_programs:{name}", None) for name in ("dies", "raises", "mask_attribute")]
    before = (torch.cuda.is_available, torch.nn.Module._apply, dict(os.environ))
    had_gpu = torch.cuda.is_available()
    explained = list(explain_many(targets, out=tmp_path, timeout_s=TIMEOUT_S))
    errors = {target.name.partition(":")[2]: explanation.error for target, explanation in explained}
    assert errors["mask_attribute"] is None
    assert "killed by SIGABRT" in (errors["dies"] or "")
    assert "ArithmeticError: no such number" in (errors["raises"] or "")
    assert "explain_programs.py" in (errors["raises"] or "")
    assert [len(one.graphs) for target, one in explained if "raises" in target.name] == [1], "what was found before"
    assert {path.name for path in tmp_path.iterdir()} == {file_name(target) for target in targets}
    for target, explanation in explained:
        written = (tmp_path / file_name(target)).read_bytes()
        assert Explanation.model_validate_json(written) == explanation
    assert (torch.cuda.is_available, torch.nn.Module._apply, dict(os.environ)) == before
    assert torch.cuda.is_available() == had_gpu


def test_explain_ends_a_target_after_its_processor_time() -> None:
    ((_, explanation),) = explain_many([Target("explain_programs:spins", None)], timeout_s=1.0)
    assert "longer than 1 s of processor time" in (explanation.error or "")


@pytest.mark.parametrize(
    ("name", "message"),
    [("explain_programs:returns_a_number", "returned int"), ("explain_programs:nothing", "no 'nothing'")],
)
def test_wrong_programs_are_wrong_use(name: str, message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        list(explain_many([Target(name, None)], timeout_s=TIMEOUT_S))


def test_files_are_named_after_target_and_variant() -> None:
    assert file_name(Target("MMC", "published")) == "MMC.json"
    assert file_name(Target("MMC", "current")) == "MMC-current.json"
    assert file_name(Target("package.module:make", None)) == "package.module.make.json"
