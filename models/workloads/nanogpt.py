"""Define NANOGPT-<prompt>-<tokens>: the program of `models.nanogpt`, a row for each of the article's configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.nanogpt.configurations import NAMED, SIZES, SWEEP, Configuration
from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

NOTES = (
    "one iteration is a whole generation: the prompt in eager mode, then {} steps over a static cache, compiled, or "
    "captured by hand in mode by-hand; tokens are drawn from a seed, the same in all modes"
)


def _register(one: Configuration) -> None:
    def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
        """Return a prompt int64 [1, count], uniform over the vocabulary."""
        import torch

        shape = SIZES[size]
        count = one.within(shape.context).prompt
        return Inputs(args=(torch.randint(shape.vocabulary, (1, count), generator=generator),))

    @register(
        acronym=one.workload,
        name=f"NanoGPT.generate, {one.prompt} + {one.new_tokens} tokens",
        suite="nanogpt",
        task="inference",
        batch=1,
        dtype_policy="fp32",
        inputs=inputs,
        parameters=56_769,
        sets=("nanogpt",),
        notes=NOTES.format(one.new_tokens - 1),
    )
    def build(variant: str, size: Size) -> torch.nn.Module:
        """Return a model of four layers of width 32, four heads, a context of 64, 65 characters."""
        from models.nanogpt.decoding import Generation

        shape = SIZES[size]
        return Generation(shape, one.within(shape.context).new_tokens)


for each in {one.workload: one for one in (*SWEEP, *NAMED)}.values():
    _register(each)
