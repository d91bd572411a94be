"""Chunks of a prompt over a cache: whole tiles of queries of a sequence, by the forward's kernel."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.attention.config import DecodeSpec, forward_config, prefill_spec
from cute_kernels.attention.launch.forward import forward_launch, nothing_seen


def prefill(
    spec: DecodeSpec,
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
    appended: bool,
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> None:
    """``attention_decode`` of a call of ``spec``."""
    if not cache_seqlens.shape[0]:
        nothing_seen(out, lse, None, None)
        return
    if sinks is not None:
        sinks = sinks.float()
    of_forward = prefill_spec(spec, left, right)
    forward_launch(q.get_device(), of_forward, forward_config(of_forward, left + right + 1)).run(
        q, k_cache, v_cache, out, lse, scale, left, right, softcap, sinks, cu_seqlens_q, None, max_seqlen_q,
        cache_seqlens, page_table, int(appended),
    )  # fmt: skip
