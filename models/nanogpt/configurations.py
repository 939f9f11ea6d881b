"""Define the article's model in numbers, and its configurations: lengths of the prompt and of the generated text.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.registry import Size


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the model's dimensions. `context`: the longest sequence, and the length of the cache."""

    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int


SIZES: Mapping[Size, Shape] = {
    "full": Shape(vocabulary=65, context=64, width=32, heads=4, layers=4),
    "tiny": Shape(vocabulary=11, context=16, width=8, heads=2, layers=2),
}
"""Published size (56,769 parameters; the article says 57K), and one for tests."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Hold one configuration. `prompt` and `new_tokens` are numbers of tokens; together at most the model's context."""

    name: str
    prompt: int
    new_tokens: int

    @property
    def workload(self) -> str:
        """Return the acronym of the workload that runs it."""
        return f"NANOGPT-{self.prompt}-{self.new_tokens}"

    def within(self, context: int) -> Configuration:
        """Return the same, shortened to a context of so many tokens: for sizes smaller than the published one."""
        prompt = min(self.prompt, context // 2)
        return Configuration(self.name, prompt, min(self.new_tokens, context - prompt))


NAMED = (
    Configuration("smoke_test", 4, 8),
    Configuration("medium_generation", 8, 32),
    Configuration("long_generation", 8, 48),
    Configuration("heavy_prompt", 32, 16),
    Configuration("near_context_limit", 4, 56),
)

SWEEP = tuple(Configuration(f"sweep_{new_tokens}", 8, new_tokens) for new_tokens in (8, 16, 32, 48, 56))
"""The generation length at a prompt of 8."""
