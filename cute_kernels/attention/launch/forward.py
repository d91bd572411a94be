"""The forward of attention.

The operator is ``cute_kernels::attention_forward``, which returns its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.attention import reference
from cute_kernels.attention.config import (
    FORWARD_SM100_CONFIGS,
    UNBOUNDED,
    ForwardConfig,
    ForwardSm100Config,
    ForwardSpec,
    contract_of,
    forward_config,
    kernel_sizes,
    pairs_tiles,
    score_factors,
    window_bounds,
)
from cute_kernels.attention.sharding import is_dtensor, register
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache, observe, observers
from cute_kernels.runtime.operators import Layout, contiguous_strides, empty, empty_strided, functional_operator
from cute_kernels.runtime.targets import Target


def lse_shape(q: Tensor, packed: bool) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])


def _fake(q, k, v, causal, scale, left=-1, right=-1, softcap=0.0, sinks=None, cu_seqlens_q=None, *_, **__):
    lse = q.new_empty(lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


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


def _register_sharding(q: Tensor) -> None:
    """At the first DTensor. (A program that calls compiled code alone calls ``attention.sharding.register`` itself.)"""
    if not is_compiling() and is_dtensor(q):
        register()


@functional_operator(
    "attention_forward",
    "Tensor q, Tensor k, Tensor v, bool causal, float scale, int left=-1, int right=-1, float softcap=0., "
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, Tensor? seqused_k=None",
    "(Tensor, Tensor)",
    fake=_fake,
    cpu=_reference,
    before_dispatch=_register_sharding,
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
    out = empty(q, (*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = attention_into(
        out, q, k, v, causal, scale, left, right, softcap, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, seqused_k,
    )  # fmt: skip
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
    packed, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    lse = empty(q, lse_shape(q, packed), torch.float32)
    if not lse.numel():
        return lse
    if not k.numel() or (packed and (cu_seqlens_q.shape[0] == 1 or not max_seqlen_q)):
        nothing_seen(out, lse, sinks, cu_seqlens_q)
        return lse
    left, right = window_bounds(causal, (left, right))
    spec = forward_spec(q, v, left, right, softcap, sinks is not None, packed, packed_k, seqused_k is not None)
    seen = min(max_seqlen_k if packed_k else k.shape[1], left + right + 1)
    launch = forward_launch(q.get_device(), spec, forward_config(spec, seen))
    launch.run(
        q, k, v, out, lse, scale, left, right, softcap, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k
    )
    return lse


def forward_spec(
    q: Tensor,
    v: Tensor,
    left: int,
    right: int,
    softcap: float = 0.0,
    sinks: bool = False,
    packed_q: bool = False,
    packed_k: bool = False,
    used_k: bool = False,
) -> ForwardSpec:
    """The Spec of a call; ``left`` and ``right`` as ``window_bounds`` returns them."""
    window = left != UNBOUNDED or right not in (0, UNBOUNDED)
    sizes = q.shape[-1], v.shape[-1]
    d, dv = kernel_sizes(*sizes)
    return ForwardSpec(
        q.dtype,
        d,
        right == 0 and not window,
        dv,
        window,
        softcap != 0.0,
        sinks,
        packed_q,
        packed_k,
        used_k,
        sizes != (d, dv),
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
    config: ForwardConfig | ForwardSm100Config
    num_sms: int

    @property
    def contract(self) -> str:
        """For ``provenance``."""
        return contract_of(*self.spec.sizes)

    @property
    def name(self) -> str:
        """The kernel and its configuration."""
        turns = ", ping-pong" if isinstance(self.config, ForwardConfig) and self.config.ping_pong else ""
        return f"attention_forward (tile rows {self.config.tile_rows}{turns})"

    @staticmethod
    def of(target: Target, spec: ForwardSpec, config: ForwardConfig | ForwardSm100Config) -> ForwardLaunch:
        if target.arch == "sm_90a":
            from cute_kernels.attention.kernel_forward_sm90 import forward_sm90 as forward
        else:
            from cute_kernels.attention.kernel_forward_sm100 import forward_sm100 as forward

        return ForwardLaunch(launches.load(forward, target.arch, spec, config), spec, config, target.num_sms)

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
        page_table: Tensor | None = None,
        appended: int | None = None,
    ) -> None:
        """Write out and lse; ``left`` and ``right`` as of ``window_bounds``. k and v may be a cache's."""
        spec, rows = self.spec, self.config.tile_rows
        if spec.packed_q:
            q, out = q.unsqueeze(0), out.unsqueeze(0)
        if spec.packed_k:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        batch, len_q, heads, _ = q.shape
        if spec.packed_q:
            sequences = cu_seqlens_q.shape[0] - 1
            num_tiles = min(len_q // rows + sequences, -(-max_seqlen_q // rows) * sequences) * heads
        else:
            num_tiles = -(-len_q // rows) * batch * heads
        if observers:
            sequences = cu_seqlens_q.shape[0] - 1 if spec.packed_q else batch
            longest = max_seqlen_q if spec.packed_q else len_q
            observe(self, (sequences, heads, longest, k.shape[1], q.shape[3]), q.get_device())
        sequences_k, len_k = k.shape[:2]
        if page_table is not None:
            sequences_k, len_k = batch, len_k * page_table.shape[1]
        kv_heads = max(batch, sequences_k) * k.shape[2]
        size, scalars = self.scalars(num_tiles, kv_heads, len_k, scale, left, right, softcap)
        self.function(
            regular(q),
            regular(k),
            regular(v),
            regular(out),
            lse,
            sinks,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            page_table,
            appended,
            empty(q, (size,), torch.float32) if size else None,
            *scalars,
        )

    def scalars(
        self, num_tiles: int, kv_heads: int, len_k: int, scale: float, left: int, right: int, softcap: float
    ) -> tuple[int, tuple]:
        """(fp32 numbers of the workspace, the scalars that the kernel takes behind its tensors)."""
        in_workspace, packed = self.config.workspace_numbers(self.spec), self.spec.packed_q
        # A CTA for each packed tile: which SM has which is up to the hardware, their work is not known
        num_ctas = num_tiles if packed and not in_workspace else min(num_tiles, self.num_sms)
        paired = not packed and pairs_tiles(self.spec, num_tiles, self.num_sms, kv_heads, len_k)
        before_tanh, score_scale = score_factors(scale, softcap)
        return num_ctas * in_workspace, (score_scale, before_tanh, left, right, num_tiles, int(paired), num_ctas)


class ForwardCall(NamedTuple):
    """All that follows from the sizes of a call without windows, softcap, sinks and lengths.

    Attributes:
        out, lse: shape and strides of what is allocated.
        workspace: fp32 numbers.
        scalars: the kernel's, behind its tensors.
        shape: for ``observe``.
    """

    launch: ForwardLaunch
    out: Layout
    lse: Layout
    workspace: int
    scalars: tuple
    shape: tuple[int, ...]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> ForwardCall | None:
        """None: no kernel is launched, or not with these strides."""
        if not q.numel() or not k.numel() or any(regular(t) is not t for t in (q, k, v)):
            return None
        (batch, len_q, heads, d), (_, len_k, pairs, _) = q.shape, k.shape
        left, right = window_bounds(causal, None)
        spec = forward_spec(q, v, left, right)
        launch = forward_launch(q.get_device(), spec, forward_config(spec, len_k))
        num_tiles = -(-len_q // launch.config.tile_rows) * batch * heads
        out, lse = (batch, len_q, heads, v.shape[3]), lse_shape(q, False)
        return ForwardCall(
            launch,
            (out, contiguous_strides(out)),
            (lse, contiguous_strides(lse)),
            *launch.scalars(num_tiles, batch * pairs, len_k, scale, left, right, 0.0),
            (batch, heads, len_q, len_k, d),
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse), as ``attention_forward``."""
        out = empty_strided(q, *self.out, q.dtype)
        lse = empty_strided(q, *self.lse, torch.float32)
        workspace = empty(q, (self.workspace,), torch.float32) if self.workspace else None
        if observers:
            observe(self.launch, self.shape, q.get_device())
        self.launch.function(q, k, v, out, lse, None, None, None, None, None, None, workspace, *self.scalars)
        return out, lse


def regular(t: Tensor) -> Tensor:
    """``t``, whose strides of dimensions of size 1 may be anything, with such as TMA's descriptor takes."""
    a, b, c, _ = t.stride()
    if not (a | b | c) & 7:
        return t
    strides = [stride if size > 1 else t.shape[3] for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, (*strides[:3], 1))


def _make_forward(target: Target, key: tuple[ForwardSpec, ForwardConfig]) -> ForwardLaunch:
    spec, config = key
    return ForwardLaunch.of(target, spec, config if target.arch == "sm_90a" else FORWARD_SM100_CONFIGS[spec.sizes])


_forward = LaunchCache(_make_forward)


def forward_launch(index: int, spec: ForwardSpec, config: ForwardConfig) -> ForwardLaunch:
    """The launch of a kernel on a device; another architecture has a config of its own."""
    return _forward.get(index, (spec, config))
