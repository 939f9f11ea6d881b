"""Define XLNet as the papers ran it: the table of relative positions is built on the CPU in every call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import XLNetConfig, XLNetLMHeadModel, XLNetModel


class CpuTableXLNetModel(XLNetModel):
    """Make XLNet's sinusoid table of CPU tensors and then transfer it, as in transformers up to 4.57.

    Newer versions pass the device on to the constructors. The values are the same up to rounding.
    """

    def relative_positional_encoding(
        self, qlen: int, klen: int, bsz: int | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Return sines, then cosines, of the relative positions klen .. 1 - qlen: [qlen + klen, bsz, d_model] float32.

        Raises:
            NotImplementedError: the configuration asks for one-way attention, two-way data or clamped positions.
        """
        if self.attn_type != "bi" or self.bi_data or self.clamp_len > 0 or bsz is None:
            raise NotImplementedError("the published table is reproduced for the default configuration only")
        # No device here, on purpose: this is the construct that keeps the published program from being captured.
        exponents = torch.arange(0, self.d_model, 2.0) / self.d_model
        frequencies = 1 / torch.pow(10000, exponents)
        positions = torch.arange(klen, -qlen, -1.0)
        angles = torch.einsum("i,d->id", positions, frequencies)
        table = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)
        return table[:, None, :].expand(-1, bsz, -1).to(device)


class CpuTableXLNetLMHeadModel(XLNetLMHeadModel):
    """Put a language-modelling head on `CpuTableXLNetModel`; parameters and outputs are the library class's."""

    def __init__(self, config: XLNetConfig) -> None:
        # Past the library's constructor, which would initialise 360 million parameters only to have them replaced.
        super(XLNetLMHeadModel, self).__init__(config)
        self.attn_type = config.attn_type
        self.same_length = config.same_length
        self.transformer = CpuTableXLNetModel(config)
        self.lm_loss = nn.Linear(config.d_model, config.vocab_size, bias=True)
        self.post_init()
