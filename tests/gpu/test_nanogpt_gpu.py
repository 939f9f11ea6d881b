"""NanoGPT's decode step on a GPU: every mode samples eager's tokens, and replays give eager's logits."""

from __future__ import annotations

import pytest
import torch

from models.nanogpt.configurations import NAMED, SIZES
from models.nanogpt.decoding import CompiledDecoder, Decoder, EagerDecoder, ReplayDecoder, generate
from models.nanogpt.network import NanoGPT
from suite.measure.modes import MODES

pytestmark = pytest.mark.gpu


def decoder(name: str, model: NanoGPT) -> Decoder:
    mode = MODES[name]
    if mode.captures == "by hand":
        return ReplayDecoder(model)
    return CompiledDecoder(
        model, lambda step: torch.compile(step, backend=mode.backend or "eager", options=dict(mode.options))
    )


@pytest.mark.parametrize("mode", ["compile", "graph", "indirection", "encore", "by-hand"])
def test_each_configuration_samples_eagers_tokens(mode: str):
    torch.manual_seed(1)
    model = NanoGPT(SIZES["full"]).eval().cuda()
    reference, other = EagerDecoder(model), decoder(mode, model)
    for configuration in NAMED:
        for seed in (1, 2):
            drawn = torch.Generator().manual_seed(seed)
            prompt = torch.randint(model.shape.vocabulary, (1, configuration.prompt), generator=drawn).cuda()
            wanted = generate(model, reference, prompt, configuration.new_tokens, seed)
            assert torch.equal(generate(model, other, prompt, configuration.new_tokens, seed), wanted)
