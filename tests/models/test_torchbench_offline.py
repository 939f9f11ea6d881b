"""TorchBench models without downloads: functions that its builders call are replaced and restored."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import timm
import torchvision
import transformers

from models.torchbench_offline import CONFIGURATIONS, without_downloads


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield


def test_trained_vision_models_get_random_weights() -> None:
    with without_downloads():
        one = torchvision.models.squeezenet1_1(pretrained=True)
        two = torchvision.models.squeezenet1_1(weights="IMAGENET1K_V1")
        small = timm.create_model("mobilenetv3_small_050", pretrained=True)
    shapes = [[tuple(each.shape) for each in model.parameters()] for model in (one, two)]
    assert shapes[0] == shapes[1]
    assert small.num_classes == 1000


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_known_configuration_needs_no_hub(name: str) -> None:
    with without_downloads():
        found = transformers.AutoConfig.from_pretrained(name)
    kind, sizes = CONFIGURATIONS[name]
    assert type(found).__name__ == kind
    assert {size: getattr(found, size) for size in sizes} == sizes


def test_replaced_functions_are_restored() -> None:
    replaced = (timm, "create_model"), (transformers.AutoConfig, "from_pretrained")
    before = [vars(owner)[name] for owner, name in replaced]
    with pytest.raises(LookupError), without_downloads():
        raise LookupError
    assert [vars(owner)[name] for owner, name in replaced] == before
    weights = torchvision.models.SqueezeNet1_1_Weights
    assert weights.verify("IMAGENET1K_V1") is weights.IMAGENET1K_V1


def test_unknown_configuration_is_loaded_from_the_hub(tmp_path: object) -> None:
    transformers.GPT2Config(n_layer=3).save_pretrained(str(tmp_path))
    with without_downloads():
        assert transformers.AutoConfig.from_pretrained(str(tmp_path)).n_layer == 3
