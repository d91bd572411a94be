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
    prefills,
    score_factors,
)
from cute_kernels.attention.launch.append import expect_hopper
from cute_kernels.attention.launch.forward import regular
from cute_kernels.attention.launch.prefill import prefill
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache, bounded, observe, observers
from cute_kernels.runtime.operators import alias, empty, operator
from cute_kernels.runtime.targets import Target


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
    of_q, of_k, dv = q.shape, k_cache.shape, v_cache.shape[3]
    heads, d, pairs = of_q[-2], of_q[-1], of_k[2]
    queries = of_q[0] if packed else of_q[0] * of_q[1]
    grid = grid_for(d, dv)
    rows = 0 if page_table is None else page_rows(of_k[1], grid.block)
    index = q.get_device()
    sequences = cache_seqlens.shape[0] or 1
    spec = DecodeSpec(q.dtype, d, dv, packed, rows, softcap != 0.0, None if sinks is None else sinks.dtype)
    splits = -(-max_seqlen_k // grid.split) or 1
    launch = _decode.get(index, spec).of((sequences, queries, heads, pairs, max_seqlen_q, splits))
    if launch is None:
        prefill(
            spec, q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, sinks, out, lse, max_seqlen_q, appended,
            left, right, softcap, scale,
        )  # fmt: skip
        return
    if observers:
        observe(launch, (sequences, heads, max_seqlen_q, max_seqlen_k, d), index)
    if packed:
        q, out, lse = one_sequence(q), one_sequence(out), one_sequence(lse)
    before_tanh, score_scale = score_factors(scale, softcap)
    launch.function(
        regular(q),
        regular(k_cache),
        regular(v_cache),
        cache_seqlens,
        page_table,
        cu_seqlens_q,
        regular(out),
        lse,
        empty(q, launch.partials, torch.float32),
        empty(q, launch.sums, torch.float32),
        counters_of(q, index, launch.counters),
        sinks,
        before_tanh,
        score_scale,
        left,
        right,
        int(appended),
        max_seqlen_k,
        launch.num_ctas,
    )


# Sequences, queries of all of them, heads, heads of keys, the longest's queries, splits of the longest's keys
Sizes = tuple[int, int, int, int, int, int]


class DecodeLaunch(NamedTuple):
    """A kernel, the shapes of its workspace, how many counters it needs and how many CTAs there are."""

    function: Callable[..., None]
    spec: DecodeSpec
    config: DecodeConfig
    partials: tuple[int, int, int]
    sums: tuple[int, int, int]
    counters: int
    num_ctas: int

    @property
    def contract(self) -> str:
        """For ``provenance``."""
        return contract_of(self.spec.head_size, self.spec.head_size_v)

    @property
    def name(self) -> str:
        """The kernel and its configuration."""
        return f"attention_decode ({'all splits' if self.config.sequential else 'a split'} a CTA)"


class DecodeLaunches:
    """The launches of a Spec, by a call's sizes."""

    def __init__(self, target: Target, spec: DecodeSpec) -> None:
        expect_hopper(target)
        self._target, self._spec = target, spec
        self._launches: dict[Sizes, tuple[DecodeLaunch | None]] = bounded()

    def of(self, sizes: Sizes) -> DecodeLaunch | None:
        """The launch for these sizes; None: the forward's kernel is to be launched."""
        found = self._launches.get(sizes)
        if found is None:
            found = self._launches[sizes] = (launch_of(self._target, self._spec, sizes),)
        return found[0]


def launch_of(target: Target, spec: DecodeSpec, sizes: Sizes) -> DecodeLaunch | None:
    """The launch of the kernel that is chosen for these sizes; None: that of the forward."""
    sequences, queries, heads, pairs, max_seqlen_q, splits = sizes
    if prefills(spec.head_size_v, queries, sequences, max_seqlen_q, heads, splits, target.num_sms):
        return None
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    group, dv = heads // pairs, spec.head_size_v
    rows = queries * group  # of a pair; the tiles of all sequences are at most
    tiles = min(sequences * -(-max_seqlen_q * group // WARPGROUP_ROWS), rows // WARPGROUP_ROWS + sequences) * pairs
    config = decode_config(dv, rows // sequences, max_seqlen_q * group, tiles, splits, target.num_sms)
    items = tiles if config.sequential else tiles * splits
    kept = 0 if splits == 1 else 1 if config.sequential else splits  # of the workspace
    workspace = max(kept, 1), rows * pairs if kept else 1
    return DecodeLaunch(
        launches.load(decode_sm90, target.arch, spec, config),
        spec,
        config,
        (*workspace, dv),
        (*workspace, 2),
        1 + (rows // WARPGROUP_ROWS + sequences) * pairs,
        max(min(items, target.num_sms), 1),
    )


_decode = LaunchCache(DecodeLaunches)


def one_sequence(t: Tensor) -> Tensor:
    """A packed tensor as a batch of one."""
    shape, strides = t.shape, t.stride()
    return alias(t, (1, *shape), (shape[0] * strides[0], *strides))


_counters: dict[tuple[int, int], Tensor] = bounded()


def counters_of(q: Tensor, index: int, number: int) -> Tensor:
    """At least so many zeros, which a kernel leaves as zeros. A stream has its own: its kernels run in turn.

    A graph gets its own, too: it may be replayed on any stream. ``index``: of q's device.
    """
    if index < 0 or torch.cuda.is_current_stream_capturing():
        return q.new_zeros(number, dtype=torch.int32)
    key = index, _current_stream(index)
    found = _counters.get(key)
    if found is None or found.shape[0] < number:
        found = _counters[key] = q.new_zeros(max(number, 4096), dtype=torch.int32)
    return found


# Its number: torch.cuda.current_stream makes an object around it. Not in torch's CPU builds
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
