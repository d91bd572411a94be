"""The layer of experts on torch tensors: the public function, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.gemm.functional import grouped_rows, weight_gradient
from cute_kernels.moe import reference
from cute_kernels.moe.checks import check_experts, check_layout
from cute_kernels.moe.launch import moe_gate_backward
from cute_kernels.moe.op.gate import Gate, gated
from cute_kernels.moe.op.rows import combined, gathered, plan
from cute_kernels.moe.reference import Plan, Routing
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_rows, needs_gradient
from cute_kernels.runtime.checks import HALVES, Backend
from cute_kernels.runtime.operators import differentiates, is_eager, mode_of, uses_reference
from cute_kernels.runtime.real import as_float


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    *,
    transposed: bool = False,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    align: int = 16,
    segments: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """``y[t] = sum of weight_e * down_e swiglu(gate_up_e x[t])`` over a token's experts e.

    Args:
        x: (T, H) bf16 or fp16, contiguous rows that start on 16 bytes; H and I are multiples of 8.
        routing: of ``moe.route``: indices (T, k) and weights (T, k) fp32.
        gate_up: (E, 2 I, H) of x's dtype. A gradient is added to its ``main_grad`` (fp32), if it has one.
        down: (E, H, I), likewise.
        transposed: the weights are (E, H, 2 I) and (E, I, H) instead.
        interleaved, limit, alpha: of the gate, as in ``moe.swiglu``.
        align: each expert's rows end at a multiple of so many, of zeros behind its own. It changes no bit.
        segments: of tokens, as in ``moe.plan``. They change bits of the weights' gradients alone. None: one.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (T, H) of x's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels: other than a Hopper.

    Numerics:
        Products as in ``grouped_mm``, the gate as in ``swiglu``, sums as in ``combine``; each result is rounded to x's
        dtype. So a token's result, its gradient, and those of its weights have the same bits whatever the other tokens
        and their experts. Gradients of gate_up and down sum over an expert's tokens in their order: they are
        reproducible, and independent of the other experts. With a ``main_grad`` the sums start from it: calls with the
        tokens of a segment each have the bits of one call with all of them and ``segments``. x, gate_up's product and
        the plan are kept for the backward.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> x, logits = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 4)
        >>> gate_up, down = torch.ones(4, 32, 8, dtype=torch.bfloat16), torch.ones(4, 8, 16, dtype=torch.bfloat16)
        >>> moe.experts(x, moe.route(logits, 2), gate_up, down).shape
        torch.Size([3, 8])
    """
    limit, alpha = (None if value is None else as_float(value) for value in (limit, alpha))
    indices, weights = routing
    if uses_reference("experts", x, backend):
        options = {"transposed": transposed, "interleaved": interleaved, "limit": limit, "alpha": alpha}
        return reference.experts(x, routing, gate_up, down, **options, align=align, segments=segments)
    check_experts(x, indices, weights, gate_up, down, transposed, limit, alpha, align, segments, HALVES)
    if is_eager(x):
        check_layout("experts", "x", x)
    rows, gate = plan(indices, gate_up.shape[0], align=align, segments=segments), (bool(interleaved), limit, alpha)
    weights = weights.contiguous()
    if differentiates(x, weights, gate_up, down):
        return apply(_ExpertsFunction, x, weights, gate_up, down, transposed, gate, *rows)
    return _forward(x, weights, gate_up, down, transposed, gate, rows)[0]


def _forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, transposed: bool, gate: Gate, rows: Plan
) -> tuple[Tensor, Tensor]:
    first, second = (gate_up, down) if transposed else (gate_up.mT, down.mT)
    z = grouped_rows(gathered(x, rows), first, rows.offs, x.dtype)
    return combined(grouped_rows(gated(z, gate), second, rows.offs, x.dtype), rows, weights), z


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, gate_up, down, transposed, gate, *rows):
        y, z = _forward(x, weights, gate_up, down, transposed, gate, Plan(*rows))
        ctx.save_for_backward(x, weights, gate_up, down, z, *rows)
        ctx.options = transposed, gate
        ctx.main_grads = tuple(getattr(weight, "main_grad", None) for weight in (gate_up, down))
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weights, gate_up, down, z, *saved = ctx.saved_tensors
        rows, (transposed, gate) = Plan(*saved), ctx.options
        needs_x, needs_weights, needs_first, needs_second = ctx.needs_input_grad[:4]
        needs_first = needs_gradient(needs_first, gate_up, ctx.main_grads[0])
        needs_second = needs_gradient(needs_second, down, ctx.main_grads[1])
        first, second = (gate_up.mT, down.mT) if transposed else (gate_up, down)
        # Of a row before its weight: the weights' gradients are its products with h, and h has room for the weight
        mode = mode_of(dy, z)
        do = gathered(gradient_rows(dy, mode.eager), rows)
        dh = grouped_rows(do, second, rows.offs, x.dtype)
        empty = mode.empty
        dz, h, dweights = empty(z, z.shape, z.dtype), empty(z, dh.shape, dh.dtype), torch.zeros_like(weights)
        moe_gate_backward(dh, z, rows.slots, weights, dz, h, dweights, *gate)
        dx = dgate_up = ddown = None
        columns = not transposed
        if needs_second:
            ddown = weight_gradient("experts", "down", h, do, rows.offs, down, ctx.main_grads[1], columns)
        del do, dh, h
        if needs_first:
            xs = gathered(x, rows)
            dgate_up = weight_gradient("experts", "gate_up", xs, dz, rows.offs, gate_up, ctx.main_grads[0], columns)
            del xs
        if needs_x:
            dx = combined(grouped_rows(dz, first, rows.offs, x.dtype), rows, None)
        return dx, dweights if needs_weights else None, dgate_up, ddown, None, None, None, None, None, None
