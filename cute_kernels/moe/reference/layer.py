"""The gate and the layer of experts in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.moe.checks import check_experts, check_swiglu, is_fp64
from cute_kernels.moe.reference.route import Routing
from cute_kernels.moe.reference.rows import combine, permute, plan
from cute_kernels.runtime.autograd import widened, without_autocast
from cute_kernels.runtime.checks import FLOATS, FP64


def swiglu(z: Tensor, *, interleaved: bool = False, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """The gate; see ``cute_kernels.moe.swiglu``."""
    check_swiglu(z, limit, alpha, is_fp64(z))
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    g, u = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, 1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = g * torch.sigmoid(g) * u if alpha is None else g * torch.sigmoid(alpha * g) * (u + 1)
    return h.to(z.dtype)


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
) -> Tensor:
    """The layer; see ``cute_kernels.moe.experts``."""
    indices, weights = routing
    check_experts(x, indices, weights, gate_up, down, transposed, limit, alpha, align, segments, FLOATS + FP64)
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = (widened("experts", n, t, wide) for n, t in (("gate_up", gate_up), ("down", down)))
    if not transposed:
        first, second = first.mT, second.mT
    rows = plan(indices, gate_up.shape[0], align=align, segments=segments)
    h = swiglu(_multiply(permute(x, rows), first, rows.offs), interleaved=interleaved, limit=limit, alpha=alpha)
    return combine(_multiply(h, second, rows.offs), rows, weights)


def _multiply(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Each expert's rows times its matrix, rounded to the rows' dtype; zeros beyond."""
    ends, wide = offs.tolist(), matrices.dtype
    with without_autocast(rows):
        parts = [rows[a:b].to(wide) @ matrices[e] for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], matrices.shape[2], dtype=wide)]).to(rows.dtype)
