"""Modules, and every way to exchange what a module holds that real programs use, for tests of bound parameters."""

from __future__ import annotations

import itertools

import torch
from torch import nn

SEEDS = itertools.count(77)


class Layer(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))
        for tensor in (*self.parameters(), self.offset):
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale + self.offset


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(seed + index) for index in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


class WeightedSine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin()


def other(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.detach() * 1.5 + 0.25).clone()


def made(layer: Layer, model: Model) -> Layer:
    return layer.eval().to(next(model.parameters()))


def data(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data = other(parameter)


def data_within(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(other(parameter))


def state_assigned(model: Model) -> None:
    model.load_state_dict({name: other(value) for name, value in model.state_dict().items()}, assign=True)


def one_parameter(model: Model) -> None:
    model.layers[1].linear.weight = nn.Parameter(other(model.layers[1].linear.weight))


def removed_and_set(model: Model) -> None:
    weight = other(model.layers[2].scale)
    del model.layers[2].scale
    model.layers[2].scale = nn.Parameter(weight)


def dictionary_entry(model: Model) -> None:
    held = model.layers[0].linear._parameters
    held["bias"] = nn.Parameter(other(held["bias"]))


def whole_dictionary(model: Model) -> None:
    linear = model.layers[0].linear
    linear.__dict__["_parameters"] = {name: nn.Parameter(other(p)) for name, p in linear._parameters.items()}


def a_buffer(model: Model) -> None:
    model.layers[0].offset = other(model.layers[0].offset)


def running_mean(model: Model) -> None:
    model.layers[0].norm.register_buffer("running_mean", other(model.layers[0].norm.running_mean))


def a_submodule(model: Model) -> None:
    model.layers[0].linear = made(Layer(next(SEEDS)), model).linear


def a_layer_of_a_list(model: Model) -> None:
    model.layers[1] = made(Layer(next(SEEDS)), model)


def order_of_layers(model: Model) -> None:
    modules = model.layers._modules
    modules["0"], modules["1"] = modules["1"], modules["0"]


def two_exchanged(model: Model) -> None:
    first, second = model.layers[0].linear, model.layers[1].linear
    first.weight, second.weight = second.weight, first.weight


def contents_exchanged(model: Model) -> None:
    """Swap as `nn.Module.to` does under `torch.__future__.set_swap_module_params_on_conversion`."""
    torch.utils.swap_tensors(model.layers[0].scale, nn.Parameter(other(model.layers[0].scale)))


def tied(model: Model) -> None:
    model.layers[0].linear.weight = nn.Parameter(other(model.layers[0].linear.weight))
    model.layers[1].linear.weight = model.layers[0].linear.weight


def overwritten_by_to(model: Model) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        data_within(model)
        kind = next(model.parameters()).dtype
        model.to(torch.float32 if kind is torch.float64 else torch.float64).to(kind)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


EXCHANGES = (
    data, data_within, state_assigned, one_parameter, removed_and_set, dictionary_entry,
    whole_dictionary, a_buffer, running_mean, a_submodule, a_layer_of_a_list, order_of_layers, two_exchanged,
    contents_exchanged, tied, overwritten_by_to,
)  # fmt: skip
