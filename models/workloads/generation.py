"""Define LLAMA-G, LLAMA-G-8 and WHISPER-G: text generation as Hugging Face's users run it today."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

NOTES = (
    "one iteration is a call of generate: the prompt in eager mode, then {} compiled steps over a static cache that is "
    "new in each call; the tokens that follow the prompt are given, results are the scores of all steps"
)
PROMPT, STEPS = {"full": 128, "tiny": 6}, {"full": 32, "tiny": 4}
VOCABULARY = {"full": 128_256, "tiny": 97}
WHISPER_VOCABULARY = {"full": 51_865, "tiny": 97}
FRAMES, MEL_BINS = {"full": 3000, "tiny": 24}, {"full": 80, "tiny": 8}


def _tokens(batch: int, size: Size, generator: torch.Generator) -> Inputs:
    import torch

    vocabulary = VOCABULARY[size]
    return Inputs(
        args=tuple(torch.randint(vocabulary, (batch, count[size]), generator=generator) for count in (PROMPT, STEPS))
    )


def one(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return prompt [1, 128] and following tokens [1, 32] int64 (tiny: [1, 6], [1, 4]), uniform over the vocabulary."""
    return _tokens(1, size, generator)


def eight(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return prompts [8, 128] and next tokens [8, 32] int64 (tiny: [2, 6], [2, 4]), uniform over the vocabulary."""
    return _tokens(8 if size == "full" else 2, size, generator)


@register(
    acronym="LLAMA-G",
    name="LlamaForCausalLM.generate",
    suite="generation",
    task="inference",
    batch=1,
    dtype_policy="bf16",
    inputs=one,
    variants=("current",),
    parameters=1_235_814_400,
    sets=("generation",),
    notes=NOTES.format(STEPS["full"] - 1),
)
@register(
    acronym="LLAMA-G-8",
    name="LlamaForCausalLM.generate",
    suite="generation",
    task="inference",
    batch=8,
    dtype_policy="bf16",
    inputs=eight,
    variants=("current",),
    parameters=1_235_814_400,
    sets=("generation",),
    notes=NOTES.format(STEPS["full"] - 1),
)
def build(variant: str, size: Size) -> torch.nn.Module:
    """Return a Llama as 3.2 1B is: 16 layers of width 2048, 32 heads over 8 of keys and values, tied words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from models.networks.generation import Generation

    if size == "full":
        width, inner, layers, heads, shared = 2048, 8192, 16, 32, 8
    else:
        width, inner, layers, heads, shared = 32, 64, 2, 4, 2
    config = LlamaConfig(
        vocab_size=VOCABULARY[size],
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Generation(LlamaForCausalLM(config))


def sounds(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return log-mel frames [1, 80, 3000] float (tiny: [1, 8, 24]), normal; tokens [1, 32] int64 (tiny: [1, 4])."""
    import torch

    frames = torch.randn(1, MEL_BINS[size], FRAMES[size], generator=generator)
    return Inputs(args=(frames, torch.randint(WHISPER_VOCABULARY[size], (1, STEPS[size]), generator=generator)))


@register(
    acronym="WHISPER-G",
    name="WhisperForConditionalGeneration.generate",
    suite="generation",
    task="inference",
    batch=1,
    dtype_policy="bf16",
    inputs=sounds,
    variants=("current",),
    parameters=241_734_912,
    sets=("generation",),
    notes=NOTES.format(STEPS["full"] - 1) + "; the encoder runs in eager mode, once per call",
)
def build_whisper(variant: str, size: Size) -> torch.nn.Module:
    """Return Whisper of the shape of its small model: 12 and 12 layers of width 768, 12 heads."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from models.networks.generation import Generation

    width, layers, heads = (768, 12, 12) if size == "full" else (32, 2, 4)
    config = WhisperConfig(
        vocab_size=WHISPER_VOCABULARY[size],
        num_mel_bins=MEL_BINS[size],
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=FRAMES[size] // 2,
        max_target_positions=448 if size == "full" else 16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return Generation(WhisperForConditionalGeneration(config))
