"""`encore run nanogpt`: a run with scripted processes, what it writes and shows, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from models.nanogpt.configurations import NAMED, SWEEP
from models.registry import Size
from suite.cli.nanogpt import RESULTS
from suite.measure import environment
from suite.nanogpt.paths import PATHS
from suite.nanogpt.records import NanoGptRun
from suite.nanogpt.run import run_paths
from suite.nanogpt.tables import NONE, grids
from suite.report.paper import EXHIBITS, Results
from suite.report.paper.nanogpt import read_nanogpt
from suite.report.published import load_published

SCRIPTED = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("path", "device", "size", "seed", "read", "write"): parser.add_argument("--" + name)
options = parser.parse_args()
def say(**message): os.write(int(options.write), json.dumps(message).encode() + b"\\n")
print("log of", options.path, flush=True)
if options.path == "compile": sys.exit(3)
if options.path == "graph": say(type="failed", error="RuntimeError: no graph"); sys.exit(1)
say(type="ready", warm_up_s=1.5, device="a device")
asked = 0
for line in os.fdopen(int(options.read)):
    question = json.loads(line)
    if question["type"] == "settle":
        say(type="settled", settled=options.path == "encore")
        continue
    asked += 1
    if options.path == "indirection" and asked == 12: time.sleep(600)
    tokens = list(range(question["new_tokens"]))
    if options.path == "encore" and question["new_tokens"] == 48: tokens[5] = -1
    us = {"eager": 400.0}.get(options.path, 100.0)
    steps = question["new_tokens"] - 1
    say(type="done", generation=dict(tokens=tokens, total_s=[us / 1e3], prompt_us=[7.0], step_us=[[2 * us] * steps],
        call_us=[[us] * steps]))
"""


def run_with(
    command: Sequence[str],
    paths: Sequence[str],
    rounds: int,
    *,
    device: str = "cpu",
    size: Size = "tiny",
    timeout_s: float = 10.0,
) -> tuple[NanoGptRun, list[NanoGptRun], list[str]]:
    """A run whose paths are these commands, what was saved, and what was said."""
    saved: list[NanoGptRun] = []
    said: list[str] = []
    run = run_paths(
        [PATHS[name] for name in paths],
        environment.collect("a run", (), {}),
        device=device,
        size=size,
        seed=1,
        rounds=rounds,
        timeout_s=timeout_s,
        save=saved.append,
        say=said.append,
        command=command,
    )
    return run, saved, said


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run over all paths: two fail at once, one hangs in the second configuration of the second round, one samples
    another token."""
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "worker.py"
    script.write_text(SCRIPTED)
    run, saved, said = run_with(
        (sys.executable, str(script)), list(PATHS), 2, device="cuda", size="full", timeout_s=3.0
    )
    return {"run": run, "saved": saved, "said": said}


def test_a_path_that_fails_says_how_and_the_others_go_on(scripted: dict[str, Any]):
    run: NanoGptRun = scripted["run"]
    failed = {path.name: path.failed for path in run.paths if path.failed}
    assert failed.keys() == {"compile", "graph", "indirection"}
    assert "exit code 3" in failed["compile"]
    assert "log of compile" in failed["compile"]
    assert failed["graph"] == "RuntimeError: no graph"
    assert failed["indirection"].startswith("no answer within 3 s")
    assert [each.name for each in run.configurations] == [each.name for each in (*NAMED, *SWEEP)]
    assert {tuple(each.paths) for each in run.configurations} == {("eager", "replay", "indirection", "encore")}
    rounds = [{name: len(path.total_s) for name, path in each.paths.items()} for each in run.configurations]
    assert rounds[0] == {"eager": 2, "replay": 2, "indirection": 2, "encore": 2}
    assert rounds[1:] == [{"eager": 2, "replay": 2, "indirection": 1, "encore": 2}] * 9, "what it had is kept"


def test_encores_paths_settle_before_the_first_round(scripted: dict[str, Any]):
    settled = {path.name: path.settled for path in scripted["run"].paths}
    assert settled == {
        "eager": None,
        "replay": None,
        "compile": None,
        "graph": None,
        "indirection": False,
        "encore": True,
    }
    said: list[str] = scripted["said"]
    assert said.index("indirection: measured before it has settled") < said.index("encore: settled")
    assert said.index("encore: settled") < said.index("round 1 of 2")


ENDING = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
for name in ("path", "device", "size", "seed", "read", "write"): parser.add_argument("--" + name)
options = parser.parse_args()
def say(**message): os.write(int(options.write), json.dumps(message).encode() + b"\\n")
say(type="ready", warm_up_s=1.5, device="a device")
for asked, line in enumerate(os.fdopen(int(options.read)), 1):
    if asked > {count}: sys.exit(5)
    steps = json.loads(line)["new_tokens"] - 1
    us = [[float(asked)] * steps]
    say(type="done", generation=dict(tokens=[0] * (steps + 1), total_s=[asked], prompt_us=[7.0], step_us=us,
        call_us=us))
"""


def run_ending(folder: Path, count: int) -> tuple[NanoGptRun, list[NanoGptRun], list[str]]:
    """A run of three rounds whose one path ends after so many answers, each of which has its number as its time."""
    script = folder / "worker.py"
    script.write_text(ENDING.replace("{count}", str(count)))
    return run_with((sys.executable, str(script)), ["eager"], 3)


def test_every_round_runs_each_configuration_once_and_is_saved(tmp_path: Path):
    run, saved, said = run_ending(tmp_path, 30)
    assert run.findings() == []
    taken = [each.paths["eager"].total_s for each in run.configurations]
    assert taken == [[place, place + 10, place + 20] for place in range(1, 11)]
    assert [len(each.configurations[9].paths["eager"].total_s) for each in saved] == [1, 2, 3]
    assert [each.rounds for each in saved] == [1, 2, 3], "those done: a run may be interrupted"
    assert said[-3:] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]


def test_a_configuration_without_samples_is_not_in_the_record(tmp_path: Path):
    run, saved, said = run_ending(tmp_path, 4)
    assert [each.name for each in run.configurations] == [each.name for each in NAMED[:4]]
    assert saved == [run], "no round follows where no path is left"
    assert "exit code 5" in str(run.paths[0].failed)
    assert said[-1] == "round 1 of 3"


def test_where_all_paths_fail_their_reasons_are_saved_and_shown(tmp_path: Path):
    run, saved, _ = run_with((sys.executable, "-c", "raise SystemExit(4)"), ["eager", "compile"], 1)
    assert [finding.partition(":")[0] for finding in run.findings()] == ["eager", "compile"]
    assert saved == [run] and run.configurations == []
    *tables, paths = grids(run, load_published())
    assert all(table.rows == () and "no path was ready" in table.title for table in tables)
    assert all("exit code 4" in row[3] for row in paths.rows)


def test_the_record_is_saved_after_each_round_and_read_back(scripted: dict[str, Any]):
    assert [run.rounds for run in scripted["saved"]] == [1, 2]
    run: NanoGptRun = scripted["run"]
    assert NanoGptRun.model_validate_json(run.model_dump_json()) == run


def test_other_tokens_are_a_finding(scripted: dict[str, Any]):
    found = [finding for finding in scripted["run"].findings() if "sampled" in finding]
    assert found == [
        f"{name}: encore sampled another token than the first path at place 5"
        for name in ("long_generation", "sweep_48")
    ]


def test_tables_have_measured_and_published_values_side_by_side(scripted: dict[str, Any]):
    named, sweep, paths = grids(scripted["run"], load_published())
    rows = {(row[0], row[3]): dict(zip(named.headings, row, strict=True)) for row in (*named.rows, *sweep.rows)}
    replay = rows["medium_generation", "replay"]
    assert (replay["step (ms)"], replay["over eager"], replay["step with feeding (ms)"]) == ("0.100", "4.00", "0.200")
    assert (replay["tokens/s"], replay["end to end over eager"]) == ("320.0", "4.00")
    assert replay["published step (ms)"] == "0.902"
    assert replay["published step over eager"] == "1.30"
    assert replay["published end to end over eager"] == "1.20"
    assert rows["medium_generation", "eager"]["published step (ms)"] == "1.175"
    assert rows["medium_generation", "eager"]["over eager"] == NONE
    assert rows["medium_generation", "encore"]["published step (ms)"] == NONE
    last = rows["sweep_56", "replay"]
    assert (last["published step over eager"], last["published end to end over eager"]) == ("1.43", "1.13")
    told = {row[0]: row[2] for row in paths.rows}
    assert told["replay"] == "as eager"
    assert told["encore"] == "other ones in long_generation, sweep_48"
    assert told["graph"] == NONE
    assert named.markdown().count("\n| ") == 2 + len(named.rows)


def test_the_report_reads_what_a_run_wrote(scripted: dict[str, Any], tmp_path: Path):
    (tmp_path / RESULTS).write_text(scripted["run"].model_dump_json())
    assert read_nanogpt(tmp_path) == scripted["run"]
    exhibit = EXHIBITS["nanogpt-table1"]
    rows = exhibit.make(exhibit, Results(load_published(), nanogpt=scripted["run"])).table.frame.to_dict("records")
    (medium,) = (row for row in rows if row["case"] == "medium generation")
    assert medium["replay_ms"] == 0.1 and medium["replay_published_ms"] == 0.902
    assert "compile" in medium["missing"]


@pytest.mark.parametrize("name", ["nanogpt-table1", "nanogpt-table2"])
def test_report_says_when_the_articles_graph_was_not_measured(scripted: dict[str, Any], name: str):
    """As any run without a GPU."""
    run: NanoGptRun = scripted["run"]
    kept = [each.model_copy(update={"paths": {"eager": each.paths["eager"]}}) for each in run.configurations]
    without = run.model_copy(update={"paths": run.paths[:1], "configurations": kept})
    exhibit = EXHIBITS[name]
    rows = exhibit.make(exhibit, Results(load_published(), nanogpt=without)).table.frame.to_dict("records")
    assert {row["missing"] for row in rows} == {"replay: not measured"}


def test_a_smoke_run_has_no_published_values(scripted: dict[str, Any]):
    tiny = scripted["run"].model_copy(update={"size": "tiny"})
    named = grids(tiny, load_published())[0]
    assert "smoke run" in named.title
    assert all(row[-3:] == (NONE, NONE, NONE) for row in named.rows)
    for name in ("nanogpt-table1", "nanogpt-table2"):
        frame = EXHIBITS[name].make(EXHIBITS[name], Results(load_published(), nanogpt=tiny)).table.frame
        assert frame[[column for column in frame if "published" in column]].isna().all(axis=None)


def encore(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "suite", "run", *arguments], capture_output=True, text=True, timeout=280
    )


def test_the_command_runs_what_a_cpu_can_run(tmp_path: Path):
    out = tmp_path / "out"
    options = ("--device", "cpu", "--size", "tiny", "--samples", "1", "--modes", "eager")
    done = encore("nanogpt", *options, "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    run = NanoGptRun.model_validate_json((out / "nanogpt.json").read_bytes())
    assert json.loads(done.stdout) == json.loads(run.model_dump_json())
    (path,) = run.paths
    assert (path.name, path.failed, path.device) == ("eager", None, "cpu")
    for each in run.configurations:
        generation = each.paths["eager"]
        assert len(generation.tokens) == each.new_tokens
        assert len(generation.step_us[0]) == each.new_tokens - 1
        assert all(0 < call < step for call, step in zip(generation.call_us[0], generation.step_us[0], strict=True))
    assert "NanoGPT, named configurations (cpu" in (out / "nanogpt.md").read_text()
    again = encore("nanogpt", "--device", "cpu", "--size", "tiny", "--out", str(out))
    assert again.returncode == 2
    assert "holds results already" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nanogpt", "ALNET"), "runs alone"),
        (("NanoGPT", "--set", "all"), "no use for --set"),
        (("nanogpt", "--device", "cpu", "--tag", "../elsewhere"), "--tag '../elsewhere'"),
        (("nanogpt", "--device", "cpu", "--modes", "graph"), "needs --device cuda"),
        (("nanogpt", "--device", "cpu", "--size", "tiny", "--seed", "-1"), "--seed -1 is out of range"),
        (("nanogpt", "--device", "cpu", "--size", "tiny", "--seed", str(2**64)), "is out of range"),
        (("nanogpt", "--blocks", "3", "--shard", "1/2"), "no use for --blocks, --shard"),
    ],
)
def test_wrong_use_is_told_before_anything_starts(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
):
    from suite.cli import main as cli

    with pytest.raises(SystemExit) as exit:
        cli.main(["run", *arguments])
    assert exit.value.code == 2
    assert words in capsys.readouterr().err
