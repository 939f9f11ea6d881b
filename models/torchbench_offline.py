"""Build TorchBench's models where nothing can be downloaded: the variant `random-weights` of each.

TorchBench gives most models of torchvision and timm their trained weights, and downloads configurations of Hugging
Face's models, whose weights are random there too. Here all weights are random, and the configurations have the
published sizes. Kernels and graphs are the same; how far results differ from eager's may not be.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

VARIANT = "random-weights"

CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "gpt2": ("GPT2Config", {}),
    "gpt2-large": ("GPT2Config", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "t5-small": ("T5Config", {}),
    "t5-base": ("T5Config", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    "t5-large": ("T5Config", {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}),
    "albert-base-v2": (
        "AlbertConfig", {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    ),
    "distilbert-base-uncased": ("DistilBertConfig", {}),
    "xlm-roberta-base": (
        "XLMRobertaConfig", {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    "facebook/bart-base": (
        "BartConfig",
        {
            "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
            "encoder_attention_heads": 12, "decoder_attention_heads": 12,
        },
    ),
    "allenai/longformer-base-4096": (
        "LongformerConfig",
        {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1, "attention_window": 512},
    ),
}  # fmt: skip
"""Class and sizes of a configuration by its name on the hub; sizes that are not named are the class's own."""


@contextmanager
def without_downloads() -> Iterator[None]:
    """Give models random weights inside the block where they would get downloaded ones.

    Only imported libraries are checked: a model's file has imported its libraries, and the others take seconds each.
    """
    with ExitStack() as stack:
        if torchvision := sys.modules.get("torchvision.models"):
            weights = torchvision.get_model_weights("alexnet").__mro__[1]  # the class that all have as their base
            stack.enter_context(patch.object(weights, "verify", classmethod(lambda cls, given: None)))
        if timm := sys.modules.get("timm"):
            stack.enter_context(patch.object(timm, "create_model", _untrained(timm.create_model)))
        if transformers := sys.modules.get("transformers"):
            automatic = transformers.AutoConfig
            known = staticmethod(_known(transformers, automatic.from_pretrained))
            stack.enter_context(patch.object(automatic, "from_pretrained", known))
        yield


def _untrained(create_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create_model)
    def create(*args: Any, **given: Any) -> Any:
        return create_model(*args, **{**given, "pretrained": False})

    return create


def _known(transformers: ModuleType, from_hub: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_hub)
    def configuration(name: str, *args: Any, **given: Any) -> Any:
        if name not in CONFIGURATIONS:
            return from_hub(name, *args, **given)
        kind, sizes = CONFIGURATIONS[name]
        return getattr(transformers, kind)(**sizes)

    return configuration
