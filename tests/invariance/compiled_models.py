"""Small language models of plain torch, with the operators that transformers' llama, qwen3, gemma3 and gpt2 have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, CHANNELS, VOCABULARY = 32, 4, 2, 8, 97


class Family(NamedTuple):
    """The properties of a family; ``eager``: attention of products and softmax, as transformers writes it."""

    layer_norm: bool = False  # with biases and learned positions, as gpt2
    qk_norm: bool = False
    offset_norm: bool = False  # 1 + weight, in fp32
    softcap: float = 0.0
    eager: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen3": Family(qk_norm=True),
    "gemma3": Family(qk_norm=True, offset_norm=True, softcap=30.0, eager=True),
    "gpt2": Family(layer_norm=True, eager=True),
}


class RMSNorm(nn.Module):
    """As transformers writes it: six operators."""

    def __init__(self, width: int, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + (0 if offset else 0.5))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).to(x.dtype) if self.offset else self.weight * y.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family
        self.norms = nn.ModuleList(self._norm(WIDTH) for _ in range(2))
        self.qk_norms = nn.ModuleList(self._norm(CHANNELS) for _ in range(2)) if family.qk_norm else None
        sizes = (HEADS * CHANNELS, KV_HEADS * CHANNELS, KV_HEADS * CHANNELS)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, size, bias=family.layer_norm) for size in sizes)
        self.out = nn.Linear(HEADS * CHANNELS, WIDTH, bias=family.layer_norm)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=family.layer_norm)
        self.gate = None if family.layer_norm else nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=family.layer_norm)

    def _norm(self, width: int) -> nn.Module:
        return nn.LayerNorm(width) if self.family.layer_norm else RMSNorm(width, self.family.offset_norm)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x = x + self.attend(self.norms[0](x), cos, sin)
        y = self.norms[1](x)
        if self.gate is None:
            return x + self.down(F.gelu(self.up(y), approximate="tanh"))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (linear(x).view(batch, tokens, -1, CHANNELS).transpose(1, 2) for linear in self.qkv)
        if self.qk_norms is not None:
            q, k = self.qk_norms[0](q), self.qk_norms[1](k)
        if cos is not None:
            q, k = (t * cos + torch.cat([-t[..., CHANNELS // 2 :], t[..., : CHANNELS // 2]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        if self.family.eager:
            scores = q @ k.transpose(2, 3) * CHANNELS**-0.5
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class Model(nn.Module):
    """Logits of tokens; the head is the embedding's table."""

    def __init__(self, family: Family, layers: int = 1) -> None:
        super().__init__()
        self.family = family
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH) if family.layer_norm else None
        self.layers = nn.ModuleList(Layer(family) for _ in range(layers))
        self.norm = self.layers[0]._norm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embedding(ids)
        cos = sin = None
        if self.positions is not None:
            x = x + self.positions(places)
        else:
            inverse = 10000.0 ** -(torch.arange(0, CHANNELS, 2, device=ids.device).float() / CHANNELS)
            angles = (inverse[None, :, None] @ places[None, None, :].float()).transpose(1, 2)
            angles = torch.cat([angles, angles], -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.norm(x) @ self.embedding.weight.t()
        return self.family.softcap * torch.tanh(logits / self.family.softcap) if self.family.softcap else logits

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def make_model(name: str, generator: torch.Generator) -> Model:
    """In bf16, of the generator's numbers, on its device."""
    model = Model(FAMILIES[name]).to(torch.bfloat16)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, device=generator.device).to(torch.bfloat16) * 0.3
    return model


def make_ids(batch: int, tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (batch, tokens), generator=generator, device=generator.device)


def step(model: Model, loss: Callable[[Tensor], Tensor], ids: Tensor) -> list[Tensor]:
    """The loss of a call and the gradients of all parameters."""
    found = loss(ids)
    return [found, *torch.autograd.grad(found, list(model.parameters()))]
