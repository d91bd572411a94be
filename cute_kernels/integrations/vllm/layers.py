"""Layers that vLLM builds in the place of its own of the same class name."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding

from cute_kernels import rms_norm
from cute_kernels.integrations.vllm.covered import check_config
from cute_kernels.integrations.vllm.experts import EXPERTS

Normed = Tensor | tuple[Tensor, Tensor]


class InvariantRMSNorm(RMSNorm):
    """By ``rms_norm``: x_hat * weight in fp32, rounded once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_config()
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None:
            expected = f"be None or hidden_size {self.hidden_size}"
            raise ValueError(f"RMSNorm: var_hidden_size must {expected}, got {self.variance_size_override}")

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        weight = self.weight if self.has_weight else None
        return _norm(x, weight, residual, self.variance_epsilon, 0.0)

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        return self.forward_native(x, residual)


class InvariantGemmaRMSNorm(GemmaRMSNorm):
    """By ``rms_norm`` with 1 added to the weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_config()
        super().__init__(*args, **kwargs)

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        return _norm(x, self.weight, residual, self.variance_epsilon, 1.0)

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        return self.forward_native(x, residual)


def _norm(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float) -> Normed:
    """y, or (y, x + residual). Heads of a slice of qkv are no rows of one stride: those are copied."""
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        return rms_norm(rows, weight, eps=eps, weight_offset=offset).view(x.shape)
    of_residual = residual.reshape(rows.shape)
    y, h = rms_norm(rows, weight, residual=of_residual, eps=eps, weight_offset=offset, return_residual=True)
    return y.view(x.shape), h.view(x.shape)


def native(cls: type[CustomOp]) -> type[CustomOp]:
    """``cls`` by torch's operators, element by element as training has them, in the place of a fused kernel."""

    def forward_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    return type(f"Native{cls.__name__}", (cls,), {"forward_cuda": forward_cuda})


LAYERS = {
    RMSNorm: InvariantRMSNorm,
    GemmaRMSNorm: InvariantGemmaRMSNorm,
    **{cls: native(cls) for cls in (SiluAndMul, GeluAndMul, RotaryEmbedding, Llama3RotaryEmbedding)},
    **EXPERTS,
}


def register() -> None:
    """Registers all, or raises RuntimeError before the first."""
    for cls, ours in LAYERS.items():
        found = op_registry_oot.get(cls.__name__, ours)
        if found is not ours:
            raise RuntimeError(f"register: {cls.__name__} is registered out of tree already: {found}")
    for cls, ours in LAYERS.items():
        if cls.__name__ not in op_registry_oot:
            cls.register_oot(ours)
