"""Fakes of attention."""

import math

import torch

from cute_kernels.attention import reference
from cute_kernels.attention.config import PADDED_ROWS, grid_for


def forward_sm90(static, q, k, v, out, lse, score_scale, heads_together, num_ctas) -> None:
    spec, config = static["spec"], static["config"]
    batch, len_q, heads, d = q.shape
    assert spec == (q.dtype, d, spec.causal) and len_q and k.shape[1]
    assert 1 <= num_ctas <= batch * heads * math.ceil(len_q / config.tile_rows)
    assert heads_together >= 1 and heads_together % (heads // k.shape[2]) == 0
    # fp64: what torch's sums owe to the number of rows is then gone with the rounding
    scale = score_scale / reference.LOG2E
    found = reference.attention(q, k, v, causal=spec.causal, scale=scale, return_lse=True, compute_dtype=torch.float64)
    out.copy_(found[0])
    lse.copy_(found[1])


def delta(static, out, dout, lse, dlse, delta, row_lse, counters) -> None:
    spec, length = static["spec"], lse.shape[2]
    assert spec == (out.dtype, out.shape[3], dlse is not None)
    assert delta.shape[2] == -(-length // PADDED_ROWS) * PADDED_ROWS
    delta.zero_()
    row_lse.fill_(math.inf)
    delta[..., :length] = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta[..., :length] -= dlse
    row_lse[..., :length] = (lse * reference.LOG2E).masked_fill(lse == -math.inf, math.inf)
    counters.zero_()


def backward_sm90(
    static, q, k, v, dout, row_lse, delta, dk, dv, dq_sums, dkv_sums, counters, score_scale, scale, together, num_ctas
) -> None:
    """``dq_sums`` are left in the order of dq: their own is between the kernels."""
    spec, config = static["spec"], static["config"]
    (batch, len_q, heads, d), (_, len_k, pairs, _) = q.shape, k.shape
    group, blocks = heads // pairs, math.ceil(len_k / grid_for(d).block)
    tiles = math.ceil(len_q / config.tile_rows) * batch * heads
    assert spec == (q.dtype, d, spec.causal, group > 1) and len_q and len_k
    assert dq_sums.numel() == tiles * config.tile_rows * d
    summed = blocks * batch * pairs if spec.grouped else 0
    assert dkv_sums.numel() == summed * 256 * d and counters.numel() == 1 + tiles + summed and not counters.any()
    assert 1 <= num_ctas <= blocks * batch * heads and together % group == 0
    wide = (t.transpose(1, 2).float() for t in (q, k, v, dout))
    queries, keys, values, gradient = (t.repeat_interleave(heads // t.shape[1], 1) for t in wide)
    seen = reference.visible(len_q, len_k, spec.causal, None, q.device)
    scores = (queries @ keys.mT * score_scale).masked_fill(~seen, -math.inf)
    p = torch.exp2(scores - row_lse[..., :len_q, None])
    ds = p * (gradient @ values.mT - delta[..., :len_q, None])
    dq_sums[: q.numel()] = (ds @ keys).flatten()
    for target, found in ((dk, ds.mT @ queries * scale), (dv, p.mT @ gradient)):
        target.copy_(found.unflatten(1, (pairs, group)).sum(2).transpose(1, 2))


def finish_dq(static, dq_sums, dq, scale, len_k) -> None:
    batch, len_q, heads, d = dq.shape
    assert not static["spec"].grouped and len_k
    dq.copy_((dq_sums[: dq.numel()] * scale).view(batch, heads, len_q, d).transpose(1, 2))
