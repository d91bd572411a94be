"""Attention over a cache.

The operator is ``cute_kernels::attention_decode``, which writes out and lse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.config import (
    WARPGROUP_ROWS,
    DecodeConfig,
    DecodeSpec,
    contract_of,
    decode_config,
    grid_for,
    page_rows,
    score_factors,
)
from cute_kernels.attention.launch.forward import regular
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import Described, LaunchCache, bounded, observe, observers
from cute_kernels.runtime.operators import empties, operator
from cute_kernels.runtime.targets import Target, UnsupportedDeviceError


@operator(
    "attention_decode",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? page_table, Tensor? cu_seqlens_q, "
    "Tensor? sinks, Tensor(a!) out, Tensor(b!) lse, int max_seqlen_q, int max_seqlen_k, bool appended, int left, "
    "int right, float softcap, float scale",
)
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    appended: bool,
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> None:
    """out and lse of rows of q over the keys of a cache, those that were appended to it among them."""
    if not out.numel():
        return
    packed = cu_seqlens_q is not None
    if packed:
        q, out, lse = q.unsqueeze(0), out.unsqueeze(0), lse.unsqueeze(0)
    d, dv = q.shape[3], v_cache.shape[3]
    rows = 0 if page_table is None else page_rows(k_cache.shape[1], grid_for(d, dv).block)
    spec = DecodeSpec(q.dtype, d, dv, packed, rows, bool(softcap), None if sinks is None else sinks.dtype)
    run(
        Call(
            q,
            k_cache,
            v_cache,
            cache_seqlens,
            page_table,
            cu_seqlens_q,
            sinks,
            out,
            lse,
            max_seqlen_q,
            max_seqlen_k,
            appended,
            left,
            right,
            softcap,
            scale,
        ),
        spec,
    )


class Call(NamedTuple):
    """What ``attention_decode`` gets, packed queries as one sequence of a batch."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    appended: bool
    left: int
    right: int
    softcap: float
    scale: float


def run(call: Call, spec: DecodeSpec) -> None:
    """Write out and lse."""
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    batch, len_q, heads, d = q.shape
    dv = v_cache.shape[3]
    sequences, pairs = max(call.cache_seqlens.shape[0], 1), k_cache.shape[2]
    group = heads // pairs
    rows = batch * len_q * group  # of a pair; the tiles of all sequences are at most
    tiles = min(sequences * -(-call.max_seqlen_q * group // WARPGROUP_ROWS), rows // WARPGROUP_ROWS + sequences) * pairs
    splits = max(-(-call.max_seqlen_k // grid_for(d, dv).split), 1)
    index = q.get_device()
    num_sms = launches.target_of(index).num_sms
    config = decode_config(dv, rows // sequences, tiles, splits, num_sms)
    items = tiles if config.sequential else tiles * splits
    kept = 0 if splits == 1 else 1 if config.sequential else splits  # of the workspace
    kept_rows = rows * pairs if kept else 1
    partials, sums = empties(
        q, ((max(kept, 1), kept_rows, dv), torch.float32), ((max(kept, 1), kept_rows, 2), torch.float32)
    )
    counters = counters_of(q, (rows // WARPGROUP_ROWS + sequences) * pairs)
    before_tanh, score_scale = score_factors(call.scale, call.softcap)
    if observers:
        name = f"attention_decode ({'all splits' if config.sequential else 'a split'} a CTA)"
        shape = sequences, heads, call.max_seqlen_q, call.max_seqlen_k, d
        observe(Described(contract_of(d, dv), name), shape, index)
    _decode.get(index, Kernel(spec, config))(
        regular(q),
        regular(k_cache),
        regular(v_cache),
        call.cache_seqlens,
        call.page_table,
        call.cu_seqlens_q,
        regular(call.out),
        call.lse,
        partials,
        sums,
        counters,
        call.sinks,
        before_tanh,
        score_scale,
        call.left,
        call.right,
        int(call.appended),
        call.max_seqlen_k,
        max(min(items, config.ctas_per_sm * num_sms), 1),
    )


_counters: dict[tuple[int, int], Tensor] = bounded()


def counters_of(q: Tensor, number: int) -> Tensor:
    """At least so many zeros, which a kernel leaves as zeros. A stream has its own: its kernels run in turn.

    A graph gets its own, too: it may be replayed on any stream.
    """
    if q.get_device() < 0:
        return q.new_zeros(number, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return q.new_zeros(number, dtype=torch.int32)
    index = q.get_device()
    key = index, torch.cuda.current_stream(index).cuda_stream
    found = _counters.get(key)
    if found is None or found.shape[0] < number:
        found = _counters[key] = q.new_zeros(max(number, 4096), dtype=torch.int32)
    return found


class Kernel(NamedTuple):
    """What is compiled."""

    spec: DecodeSpec
    config: DecodeConfig


def _make_decode(target: Target, kernel: Kernel) -> Callable[..., None]:
    if target.arch != "sm_90a":
        raise UnsupportedDeviceError(
            f"attention_with_kv_cache: has kernels for compute capability 9.0 alone yet, got {target.arch}. "
            "Pass backend='reference' to run plain torch"
        )
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    return launches.load(decode_sm90, target.arch, *kernel)


_decode = LaunchCache(_make_decode)
