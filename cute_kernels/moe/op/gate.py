"""swiglu on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.moe import reference
from cute_kernels.moe.checks import check_layout, check_swiglu
from cute_kernels.moe.launch import moe_gate, moe_gate_backward
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_rows
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import Mode, differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float


class Gate(NamedTuple):
    """The activation of an expert, as the launches take it; see ``config.GateSpec``."""

    function: str
    interleaved: bool
    limit: float | None
    alpha: float | None


class Bias(NamedTuple):
    """The bias that is added to rows before an activation, or before their sum.

    Attributes:
        experts: (T, k) int32: the expert of each slot.
        bias: (E, columns) of the rows' dtype.
    """

    experts: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, experts: Tensor | None, bias: Tensor | None) -> Bias:
        """None of both where there is no bias."""
        return NO_BIAS if bias is None else cls(experts, bias)


NO_BIAS = Bias(None, None)


def swiglu(
    z: Tensor,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """``silu(g) * u`` of z = (g, u), row by row.

    Args:
        z: (R, 2 I) bf16, fp16 or fp32: g is the first half of a row's columns, u the second. The kernel takes
            contiguous rows that start on 16 bytes; I is a multiple of 8, in fp32 of 4.
        interleaved: g and u are the even and the odd columns instead.
        limit: g is at most this, and u is within -limit and limit. None: no limit.
        alpha: the result is ``(u + 1) * g * sigmoid(alpha * g)`` instead.
        backend: None: the kernel for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (R, I) of z's dtype, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        In fp32, rounded once. An element depends on its own g and u alone.

    Source:
        Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202; limit and alpha as in gpt-oss.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> moe.swiglu(torch.tensor([[0.0, 2.0, 5.0, 1.0]])).tolist()
        [[0.0, 1.7615940570831299]]
    """
    limit, alpha = (None if value is None else as_float(value) for value in (limit, alpha))
    if uses_reference("swiglu", z, backend):
        return reference.swiglu(z, interleaved=interleaved, limit=limit, alpha=alpha)
    check_swiglu(z, limit, alpha)
    if z.shape[1] // 2 * z.itemsize % 16:
        check_layout("swiglu", "z's halves", z[:, : z.shape[1] // 2])
    gate = Gate("swiglu", bool(interleaved), limit, alpha)
    return apply(_GateFunction, z, gate) if differentiates(z) else _forward(z, gate)


def _forward(z: Tensor, gate: Gate) -> Tensor:
    mode = mode_of(z)
    if mode.eager:
        check_layout("swiglu", "z", z)
    return gated(mode, z, gate)


def gated(mode: Mode, z: Tensor, gate: Gate, slots: Tensor | None = None, bias: Bias = NO_BIAS) -> Tensor:
    """h of z, with the bias of the experts of its rows' ``slots``."""
    columns = z.shape[1] if gate.function == "silu" else z.shape[1] // 2
    h = mode.empty(z, (z.shape[0], columns), z.dtype)
    mode.of(moe_gate)(z, None if bias.bias is None else slots, *bias, h, *gate)
    return h


class _GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, gate):
        ctx.save_for_backward(z)
        ctx.gate = gate
        return _forward(z, gate)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dh):
        (z,) = ctx.saved_tensors
        mode = mode_of(dh, z)
        dz = mode.empty(z, z.shape, z.dtype)
        mode.of(moe_gate_backward)(gradient_rows(dh, mode.eager), z, None, None, None, None, dz, None, None, *ctx.gate)
        return dz, None
