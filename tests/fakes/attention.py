"""Fakes of attention."""

import math

import torch

from cute_kernels.attention import reference, reference_cache
from cute_kernels.attention.checks_cache import Cache
from cute_kernels.attention.config import LOG2E, UNBOUNDED, backward_block, grid_for


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
    page_table,
    appended,
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
    assert (appended is None) == (not spec.cached) and (page_table is None) == (not spec.page_rows)
    if spec.cached:
        assert spec.used_k and not spec.packed_k
        assert spec.page_rows == (0 if page_table is None else min(k.shape[1], grid_for(d, dv).block))
        bounds = (UNBOUNDED, 0) if spec.causal else (left, right) if spec.window else (UNBOUNDED, UNBOUNDED)
        _over_a_cache(q, k, v, seqused_k, page_table, cu_seqlens_q, out, lse, sinks, scale, softcap, bounds, appended)
        return
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


def append(static, k, v, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen) -> None:
    spec = static["spec"]
    packed, paged = cu_seqlens_q is not None, page_table is not None
    assert spec == (k.dtype, k.shape[3], v.shape[3], packed, paged) and k.numel()
    if packed:
        k, v = k[0], v[0]
        assert max_seqlen >= cu_seqlens_q.diff().max()
    else:
        assert max_seqlen == k.shape[1]
    reference_cache.append(
        Cache(k_cache, v_cache, cache_seqlens, page_table, k, v, cu_seqlens_q, max_seqlen if packed else None, None)
    )


def decode_sm90(
    static,
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    out,
    lse,
    partials,
    sums,
    counters,
    sinks,
    before_tanh,
    score_scale,
    left,
    right,
    appended,
    max_seqlen_k,
    num_ctas,
) -> None:
    spec, config = static["spec"], static["config"]
    d, dv, page_size = q.shape[3], v_cache.shape[3], k_cache.shape[1]
    grid = grid_for(d, dv)
    packed = cu_seqlens_q is not None
    page_rows = 0 if page_table is None else min(page_size, grid.block)
    assert spec == (q.dtype, d, dv, packed, page_rows, before_tanh != 0, None if sinks is None else sinks.dtype)
    assert (
        appended in (0, 1) and num_ctas >= 1 and max_seqlen_k <= page_size * (page_table.shape[1] if page_rows else 1)
    )
    queries = cu_seqlens_q.diff() if packed else torch.full_like(cache_seqlens, q.shape[1])
    keys = cache_seqlens + appended * queries
    assert (keys <= max_seqlen_k).all()
    splits = math.ceil(max_seqlen_k / grid.split)
    if splits > 1:
        assert partials.shape == (1 if config.sequential else splits, out.numel() // dv, dv)
        assert sums.shape[:2] == partials.shape[:2]
    group = q.shape[2] // k_cache.shape[2]
    tiles = [math.ceil(n * group / 64) for n in queries.tolist()]
    assert counters.shape[0] > sum(tiles) * k_cache.shape[2] and not counters.any()
    scale, softcap = score_scale / LOG2E, 0.0
    if spec.softcap:
        scale, softcap = before_tanh * scale, scale
    _over_a_cache(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        page_table,
        cu_seqlens_q,
        out,
        lse,
        sinks,
        scale,
        softcap,
        (left, right),
        appended,
    )


def _over_a_cache(
    q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, out, lse, sinks, scale, softcap, bounds, appended
) -> None:
    """``q`` and ``out`` packed as a batch of one."""
    packed = cu_seqlens_q is not None
    queries = cu_seqlens_q.diff() if packed else torch.full_like(cache_seqlens, q.shape[1])
    found = reference_cache.attention_with_kv_cache(
        q[0] if packed else q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens + appended * queries,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=int(queries.max()) if packed else None,
        causal=False,
        window=tuple(None if bound == UNBOUNDED else bound for bound in bounds),
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        return_lse=True,
        compute_dtype=torch.float64,
    )
    (out[0] if packed else out).copy_(found[0])
    (lse[0] if lse.dim() == 3 and packed else lse).copy_(found[1])


def _sequences(cu_seqlens, batch, length):
    """(First row, rows) of each."""
    if cu_seqlens is None:
        return [(i * length, length) for i in range(batch)]
    starts = cu_seqlens.tolist()
    return [(a, b - a) for a, b in zip(starts, starts[1:], strict=False)]


def _first_tile(cu_seqlens, i, length, rows):
    """The first of a sequence's tiles."""
    return i * math.ceil(length / rows) if cu_seqlens is None else cu_seqlens[i].item() // rows + i


def delta(static, out, dout, lse, dlse, cu_seqlens_q, delta, row_lse, counters) -> None:
    spec, (batch, length, heads, d) = static["spec"], out.shape
    assert spec[2:4] == (dlse is not None, cu_seqlens_q is not None) and d <= spec.head_size and delta.shape[0] == heads
    assert spec.padded or d == spec.head_size
    delta.zero_()
    row_lse.fill_(math.inf)
    found = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    if dlse is not None:
        found -= dlse
    known = (lse * LOG2E).masked_fill(lse == -math.inf, math.inf)
    for i, (start, n) in enumerate(_sequences(cu_seqlens_q, batch, length)):
        first = _first_tile(cu_seqlens_q, i, length, spec.padded_rows) * spec.padded_rows
        matrix, rows = (i, slice(None)) if cu_seqlens_q is None else (0, slice(start, start + n))
        delta[:, first : first + n], row_lse[:, first : first + n] = found[matrix][:, rows], known[matrix][:, rows]
    counters.zero_()


def backward_sm90(
    static,
    q,
    k,
    v,
    dout,
    row_lse,
    delta,
    dk,
    dv,
    dq_sums,
    dkv_sums,
    counters,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    score_scale,
    before_tanh,
    scale,
    left,
    right,
    num_tiles,
    num_blocks,
    together,
    num_ctas,
) -> None:
    """``dq_sums`` are left in the order of dq: their own is between the kernels."""
    spec, config = static["spec"], static["config"]
    (batch, len_q, heads, d), (_, len_k, pairs, _) = q.shape, k.shape
    group, block, rows = heads // pairs, backward_block(spec.head_size), config.tile_rows
    assert spec.dtype is q.dtype and spec.grouped == (group > 1) and bool(before_tanh) == spec.softcap
    assert (cu_seqlens_q is not None, cu_seqlens_k is not None, seqused_k is not None) == spec[6:9]
    assert spec.padded == ((d, v.shape[3]) != spec.sizes)
    queries, keys = _sequences(cu_seqlens_q, batch, len_q), _sequences(cu_seqlens_k, k.shape[0], len_k)
    for starts, found, length, tile, number in (
        (cu_seqlens_q, queries, len_q, rows, num_tiles),
        (cu_seqlens_k, keys, len_k, block, num_blocks),
    ):
        last = len(found) - 1
        assert number >= _first_tile(starts, last, length, tile) + math.ceil(found[last][1] / tile)
    assert dq_sums.numel() == num_tiles * heads * rows * spec.head_size
    summed = num_blocks * pairs if spec.grouped else 0
    assert dkv_sums.numel() == summed * 2 * block * spec.head_size
    assert counters.numel() == 1 + num_tiles * heads + summed and not counters.any()
    assert 1 <= num_ctas <= num_blocks * heads and together % group == 0
    of_rows = dq_sums[: q.numel()].view(q.shape)
    for i in range(len(queries)):
        (start, n), (start_k, n_k) = queries[i], keys[i]
        first = _first_tile(cu_seqlens_q, i, len_q, config.padded_rows) * config.padded_rows
        assert first + math.ceil(n / rows) * rows <= row_lse.shape[1]  # whole tiles are read
        of_q = (i, slice(None)) if cu_seqlens_q is None else (0, slice(start, start + n))
        used = n_k if seqused_k is None else min(seqused_k[i].item(), n_k)
        of_k = (i, slice(used)) if cu_seqlens_k is None else (0, slice(start_k, start_k + used))
        rows_q, gradient = (t[of_q].transpose(0, 1).float() for t in (q, dout))
        rows_k, rows_v = (t[of_k].transpose(0, 1).float().repeat_interleave(group, 0) for t in (k, v))
        window = tuple(-1 if distance == UNBOUNDED else distance for distance in (left, right)) if spec.window else None
        seen = reference.visible(n, used, spec.causal, window, q.device)
        scores = _product(rows_q, rows_k.mT)
        scores = torch.tanh(scores * before_tanh) if spec.softcap else scores
        p = torch.exp2(scores.masked_fill(~seen, -math.inf) * score_scale - row_lse[:, first : first + n, None])
        slope = 1 - scores.square() if spec.softcap else 1.0
        ds = p * slope * (_product(gradient, rows_v.mT) - delta[:, first : first + n, None])
        of_rows[of_q] = _product(ds, rows_k).transpose(0, 1)
        if spec.grouped:  # left in the order of dk and dv, too
            sums = dkv_sums[: 2 * k.shape[0] * len_k * pairs * spec.head_size].view(2, *k.shape[:3], spec.head_size)
            targets = sums[0, ..., :d], sums[1, ..., : v.shape[3]]
        else:
            targets = dk, dv
        for target, found, factor in zip(
            targets, (_product(ds.mT, rows_q), _product(p.mT, gradient)), (scale, 1.0), strict=True
        ):
            found = found.unflatten(0, (pairs, group)).sum(1).transpose(0, 1)
            target[of_k] = found if spec.grouped else (found * factor).to(target.dtype)


def _product(a, b):
    """``a @ b``, added in fp64: a CPU's order of adding may depend on the number of rows."""
    return (a.double() @ b.double()).float()


def finish_dq(static, dq_sums, dq, cu_seqlens_q, cu_seqlens_k, seqused_k, scale, right, len_k, num_tiles) -> None:
    spec, (batch, len_q, heads, _) = static["spec"], dq.shape
    assert not spec.grouped and not spec.softcap
    assert dq_sums.numel() == num_tiles * heads * static["config"].tile_rows * spec.head_size
    for i, (start, n) in enumerate(_sequences(cu_seqlens_q, batch, len_q)):
        of_q = (i, slice(None)) if cu_seqlens_q is None else (0, slice(start, start + n))
        dq[of_q] = (dq_sums[: dq.numel()].view(dq.shape)[of_q] * scale).to(dq.dtype)


def finish_dkv(static, dkv_sums, dk, dv, cu_seqlens_k, seqused_k, scale, num_blocks) -> None:
    spec, (batch, len_k, pairs, d) = static["spec"], dk.shape
    assert spec.grouped and not (spec.causal or spec.window or spec.softcap or spec.packed_q)
    assert dkv_sums.numel() == 2 * num_blocks * pairs * backward_block(spec.head_size) * spec.head_size
    sums = dkv_sums[: 2 * batch * len_k * pairs * spec.head_size].view(2, *dk.shape[:3], spec.head_size)
    for i, (start, n) in enumerate(_sequences(cu_seqlens_k, batch, len_k)):
        used = n if seqused_k is None else min(seqused_k[i].item(), n)
        of_k = (i, slice(used)) if cu_seqlens_k is None else (0, slice(start, start + used))
        dk[of_k] = (sums[0][of_k][..., :d] * scale).to(dk.dtype)
        dv[of_k] = sums[1][of_k][..., : dv.shape[3]].to(dv.dtype)
