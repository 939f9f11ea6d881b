"""Inference with weights that move, are replaced, or take turns between calls."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from real_programs.pieces import batches, bert_config, built, descend, normal, served, transformer
from real_programs.record import Body, Setting, program

VERSIONS = 3
"""Sets of weights that take turns."""


def _shape(setting: Setting) -> tuple[int, int, int]:
    """Tokens, width, layers."""
    return setting.pick((64, 256, 6), (8, 32, 2))


def _model(setting: Setting) -> nn.Sequential:
    _, width, layers = _shape(setting)
    return built(setting, lambda: transformer(width, layers)).eval()


def _inputs(setting: Setting) -> list[torch.Tensor]:
    tokens, width, _ = _shape(setting)
    return batches(2, lambda generator: normal(setting, generator, 2, tokens, width))


def _versions(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """State dicts with the model's weights scaled a little, each in memory of its own."""
    return [
        {name: value.clone() * (1 + 0.05 * version) for name, value in model.state_dict().items()}
        for version in range(VERSIONS)
    ]


@program(calls=12)
def swapped_parameter_data(setting: Setting) -> Body:
    """`p.data` of every parameter replaced before each call, by sets of weights that take turns."""
    model, inputs = _model(setting), _inputs(setting)
    versions = _versions(model)
    call = setting.compile(model)

    def step(i: int) -> Any:
        chosen = versions[i % VERSIONS]
        for name, parameter in model.named_parameters():
            parameter.data = chosen[name]
        return call(inputs[i % 2])

    return served(step)


@program(calls=12)
def load_state_dict_assign(setting: Setting) -> Body:
    """`load_state_dict(assign=True)` with new tensors before every other call."""
    model, inputs = _model(setting), _inputs(setting)
    versions = _versions(model)
    call = setting.compile(model)

    def step(i: int) -> Any:
        if i % 2 == 0:
            state = {name: value.clone() for name, value in versions[i // 2 % VERSIONS].items()}
            model.load_state_dict(state, assign=True)
        return call(inputs[i % 2])

    return served(step)


@program(calls=12)
def offloaded_and_returned(setting: Setting) -> Body:
    """A model that goes to the CPU and comes back between calls, as a server does that holds more than fits."""
    model, inputs = _model(setting), _inputs(setting)
    call = setting.compile(model)
    in_between = []

    def step(i: int) -> Any:
        if i and i % 3 == 0:
            model.to("cpu")
            # Others take the memory meanwhile, so that the weights come back elsewhere.
            in_between.append(torch.empty(4096 * (i % 7 + 1), device=setting.device))
            del in_between[:-2]
            model.to(setting.device)
        return call(inputs[i % 2])

    return served(step)


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter that is exchanged from outside."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down, self.up = nn.Parameter(torch.empty(rank, width)), nn.Parameter(torch.empty(width, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.base(x) + x @ self.down.t() @ self.up.t())


@program(calls=12)
def lora_adapters(setting: Setting) -> Body:
    """Adapters swapped by assigning new parameters to the layers, the base weights staying where they are."""
    _, width, layers = _shape(setting)
    model = built(setting, lambda: nn.Sequential(*(Adapted(width, 8) for _ in range(2 * layers)))).eval()
    adapters = batches(
        VERSIONS,
        lambda generator: [
            [normal(setting, generator, 8, width) / 10, normal(setting, generator, width, 8) / 10] for _ in model
        ],
    )
    inputs = _inputs(setting)
    call = setting.compile(model)

    def step(i: int) -> Any:
        for layer, (down, up) in zip(model, adapters[i % VERSIONS], strict=True):
            layer.down, layer.up = nn.Parameter(down), nn.Parameter(up)
        return call(inputs[i % 2])

    return served(step)


@program(calls=6, trains=True)
def ema_weights(setting: Setting) -> Body:
    """Training with an average of the weights, which is swapped in for an evaluation after each step."""
    model, inputs = _model(setting), _inputs(setting)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    call = setting.compile(model)

    def step(i: int) -> Any:
        loss = descend(call(inputs[i % 2]).square().mean(), optimizer)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
                mean.data, parameter.data = parameter.data, mean.data
            evaluated = call(inputs[0]).square().mean()
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.data, parameter.data = parameter.data, mean.data
        return loss, evaluated

    return Body(step, lambda: next(average.parameters()))


@program(calls=12)
def functional_weights(setting: Setting) -> Body:
    """`torch.func.functional_call`: the weights are arguments, three sets taking turns, as in ensembles."""
    model, inputs = _model(setting), _inputs(setting)
    versions = _versions(model)

    def run(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, state, (x,))

    call = setting.compile(run)

    return served(lambda i: call(versions[i % VERSIONS], inputs[i % 2]))


@program(calls=9)
def bert_checkpoints(setting: Setting) -> Body:
    """Hugging Face BERT whose parameters are set one by one from checkpoints that were just read."""
    from transformers import BertModel

    config = bert_config(setting)
    model = built(setting, lambda: BertModel(config)).eval()
    call = setting.compile(model)
    checkpoints = [{name: value.cpu() for name, value in state.items()} for state in _versions(model)]
    tokens = torch.arange(32, device=setting.device)[None] % config.vocab_size

    def step(i: int) -> Any:
        for name, parameter in model.named_parameters():
            parameter.data = checkpoints[i % VERSIONS][name].to(setting.device)
        return call(tokens).last_hidden_state

    return served(step)
