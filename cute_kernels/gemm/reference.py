"""mm, bmm and linear in plain torch: the specification of the kernels, and what runs without a supported GPU.

z = x W^T + bias;  y = act(z);   backward, with z rounded to y's dtype:
dz = dy act'(z), rounded to y's dtype, then to x's;  dx = dz W;  dW = dz^T x;  dbias = sum of dz over tokens.

All in fp32 (on a GPU as torch's flags have it; fp64 tensors, which the kernels do not take, in fp64), each result
rounded once. The order of the kernels' sums, ``serial_k16``, is not imitated: their results agree with these to
rounding, not bit by bit.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.gemm.checks import (
    check_bmm,
    check_grouped_mm,
    check_grouped_mm_mxfp8,
    check_linear,
    check_mm,
    check_separate,
)
from cute_kernels.gemm.config_mxfp8 import BLOCK
from cute_kernels.runtime.autograd import (
    first_derivative_only,
    gradient_buffer,
    needs_gradient,
    widened,
    without_autocast,
)
from cute_kernels.runtime.checks import fail
from cute_kernels.runtime.strict import has_address, is_strict, strict_rows


def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """``a @ b``; see ``cute_kernels.mm``."""
    check_mm(a, b, out_dtype, out, _is_fp64(a))
    if out is None:
        return _Linear.apply(a, b.t(), None, out_dtype or a.dtype, None, None)
    if has_address(a, b, out):
        check_separate(out, a, b)
    with torch.no_grad():
        return out.copy_(_product(a.to(_wide(a)), b.to(_wide(a))))


def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """``a @ b`` of batches; see ``cute_kernels.bmm``."""
    check_bmm(a, b, out_dtype, _is_fp64(a))
    return _Bmm.apply(a, b, out_dtype or a.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """``act(x @ weight.T + bias)``; see ``cute_kernels.linear``."""
    check_linear(x, weight, bias, out_dtype, activation, num_valid_tokens, _is_fp64(x))
    strict_rows("linear", x=x)
    return _Linear.apply(x, weight, bias, out_dtype or x.dtype, activation, num_valid_tokens)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """``a @ b`` of groups; see ``cute_kernels.grouped_mm``. A group's end below the one before is an error here."""
    if b_scale is not None:
        check_grouped_mm_mxfp8(a, b, b_scale, offs, out_dtype, accumulate_into)
        return grouped_rows_mxfp8(a, b, b_scale, offs, out_dtype or a.dtype)
    check_grouped_mm(a, b, offs, out_dtype, accumulate_into, _is_fp64(a))
    out_dtype = out_dtype or a.dtype
    if accumulate_into is not None:
        with torch.no_grad():
            return accumulate_into.add_(grouped_sums(a, b, offs, accumulate_into.dtype))
    if offs is None:
        return bmm(a, b, out_dtype=out_dtype)
    if a.dim() == b.dim() == 2:
        return grouped_sums(a, b, offs, out_dtype)
    if a.dim() == 3:
        return grouped_rows(b.t(), a.mT, offs, out_dtype).t()
    return grouped_rows(a, b, offs, out_dtype)


def grouped_rows(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(R, N): rows a (R, K), those of group e times b[e] (K, N); zeros beyond the last group."""
    ends = _ends(offs, a.shape[0])
    wide_a, wide_b = a.to(_wide(a)), widened("grouped_mm", "b", b, _wide(a))
    parts = [
        _product(wide_a[start:end], wide_b[e]) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    rest = a.shape[0] - (ends[-1] if ends else 0)
    return torch.cat([*parts, wide_a.new_zeros(rest, b.shape[2])]).to(out_dtype)


def grouped_rows_mxfp8(a: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``grouped_rows`` of the values in bf16 that e4m3 elements b (E, K, N) and scales (E, N, K / 32) stand for."""
    blocks = b.mT.float().unflatten(-1, (b.shape[1] // BLOCK, BLOCK))
    values = (blocks * b_scale.float().unsqueeze(-1)).flatten(-2)
    return grouped_rows(a, values.bfloat16().mT, offs, out_dtype)


def grouped_sums(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(E, M, N): columns a (M, R) of group e times rows b (R, N) of it."""
    ends = _ends(offs, b.shape[0])
    a, b = a.to(_wide(a)), b.to(_wide(b))
    sums = [_product(a[:, start:end], b[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return (torch.stack(sums) if sums else a.new_zeros(0, a.shape[0], b.shape[1])).to(out_dtype)


def _ends(offs: Tensor, rows: int) -> list[int]:
    ends = offs.tolist()
    if any(end < start for start, end in zip([0, *ends], [*ends, rows], strict=True)):
        fail("grouped_mm", "offs", f"ascend from 0 to at most {rows}", ends)
    return ends


class _Bmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, out_dtype):
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        return _product(a.to(_wide(a)), b.to(_wide(a))).to(out_dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        a, b = ctx.saved_tensors
        like = a if b is None else b
        dtype, wide = like.dtype, _wide(like)
        dout = dout.to(dtype).to(wide)
        da = _product(dout, b.to(wide).mT).to(dtype) if ctx.needs_input_grad[0] else None
        db = _product(a.to(wide).mT, dout).to(dtype) if ctx.needs_input_grad[1] else None
        return da, db, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, out_dtype, activation, num_valid_tokens):
        z = _product(x.to(_wide(x)), weight.to(_wide(x)).t())
        if bias is not None:
            z = z + bias.to(z.dtype)
        y = activate(z, activation).to(out_dtype)
        kept = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weight, bias, z.to(out_dtype) if activation else None, num_valid_tokens)
        ctx.activation = activation
        ctx.main_grads = getattr(weight, "main_grad", None), getattr(bias, "main_grad", None)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight, bias, z, num_valid_tokens = ctx.saved_tensors
        wide = _wide(weight)
        dz = dy.to(wide)
        if ctx.activation is not None:
            dz = activation_gradient(dz, z.to(wide), ctx.activation)
        dz = dz.to(dy.dtype).to(weight.dtype).to(wide)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _product(dz, weight.to(wide)).to(weight.dtype)
        tokens, valid = _as_rows(dz), True
        if num_valid_tokens is not None:
            valid = torch.arange(len(tokens), device=dy.device)[:, None] < num_valid_tokens.view(1)
            tokens = torch.where(valid, tokens, 0.0)
        if needs_gradient(ctx.needs_input_grad[1], weight, ctx.main_grads[0]):
            rows = _as_rows(x.to(wide))
            rows = rows if valid is True else torch.where(valid, rows, 0.0)
            dw = _deliver("weight", _product(tokens.t(), rows), weight, ctx.main_grads[0])
        if needs_gradient(ctx.needs_input_grad[2], bias, ctx.main_grads[1]):
            db = _deliver("bias", tokens.sum(0), bias, ctx.main_grads[1])
        return dx, dw, db, None, None, None


def activate(z: Tensor, activation: str | None) -> Tensor:
    """relu, silu or the exact gelu of z; z itself for None."""
    return z if activation is None else {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}[activation](z)


def activation_gradient(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """dy d activate(z) / dz; of relu 0 where it is flat, whatever dy."""
    if activation == "relu":
        return torch.where(z <= 0, 0.0, dy)
    if activation == "silu":
        s = torch.sigmoid(z)
        return dy * (s * (1 + z * (1 - s)))
    return dy * (0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


def _product(a: Tensor, b: Tensor) -> Tensor:
    with without_autocast(a):
        return a @ b


def _as_rows(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _deliver(name: str, gradient: Tensor, parameter: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """The gradient for autograd: None where it was added to main_grad."""
    buffer, result = gradient_buffer("linear", name, parameter, main_grad)
    if result is not None:
        return gradient.to(parameter.dtype)
    buffer.add_(gradient)
    return None


def _is_fp64(t: object) -> bool:
    return isinstance(t, Tensor) and t.dtype is torch.float64 and not is_strict()


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype is torch.float64 else torch.float32
