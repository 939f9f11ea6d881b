"""Constants of activations are tested by value: a wrong one changes no shape."""

from __future__ import annotations

import math

import pytest
import torch

from models.networks import clip, dcgan
from models.networks.speech_transformer import FeedForward, SpeechConfig


def test_clips_quick_gelu_has_its_papers_constant() -> None:
    """Hendrycks and Gimpel approximate GELU by x * sigmoid(1.702 x), which is close to GELU as 1.0 is not."""
    x = torch.tensor([-2.0, -0.5, 1.0, 3.0])
    expected = [value / (1 + math.exp(-1.702 * value)) for value in x.tolist()]
    assert clip.QuickGelu()(x).tolist() == pytest.approx(expected, rel=1e-6)
    assert (clip.QuickGelu()(x) - torch.nn.functional.gelu(x)).abs().max() < 0.03


def test_speech_feed_forward_passes_no_negative_values() -> None:
    layer = FeedForward(SpeechConfig(width=4, feedforward=8)).eval()
    with torch.no_grad():
        layer.widen.weight.zero_()
        layer.widen.bias.fill_(-0.5)  # GELU would let -0.15 through
        layer.narrow.weight.copy_(torch.arange(4.0)[:, None].expand(4, 8))  # layer norm takes a common shift away
        layer.narrow.bias.zero_()
        x = torch.tensor([[1.0, 2.0, -1.0, 0.5]])
        torch.testing.assert_close(layer(x), layer.norm(x))
        layer.widen.bias.fill_(0.25)
        torch.testing.assert_close(layer(x), layer.norm(x + 8 * 0.25 * torch.arange(4.0)))


def test_discriminators_leaky_relu_has_slope_one_fifth() -> None:
    found = [module for module in dcgan.Discriminator(width=4).modules() if isinstance(module, torch.nn.LeakyReLU)]
    assert len(found) == 4
    assert [module(torch.tensor(-1.0)).item() for module in found] == pytest.approx([-0.2] * 4)
