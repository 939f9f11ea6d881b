"""Define mT5 as the papers ran it: an output layer with its own weights, and a cache that does not break the graph."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, MT5Config, MT5ForConditionalGeneration


class UntiedMT5(MT5ForConditionalGeneration):
    """Keep mT5's output layer untied from the embedding, as its published weights are and as transformers 4 had it.

    A call makes its key-value cache without a configuration: with one, the library copies the configuration, which
    Dynamo cannot trace. Both caches hold the same tensors.
    """

    def __init__(self, config: MT5Config) -> None:
        config.tie_word_embeddings = False  # after the configuration's own constructor, which insists on True
        super().__init__(config)
        self.set_input_embeddings(self.shared)  # untied means for the library that encoder and decoder part, too

    def forward(self, **inputs: Any) -> Any:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return super().forward(**inputs, past_key_values=cache)
