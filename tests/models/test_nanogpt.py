"""`models.nanogpt`, its workloads and the metric `decode`: the published program in numbers, and the same tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from models.instance import instantiate
from models.nanogpt.configurations import NAMED, SIZES, SWEEP, Configuration
from models.nanogpt.decoding import CompiledDecoder, EagerDecoder, Generation, generate
from models.nanogpt.network import CachedAttention, NanoGPT
from models.registry import Inputs, find, find_set
from suite.measure.metrics import PreparedCell, decode
from suite.measure.modes import MODES
from suite.report.published import load_published
from suite.worker.compilation import Compilation
from suite.worker.protocol import Unsupported


@pytest.fixture
def model() -> NanoGPT:
    torch.manual_seed(3)
    made = NanoGPT(SIZES["tiny"]).eval()
    for parameter in made.parameters():  # its own draw makes all tokens nearly as likely
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def prompt(model: NanoGPT, count: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(model.shape.vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))


def test_configurations_equal_those_of_the_article():
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
def test_decoding_by_steps_equals_one_forward(model: NanoGPT):
    tokens = prompt(model, 9)
    whole = model(tokens, 0)
    model.clear_cache()
    first = model(tokens[:, :4], 0)
    torch.testing.assert_close(first, whole[:, :4])
    for place in range(4, 9):
        position = torch.tensor([place])
        torch.testing.assert_close(model.decode(tokens[:, place : place + 1], position), whole[:, place : place + 1])


@torch.no_grad()
def test_step_reads_no_later_slot_and_moves_no_cache(model: NanoGPT):
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


def test_same_seed_gives_the_same_tokens_compiled_and_eager(model: NanoGPT):
    eager = EagerDecoder(model)
    compiled = CompiledDecoder(model, lambda step: torch.compile(step, backend="aot_eager"))
    found = [generate(model, decoder, prompt(model, 4), 12, seed=7) for decoder in (eager, compiled, eager)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]), "the cache of one generation must not reach the next"
    assert not torch.equal(found[0], generate(model, eager, prompt(model, 4), 12, seed=8))


def test_generation_compiled_or_not_gives_the_same_tokens() -> None:
    torch.manual_seed(3)
    whole = Generation(SIZES["tiny"], new_tokens=9)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    compiled = whole.compiled_with(backend="aot_eager")
    for seed in (1, 2):
        tokens = prompt(whole.model, 4, seed)
        for found, wanted in zip(compiled(tokens), whole(tokens), strict=True):
            assert torch.equal(found, wanted)
    assert not torch.equal(whole(prompt(whole.model, 4, 1))[0], whole(prompt(whole.model, 4, 2))[0])


def test_compiled_part_of_a_generation_is_its_first_step(model: NanoGPT) -> None:
    whole = Generation(SIZES["tiny"], new_tokens=3)
    tokens = prompt(whole.model, 4)
    step, arguments, keywords = whole.compiled_part(Inputs(args=(tokens,)))
    with torch.no_grad():
        whole.model(tokens, 0)
        assert torch.equal(step(*arguments, **keywords), whole.model.decode(tokens[:, :1], torch.tensor([4])))


def test_every_configuration_of_the_article_is_a_workload() -> None:
    wanted = {one.workload: one for one in (*NAMED, *SWEEP)}
    assert {row.acronym for row in find_set("nanogpt")} == set(wanted)
    for name, one in wanted.items():
        made = instantiate(find(name), device="cpu", size="tiny", seed=1)
        short = one.within(SIZES["tiny"].context)
        (tokens,) = made.inputs(0).args
        assert tokens.shape == (1, short.prompt)
        assert made.module(tokens)[0].shape == (1, short.prompt + short.new_tokens)


def test_mode_by_hand_refuses_a_program_without_a_capture() -> None:
    class Known:
        mode = MODES["by-hand"]
        _program = SimpleNamespace(instance=SimpleNamespace(workload=SimpleNamespace(task="inference")))

    with pytest.raises(Unsupported, match="for training, and for programs that capture a part"):
        Compilation.callable_for(Known(), torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    whole = Generation(SIZES["tiny"], new_tokens=3)
    assert Compilation.callable_for(Known(), whole) != whole  # type: ignore[arg-type]


def test_decode_times_steps_and_whole_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "ROUNDS", 3)
    whole = Generation(SIZES["tiny"], new_tokens=5)
    tokens = prompt(whole.model, 4)
    watched: list[bool] = []

    def iterate(index: int) -> None:
        watched.append(whole.watch is not None)
        whole(tokens)

    cell = PreparedCell(iterate, torch.device("cpu"), MODES["eager"], module=whole)
    found = decode.METRIC.values(cell)
    assert set(found) == set(decode.METRIC.columns) and all(value and value > 0 for value in found.values())
    assert found["tokens_per_s"] == pytest.approx(5e6 / found["generation_us"])  # type: ignore[operator]
    assert watched == [False, True] * 3 and whole.watch is None, "a generation that is timed whole is not watched"
    other = PreparedCell(iterate, torch.device("cpu"), MODES["eager"], module=torch.nn.Linear(1, 1))
    assert decode.METRIC.values(other) == {}
