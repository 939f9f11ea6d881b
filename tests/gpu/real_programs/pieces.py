"""Small networks and seeded data that several programs are built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from real_programs.record import Body, Setting

if TYPE_CHECKING:
    from transformers import BertConfig, GPT2Config, LlamaConfig

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)


def built(setting: Setting, make: Callable[[], Module], seed: int = 0, dtype: torch.dtype | None = None) -> Module:
    """A module with weights drawn from `seed` on the CPU, the same in every mode, on the setting's device."""
    torch.manual_seed(seed)
    return make().to(setting.device, dtype)


def batches(count: int, make: Callable[[torch.Generator], T]) -> list[T]:
    """Data made from one CPU generator each, seeded by its place."""
    made = []
    for index in range(count):
        generator = torch.Generator().manual_seed(1000 + index)
        made.append(make(generator))
    return made


def normal(setting: Setting, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """float32, standard normal, on the setting's device."""
    return torch.randn(shape, generator=generator).to(setting.device)


def integers(setting: Setting, generator: torch.Generator, high: int, *shape: int) -> torch.Tensor:
    """int64, uniform in [0, high), on the setting's device."""
    return torch.randint(high, shape, generator=generator).to(setting.device)


def weights(module: nn.Module) -> list[torch.Tensor]:
    """The first parameters, as a sample of all."""
    return list(module.parameters())[:8]


def descend(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Update the weights once. Return the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def served(step: Callable[[int], Any]) -> Body:
    """Return a program of inference alone."""
    return Body(torch.no_grad()(step))


def mlp(width: int, depth: int, inputs: int | None = None, outputs: int | None = None) -> nn.Sequential:
    """`depth` hidden layers of `width` with GELU."""
    layers: list[nn.Module] = [nn.Linear(inputs or width, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs or width))


class Block(nn.Module):
    """A pre-norm transformer layer over [batch, tokens, width], with dropout in its attention."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = mlp(2 * width, 1, width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        options = {"dropout_p": self.dropout, "is_causal": self.causal}
        attended = nn.functional.scaled_dot_product_attention(query, key, value, **options)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed_forward(self.norm_2(x))


def transformer(width: int, layers: int, heads: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block(width, heads) for _ in range(layers)))


def llama_config(setting: Setting) -> LlamaConfig:
    from transformers import LlamaConfig

    width = setting.pick(512, 32)
    return LlamaConfig(
        vocab_size=setting.pick(4096, 97),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=setting.pick(6, 2),
        num_attention_heads=setting.pick(8, 2),
        num_key_value_heads=setting.pick(4, 1),
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )


def bert_config(setting: Setting, **changes: Any) -> BertConfig:
    """Return a configuration without dropout, so that compiled and eager results can be compared."""
    from transformers import BertConfig

    width = setting.pick(384, 32)
    return BertConfig(
        vocab_size=setting.pick(4096, 97),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=setting.pick(6, 2),
        num_attention_heads=setting.pick(6, 2),
        max_position_embeddings=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **changes,
    )


def gpt2_config(setting: Setting) -> GPT2Config:
    """Return a configuration without dropout."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=setting.pick(4096, 97),
        n_positions=128,
        n_embd=setting.pick(384, 32),
        n_layer=setting.pick(6, 2),
        n_head=setting.pick(6, 2),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
