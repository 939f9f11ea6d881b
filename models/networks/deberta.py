"""Define DeBERTa's attention without relative positions, so that it runs under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DebertaConfig, DebertaForMaskedLM


class ContentAttention(nn.Module):
    """Take the place and the weights of the library's attention and compute the same.

    The library hides padding with the least value of the query's dtype. Under autocast the query is float32, because
    its bias is, and the scores are not: filling them with a float32 minimum is an error. Here it is the least value of
    the scores' own dtype, as in transformers 4.

    Raises:
        NotImplementedError: the configuration asks for relative attention or talking heads.
    """

    def __init__(self, config: DebertaConfig, library: Any) -> None:
        super().__init__()
        if config.relative_attention or getattr(config, "talking_head", False):
            raise NotImplementedError("only attention by content is reproduced, the default configuration's")
        self.heads = config.num_attention_heads
        self.head_width = config.hidden_size // config.num_attention_heads
        self.in_proj: nn.Module = library.in_proj
        self.q_bias: Tensor = library.q_bias
        self.v_bias: Tensor = library.v_bias
        self.dropout: nn.Module = library.dropout

    def forward(
        self, hidden: Tensor, attention_mask: Tensor, *unused: object, **options: object
    ) -> tuple[Tensor, None]:
        """Attend: `hidden` [batch, length, width], `attention_mask` [batch, 1, length, length] -> like `hidden`.

        The library's calls pass relative positions and the like too, which are None here.
        """
        query, key, value = self.in_proj(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        query, value = query + self._by_head(self.q_bias), value + self._by_head(self.v_bias)
        # A CPU tensor of rank 0 in every layer, as in the library: the published program's construct.
        scale = torch.sqrt(torch.tensor(self.head_width, dtype=torch.float))
        scores = torch.matmul(query / scale.to(query.dtype), key.transpose(-1, -2))
        scores = scores.masked_fill(~attention_mask.bool(), torch.finfo(scores.dtype).min)
        attended = torch.matmul(self.dropout(scores.softmax(dim=-1)), value)
        return attended.transpose(1, 2).flatten(2), None

    def _by_head(self, bias: Tensor) -> Tensor:
        return bias.unflatten(0, (self.heads, 1, self.head_width))


class AutocastDebertaForMaskedLM(DebertaForMaskedLM):
    """Put `ContentAttention` in each layer of the library's class; parameters, outputs and loss stay the library's."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__(config)
        layers: Any = self.deberta.encoder.layer
        for layer in layers:
            layer.attention.self = ContentAttention(config, layer.attention.self)
