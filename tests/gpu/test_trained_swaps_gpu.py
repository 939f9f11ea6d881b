"""Weights that are swapped in training, on a GPU: eager's gradients, and no recordings for ever new addresses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import optimizations

pytestmark = pytest.mark.gpu

STEPS, KNOWN_AFTER = 40, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.norm(self.second(hidden) + self.second.weight.mean())


def _drawn(like: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) / 8
    return drawn.to(like.device)


def through_data(net: nn.Module, seed: int) -> None:
    for place, parameter in enumerate(net.parameters()):
        parameter.data = _drawn(parameter, seed + place)


def by_a_state_dict(net: nn.Module, seed: int) -> None:
    state = {name: _drawn(value, seed + place) for place, (name, value) in enumerate(net.state_dict().items())}
    net.load_state_dict(state, assign=True)


@pytest.mark.parametrize("way", [through_data, by_a_state_dict])
def test_swapped_weights_train_as_in_eager_without_recording(
    way: Callable[[nn.Module, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    optimizations.reset()
    net = Net().cuda()
    twin = copy.deepcopy(net)
    call = torch.compile(net, backend="encore")
    kept: list[torch.Tensor] = []
    recordings: list[int] = []
    grew: list[tuple[int, list[object]]] = []
    held_bytes: list[int] = []
    for step in range(STEPS):
        for one in (net, twin):
            way(one, 100 * step)
        kept = [torch.empty(64 * (1 + step % 5), device="cuda")]  # the allocator gives other addresses
        x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        losses = []
        for one, module in ((net, call), (twin, twin)):
            one.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.1 * parameter.grad
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
        for mine, expected in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)
        recordings.append(len(made := optimizations.recordings()))
        if len(set(recordings[-2:])) > 1:
            grew.append((step, [(one.direction, one.replays) for one in made]))
        held_bytes.append(torch.cuda.memory_allocated())
    del kept
    assert recordings[KNOWN_AFTER] == recordings[-1], grew
    assert held_bytes[-1] < held_bytes[KNOWN_AFTER] + 2**18, "weights from before are kept alive"
    forwards = [one for one in optimizations.recordings() if one.direction == "forward"]
    assert max(len(one.inputs) for one in forwards) > min(len(one.inputs) for one in forwards)
    assert sum(one.replays for one in optimizations.recordings()) > STEPS
