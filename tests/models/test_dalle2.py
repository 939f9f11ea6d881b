"""DALL-E 2: parts that its published parameter counts and the other tests do not check."""

from __future__ import annotations

import math

import pytest
import torch

from models.instance import instantiate
from models.networks.dalle2 import Dalle2, Schedule
from models.networks.dalle2_attention import GainNorm, Rotary, SelfAttention
from models.networks.dalle2_prior import RelativeBias
from models.registry import find


def tiny(variant: str = "published") -> tuple[Dalle2, torch.Tensor]:
    instance = instantiate(find("DALLE2"), variant=variant, size="tiny", device="cpu", seed=0)
    module = instance.module
    assert isinstance(module, Dalle2)
    return module, instance.inputs(0).args[0]


def drawn(module: Dalle2, text: torch.Tensor, seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    with torch.no_grad():
        return module(text)


def test_image_depends_on_noise_and_readable_words() -> None:
    module, text = tiny()
    image = drawn(module, text)
    assert image.shape == (3, 32, 32)
    assert image.min() >= 0 and image.max() <= 1
    assert torch.equal(image, drawn(module, text))
    assert not torch.equal(image, drawn(module, text, seed=4))
    other, beyond = text.clone(), text.clone()
    other[0, 1] = other[0, 1] % 90 + 1
    beyond[0, 12:] = 5
    assert not torch.equal(image, drawn(module, other))
    assert torch.equal(image, drawn(module, beyond))


def test_text_tower_ignores_tokens_after_the_end() -> None:
    module, _ = tiny()
    tower = module.clip.text
    text = torch.randint(1, 90, (1, 12))
    text[0, 5] = 96  # the end token, the highest id
    behind = text.clone()
    behind[0, 7] = text[0, 7] % 90 + 1
    with torch.no_grad():
        (embedding, encoded), (other_embedding, other_encoded) = tower(text), tower(behind)
    assert torch.equal(embedding, other_embedding)
    assert torch.equal(encoded, other_encoded)
    assert [bool(row.any()) for row in encoded[0]] == [True] * 6 + [False] * 6
    assert embedding.norm().item() == pytest.approx(1)


def test_prior_takes_the_sample_nearest_to_the_text() -> None:
    module, text = tiny()
    seen: list[torch.Tensor] = []
    module.prior.register_forward_hook(lambda part, args, output: seen.append(output))
    torch.manual_seed(0)
    with torch.no_grad():
        embedding, _ = module.clip.text(text)
        torch.manual_seed(0)
        chosen = module._imagine(text)
    likeness = torch.nn.functional.cosine_similarity(seen[0], embedding)
    best = seen[0][likeness.argmax()]
    assert torch.nn.functional.cosine_similarity(chosen[0], best, dim=0).item() == pytest.approx(1, abs=1e-5)


def test_causal_attention_ignores_later_tokens() -> None:
    attention = SelfAttention(16, heads=2, head_width=8, rotary=Rotary(4))
    bias = RelativeBias(2)(6, 7, torch.device("cpu"))
    x = torch.randn(1, 6, 16)
    changed = x.clone()
    changed[0, 4:] = torch.randn(2, 16)
    with torch.no_grad():
        first, second = attention(x, bias), attention(changed, bias)
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4:], second[:, 4:])


def test_rotary_positions_make_products_depend_on_distance() -> None:
    rotary = Rotary(4)
    query, key = torch.randn(8).expand(7, 8), torch.randn(8).expand(7, 8)
    products = rotary(query) @ rotary(key).T
    torch.testing.assert_close(products[2, 0], products[6, 4])
    assert not torch.allclose(products[2, 0], products[2, 1])


def test_relative_bias_shares_buckets_of_large_distances() -> None:
    table = RelativeBias(1)
    with torch.no_grad():
        table.bias.weight.copy_(torch.arange(32.0)[:, None])
        buckets = table(300, 300, torch.device("cpu"))[0]
    assert buckets[20, 5:21].tolist() == list(range(15, -1, -1))
    assert buckets[5, 6:].unique().tolist() == [0], "what follows is no distance"
    assert buckets[299, 0] == buckets[299, 100] == 31
    assert 16 <= buckets[40, 10] < 31


def test_gain_norm_is_layer_norm_without_a_shift() -> None:
    x = torch.randn(3, 16)
    torch.testing.assert_close(GainNorm(16)(x), torch.nn.functional.layer_norm(x, (16,)))
    torch.testing.assert_close(GainNorm(16, stable=True)(x), GainNorm(16)(x), atol=1e-4, rtol=1e-3)


def test_one_step_denoises_completely_without_new_noise() -> None:
    schedule, time = Schedule(), torch.zeros(2, dtype=torch.int64)
    start, noise = torch.randn(2, 3), torch.randn(2, 3)
    noisy = math.sqrt(0.001) * start + math.sqrt(0.999) * noise
    torch.testing.assert_close(schedule.start(noisy, time, noise), start, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(schedule.step_back(noisy, time, start, None), start, atol=1e-4, rtol=1e-3)


def test_published_and_current_draw_the_same() -> None:
    published, text = tiny("published")
    current, _ = tiny("current")
    assert torch.equal(drawn(published, text), drawn(current, text))
