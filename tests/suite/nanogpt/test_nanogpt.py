"""`models.nanogpt` and its paths: the published program in numbers, one decode step like the other, and the same tokens
on every path."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.nanogpt.configurations import NAMED, SIZES, SWEEP, Configuration
from models.nanogpt.decoding import CompiledDecoder, EagerDecoder, generate
from models.nanogpt.network import CachedAttention, NanoGPT
from suite.measure.modes import MODES
from suite.nanogpt import worker
from suite.nanogpt.paths import PATHS, select_paths
from suite.report.published import load_published
from suite.results.errors import WrongUse


@pytest.fixture
def model() -> NanoGPT:
    torch.manual_seed(3)
    made = NanoGPT(SIZES["tiny"]).eval()
    for parameter in made.parameters():  # its own draw makes all tokens nearly as likely
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def prompt(model: NanoGPT, count: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(model.shape.vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))


def test_a_path_that_is_ready_has_met_every_prompts_length(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    stock = worker.generate

    def noting(model: NanoGPT, decoder: EagerDecoder, prompt: torch.Tensor, *others: object) -> torch.Tensor:
        met.append(prompt.shape[1])
        return stock(model, decoder, prompt, *others)

    monkeypatch.setattr(worker, "generate", noting)
    worker.Program(PATHS["eager"], torch.device("cpu"), "full", seed=3).warm_up()
    assert set(met) == {one.prompt for one in (*NAMED, *SWEEP)}


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


def test_each_sampled_token_is_fed_at_its_own_position(model: NanoGPT):
    decoder = Spied(model)
    sequence = generate(model, decoder, prompt(model, 5), 8, seed=1)
    assert sequence.shape == (1, 13)
    assert decoder.fed == [(int(sequence[0, place]), place) for place in range(5, 12)]
    assert len(set(sequence[0, 5:].tolist())) > 1, "a model that always says the same would hide a wrong step"


def test_same_seed_gives_the_same_tokens_compiled_and_eager(model: NanoGPT):
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


def test_compiled_path_warms_up_on_its_own_generation(monkeypatch: pytest.MonkeyPatch):
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


def test_path_settles_until_nothing_is_pending_or_time_is_up(monkeypatch: pytest.MonkeyPatch):
    import optimizations
    from optimizations.in_place import budget

    asked: list[int] = []
    spread: list[bool] = []
    stock = worker.generate

    def noting(model: NanoGPT, decoder: EagerDecoder, prompt: torch.Tensor, new_tokens: int, *others: object):
        asked.append(new_tokens)
        spread.append(budget._spread)
        return stock(model, decoder, prompt, new_tokens, *others)

    program = worker.Program(PATHS["eager"], torch.device("cpu"), "tiny", seed=3)
    program.warm_up()
    monkeypatch.setattr(worker, "generate", noting)
    monkeypatch.setattr(optimizations, "settled", lambda: len(asked) >= 3)
    assert program.settle(60.0).settled
    assert asked == [max(one.within(16).new_tokens for one in NAMED)] * 3
    assert spread == [False] * 3, "work of Encore's is done at once, not spread over use"
    assert program.settle(60.0).settled and len(asked) == 3
    monkeypatch.setattr(optimizations, "settled", lambda: False)
    assert not program.settle(0.05).settled
    assert len(asked) > 3
