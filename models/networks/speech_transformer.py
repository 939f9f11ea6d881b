"""Define Speech-Transformer (Dong et al., 2018): an encoder over frames of filter banks, a decoder over characters.

Post-norm layers, sinusoid positions, output projection tied to the embedding. What depends on the lengths of the
utterances goes through a `Lengths` object, because it is there that the published program and one written for a GPU
differ; both give the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from torch import Tensor, nn

PADDING = -1
"""Stands in targets where a shorter text has ended; ignored by a loss."""


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """Hold the dimensions; the defaults are the published ones (320 features = 80 filter banks of 4 stacked frames).

    `per_utterance` chooses the published program: attention divides by a numpy float64, which reaches a compiled
    graph as a CPU tensor of rank 0 (one for each attention), and the host reads every length.
    """

    per_utterance: bool = True
    features: int = 320
    vocabulary: int = 1014
    sos: int = 1
    eos: int = 2
    layers: int = 6
    heads: int = 8
    head_width: int = 64
    width: int = 512
    feedforward: int = 2048
    dropout: float = 0.1
    longest: int = 5000


class Lengths(Protocol):
    """Provide what the network has to know of the utterances' lengths."""

    def frame_mask(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Return 1 where a frame is real and 0 where it is padding: [batch, time] in the dtype of `frames`."""

    def teacher_forcing(self, target: Tensor, config: SpeechConfig) -> tuple[Tensor, Tensor]:
        """Return the decoder's input (start, text, ends) and target (text, end, padding): each [batch, time + 1]."""


class PerUtteranceLengths:
    """Read each length on the host and cut out each text by a mask, one utterance at a time, as published."""

    def frame_mask(self, frames: Tensor, lengths: Tensor) -> Tensor:
        mask = frames.new_ones(frames.shape[:2])
        for row in range(frames.shape[0]):
            mask[row, lengths[row] :] = 0
        return mask

    def teacher_forcing(self, target: Tensor, config: SpeechConfig) -> tuple[Tensor, Tensor]:
        texts = [text[text != PADDING] for text in target]
        start, end = target.new_tensor([config.sos]), target.new_tensor([config.eos])
        fed = [torch.cat([start, text]) for text in texts]
        said = [torch.cat([text, end]) for text in texts]
        return (
            nn.utils.rnn.pad_sequence(fed, batch_first=True, padding_value=config.eos),
            nn.utils.rnn.pad_sequence(said, batch_first=True, padding_value=PADDING),
        )


class BatchedLengths:
    """Treat the whole batch at once by comparisons on the device, with shapes that do not depend on the data.

    Equal to `PerUtteranceLengths` where the longest text fills its row.
    """

    def frame_mask(self, frames: Tensor, lengths: Tensor) -> Tensor:
        times = torch.arange(frames.shape[1], device=frames.device)
        return (times < lengths[:, None]).to(frames.dtype)

    def teacher_forcing(self, target: Tensor, config: SpeechConfig) -> tuple[Tensor, Tensor]:
        fed = nn.functional.pad(target.masked_fill(target == PADDING, config.eos), (1, 0), value=config.sos)
        times = torch.arange(target.shape[1] + 1, device=target.device)
        text_lengths = (target != PADDING).sum(dim=1, keepdim=True)
        said = nn.functional.pad(target, (0, 1), value=PADDING).masked_fill(times == text_lengths, config.eos)
        return fed, said


class Attention(nn.Module):
    """Compute multi-head attention, then a residual connection and layer norm."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads = config.heads
        # Each attention makes its own scalar: one shared object would be one input of the compiled graph.
        self.temperature = numpy.power(config.head_width, 0.5) if config.per_utterance else math.sqrt(config.head_width)
        self.query = nn.Linear(config.width, inner)
        self.key = nn.Linear(config.width, inner)
        self.value = nn.Linear(config.width, inner)
        self.output = nn.Linear(inner, config.width)
        self.weights_dropout = nn.Dropout(config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        """Attend from `x` [batch, queries, width] to `memory` [batch, keys, width] -> [batch, queries, width].

        `hidden` [batch, queries, keys] is true where no attention may go.
        """
        query, key, value = self._split(self.query(x)), self._split(self.key(memory)), self._split(self.value(memory))
        scores = torch.bmm(query, key.transpose(1, 2)) / self.temperature
        scores = scores.masked_fill(hidden.repeat(self.heads, 1, 1), -math.inf)
        attended = torch.bmm(self.weights_dropout(scores.softmax(dim=-1)), value)
        merged = attended.unflatten(0, (self.heads, -1)).permute(1, 2, 0, 3).flatten(2)
        return self.norm(self.dropout(self.output(merged)) + x)

    def _split(self, projected: Tensor) -> Tensor:
        """Reshape [batch, time, heads * head_width] to [heads * batch, time, head_width]."""
        return projected.unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3).flatten(0, 1)


class FeedForward(nn.Module):
    """Apply two linear layers, then a residual connection and layer norm."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, config.feedforward)
        self.narrow = nn.Linear(config.feedforward, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.narrow(torch.relu(self.widen(x)))) + x)


class EncoderLayer(nn.Module):
    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, real: Tensor, hidden: Tensor) -> Tensor:
        x = self.attention(x, x, hidden)
        x *= real
        x = self.feedforward(x)
        x *= real
        return x


class DecoderLayer(nn.Module):
    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.self_attention = Attention(config)
        self.cross_attention = Attention(config)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, memory: Tensor, real: Tensor, hidden: Tensor, hidden_memory: Tensor) -> Tensor:
        x = self.self_attention(x, x, hidden)
        x *= real
        x = self.cross_attention(x, memory, hidden_memory)
        x *= real
        x = self.feedforward(x)
        x *= real
        return x


class Positions(nn.Module):
    """Return a sinusoid table [1, longest, width], cut to the length of the input."""

    table: Tensor

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        positions = torch.arange(config.longest).float()[:, None]
        frequencies = torch.exp(torch.arange(0, config.width, 2).float() * (-math.log(10000.0) / config.width))
        angles = positions * frequencies
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.table[:, : x.shape[1]]


class Encoder(nn.Module):
    """Map frames [batch, time, features] to [batch, time, width]."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.lengths = _lengths(config)
        self.project = nn.Linear(config.features, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.positions = Positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        real = self.lengths.frame_mask(frames, lengths)[..., None]
        hidden = _hidden_frames(self.lengths.frame_mask(frames, lengths), queries=frames.shape[1])
        x = self.dropout(self.norm(self.project(frames)) + self.positions(frames))
        for layer in self.layers:
            x = layer(x, real, hidden)
        return x


class Decoder(nn.Module):
    """Map target text [batch, time] and encoded frames to logits [batch, time + 1, vocabulary] and their targets."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.lengths = _lengths(config)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = Positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.project = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.xavier_normal_(self.project.weight)
        self.embedding.weight = self.project.weight

    def forward(self, target: Tensor, memory: Tensor, memory_lengths: Tensor) -> tuple[Tensor, Tensor]:
        fed, said = self.lengths.teacher_forcing(target, self.config)
        ended = fed == self.config.eos
        real = (~ended)[..., None].to(memory.dtype)
        future = torch.ones(fed.shape[1], fed.shape[1], dtype=torch.bool, device=fed.device).triu(1)
        hidden = ended[:, None, :] | future
        hidden_memory = _hidden_frames(self.lengths.frame_mask(memory, memory_lengths), queries=fed.shape[1])
        x = self.dropout(self.embedding(fed) * math.sqrt(self.config.width) + self.positions(fed))
        for layer in self.layers:
            x = layer(x, memory, real, hidden, hidden_memory)
        return self.project(x), said


class SpeechTransformer(nn.Module):
    """Map (frames [batch, time, features], lengths [batch] int64, target [batch, text] int64) to (logits, said)."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def forward(self, frames: Tensor, lengths: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(target, self.encoder(frames, lengths), lengths)


def _lengths(config: SpeechConfig) -> Lengths:
    return PerUtteranceLengths() if config.per_utterance else BatchedLengths()


def _hidden_frames(frame_mask: Tensor, queries: int) -> Tensor:
    """Map [batch, keys] with 1 for real frames to [batch, queries, keys], true where a frame is padding."""
    return (frame_mask < 1)[:, None, :].expand(-1, queries, -1)
