"""NanoGPT's decode step on a GPU: every path samples eager's tokens, and replays give eager's logits."""

from __future__ import annotations

import pytest
import torch

from models.nanogpt.configurations import NAMED, SIZES
from models.nanogpt.decoding import CompiledDecoder, Decoder, EagerDecoder, ReplayDecoder, generate
from models.nanogpt.network import NanoGPT
from suite.nanogpt.paths import PATHS

pytestmark = pytest.mark.gpu


def decoder(path: str, model: NanoGPT) -> Decoder:
    mode = PATHS[path].mode
    if mode is None:
        return ReplayDecoder(model)
    return CompiledDecoder(
        model, lambda step: torch.compile(step, backend=mode.backend or "eager", options=dict(mode.options))
    )


@pytest.mark.parametrize("path", [name for name in PATHS if name != "eager"])
def test_path_samples_eagers_tokens_in_every_configuration(path: str):
    torch.manual_seed(1)
    model = NanoGPT(SIZES["full"]).eval().cuda()
    reference, other = EagerDecoder(model), decoder(path, model)
    for configuration in NAMED:
        for seed in (1, 2):
            drawn = torch.Generator().manual_seed(seed)
            prompt = torch.randint(model.shape.vocabulary, (1, configuration.prompt), generator=drawn).cuda()
            wanted = generate(model, reference, prompt, configuration.new_tokens, seed)
            assert torch.equal(generate(model, other, prompt, configuration.new_tokens, seed), wanted)


@torch.no_grad()
def test_a_replay_gives_the_logits_of_the_step_it_captured():
    torch.manual_seed(1)
    model = NanoGPT(SIZES["full"]).eval().cuda()
    replay = ReplayDecoder(model)
    tokens = torch.randint(model.shape.vocabulary, (1, 6)).cuda()
    model.clear_cache()
    wanted = [model.decode(tokens[:, i : i + 1], torch.tensor([i]).cuda()) for i in range(6)]
    model.clear_cache()
    for i in range(6):
        replay.feed(tokens[:, i : i + 1], i)
        assert torch.equal(replay.step(), wanted[i])
