"""layer_norm and rms_norm in plain torch: the specification of the kernels, and what runs without a supported GPU.

h = x (+ residual, rounded to the residual's dtype);  W = weight + weight_offset (1 without weight);
rms:    y = h * rsqrt(mean(h^2) + eps) * W + bias
layer:  y = (h - mean(h)) * rsqrt(var(h) + eps) * W + bias      (population variance)

All in ``compute_dtype``, rounded once at the end. ``save`` chooses what the kernels keep for the backward; here it
changes one result, as there: with "output" dw = 0 where W = 0. A parameter's gradient is added to its ``main_grad``
where it has one, and its ``grad`` stays None; a tensor hook on such a parameter is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.norm.checks import check_norm
from cute_kernels.runtime.autograd import widened
from cute_kernels.runtime.real import as_float
from cute_kernels.runtime.strict import strict_rows

Norm = Tensor | tuple[Tensor, Tensor]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    save: str = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Norm:
    """Root-mean-square norm; see ``cute_kernels.rms_norm``. ``compute_dtype``: torch.float32 or torch.float64."""
    eps, weight_offset = as_float(eps), as_float(weight_offset)
    check_norm("rms_norm", x, weight, bias, residual, eps, weight_offset, save, out_dtype)
    strict_rows("rms_norm", x=x, residual=residual)
    h, stored = _residual_stream(x, residual, compute_dtype)
    x_hat = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = _affine("rms_norm", x_hat, weight, bias, weight_offset, save, out_dtype or x.dtype)
    return (y, stored) if return_residual else y


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    save: str = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Norm:
    """Layer norm; see ``cute_kernels.layer_norm``. ``compute_dtype``: torch.float32 or torch.float64."""
    eps, weight_offset = as_float(eps), as_float(weight_offset)
    check_norm("layer_norm", x, weight, bias, residual, eps, weight_offset, save, out_dtype)
    strict_rows("layer_norm", x=x, residual=residual)
    h, stored = _residual_stream(x, residual, compute_dtype)
    centred = h - h.mean(-1, keepdim=True)
    x_hat = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = _affine("layer_norm", x_hat, weight, bias, weight_offset, save, out_dtype or x.dtype)
    return (y, stored) if return_residual else y


def _residual_stream(x: Tensor, residual: Tensor | None, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(h in compute_dtype, h as it is stored)."""
    if residual is None:
        return x.to(compute_dtype), x
    stored = (x.to(compute_dtype) + residual.to(compute_dtype)).to(residual.dtype)
    return stored.to(compute_dtype), stored


def _affine(
    op: str,
    x_hat: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    save: str,
    dtype: torch.dtype,
) -> Tensor:
    if weight is not None:
        w = widened(op, "weight", weight, x_hat.dtype) + offset
        if save == "output":
            w = torch.where(w == 0, w.detach(), w)
        x_hat = x_hat * w
    if bias is not None:
        x_hat = x_hat + widened(op, "bias", bias, x_hat.dtype)
    return x_hat.to(dtype)
