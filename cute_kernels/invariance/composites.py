"""In place of the operators that torch makes of others, and of which others by strides or settings: linear, attention.

Their kernels lie above autograd and call operators that it differentiates. They return NotImplemented where torch is to
take the operator apart: what it is made of comes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cute_kernels.attention import attention
from cute_kernels.attention.checks import DENSE, check_sizes
from cute_kernels.attention.launch import attention_forward
from cute_kernels.invariance import aten, scopes
from cute_kernels.invariance.fused_attention import is_taken, on_16_bytes
from cute_kernels.runtime.operators import differentiates, mode_of
from cute_kernels.runtime.targets import UnsupportedDeviceError

_PLAIN = frozenset((Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor, type(None)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product, bias and rounding, where torch rounds twice if x is no view of a matrix. A batch of one mostly is.

    Where gradients are wanted, or a mode of torch's looks on, it is made of torch's own ``addmm``.
    """
    if x.layout is not torch.strided or weight.layout is not torch.strided:
        return NotImplemented
    if mode_of(x, weight, bias).eager and not differentiates(x, weight, bias):
        scopes.thread.inside = True
        try:
            found = aten.linear(x, weight, bias)
        finally:
            scopes.thread.inside = False
        if found is not NotImplemented:
            return found
    elif not _PLAIN.issuperset(map(type, (x, weight, bias))):
        return NotImplemented
    if bias is None or x.dim() in (0, 2) or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return NotImplemented
    rows = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return torch.addmm(bias, rows, weight.t()).view(*x.shape[:-1], len(weight))


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``attention`` of (B, H, L, D), unless its fused kernels are switched off: then of products and a softmax."""
    if attn_mask is not None or dropout_p or not mode_of(q, k, v).eager or not q.dim() == k.dim() == v.dim() == 4:
        return NotImplemented
    if is_causal and q.shape[2] != k.shape[2]:  # a mask that begins at the first key
        return NotImplemented
    if not is_taken(q, k, v, scale, dropout_p) or not _are_heads(q, k, v, enable_gqa) or not _may_be_fused():
        return NotImplemented
    q, k, v = (on_16_bytes(t.transpose(1, 2)) for t in (q, k, v))
    scopes.thread.inside = True
    try:
        if differentiates(q, k, v):
            return attention(q, k, v, causal=is_causal, scale=scale).transpose(1, 2)
        check_sizes(q, k, DENSE)
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        return attention_forward(q, k, v, is_causal, scale)[0].transpose(1, 2)
    except UnsupportedDeviceError:  # a GPU without a kernel
        return NotImplemented
    finally:
        scopes.thread.inside = False


def _are_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether sizes are such as torch takes."""
    (batch, heads, _, size), shared = q.shape, k.shape[1]
    if k.shape[0] != batch or k.shape[3] != size or v.shape[:3] != k.shape[:3] or not shared:
        return False
    return heads == shared or (enable_gqa and heads % shared == 0)


def _may_be_fused() -> bool:
    """Under ``sdpa_kernel(SDPBackend.MATH)`` none of these is on."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()


COMPOSITES: dict[str, Callable[..., Any]] = {
    "linear.default": linear,
    "scaled_dot_product_attention.default": scaled_dot_product_attention,
}
