"""Attention in plain torch: the specification, and what runs without a supported GPU.

``attention`` is computed in ``compute_dtype`` and rounded once at the end; its gradients are autograd's. ``kv_grid`` is
the contract that the kernels keep, step by step: the same blocks, splits, rescales and merges, each operation rounded
to fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.checks import DENSE, Lengths, Window, check_attention, check_layout, check_out, check_values
from cute_kernels.attention.config import LOG2E, THRESHOLD, grid_for, score_factors
from cute_kernels.runtime.autograd import without_autocast
from cute_kernels.runtime.real import as_float
from cute_kernels.runtime.strict import has_address

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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    check: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """See ``cute_kernels.attention``. Lengths on the device are read: the host waits for it."""
    softcap, scale = as_float(softcap), as_float(scale)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    lengths = DENSE if lengths == DENSE else lengths
    check_attention(q, k, v, causal, window, softcap, sinks, scale, lengths=lengths)
    if out is not None:
        check_out(out, q, v)
    if has_address(q, k, v):
        check_layout(q, k, v, out)
    if check:
        check_values(q, k, lengths)
    if q.dtype is torch.float64:
        compute_dtype = q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        if lengths is DENSE:
            results = _dense(q, k, v, causal, window, softcap, sinks, scale, compute_dtype)
        else:
            results = _by_sequence(q, k, v, causal, window, softcap, sinks, scale, compute_dtype, lengths)
    found, lse = results[0].to(q.dtype).contiguous(), results[1].to(torch.promote_types(torch.float32, q.dtype))
    if out is not None:
        found = out.copy_(found)
    return (found, lse) if return_lse else found


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window | None,
    softcap: float,
    sinks: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense batch, in ``dtype``."""
    group = q.shape[2] // k.shape[2]
    queries = q.to(dtype).transpose(1, 2)
    keys, values = (t.to(dtype).transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scores = queries @ keys.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(q.shape[1], k.shape[1], causal, window, q.device), -math.inf)
    logits = scores
    if sinks is not None:
        sink = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, sink], -1)
    of_nothing = logits.new_full(logits.shape[:3], -math.inf)
    lse = torch.logsumexp(logits, -1) if logits.shape[3] else of_nothing
    # A row that sees nothing has an lse of -inf, and p of 0
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return (p @ values).transpose(1, 2), lse


def _by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window | None,
    softcap: float,
    sinks: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    lengths: Lengths,
) -> tuple[Tensor, Tensor]:
    """(out, lse), each sequence by itself. Rows of q that are no sequence's have 0 and -inf."""
    packed = lengths.cu_seqlens_q is not None
    outs, lses = [], []
    for rows, keys, values in sequences(q, k, v, lengths):
        out, lse = _dense(rows, keys, values, causal, window, softcap, sinks, scale, dtype)
        outs.append(out)
        lses.append(lse)
    if not packed:
        return (torch.cat(outs), torch.cat(lses)) if outs else (q.new_zeros(q.shape), q.new_zeros(0, q.shape[2], 0))
    missing = q.shape[0] - sum(out.shape[1] for out in outs)
    outs.append(q.new_zeros((1, missing, q.shape[1], v.shape[-1]), dtype=dtype))
    lses.append(q.new_full((1, q.shape[1], missing), -math.inf, dtype=dtype))
    return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0]


def sequences(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each sequence, as dense batches of one."""
    starts_q, starts_k, used = (
        None if t is None else t.tolist() for t in (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k)
    )
    batch = q.shape[0] if starts_q is None else len(starts_q) - 1
    for i in range(batch):
        rows = q[i] if starts_q is None else q[starts_q[i] : starts_q[i + 1]]
        keys, values = (t[i] if starts_k is None else t[starts_k[i] : starts_k[i + 1]] for t in (k, v))
        if used is not None:
            keys, values = keys[: used[i]], values[: used[i]]
        yield rows[None], keys[None], values[None]


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


def kv_grid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> KvGrid:
    """The contract ``kv_grid`` of a dense batch in torch, for tests: all but the products as the kernels name it.

    Products are summed in torch's own order, in fp32; all else has the kernels' order.
    """
    grid = grid_for(q.shape[3], v.shape[3])
    dtype, (batch, len_q, heads, _), len_k = q.dtype, q.shape, k.shape[1]
    before_tanh, c = (_fp32(x) for x in score_factors(q.shape[3] ** -0.5 if scale is None else scale, softcap))
    group = heads // k.shape[2]
    queries = q.float().transpose(1, 2)
    keys, values = (t.float().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    seen = visible(len_q, len_k, causal, window, q.device)
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
            scores = queries @ keys[:, :, block].mT
            if softcap:
                scores = torch.tanh(scores * before_tanh)
            scores = scores.masked_fill(~seen[:, block], -math.inf)
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
    shift, reciprocal = merged_maximum * c, 1 / merged_total
    lse = _fma(shift, math.log(2.0), torch.log(merged_total)).masked_fill(nothing, -math.inf)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1)
        excess = _fma(sink.expand(rows), _fp32(LOG2E), -shift)  # of the sink over the maximum, an exponent of 2
        below = merged_total + torch.exp2(excess)
        factor = torch.exp2(-excess)
        above = _fma(merged_total, factor, torch.ones_like(factor))
        reciprocal = torch.where(excess <= 0, 1 / below, factor * (1 / above))
        of_below = _fma(shift, math.log(2.0), torch.log(below))
        lse = torch.where(nothing, sink, torch.where(excess <= 0, of_below, sink + torch.log(above)))
    out = (merged * reciprocal.unsqueeze(-1)).masked_fill(nothing.unsqueeze(-1), 0.0)
    moved = torch.stack(moved, -1) if moved else seen.new_zeros(*rows, 0)
    return KvGrid(out.transpose(1, 2).to(dtype), lse, moved)


def _fp32(x: float) -> float:
    """As a kernel's argument has it."""
    return torch.tensor(x, dtype=torch.float32).item()


def _fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """One rounding, but where fp64 rounds to the middle of two fp32 numbers."""
    return (a.double() * (b.double() if isinstance(b, Tensor) else b) + c.double()).float()
