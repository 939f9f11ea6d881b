"""Run the decode step in several ways, generate with any of them, and offer a generation as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from models.nanogpt.configurations import Shape
from models.nanogpt.network import NanoGPT
from models.registry import Inputs

SAMPLING_SEED = 1337


class Decoder(Protocol):
    """Run one step. A call of `feed` says what the next `step` works on."""

    def feed(self, token: torch.Tensor, position: int) -> None:
        """Set the next `token` (int64 [1, 1], as it was sampled) and its `position` in the sequence."""
        ...

    def step(self) -> torch.Tensor:
        """Return logits [1, 1, vocabulary], valid until the next step."""
        ...


class Watch(Protocol):
    """Watch a generation: its methods are called when a part begins and ends; a part is the prompt or a step."""

    def prompt(self) -> None: ...

    def prompt_ended(self) -> None: ...

    def feeding(self) -> None:
        """Callback: inputs of a step are about to be fed."""
        ...

    def step(self) -> None:
        """Callback: they were fed, and the step is about to run."""
        ...

    def step_ended(self) -> None: ...


class _Unwatched:
    def prompt(self) -> None: ...

    def prompt_ended(self) -> None: ...

    def feeding(self) -> None: ...

    def step(self) -> None: ...

    def step_ended(self) -> None: ...


def generate(
    model: NanoGPT, decoder: Decoder, prompt: torch.Tensor, new_tokens: int, seed: int, watch: Watch | None = None
) -> torch.Tensor:
    """Sample `new_tokens` after `prompt` (int64 [1, count]): int64 [1, count + new_tokens]."""
    return generate_with_logits(model, decoder, prompt, new_tokens, seed, watch)[0]


@torch.no_grad()
def generate_with_logits(
    model: NanoGPT, decoder: Decoder, prompt: torch.Tensor, new_tokens: int, seed: int, watch: Watch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `generate` does, and the logits [vocabulary] of the last token.

    The prompt always runs in eager mode. Tokens are drawn from the softmax by a generator seeded with `seed`, so that
    every decoder draws the same ones from equal logits.
    """
    watch = watch or _Unwatched()
    # A fake tensor, which memory is estimated with, may be on a device that is not there.
    generator = torch.Generator(prompt.device).manual_seed(seed) if type(prompt) is torch.Tensor else None
    model.clear_cache()
    watch.prompt()
    logits = model(prompt, 0)
    watch.prompt_ended()
    token = _drawn(logits, generator)
    sequence = torch.cat((prompt, token), dim=1)
    for position in range(prompt.shape[1], prompt.shape[1] + new_tokens - 1):
        watch.feeding()
        decoder.feed(token, position)
        watch.step()
        logits = decoder.step()
        watch.step_ended()
        token = _drawn(logits, generator)
        sequence = torch.cat((sequence, token), dim=1)
    return sequence, logits[0, -1].clone()


def _drawn(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return a token int64 [1, 1] drawn from the last of `logits` [1, count, vocabulary]."""
    return torch.multinomial(torch.softmax(logits[:, -1], dim=-1), num_samples=1, generator=generator)


class EagerDecoder:
    """Run the model's forward with the position as a Python number, as in the published eager path."""

    def __init__(self, model: NanoGPT) -> None:
        self._model = model

    def feed(self, token: torch.Tensor, position: int) -> None:
        self._token, self._position = token, position

    def step(self) -> torch.Tensor:
        logits: torch.Tensor = self._model(self._token, self._position)
        return logits


class CompiledDecoder:
    """Run the decode step through `compile`, such as `functools.partial(torch.compile, mode="reduce-overhead")`.

    The sampled token is passed as it is, wherever it lies; the position goes into one buffer.
    """

    def __init__(self, model: NanoGPT, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._decode = compile(model.decode)
        self._position = torch.zeros(1, dtype=torch.int64, device=_device(model))

    def feed(self, token: torch.Tensor, position: int) -> None:
        self._token = token
        self._position.fill_(position)

    def step(self) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the logits of the step before are read
        logits: torch.Tensor = self._decode(self._token, self._position)
        return logits


class ReplayDecoder:
    """Replay the decode step, captured by hand into one CUDA graph, as in the article.

    Inputs are copied into buffers of its own before each replay. Needs a GPU; captures when it is made.
    """

    @torch.no_grad()
    def __init__(self, model: NanoGPT) -> None:
        device = _device(model)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            model.decode(self._token, self._position)  # libraries set themselves up outside of a capture
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._logits = model.decode(self._token, self._position)

    def feed(self, token: torch.Tensor, position: int) -> None:
        self._token.copy_(token)
        self._position.fill_(position)

    def step(self) -> torch.Tensor:
        self._graph.replay()
        return self._logits


def _device(model: NanoGPT) -> torch.device:
    return model.head.weight.device


class DecodeStep(nn.Module):
    """Wrap the step that is compiled as a module."""

    def __init__(self, model: NanoGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.model.decode(token, position)


class Generation(nn.Module):
    """Generate in one call: a prompt int64 [1, count] -> the sequence int64 [1, count + `new_tokens`] and logits
    [vocabulary] of its last token.

    All ways to run the step draw from the same seed, so they give the same tokens.

    Attributes:
        watch: called at the parts of each generation; None: no callback.
    """

    def __init__(self, shape: Shape, new_tokens: int) -> None:
        super().__init__()
        self.model = NanoGPT(shape)
        self.new_tokens = new_tokens
        self.watch: Watch | None = None

    def forward(self, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._generate(EagerDecoder(self.model), prompt)

    def compiled_with(self, **keywords: Any) -> Callable[..., Any]:
        """Return the generation with its step through `torch.compile` with these keywords."""
        return partial(self._generate, CompiledDecoder(self.model, partial(torch.compile, **keywords)))

    def compiled_part(self, inputs: Inputs) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        """Return the first step after the prompt."""
        (prompt,) = inputs.args
        position = torch.full((1,), prompt.shape[1], dtype=torch.int64, device=prompt.device)
        return DecodeStep(self.model), (prompt[:, :1], position), {}

    def captured_by_hand(self) -> Callable[..., Any]:
        """Return the generation with its step as one CUDA graph, which is captured in the first call."""
        made: list[ReplayDecoder] = []

        def generate(prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not made:
                made.append(ReplayDecoder(self.model))
            return self._generate(made[0], prompt)

        return generate

    def _generate(self, decoder: Decoder, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return generate_with_logits(self.model, decoder, prompt, self.new_tokens, SAMPLING_SEED, self.watch)
