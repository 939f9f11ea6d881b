"""`tests/gpu/programs.py`: programs at tiny size, what compares and judges them, and the script with real workers."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from row_files import read_rows

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU_TESTS))

from real_programs import floor  # noqa: E402
from real_programs import rows as rows_of  # noqa: E402
from real_programs.record import Setting, programs  # noqa: E402

PROGRAMS = programs()
SCRIPT = GPU_TESTS / "programs.py"


def setting(mode: str = "eager") -> Setting:
    return Setting(mode, "cpu", tiny=True)


def flat(nest: Any) -> list[Any]:
    from models.nests import leaves_of

    return list(leaves_of(nest))


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_repeats_itself_unless_it_trains(name: str):
    import torch
    from real_programs.worker import _round

    program = PROGRAMS[name]
    if program.missing():
        pytest.skip(f"not installed: {', '.join(program.missing())}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors, and other tests run next to this one
    try:
        body = program.build(setting())
        first, second = _round(program, body, 0), _round(program, body, 1)
    finally:
        torch.set_num_threads(threads)
    assert flat(first), "a program without results shows nothing"
    assert all(leaf.double().isfinite().all() for leaf in flat([first, second]))
    same = all(torch.equal(a, b) for a, b in zip(flat(first), flat(second), strict=True))
    assert same != program.trains
    if not program.trains and program.calls > 1:
        assert not all(
            torch.equal(a, b) for call in first[1:] for a, b in zip(flat(first[0]), flat(call), strict=False)
        ), "calls with one and the same result would hide a stale one"


# --- comparing


def saved(folder: Path, name: str, **leaves: Any) -> Path:
    from safetensors.torch import save_file

    path = folder / name
    save_file(leaves, str(path))
    return path


def test_worst_leaf_is_named_and_minus_zero_is_another_bit(tmp_path: Path):
    import torch
    from real_programs.compare import difference, relative_error

    left = saved(tmp_path, "left", a=torch.tensor([3.0, 4.1]), b=torch.tensor([1.01]))
    right = saved(tmp_path, "right", a=torch.tensor([3.0, 4.0]), b=torch.tensor([1.0]))
    found = difference(left, right)
    assert (found.where, found.bits) == ("a", False)
    assert found.error == pytest.approx(0.02, rel=1e-3)
    zeros = difference(saved(tmp_path, "plus", a=torch.tensor([0.0])), saved(tmp_path, "minus", a=torch.tensor([-0.0])))
    assert (zeros.error, zeros.bits) == (0.0, False)
    for one, other in (([1.0, float("nan")], [float("nan"), 1.0]), ([1.0], [1])):
        assert relative_error(torch.tensor(one), torch.tensor(other)) == float("inf"), "they cannot be compared"


# --- judging


def row(program: str = "p", mode: str = "encore", status: str = "ok", **fields: Any) -> dict[str, Any]:
    made = {"program": program, "mode": mode, "status": status, "reason": None, "verdict": None}
    if status == "ok":
        memory = {"allocated_bytes": 100, "reserved_bytes": 100}
        made |= {"whole_us": 10.0, "turns_us": [10.0]}
        made |= {"recording": memory, "learning": memory, "steady": memory}
    return made | fields


@pytest.mark.parametrize(
    ("fields", "stock", "verdict"),
    [
        ({"error_over_eager": 1e-4}, None, "right"),
        ({"error_over_eager": 2e-3}, None, "wrong"),
        ({"error_over_eager": 2e-3}, row(mode="stock", error_over_eager=1.1e-3), "as stock"),
        ({}, None, None),
    ],
)
def test_verdict_follows_from_error_and_bits(fields: dict[str, Any], stock: dict[str, Any] | None, verdict: str | None):
    assert rows_of.judged(row(**fields), 1e-3, stock)["verdict"] == verdict


def test_findings_exclude_stocks_and_eagers_failures():
    found = rows_of.findings(
        [
            row("a", "eager"),
            row("a", "stock", "error", reason="overwritten"),
            row("a", verdict="right"),
            row("b", "eager"),
            row("b", verdict="wrong", error_over_eager="Infinity", worst="final: 0"),
            row("c", "eager"),
            row("c", status="crashed", reason="by signal SIGSEGV"),
            row("d", "eager", "error", reason="no such thing"),
            row("d", status="error", reason="no such thing"),
            row("e", "eager", "skipped", reason="not installed"),
            row("e", status="skipped", reason="not installed"),
            row("f", "eager", "not_run", reason="budget"),
        ]
    )
    assert "results inf off" in found[0]
    assert [finding.split(":")[0] for finding in found] == ["b, encore", "c, encore", "d, eager", "f, eager"]


def test_table_has_times_verdicts_and_memory():
    rows = [
        row("a", "eager", whole_us=40.0),
        row("a", "stock", whole_us=20.0),
        row("a", whole_us=10.0, verdict="right"),
        row("b", "stock"),
        row("b", verdict="wrong", recording={"allocated_bytes": 1, "reserved_bytes": 300}),
        row("c", "stock", "error", reason="overwritten"),
        row("c", verdict="right"),
    ]
    text = rows_of.table(rows)
    first, _, third = (
        next(line.split() for line in text.splitlines() if line.startswith(f"{name} ")) for name in "abc"
    )
    assert first == ["a", "40", "20", "10", "right", "1.00/1.00/1.00"]
    assert third == ["c", "-", "error", "10", "right", "-/-/-"]
    assert "while recording 1.73 times stock's in the geometric mean; highest 3.00 (b)" in text
    assert "encore: 2 right, 1 wrong" in text
    assert "c, stock: error: overwritten" in text


def processes(**ratios: tuple[float, ...]) -> list[dict[str, Any]]:
    """Rows of programs that are so much faster than plain compile in each process, and twice that over stock."""
    rows = []
    for program, values in ratios.items():
        for process, value in enumerate(values, 1):
            rows.append(row(program, "compile", turns_us=[100.0] * 3, process=process))
            rows.append(row(program, "stock", turns_us=[200.0] * 3, process=process))
            rows.append(row(program, turns_us=[100.0 / value] * 3, process=process))
    return rows


def test_program_is_slow_by_its_interval_over_processes():
    rows = processes(slow=(0.80, 0.82, 0.81), noisy=(0.6, 0.9, 1.2), fast=(1.2, 1.21, 1.19))
    over = floor.speeds(floor.by_process([rows]))
    assert [line.split(",")[0] for line in floor.slow(over)] == ["SLOW: slow"]
    assert over["slow", "compile"].low < 0.81 < over["slow", "compile"].high < 0.95 < over["noisy", "compile"].high
    assert over["fast", "stock"].estimate == pytest.approx(2.4, rel=1e-3)
    programs, means, said = floor.brief(over)
    assert "slow 0.81 [0.79, 0.84] / 1.62 [" in programs and "over compile 0.94 (of 3), over graph 1.89 (of 3)" in means
    assert said.startswith("SLOW: slow, encore: 0.81")


# --- conducting


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import os; os.abort()", "crashed", "SIGABRT"),
        ("import time; time.sleep(60)", "timed_out", "no answer (prepared) within 2.0 s"),
        ('print(\'{"error": "RuntimeError: overwritten"}\')', "error", "RuntimeError: overwritten"),
        ('print(\'{"skipped": "not installed: unheard_of"}\')', "skipped", "unheard_of"),
    ],
)
def test_process_without_an_answer_says_why(tmp_path: Path, code: str, status: str, words: str):
    from real_programs.conduct import Process

    process = Process(PROGRAMS["side_stream"], "encore", tmp_path)
    process.start("cpu", "tiny", tmp_path, (sys.executable, "-c", code))
    process.ask("prepared", 2.0)
    process.kill()
    assert process.failure is not None
    assert process.failure[0] == status and words in process.failure[1]


# --- the command


def script(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=timeout, env=dict(os.environ)
    )


def test_script_compares_and_times_real_programs(tmp_path: Path):
    out = tmp_path / "rows.jsonl"
    names = "side_stream" + ("" if importlib.util.find_spec("diffusers") else ",diffusers_pipeline")
    done = script("--device", "cpu", "--tiny", "--only", names, "--out", str(out), "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["program"], row["mode"]): row for row in read_rows(out, rows_of.is_row)}
    assert len(rows) == 2 * len(names.split(","))
    compiled = rows["side_stream", "aot_eager"]
    assert (compiled["status"], compiled["verdict"], compiled["size"]) == ("ok", "right", "tiny")
    assert 0 < compiled["issue_us"] <= compiled["whole_us"]
    drawn = script("--table", str(out))
    assert drawn.returncode == 0
    assert drawn.stdout == done.stdout
    assert "aot_eager: 1 right" in drawn.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "lama_generate"], "llama_generate"),
        (["--seconds", "0"], "above 0"),
    ],
)
def test_wrong_use_is_reported(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT))["main"](arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
