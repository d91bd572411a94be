"""Attention in plain torch: the specification, and what runs without a supported GPU.

``attention`` is computed in ``compute_dtype``, rounded once at the end. ``kv_grid`` is the contract that the kernels
keep, step by step: the same blocks, splits, rescales and merges, each operation rounded to fp32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.checks import Window, check_attention, check_layout
from cute_kernels.attention.config import THRESHOLD, grid_for
from cute_kernels.runtime.autograd import without_autocast
from cute_kernels.runtime.real import as_float
from cute_kernels.runtime.strict import has_address

LOG2E = math.log2(math.e)
LANES = 4


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of dense batches; see ``cute_kernels.attention``."""
    softcap, scale = as_float(softcap), as_float(scale)
    check_attention(q, k, v, causal, window, softcap, sinks, scale)
    if has_address(q, k, v):
        check_layout(q, k, v)
    if q.dtype is torch.float64:
        compute_dtype = q.dtype
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    with without_autocast(q):
        queries = q.to(compute_dtype).transpose(1, 2)
        keys, values = (t.to(compute_dtype).transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
        scores = queries @ keys.mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible(q.shape[1], k.shape[1], causal, window, q.device), -math.inf)
        logits = scores
        if sinks is not None:
            sink = sinks.to(compute_dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            logits = torch.cat([scores, sink], -1)
        of_nothing = logits.new_full(logits.shape[:3], -math.inf)
        lse = torch.logsumexp(logits, -1) if logits.shape[3] else of_nothing
        # A row that sees nothing has an lse of -inf, and p of 0
        p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
        out = (p @ values).transpose(1, 2).to(q.dtype).contiguous()
    return (out, lse.to(torch.promote_types(torch.float32, q.dtype))) if return_lse else out


def visible(queries: int, keys: int, causal: bool, window: Window | None, device: torch.device) -> Tensor:
    """(queries, keys): whether a query sees a key. The last query is at the place of the last key."""
    place = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    key = torch.arange(keys, device=device)
    left, right = (None, None) if window is None else (None if w == -1 else w for w in window)
    found = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        found &= key <= place
    if left is not None:
        found &= key >= place - left
    if right is not None:
        found &= key <= place + right
    return found


class KvGrid(NamedTuple):
    """The contract's results: out (b, s, h, d), lse (b, h, s), and (b, h, s, blocks): where a maximum moved."""

    out: Tensor
    lse: Tensor
    moved: Tensor


def kv_grid(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> KvGrid:
    """The contract ``kv_grid`` in torch, for tests: products in fp32, every other step as the kernels name it.

    Products are summed in torch's own order; all else has the kernels' order.
    """
    grid = grid_for(q.shape[3])
    dtype, (batch, len_q, heads, _), len_k = q.dtype, q.shape, k.shape[1]
    c = torch.tensor((q.shape[3] ** -0.5 if scale is None else scale) * LOG2E, dtype=torch.float32).item()
    group = heads // k.shape[2]
    queries = q.float().transpose(1, 2)
    keys, values = (t.float().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    seen = visible(len_q, len_k, causal, None, q.device)
    rows = (batch, heads, len_q)

    def empty() -> tuple[Tensor, Tensor, Tensor]:
        maximum = queries.new_full(rows, -math.inf)
        return maximum, queries.new_zeros(*rows, LANES), queries.new_zeros(*rows, v.shape[3])

    merged_maximum, merged_total, merged = empty()
    merged_total = merged_total[..., 0]
    moved = []
    for split in range(0, len_k, grid.split):
        maximum, total, output = empty()
        for first in range(split, min(split + grid.split, len_k), grid.block):
            block = slice(first, min(first + grid.block, len_k))
            scores = (queries @ keys[:, :, block].mT).masked_fill(~seen[:, block], -math.inf)
            largest = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(-1)
            moves = (maximum == -math.inf) | ((largest - maximum) * c > THRESHOLD)
            factor = torch.exp2((maximum - largest) * c).masked_fill(maximum == -math.inf, 0.0)
            factor = torch.where(moves, factor, 1.0)
            maximum = torch.where(moves, largest, maximum)
            moved.append(moves)
            output, total = output * factor.unsqueeze(-1), total * factor.unsqueeze(-1)
            shift = maximum.masked_fill(maximum == -math.inf, 0.0) * c
            p = torch.exp2(_fma(scores, c, -shift.unsqueeze(-1)))
            for j in range(p.shape[3]):
                total[..., j % 8 // 2] += p[..., j]
            output = output + p.to(dtype).float() @ values[:, :, block]
        total = (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
        after = torch.maximum(merged_maximum, maximum)
        nothing = after == -math.inf
        a = torch.exp2((merged_maximum - after) * c).masked_fill(nothing, 1.0)
        b = torch.exp2((maximum - after) * c).masked_fill(nothing, 0.0)
        merged = _fma(merged, a.unsqueeze(-1), output * b.unsqueeze(-1))
        merged_total = _fma(merged_total, a, total * b)
        merged_maximum = after
    nothing = merged_total == 0
    out = (merged / merged_total.unsqueeze(-1)).masked_fill(nothing.unsqueeze(-1), 0.0)
    lse = _fma(merged_maximum * c, math.log(2.0), torch.log(merged_total)).masked_fill(nothing, -math.inf)
    moved = torch.stack(moved, -1) if moved else seen.new_zeros(*rows, 0)
    return KvGrid(out.transpose(1, 2).to(dtype), lse, moved)


def _fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """One rounding, but where fp64 rounds to the middle of two fp32 numbers."""
    return (a.double() * (b.double() if isinstance(b, Tensor) else b) + c.double()).float()
