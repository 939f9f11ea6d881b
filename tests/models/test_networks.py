from __future__ import annotations

import copy
import math

import numpy
import pytest
import torch
from torch import Tensor

from models.networks import clip, dcgan
from models.networks.bert import Bert, BertConfig
from models.networks.deep_recommender import RatingAutoencoder
from models.networks.dlrm import Dlrm, DlrmConfig
from models.networks.speech_transformer import (
    BatchedLengths,
    FeedForward,
    PerUtteranceLengths,
    SpeechConfig,
    SpeechTransformer,
)
from models.networks.teos10 import enthalpy_slope, volume_coefficients

# Absolute Salinity in g/kg, Conservative Temperature in degrees Celsius, pressure in dbar, and density in kg/m^3 by the
# full Gibbs function, from the examples of the TEOS-10 documentation (gsw_rho_t_exact).
SEA_WATER = [
    (34.7118, 28.8099, 10.0, 1021.840173),
    (34.8915, 28.4392, 50.0, 1022.262690),
    (35.0256, 22.7862, 125.0, 1024.427716),
    (34.8472, 10.2262, 250.0, 1027.790202),
    (34.7366, 6.8272, 600.0, 1029.837715),
    (34.7324, 4.3236, 1000.0, 1032.002404),
]


def specific_volume(s: Tensor, t: Tensor, p: Tensor) -> Tensor:
    c = volume_coefficients(s, t)
    numerator = c.a0.value + c.a1.value * p + c.a2.value * p**2 + c.a3.value * p**3
    return numerator / (c.b0.value + 2 * c.b1.value * p + c.b2.value * p**2)


@pytest.mark.parametrize(("s", "t", "p", "density"), SEA_WATER)
def test_sea_water_density_follows_from_48_terms(s: float, t: float, p: float, density: float) -> None:
    volume = specific_volume(*(torch.tensor(value, dtype=torch.float64) for value in (s, t, p)))
    # The approximation itself is off by some 0.0003 kg/m^3 here; 1 % in any but the seven least terms would be more.
    assert 1 / volume.item() == pytest.approx(density, abs=5e-4)


@pytest.mark.parametrize("pressure", [0.0, 10.0, 1000.0, 5000.0])
def test_enthalpy_slope_is_the_integrated_volume(pressure: float) -> None:
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(50, generator=generator, dtype=torch.float64) * 40 + 0.01
    t = torch.rand(50, generator=generator, dtype=torch.float64) * 32 - 2
    t.requires_grad_()
    nodes, weights = numpy.polynomial.legendre.leggauss(12)
    pressures = torch.tensor((nodes + 1) / 2 * pressure)
    volumes = specific_volume(s[:, None], t[:, None], pressures)
    enthalpy = 1e4 * pressure / 2 * (volumes * torch.tensor(weights)).sum(dim=1)
    (integrated,) = torch.autograd.grad(enthalpy.sum(), t)
    torch.testing.assert_close(
        enthalpy_slope(s, t.detach(), torch.full_like(s, pressure)), integrated, rtol=1e-8, atol=1e-9
    )


def test_berts_mask_hides_padding_and_is_not_copied() -> None:
    model = Bert(BertConfig(vocabulary=11, width=8, layers=1, heads=2, feedforward=16)).eval()
    tokens, segments = torch.tensor([[3, 7, 2, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    longer = torch.tensor([[3, 7, 2, 0, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        follows, words = model(tokens, segments)
        assert torch.equal(model.blocks[0].masked_attention.hidden, (tokens == 0)[:, None, None, :].expand(1, 1, 5, 5))
        assert copy.deepcopy(model).blocks[0].masked_attention.hidden is None
        follows_longer, words_longer = model(*longer)
    assert words.shape == (1, 5, 11)
    torch.testing.assert_close(follows, follows_longer)
    torch.testing.assert_close(words[:, :3], words_longer[:, :3])
    torch.testing.assert_close(words.exp().sum(dim=-1), torch.ones(1, 5))


def test_dlrm_multiplies_every_pair_of_vectors_once() -> None:
    model = Dlrm(DlrmConfig(tables=2, rows=5, width=4, bottom=(3, 4), top=(1,)))
    seen: list[Tensor] = []
    model.top.register_forward_pre_hook(lambda part, args: seen.append(args[0]))
    dense, indices = torch.rand(2, 3), [torch.tensor([0, 1, 4]), torch.tensor([2, 3, 3])]
    offsets = torch.tensor([[0, 2], [0, 1]])
    with torch.no_grad():
        rate = model(dense, offsets, indices)
        bottom = model.bottom(dense)
        first, second = (table.weight for table in model.tables)
    looked_up = [torch.stack([first[0] + first[1], first[4]]), torch.stack([second[2], second[3] * 2])]
    a, b, c = bottom, *looked_up
    products = torch.stack([(b * a).sum(1), (c * a).sum(1), (c * b).sum(1)], dim=1)
    torch.testing.assert_close(seen[0], torch.cat([bottom, products], dim=1))
    assert rate.shape == (2, 1)
    assert (rate >= 0).all()


def test_autoencoder_drops_most_of_its_code_in_training_only() -> None:
    model, ratings = RatingAutoencoder(12, (8, 8, 1000)), torch.randn(3, 12)
    codes: list[Tensor] = []
    model.code_dropout.register_forward_hook(lambda module, args, code: codes.append(code))
    assert model.train()(ratings).shape == (3, 12)
    model.eval()(ratings)
    assert [round((code == 0).float().mean().item(), 1) for code in codes] == [0.8, 0.0]


@pytest.mark.parametrize("lengths", [(5, 3, 1), (2, 5, 4), (5, 5, 5)])
def test_lengths_mean_the_same_one_by_one_and_batched(lengths: tuple[int, ...]) -> None:
    config = SpeechConfig()
    frames = torch.randn(3, 5, 2)
    target = torch.tensor(
        [[10 * row + place if place < n else -1 for place in range(5)] for row, n in enumerate(lengths, start=1)]
    )
    one_by_one, batched = PerUtteranceLengths(), BatchedLengths()
    mask = one_by_one.frame_mask(frames, torch.tensor(lengths))
    assert torch.equal(mask, batched.frame_mask(frames, torch.tensor(lengths)))
    assert mask.sum(dim=1).tolist() == list(lengths)
    fed, said = one_by_one.teacher_forcing(target, config)
    assert torch.equal(fed, batched.teacher_forcing(target, config)[0])
    assert torch.equal(said, batched.teacher_forcing(target, config)[1])
    assert fed[:, 0].tolist() == [config.sos] * 3
    assert [row[n].item() for row, n in zip(said, lengths, strict=True)] == [config.eos] * 3


def test_speech_after_an_utterances_end_is_ignored() -> None:
    config = SpeechConfig(
        features=6, vocabulary=11, layers=1, heads=2, head_width=4, width=8, feedforward=16, longest=8
    )
    model = SpeechTransformer(config).eval()
    frames, lengths, target = torch.randn(2, 6, 6), torch.tensor([6, 4]), torch.tensor([[3, 4, 5], [6, 7, -1]])
    behind, within = frames.clone(), frames.clone()
    behind[1, 4:] += 1
    within[1, 3] += 1
    with torch.no_grad():
        logits, said = model(frames, lengths, target)
        assert logits.shape == (2, 4, 11)
        assert said.shape == (2, 4)
        assert torch.equal(model(behind, lengths, target)[0], logits)
        assert not torch.equal(model(within, lengths, target)[0], logits)


# Constants of activations, by value: a wrong one changes no shape.


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
