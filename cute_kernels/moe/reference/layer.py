"""The gate and the layer of experts in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.moe.checks import Activation, check_activation, check_experts, check_swiglu, is_fp64
from cute_kernels.moe.config import OAI
from cute_kernels.moe.reference.route import Routing
from cute_kernels.moe.reference.rows import Plan, combine, permute, plan
from cute_kernels.runtime.autograd import widened, without_autocast
from cute_kernels.runtime.checks import FLOATS, FP64


def swiglu(z: Tensor, *, interleaved: bool = False, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """The gate; see ``cute_kernels.moe.swiglu``."""
    check_swiglu(z, limit, alpha, is_fp64(z))
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    return activated(wide, "swiglu", interleaved, limit, alpha).to(z.dtype)


def activated(z: Tensor, function: str, interleaved: bool, limit: float | None, alpha: float | None) -> Tensor:
    """h of z, of any activation of ``experts``."""
    if function == "silu":
        return F.silu(z)
    g, u = (z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, 1)
    if function == "geglu":
        return F.gelu(g) * u
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(g) * u if alpha is None else g * torch.sigmoid(alpha * g) * (u + 1)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    activation: Activation = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    align: int = 16,
    segments: Tensor | None = None,
) -> Tensor:
    """The layer; see ``cute_kernels.moe.experts``."""
    indices, weights = routing
    check_activation(activation, interleaved, limit, alpha)
    options = gate_up_bias, down_bias, transposed, activation, align, segments
    scales = gate_up_scale, down_scale
    check_experts(x, indices, weights, gate_up, down, *options, scales, FLOATS + FP64)
    if gate_up_scale is not None:
        gate_up, down = _dequantized(gate_up, gate_up_scale), _dequantized(down, down_scale)
    if activation == "swiglu_oai":
        limit, alpha = (given or usual for given, usual in zip((limit, alpha), OAI, strict=True))
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = (widened("experts", n, t, wide) for n, t in (("gate_up", gate_up), ("down", down)))
    if not transposed:
        first, second = first.mT, second.mT
    rows = plan(indices, gate_up.shape[0], align=align, segments=segments)
    z = _multiply(permute(x, rows), first, rows.offs).to(wide)
    if gate_up_bias is not None:
        z = z + _of_rows(widened("experts", "gate_up_bias", gate_up_bias, wide), indices, rows)
    if callable(activation):
        h = activation(z.to(x.dtype))
    else:
        h = activated(z, activation.removesuffix("_oai"), interleaved, limit, alpha).to(x.dtype)
    y = _multiply(h, second, rows.offs)
    if down_bias is not None:
        y = y.to(wide) + _of_rows(widened("experts", "down_bias", down_bias, wide), indices, rows)
    return combine(y, rows, weights).to(x.dtype)


def _dequantized(q: Tensor, scale: Tensor) -> Tensor:
    """The values in bf16 that e4m3 elements (E, N, K) and their scales (E, N, K / 32) stand for."""
    blocks = q.float().unflatten(-1, (scale.shape[2], 32))
    return (blocks * scale.float().unsqueeze(-1)).flatten(-2).bfloat16()


def _of_rows(bias: Tensor, indices: Tensor, rows: Plan) -> Tensor:
    """The bias of each row's expert; zeros of a row without a slot."""
    used = (rows.slots >= 0).unsqueeze(1)
    expert = torch.where(used.squeeze(1), indices.flatten().long()[rows.slots.long().clamp(min=0)], 0)
    return torch.where(used, bias[expert], 0.0)


def _multiply(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Each expert's rows times its matrix, rounded to the rows' dtype; zeros beyond."""
    ends, wide = offs.tolist(), matrices.dtype
    with without_autocast(rows):
        parts = [rows[a:b].to(wide) @ matrices[e] for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], matrices.shape[2], dtype=wide)]).to(rows.dtype)
