"""`models.nanogpt` and `encore run nanogpt`: the published program in numbers, one decode step like the other, the same
tokens on every path, and a run whose processes do whatever they like."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.nanogpt.configurations import NAMED, SIZES, SWEEP, Configuration
from models.nanogpt.decoding import CompiledDecoder, EagerDecoder, generate
from models.nanogpt.network import CachedAttention, NanoGPT
from suite import environment
from suite.cli_nanogpt import RESULTS
from suite.errors import WrongUse
from suite.modes import MODES
from suite.nanogpt.paths import PATHS, select_paths
from suite.nanogpt.records import NanoGptRun
from suite.nanogpt.run import run_paths
from suite.nanogpt.tables import NONE, grids
from suite.report.paper import EXHIBITS, Results
from suite.report.paper.nanogpt import read_nanogpt
from suite.report.published import load_published


@pytest.fixture
def model() -> NanoGPT:
    torch.manual_seed(3)
    made = NanoGPT(SIZES["tiny"]).eval()
    for parameter in made.parameters():  # its own draw makes all tokens nearly as likely
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def prompt(model: NanoGPT, count: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(model.shape.vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))


def test_the_published_size_has_the_published_parameters():
    made = NanoGPT(SIZES["full"])
    assert sum(parameter.numel() for parameter in made.parameters()) == 56_769
    assert made.layers[0].attention.keys.shape == (1, 4, 64, 8)


def test_configurations_are_the_articles():
    published = load_published()
    assert {each.name: (each.prompt, each.new_tokens) for each in NAMED} == {
        name: (row["prompt"], row["gen"]) for name, row in published.nanogpt_per_step_ms.items()
    }
    assert [str(each.new_tokens) for each in SWEEP] == list(published.nanogpt_sweep_prompt8)
    assert all(each.within(64) == each for each in (*NAMED, *SWEEP))


def test_configurations_are_shortened_to_a_smaller_context():
    assert Configuration("a", 32, 16).within(16) == Configuration("a", 8, 8)
    assert Configuration("a", 4, 56).within(16) == Configuration("a", 4, 12)


@torch.no_grad()
def test_one_step_after_the_other_gives_what_all_at_once_gives(model: NanoGPT):
    tokens = prompt(model, 9)
    whole = model(tokens, 0)
    model.clear_cache()
    first = model(tokens[:, :4], 0)
    torch.testing.assert_close(first, whole[:, :4])
    for place in range(4, 9):
        position = torch.tensor([place])
        torch.testing.assert_close(model.decode(tokens[:, place : place + 1], position), whole[:, place : place + 1])


@torch.no_grad()
def test_a_step_sees_no_slot_behind_its_own_and_moves_no_cache(model: NanoGPT):
    caches = [module.keys for module in model.modules() if isinstance(module, CachedAttention)]
    addresses = [cache.data_ptr() for cache in caches]
    tokens = prompt(model, 3)
    clean = model.decode(tokens[:, :1], torch.tensor([0]))
    for cache in caches:
        cache[:, :, 1:] = 100.0
    assert torch.equal(model.decode(tokens[:, :1], torch.tensor([0])), clean)
    assert caches[0][:, :, 1:].eq(100.0).all()
    model.clear_cache()
    assert not any(cache.any() for cache in caches)
    assert [module.keys.data_ptr() for module in model.modules() if isinstance(module, CachedAttention)] == addresses


class Spied(EagerDecoder):
    """Notes what it is fed."""

    def __init__(self, model: NanoGPT) -> None:
        super().__init__(model)
        self.fed: list[tuple[int, int]] = []

    def feed(self, token: torch.Tensor, position: int) -> None:
        self.fed.append((int(token), position))
        super().feed(token, position)


def test_every_sampled_token_but_the_last_is_fed_at_its_own_position(model: NanoGPT):
    decoder = Spied(model)
    sequence = generate(model, decoder, prompt(model, 5), 8, seed=1)
    assert sequence.shape == (1, 13)
    assert decoder.fed == [(int(sequence[0, place]), place) for place in range(5, 12)]
    assert len(set(sequence[0, 5:].tolist())) > 1, "a model that always says the same would hide a wrong step"


def test_the_same_seed_gives_the_same_tokens_on_compiled_and_eager_steps_and_another_seed_others(model: NanoGPT):
    eager = EagerDecoder(model)
    compiled = CompiledDecoder(model, lambda step: torch.compile(step, backend="aot_eager"))
    found = [generate(model, decoder, prompt(model, 4), 12, seed=7) for decoder in (eager, compiled, eager)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]), "the cache of one generation must not reach the next"
    assert not torch.equal(found[0], generate(model, eager, prompt(model, 4), 12, seed=8))


def test_paths_of_a_cpu_and_names_that_are_none():
    assert [path.name for path in select_paths(None, "cpu")] == ["eager", "compile"]
    assert list(PATHS) == [path.name for path in select_paths(None, "cuda")]
    assert {"eager", "replay", "graph", "indirection", "encore"} <= set(PATHS)
    assert [path.name for path in select_paths(["replay"], "cuda")] == ["eager", "replay"]
    with pytest.raises(WrongUse, match="did you mean replay"):
        select_paths(["replays"], "cuda")
    with pytest.raises(WrongUse, match="needs --device cuda; without: eager, compile"):
        select_paths(["graph"], "cpu")
    with pytest.raises(WrongUse, match="--modes names no path; nanogpt has here: eager, compile"):
        select_paths([], "cpu")


def test_a_compiled_path_warms_up_and_measures_the_steps_of_its_own_generation(monkeypatch: pytest.MonkeyPatch):
    from suite.nanogpt import worker
    from suite.nanogpt.records import Ask

    monkeypatch.setattr(worker, "start_toolchain", lambda device: None)
    mode = dataclasses.replace(MODES["compile"], backend="aot_eager", options={})
    cpu = torch.device("cpu")
    compiled = worker.Program(dataclasses.replace(PATHS["compile"], mode=mode), cpu, "tiny", seed=3)
    eager = worker.Program(PATHS["eager"], cpu, "tiny", seed=3)
    ready = compiled.warm_up()
    assert (ready.device, ready.warm_up_s > 0) == ("cpu", True)
    eager.warm_up()
    ask = Ask(prompt=4, new_tokens=9)
    measured = compiled.generations(ask)
    assert measured.tokens == eager.generations(ask).tokens
    assert len(measured.step_us[0]) == len(measured.call_us[0]) == 8
    assert measured.total_s[0] > 0
    assert measured.prompt_us[0] > 0


# --- a run with scripted processes

SCRIPTED = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("path", "device", "size", "seed", "read", "write"): parser.add_argument("--" + name)
options = parser.parse_args()
def say(**message): os.write(int(options.write), json.dumps(message).encode() + b"\\n")
print("log of", options.path, flush=True)
if options.path == "compile": sys.exit(3)
if options.path == "graph": say(type="failed", error="RuntimeError: no graph"); sys.exit(1)
say(type="ready", warm_up_s=1.5, settled=None, device="a device")
asked = 0
for line in os.fdopen(int(options.read)):
    asked += 1
    question = json.loads(line)
    if options.path == "indirection" and asked == 3: time.sleep(600)
    tokens = list(range(question["new_tokens"]))
    if options.path == "encore" and question["new_tokens"] == 48: tokens[5] = -1
    us = {"eager": 400.0}.get(options.path, 100.0)
    steps = question["new_tokens"] - 1
    say(type="done", generation=dict(tokens=tokens, total_s=[us / 1e3], prompt_us=[7.0], step_us=[[2 * us] * steps],
        call_us=[[us] * steps]))
"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run over all paths: two fail at once, one hangs in its second configuration, one samples another token."""
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "worker.py"
    script.write_text(SCRIPTED)
    saved: list[NanoGptRun] = []
    said: list[str] = []
    run = run_paths(
        list(PATHS.values()),
        environment.collect("a run", (), {}),
        device="cuda",
        size="full",
        seed=1,
        rounds=2,
        timeout_s=3.0,
        save=saved.append,
        say=said.append,
        command=(sys.executable, str(script)),
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
    assert set(run.configurations[0].paths) == {"eager", "replay", "indirection", "encore"}
    assert set(run.configurations[1].paths) == {"eager", "replay", "encore"}
    assert all(len(path.total_s) == 2 for path in run.configurations[1].paths.values())


def test_where_all_paths_fail_their_reasons_are_saved_and_shown(tmp_path: Path):
    saved: list[NanoGptRun] = []
    run = run_paths(
        [PATHS["eager"], PATHS["compile"]],
        environment.collect("a run", (), {}),
        device="cpu",
        size="tiny",
        seed=1,
        rounds=1,
        timeout_s=10.0,
        save=saved.append,
        say=lambda text: None,
        command=(sys.executable, "-c", "raise SystemExit(4)"),
    )
    assert [finding.partition(":")[0] for finding in run.findings()] == ["eager", "compile"]
    assert saved[-1] == run
    *tables, paths = grids(run, load_published())
    assert all(table.rows == () and "no path was ready" in table.title for table in tables)
    assert all("exit code 4" in row[3] for row in paths.rows)


def test_the_record_is_saved_after_each_configuration_and_read_back(scripted: dict[str, Any]):
    assert [len(run.configurations) for run in scripted["saved"]] == list(range(1, 11))
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
def test_the_report_says_of_a_run_without_the_articles_graph_that_it_was_not_measured(
    scripted: dict[str, Any], name: str
):
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


# --- the command


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
    from suite import cli

    with pytest.raises(SystemExit) as exit:
        cli.main(["run", *arguments])
    assert exit.value.code == 2
    assert words in capsys.readouterr().err
