"""The forward of attention.

The operator is ``cute_kernels::attention_forward``, which returns its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention import reference
from cute_kernels.attention.config import (
    UNBOUNDED,
    WARPGROUP_ROWS,
    ForwardConfig,
    ForwardSpec,
    forward_config,
    kernel_sizes,
    merges_in_workspace,
    pairs_tiles,
    score_factors,
    window_bounds,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import empties, empty, functional_operator
from cute_kernels.runtime.targets import Target, UnsupportedDeviceError


def outputs(q: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as they are allocated."""
    out, lse = empties(q, ((*q.shape[:-1], v.shape[-1]), q.dtype), (lse_shape(q, packed), torch.float32))
    return out, lse


def lse_shape(q: Tensor, packed: bool) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])


def _fake(q, k, v, causal, scale, left=-1, right=-1, softcap=0.0, sinks=None, cu_seqlens_q=None, *_, **__):
    return outputs(q, v, cu_seqlens_q is not None)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return reference.attention(
        q,
        k,
        v,
        causal=causal,
        window=(left, right),
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
        return_lse=True,
    )


@functional_operator(
    "attention_forward",
    "Tensor q, Tensor k, Tensor v, bool causal, float scale, int left=-1, int right=-1, float softcap=0., "
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, Tensor? seqused_k=None",
    "(Tensor, Tensor)",
    fake=_fake,
    cpu=_reference,
)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse), arguments as of ``attention``, ``sinks`` fp32; out is contiguous."""
    out, lse = outputs(q, v, cu_seqlens_q is not None)
    arguments = (
        causal,
        scale,
        left,
        right,
        softcap,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k,
    )
    write_attention(out, lse, q, k, v, *arguments)
    return out, lse


def attention_into(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_k: Tensor | None,
) -> Tensor:
    """``attention_forward`` of plain tensors into ``out``; returns lse."""
    lse = empty(q, lse_shape(q, cu_seqlens_q is not None), torch.float32)
    arguments = (
        causal,
        scale,
        left,
        right,
        softcap,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k,
    )
    write_attention(out, lse, q, k, v, *arguments)
    return lse


def write_attention(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_k: Tensor | None,
) -> None:
    """``attention_forward`` into given memory."""
    if not lse.numel():
        return
    packed, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    if not k.numel() or (packed and (cu_seqlens_q.shape[0] == 1 or not max_seqlen_q)):
        nothing_seen(out, lse, sinks, cu_seqlens_q)
        return
    left, right = window_bounds(causal, (left, right))
    window = left != UNBOUNDED or right not in (0, UNBOUNDED)
    sizes = q.shape[-1], v.shape[-1]
    d, dv = kernel_sizes(*sizes)
    spec = ForwardSpec(
        q.dtype,
        d,
        right == 0 and not window,
        dv,
        window,
        softcap != 0.0,
        sinks is not None,
        packed,
        packed_k,
        seqused_k is not None,
        sizes != (d, dv),
    )
    launch = _forward.get(q.get_device(), (spec, forward_config(spec, max_seqlen_k if packed_k else k.shape[1])))
    launch.run(
        q, k, v, out, lse, scale, left, right, softcap, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k
    )


def nothing_seen(out: Tensor, lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None) -> None:
    """Results of rows that see no key."""
    out.zero_()
    lse.fill_(-math.inf)
    if sinks is not None and cu_seqlens_q is None:
        lse.copy_(sinks.unsqueeze(1).expand_as(lse))
    elif sinks is not None:
        of_sequence = torch.arange(lse.shape[1], device=lse.device) < cu_seqlens_q[-1]
        lse.copy_(torch.where(of_sequence, sinks.unsqueeze(1), lse))


class ForwardLaunch(NamedTuple):
    """A kernel, and on how many SMs it walks over its tiles."""

    function: Callable[..., None]
    spec: ForwardSpec
    config: ForwardConfig
    num_sms: int

    @staticmethod
    def of(target: Target, spec: ForwardSpec, config: ForwardConfig) -> ForwardLaunch:
        """Raises:
        UnsupportedDeviceError: a GPU other than a Hopper.
        """
        if target.arch != "sm_90a":
            raise UnsupportedDeviceError(
                f"attention: has kernels for compute capability 9.0 alone yet, got {target.arch}. "
                "Pass backend='reference' to run plain torch"
            )
        from cute_kernels.attention import kernel_forward_sm90

        function = launches.load(kernel_forward_sm90.forward_sm90, target.arch, spec, config)
        return ForwardLaunch(function, spec, config, target.num_sms)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        left: int = UNBOUNDED,
        right: int = UNBOUNDED,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        seqused_k: Tensor | None = None,
    ) -> None:
        """Write out and lse; ``left`` and ``right`` as of ``window_bounds``."""
        spec, rows = self.spec, self.config.tile_rows
        if spec.packed_q:
            q, out = q.unsqueeze(0), out.unsqueeze(0)
        if spec.packed_k:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        batch, len_q, heads, _ = q.shape
        if spec.packed_q:
            sequences = cu_seqlens_q.shape[0] - 1
            num_tiles = min(len_q // rows + sequences, -(-max_seqlen_q // rows) * sequences) * heads
            num_ctas = num_tiles  # which SM has which is up to the hardware: their work is not known
        else:
            num_tiles = -(-len_q // rows) * batch * heads
            num_ctas = min(num_tiles, self.num_sms)
        workspace = None
        if merges_in_workspace(spec.head_size):
            num_ctas = min(num_tiles, self.num_sms)
            size = num_ctas * self.config.warpgroups * WARPGROUP_ROWS * spec.sizes[1]
            workspace = empty(q, (size,), torch.float32)
        kv_heads = max(batch, k.shape[0]) * k.shape[2]
        paired = not spec.packed_q and pairs_tiles(spec, num_tiles, self.num_sms, kv_heads, k.shape[1])
        score_scale, before_tanh = score_factors(scale, softcap)[::-1]
        q, k, v, out = regular(q), regular(k), regular(v), regular(out)
        self.function(
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
            int(paired),
            num_ctas,
        )


def regular(t: Tensor) -> Tensor:
    """``t``, whose strides of dimensions of size 1 may be anything, with such as TMA's descriptor takes."""
    a, b, c, _ = t.stride()
    if not (a | b | c) & 7:
        return t
    strides = [stride if size > 1 else t.shape[3] for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, (*strides[:3], 1))


def _make_forward(target: Target, key: tuple[ForwardSpec, ForwardConfig]) -> ForwardLaunch:
    return ForwardLaunch.of(target, *key)


_forward = LaunchCache(_make_forward)
