"""Inputs whose sizes, or addresses' alignment, change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from real_programs.pieces import batches, bert_config, built, descend, integers, mlp, normal, served, transformer
from real_programs.record import Body, Setting, program


def _graphs(setting: Setting, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Nodes [n, width] and edges int64 [2, 4 n], for six numbers of nodes n."""
    nodes = iter(setting.pick((300, 410, 350, 520, 480, 390), (12, 17, 14, 20, 15, 13)))

    def make(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        count = next(nodes)
        return normal(setting, generator, count, width), integers(setting, generator, count, 2, 4 * count)

    return batches(6, make)


class MessagePassing(nn.Module):
    """Sums messages over edges, and updates the nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = mlp(width, 1, 2 * width), mlp(width, 1, 2 * width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], -1))
        gathered = torch.zeros_like(nodes).index_add(0, target, messages)
        return nodes + self.update(torch.cat([nodes, gathered], -1))


@program(calls=12)
def message_passing(setting: Setting) -> Body:
    """A graph network in plain PyTorch over graphs of six sizes, which come again."""
    width = setting.pick(64, 8)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MessagePassing(width) for _ in range(3))

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                nodes = layer(nodes, edges)
            return nodes.mean(0)

    call = setting.compile(built(setting, Network).eval())
    graphs = _graphs(setting, width)

    return served(lambda i: call(*graphs[i % len(graphs)]))


@program(calls=12, trains=True, needs=("torch_geometric",))
def geometric_graph_network(setting: Setting) -> Body:
    """PyTorch Geometric: two convolutions and one attention over graphs of six sizes, with a backward pass."""
    from torch_geometric.nn import GATv2Conv, GCNConv

    width = setting.pick(64, 8)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList([GCNConv(width, width), GCNConv(width, width)])
            self.attention = GATv2Conv(width, width // 4, heads=4)

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in self.convolutions:
                nodes = layer(nodes, edges).relu()
            return self.attention(nodes, edges)

    model = built(setting, Network)
    call = setting.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    graphs = _graphs(setting, width)

    def step(i: int) -> Any:
        return descend(call(*graphs[i % len(graphs)]).square().mean(), optimizer)

    return Body(step)


@program(calls=6)
def ode_solver(setting: Setting) -> Body:
    """Runge-Kutta steps of a compiled right-hand side, times as CPU scalars, steps halved where the error is large."""
    width = setting.pick(128, 8)
    derivative = setting.compile(built(setting, lambda: mlp(width, 3)).eval())
    starts = batches(3, lambda generator: normal(setting, generator, setting.pick(256, 4), width))

    def stage(time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return derivative(state * torch.cos(time).item())

    def step(i: int) -> Any:
        state, time, size = starts[i % len(starts)], torch.tensor(0.0), torch.tensor(0.1)
        for turn in range(setting.pick(10, 2)):
            k1 = stage(time, state)
            k2 = stage(time + size / 2, state + size.item() / 2 * k1)
            k3 = stage(time + size / 2, state + size.item() / 2 * k2)
            k4 = stage(time + size, state + size.item() * k3)
            state = state + size.item() / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            time = time + size
            if turn == 4:
                size = size / 2
        return state

    return served(step)


@program(calls=4, needs=("torchdiffeq",))
def torchdiffeq_solver(setting: Setting) -> Body:
    """torchdiffeq: an adaptive solver around a compiled right-hand side with the time as an argument."""
    from torchdiffeq import odeint

    width = setting.pick(128, 8)

    class Derivative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp(width, 3)

        def forward(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.network(state) * torch.cos(time) - state

    derivative = setting.compile(built(setting, Derivative).eval())
    starts = batches(3, lambda generator: normal(setting, generator, setting.pick(256, 4), width))
    times = torch.linspace(0, 1, 3, device=setting.device)

    return served(lambda i: odeint(derivative, starts[i % len(starts)], times, method="dopri5", rtol=1e-3, atol=1e-3))


@program(calls=16)
def slices_of_a_buffer(setting: Setting) -> Body:
    """Windows into one long buffer, most of which begin at addresses that are not aligned."""
    length, width = setting.pick((4096, 512), (64, 16))
    buffer = normal(setting, torch.Generator().manual_seed(3), 8 * length)
    call = setting.compile(built(setting, lambda: mlp(width, 3)).eval())
    offsets = (0, 1, 5, 64, 33, 128, 2, 77)

    def step(i: int) -> Any:
        begin = offsets[i % len(offsets)]
        return call(buffer[begin : begin + length].view(-1, width))

    return served(step)


@program(calls=12)
def bert_lengths(setting: Setting) -> Body:
    """Hugging Face BERT on batches padded to the longest of each, six lengths."""
    from transformers import BertModel

    config = bert_config(setting)
    call = setting.compile(built(setting, lambda: BertModel(config)).eval())
    lengths = iter(setting.pick((24, 40, 32, 64, 48, 56), (4, 8, 6, 12, 9, 7)))

    def make(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        length = next(lengths)
        tokens = integers(setting, generator, config.vocab_size, 4, length)
        used = torch.tensor([length, length - 1, length - 2, length // 2], device=setting.device)
        return tokens, (torch.arange(length, device=setting.device) < used[:, None]).long()

    inputs = batches(6, make)

    def step(i: int) -> Any:
        tokens, mask = inputs[i % len(inputs)]
        return call(tokens, attention_mask=mask).pooler_output

    return served(step)


@program(calls=12, trains=True)
def smaller_last_batch(setting: Setting) -> Body:
    """Training on a data set that the batch size does not divide: the last batch of each epoch is smaller."""
    width, tokens = setting.pick((256, 32), (32, 4))
    model = built(setting, lambda: transformer(width, setting.pick(4, 1)))
    call = setting.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sizes: Callable[[int], int] = lambda i: 3 if i % 4 == 3 else 8  # noqa: E731
    (data,) = batches(1, lambda generator: normal(setting, generator, 8, tokens, width))

    def step(i: int) -> Any:
        return descend(call(data[: sizes(i)]).square().mean(), optimizer)

    return Body(step)
