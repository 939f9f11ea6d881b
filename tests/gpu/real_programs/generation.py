"""Decoders that call a compiled step once per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from real_programs.pieces import batches, built, integers, llama_config, mlp, normal, served
from real_programs.record import Body, Setting, program


@program(calls=4)
def llama_generate(setting: Setting) -> Body:
    """Hugging Face Llama: `generate` with a compile config, which makes a static cache in each call."""
    from transformers import CompileConfig, LlamaForCausalLM

    config = llama_config(setting)
    model = built(setting, lambda: LlamaForCausalLM(config)).eval()
    prompts = batches(3, lambda generator: integers(setting, generator, config.vocab_size, 2, 16))
    compile_config = None
    if setting.compiles:
        # The library asks for a mode of Inductor where none is given.
        compile_config = CompileConfig(**{"mode": "default", **setting.keywords()})
        compile_config._compile_all_devices = True

    def step(i: int) -> Any:
        return model.generate(
            prompts[i % len(prompts)],
            attention_mask=torch.ones_like(prompts[0]),
            max_new_tokens=setting.pick(24, 4),
            do_sample=False,
            cache_implementation="static",
            compile_config=compile_config,
            disable_compile=not setting.compiles,
        )

    return Body(step)


@program(calls=6)
def llama_decode_loop(setting: Setting) -> Body:
    """A compiled Llama in a decode loop of the user's own, with a new static cache for each prompt."""
    from transformers import LlamaForCausalLM, StaticCache

    config = llama_config(setting)
    model = built(setting, lambda: LlamaForCausalLM(config)).eval()
    decode = setting.compile(model.forward)
    prompts = batches(3, lambda generator: integers(setting, generator, config.vocab_size, 2, 16))
    new_tokens = setting.pick(16, 3)

    def step(i: int) -> Any:
        prompt = prompts[i % len(prompts)]
        cache = StaticCache(config=config, max_cache_len=64)
        places = torch.arange(prompt.shape[1], device=setting.device)[None]
        logits = model(prompt, past_key_values=cache, position_ids=places).logits
        tokens = [logits[:, -1:].argmax(-1)]
        for offset in range(new_tokens):
            place = torch.full((1, 1), prompt.shape[1] + offset, device=setting.device)
            logits = decode(tokens[-1], past_key_values=cache, position_ids=place).logits
            tokens.append(logits[:, -1:].argmax(-1))
        return torch.cat(tokens, 1)

    return served(step)


@program(calls=3)
def whisper_generate(setting: Setting) -> Body:
    """Hugging Face Whisper: `forward` compiled as its page says, static cache, logits kept by the library."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width = setting.pick(256, 32)
    config = WhisperConfig(
        vocab_size=setting.pick(2048, 97),
        num_mel_bins=setting.pick(80, 8),
        d_model=width,
        encoder_layers=setting.pick(4, 1),
        decoder_layers=setting.pick(4, 1),
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_source_positions=setting.pick(300, 16),
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = built(setting, lambda: WhisperForConditionalGeneration(config)).eval()
    model.generation_config.cache_implementation = "static"
    model.generation_config.eos_token_id = model.generation_config.max_length = None
    model.forward = setting.compile(model.forward)
    model.model.encoder.forward = setting.compile(model.model.encoder.forward)
    frames = 2 * config.max_source_positions
    sounds = batches(2, lambda generator: normal(setting, generator, 1, config.num_mel_bins, frames))

    def step(i: int) -> Any:
        return model.generate(
            sounds[i % len(sounds)],
            max_new_tokens=setting.pick(16, 3),
            do_sample=False,
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )["logits"]

    return served(step)


@program(calls=4)
def t5_generate(setting: Setting) -> Body:
    """Hugging Face T5 with encoder and decoder compiled one by one: the encoder's result is read in every step."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=setting.pick(2048, 97),
        d_model=setting.pick(256, 32),
        d_kv=32,
        d_ff=setting.pick(512, 64),
        num_layers=setting.pick(4, 1),
        num_heads=setting.pick(8, 2),
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = built(setting, lambda: T5ForConditionalGeneration(config)).eval()
    encode, decode = setting.compile(model.encoder), setting.compile(model.decoder)
    prompts = batches(3, lambda generator: integers(setting, generator, config.vocab_size, 2, 32))
    new_tokens = setting.pick(8, 2)

    def step(i: int) -> Any:
        states = encode(prompts[i % len(prompts)]).last_hidden_state
        tokens = torch.zeros(2, new_tokens + 1, dtype=torch.int64, device=setting.device)
        for place in range(new_tokens):
            hidden = decode(tokens, encoder_hidden_states=states, use_cache=False).last_hidden_state
            scores = model.lm_head(hidden[:, place])
            tokens[:, place + 1] = scores.argmax(-1)
        return tokens, scores

    return served(step)


class CachedAttention(nn.Module):
    """One token over a key-value cache that is an argument and is written in place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), mlp(2 * width, 1, width, width)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """`x` [batch, width], `cache` [2, batch, heads, length, width / heads], `place` int64 [1]."""
        query, key, value = (part.view(x.shape[0], self.heads, 1, -1) for part in self.qkv(x).chunk(3, -1))
        cache[0].index_copy_(2, place, key)
        cache[1].index_copy_(2, place, value)
        seen = torch.arange(cache.shape[3], device=x.device) <= place
        attended = nn.functional.scaled_dot_product_attention(query, cache[0], cache[1], attn_mask=seen[None])
        return x + self.out(attended.reshape(x.shape))


@program(calls=8, trains=True)
def key_value_cache_as_argument(setting: Setting) -> Body:
    """A decode step that writes the caches it is passed, one set of caches per sequence, sequences taking turns."""
    width, heads, length, batch, layers = setting.pick((256, 8, 64, 4, 6), (32, 2, 8, 2, 2))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(CachedAttention(width, heads) for _ in range(layers))

        def forward(self, x: torch.Tensor, caches: list[torch.Tensor], place: torch.Tensor) -> torch.Tensor:
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache, place)
            return x

    model = setting.compile(built(setting, Decoder))
    first = batches(3, lambda generator: normal(setting, generator, batch, width))
    held = [
        [torch.zeros(2, batch, heads, length, width // heads, device=setting.device) for _ in range(layers)]
        for _ in first
    ]
    places = [torch.tensor([place], device=setting.device) for place in range(length)]

    @torch.no_grad()
    def step(i: int) -> Any:
        sequence = i % len(first)
        x = first[sequence]
        for offset in range(setting.pick(8, 2)):
            x = nn.functional.normalize(model(x, held[sequence], places[(i + offset) % length]))
        return x

    return Body(step, lambda: [caches[-1] for caches in held])
