"""Generation as workloads: what is compiled is the decoding step, the suite compiles it in every mode, and the tokens
that follow the prompt are those of the input whatever the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import registry
from models.instance import Instance, instantiate
from models.networks.generation import FollowedBy
from models.parts import CompiledInParts
from suite.measure import iteration
from suite.measure.modes import MODES

ACRONYMS = ("LLAMA-G", "LLAMA-G-8", "WHISPER-G")


@pytest.fixture(scope="module", params=ACRONYMS)
def instance(request: pytest.FixtureRequest) -> Instance:
    return instantiate(registry.find(request.param), size="tiny", device="cpu", seed=0)


@torch.no_grad()
def test_each_step_after_the_prompt_is_one_compiled_call(instance: Instance):
    graphs, calls = [], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)

        def run(*arguments: Any) -> Any:
            calls.append(len(arguments))
            return graph.forward(*arguments)

        return run

    torch.compiler.reset()
    assert isinstance(instance.module, CompiledInParts)
    generate = instance.module.compiled_with(backend=backend, options={})
    for index in (0, 1):
        inputs = instance.inputs(index)
        scores = generate(*inputs.args)
        assert torch.equal(scores, instance.module(*inputs.args)), "a graph run as it is computes eager's bits"
    steps, batch, _ = scores.shape
    assert (steps, batch) == (inputs.args[1].shape[1], inputs.args[1].shape[0])
    assert len(calls) == 2 * (steps - 1)
    assert len(graphs) == 1, "a new cache in the next call compiles nothing"


@torch.no_grad()
def test_scores_depend_on_the_tokens_before_them_only(instance: Instance):
    prompt, following = instance.inputs(0).args
    scores = instance.module(prompt, following)
    changed = following.clone()
    changed[:, 1] = (changed[:, 1] + 1) % scores.shape[-1]
    others = instance.module(prompt, changed)
    assert torch.equal(scores[:2], others[:2])
    assert not torch.equal(scores[2], others[2])


@torch.no_grad()
def test_explained_part_is_the_step_that_runs(instance: Instance, monkeypatch: pytest.MonkeyPatch):
    inputs = instance.inputs(0)
    seen: list[dict[str, Any]] = []
    model = instance.module.model
    forward = model.forward

    def spy(*arguments: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        return forward(*arguments, **keywords)

    monkeypatch.setattr(model, "forward", spy)
    instance.module(*inputs.args)
    step = seen[1]
    part, _, keywords = instance.module.compiled_part(inputs)
    assert part is model
    tokens = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    assert keywords.keys() == step.keys()
    assert torch.equal(keywords[tokens], step[tokens])
    assert type(keywords["past_key_values"]) is type(step["past_key_values"])
    assert keywords["past_key_values"].is_compileable


def test_generation_gets_the_backend_and_options_of_its_mode():
    asked: list[dict[str, Any]] = []

    class Parts(torch.nn.Module):
        def forward(self) -> str:
            return "eager"

        def compiled_with(self, **keywords: Any) -> Callable[..., Any]:
            asked.append(keywords)
            return lambda: "compiled"

        def compiled_part(self, inputs: Any) -> Any:
            raise NotImplementedError

    assert iteration.callable_for(MODES["graph"], Parts())() == "compiled"
    assert iteration.callable_for(MODES["eager"], Parts())() == "eager"
    assert asked == [{"backend": "inductor", "options": {"triton.cudagraphs": True}}]


def test_only_the_next_given_token_passes():
    chosen = FollowedBy(torch.tensor([[3, 1], [0, 2]]), prompt=5)
    for place, wanted in ((5, [3, 0]), (6, [1, 2])):
        scores = chosen(torch.zeros(2, place, dtype=torch.int64), torch.randn(2, 4))
        assert scores.argmax(-1).tolist() == wanted
        assert scores.isneginf().sum() == 6
