"""Fakes of attention."""

import math

import torch

from cute_kernels.attention import reference
from cute_kernels.attention.config import LOG2E, UNBOUNDED


def forward_sm90(
    static,
    q,
    k,
    v,
    out,
    lse,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    workspace,
    score_scale,
    before_tanh,
    left,
    right,
    num_tiles,
    paired,
    num_ctas,
) -> None:
    spec, config = static["spec"], static["config"]
    batch, len_q, heads, d = q.shape
    rows, dv = config.tile_rows, v.shape[3]
    assert spec.dtype is q.dtype and len_q and k.shape[1] and (d, dv) <= spec.sizes
    assert spec.padded == ((d, dv) != spec.sizes)
    assert not (spec.causal and spec.window) and not (spec.packed_q and batch > 1)
    tiles = [(start, n) for start, n in _sequences(cu_seqlens_q, batch, len_q)]
    needed = sum(math.ceil(n / rows) for _, n in tiles) * heads
    assert num_tiles >= needed if spec.packed_q else num_tiles == needed
    assert 1 <= num_ctas <= num_tiles and paired in (0, 1)
    assert (workspace.numel() if workspace is not None else 0) == num_ctas * config.workspace_numbers(spec)
    assert bool(before_tanh) == spec.softcap
    softcap = score_scale / LOG2E if spec.softcap else 0.0
    scale = before_tanh * softcap if spec.softcap else score_scale / LOG2E
    # fp64: what torch's sums owe to the number of rows is then gone with the rounding
    found = reference.attention(
        q[0] if spec.packed_q else q,
        *((t[0] if spec.packed_k else t) for t in (k, v)),
        causal=spec.causal,
        window=tuple(-1 if distance == UNBOUNDED else distance for distance in (left, right)) if spec.window else None,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=len_q if spec.packed_q else None,
        max_seqlen_k=k.shape[1] if spec.packed_k else None,
        seqused_k=seqused_k,
        return_lse=True,
        compute_dtype=torch.float64,
    )
    (out[0] if spec.packed_q else out).copy_(found[0])
    lse.copy_(found[1])


forward_sm100 = forward_sm90


def _sequences(cu_seqlens, batch, length):
    """(First row, rows) of each."""
    if cu_seqlens is None:
        return [(i * length, length) for i in range(batch)]
    starts = cu_seqlens.tolist()
    return [(a, b - a) for a, b in zip(starts, starts[1:], strict=False)]
