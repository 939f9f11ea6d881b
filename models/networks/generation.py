"""Run Hugging Face's `generate` as a module: an eager prompt, then one compiled call per token over a static cache.

The library compiles the decoding step itself where the cache is static, as its users have it: with a `CompileConfig`,
and a new cache in each call.

Which tokens follow the prompt is an input. A decoder that chose them itself would go its own way after the first close
choice that rounding decides, and nothing after it could be compared; the work is the same. Results are the scores of
all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig, GenerationConfig, GenerationMixin, StaticCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import LogitsProcessor, LogitsProcessorList

from models.registry import Inputs


class FollowedBy(LogitsProcessor):
    """Let no token through but the next of `tokens` (int64 [batch, steps]): a logits processor."""

    def __init__(self, tokens: torch.Tensor, prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        place = input_ids.shape[1] - self._prompt
        return torch.full_like(scores, float("-inf")).scatter(1, self._tokens[:, place : place + 1], 0.0)


class Generation(nn.Module):
    """Run `generate` of `model`, called with the prompt and the tokens that follow, int64 [batch, count] each.

    An encoder-decoder's prompt is what it encodes, and decoding begins with the configuration's start token.

    Returns scores, float32 [steps, batch, vocabulary].
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, prompt: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return self._generate(prompt, following, None)

    def compiled_with(self, **keywords: Any) -> Callable[..., Any]:
        # Without its own mode the library would give one, which a backend with options refuses.
        config = CompileConfig(**{"mode": None, **keywords})
        vars(config)["_compile_all_devices"] = True  # on a CPU too, for tests

        def generate(prompt: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            return self._generate(prompt, following, config)

        return generate

    def compiled_part(self, inputs: Inputs) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        """Return the first decoding step after the prompt, with caches that hold nothing yet."""
        prompt, following = inputs.args
        batch, steps = following.shape
        decodes = self.model.config.is_encoder_decoder
        begun = 1 if decodes else prompt.shape[1]
        cache = self._cache(batch, begun + steps, prompt)
        keywords = {"past_key_values": cache, "use_cache": True, "return_dict": True}
        if not decodes:
            return self.model, (), {**keywords, "input_ids": following[:, :1]}
        with torch.no_grad():
            keywords["encoder_outputs"] = self.model.get_encoder()(prompt)
        return self.model, (), {**keywords, "decoder_input_ids": following[:, :1]}

    def _cache(self, batch: int, length: int, prompt: torch.Tensor) -> Any:
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        sizes = {"num_heads": heads, "head_dim": config.hidden_size // config.num_attention_heads}
        own = StaticCache(config=config, max_cache_len=length)
        own.early_initialization(batch, dtype=self.model.dtype, device=prompt.device, **sizes)
        if not self.model.config.is_encoder_decoder:
            return own
        crossed = StaticCache(config=config, max_cache_len=self.model.config.max_source_positions)
        crossed.early_initialization(batch, dtype=self.model.dtype, device=prompt.device, **sizes)
        return EncoderDecoderCache(own, crossed)

    def _generate(self, prompt: torch.Tensor, following: torch.Tensor, compile: CompileConfig | None) -> torch.Tensor:
        begun = 1 if self.model.config.is_encoder_decoder else prompt.shape[1]
        # The mixin's own method: Whisper's would cut long sounds into pieces first.
        generated: Any = GenerationMixin.generate(
            self.model,
            prompt,
            generation_config=GenerationConfig(
                max_new_tokens=following.shape[1],
                do_sample=False,
                cache_implementation="static",
                return_dict_in_generate=True,
                output_logits=True,
                eos_token_id=None,
                pad_token_id=0,
                bos_token_id=1,
                decoder_start_token_id=1 if self.model.config.is_encoder_decoder else None,
                disable_compile=compile is None,
                compile_config=compile,
            ),
            logits_processor=LogitsProcessorList([FollowedBy(following, begun)]),
        )
        return torch.stack(generated.logits)
