"""Fakes of attention."""

import math

import torch

from cute_kernels.attention import reference
from cute_kernels.attention.config import grid_for


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


def forward_sm100(static, q, k, v, out, lse, merged, *scalars) -> None:
    splits = k.shape[1] > grid_for(q.shape[3]).split
    assert merged.shape[0] == (scalars[2] if splits else 1)
    forward_sm90(static, q, k, v, out, lse, *scalars)
