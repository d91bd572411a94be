"""Helpers for the tests of experts: sizes of models, inputs, bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import moe
from tests.gemm.cases import assert_same_bits, bits, same_bits

__all__ = ["BF16", "FP16", "FP32", "assert_same_bits", "bits", "same_bits"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Router:
    """Options of ``route`` beside tokens."""

    experts: int
    k: int
    score: str = "softmax"
    normalize: bool = True
    eps: float = 0.0
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    biased: bool = False

    def __str__(self) -> str:
        words = [f"{self.experts}-{self.k}-{self.score}"] + ["plain"] * (not self.normalize)
        words += [f"groups_{self.groups[0]}_{self.groups[1]}"] * 1 if self.groups else []
        return "-".join(words + ["biased"] * self.biased + ["eps"] * bool(self.eps))

    def options(self, generator: torch.Generator) -> dict:
        found = {"score": self.score, "normalize": self.normalize, "eps": self.eps, "scale": self.scale}
        if self.biased:
            found["bias"] = 0.3 * torch.randn(self.experts, generator=generator, device=generator.device)
        return found | {"groups": self.groups}


ROUTERS = [
    Router(8, 2),
    Router(128, 8),
    Router(128, 4, "softmax_of_topk"),
    Router(160, 6, normalize=False, scale=16.0),
    Router(64, 6, eps=1e-6),
    Router(256, 8, "sigmoid", eps=1e-20, scale=2.5, groups=(8, 4), biased=True),
    Router(48, 3, groups=(16, 5)),
    Router(5, 5),
    Router(1, 1),
    Router(33, 32, "sigmoid", normalize=False),
    Router(1000, 7),
]


def randn(*shape: int, generator: torch.Generator, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(dtype)


def ties(tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """Logits of few values, both zeros among them; infinities."""
    whole = torch.randint(-3, 4, (tokens, experts), generator=generator, device=generator.device).float()
    whole[:, ::3] *= -1.0  # -0, too
    whole[1::7, 0] = -float("inf")
    return whole


@dataclass
class Layer:
    """Inputs of ``experts``; all but dy require a gradient."""

    x: Tensor
    logits: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> Layer:
        return Layer(*(None if t is None else change(t) for t in vars(self).values()))


def make_layer(
    tokens: int,
    hidden: int,
    width: int,
    num_experts: int,
    generator: torch.Generator,
    dtype: torch.dtype = BF16,
    biased: bool = False,
    gated: bool = True,
) -> Layer:
    columns = 2 * width if gated else width

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, device=generator.device)).to(dtype)

    return Layer(
        randn(tokens, hidden),
        torch.randn(tokens, num_experts, generator=generator, device=generator.device),
        randn(num_experts, columns, hidden, scale=hidden**-0.5),
        randn(num_experts, hidden, width, scale=width**-0.5),
        randn(tokens, hidden),
        *((randn(num_experts, columns), randn(num_experts, hidden)) if biased else ()),
    )


def run_layer(layer: Layer, k: int, index=slice(None), **options) -> dict[str, Tensor]:
    """y and all gradients, of some tokens."""
    biases = [t for t in (layer.gate_up_bias, layer.down_bias) if t is not None]
    tensors = layer.x[index], layer.logits[index], layer.gate_up, layer.down, *biases
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    x, logits, gate_up, down, *biases = leaves
    options |= dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
    backend = {"backend": options["backend"]} if "backend" in options else {}
    routing = moe.route(logits, k, **backend)
    y = moe.experts(x, routing, gate_up, down, **options)
    names = ("dx", "dlogits", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias")[: len(leaves)]
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, leaves, layer.dy[index]), strict=True))}
