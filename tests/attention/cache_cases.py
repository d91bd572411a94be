"""Caches of attention: sequences, and the same in contiguous caches, in pages, with what is not there filled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import attention_with_kv_cache
from cute_kernels.attention.config import FEW_ROWS, DecodeConfig
from cute_kernels.attention.launch import decode as launch_decode
from cute_kernels.runtime import launches

# A CTA has a split, all splits, or the forward's kernel serves
WAYS = ("parallel", "sequential", "forward")
LATE = "late"  # as parallel, but splits are merged when no item is left


def choose_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Calls over a cache go this way, whatever their sizes."""

    def config(head_size_v: int, rows: int, most_rows: int, *sizes: int) -> DecodeConfig:
        few_rows = way in ("parallel", LATE) and most_rows <= FEW_ROWS
        return DecodeConfig(way == "sequential", few_rows, merges_late=way == LATE)

    monkeypatch.setattr(launch_decode, "decode_config", config)
    monkeypatch.setattr(launch_decode, "prefills", lambda *sizes: way == "forward")
    launches.forget()


@dataclass(frozen=True)
class Sequences:
    """Whole sequences: (length, heads, head size) of q, k and v each."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    @staticmethod
    def make(
        lengths: list[int],
        heads: int,
        pairs: int,
        head_size: int,
        dtype: torch.dtype,
        generator: torch.Generator,
        head_size_v: int | None = None,
    ) -> Sequences:
        def randn(length: int, heads: int, spread: float, size: int = head_size) -> Tensor:
            shape = length, heads, size
            return (spread * torch.randn(shape, generator=generator, device=generator.device)).to(dtype)

        return Sequences(
            [randn(n, heads, 2.0) for n in lengths],
            [randn(n, pairs, 1.0) for n in lengths],
            [randn(n, pairs, 1.0, head_size_v or head_size) for n in lengths],
        )

    def of(self, order: list[int]) -> Sequences:
        return Sequences(*([tensors[i] for i in order] for tensors in (self.q, self.k, self.v)))


@dataclass(frozen=True)
class Layout:
    """How keys lie in a cache.

    Attributes:
        page_size: 0: contiguous.
        fill: what there is where there are no keys: NaN shows who reads it.
        spare: keys that there is more room for than needed; pages that no sequence has.
        seed: of the order of pages.
    """

    page_size: int = 0
    fill: float = math.nan
    spare: int = 5
    seed: int = 0


def cached(sequences: Sequences, lengths: list[int], layout: Layout, room: int = 0) -> dict[str, Any]:
    """The first keys of each sequence in a cache of room for ``room`` keys; arguments of attention_with_kv_cache."""
    k, batch, pairs = sequences.k[0], len(lengths), sequences.k[0].shape[1]
    sizes = k.shape[2], sequences.v[0].shape[2]
    most = max([*lengths, room, 1])
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=k.device)
    if not layout.page_size:
        caches = [k.new_full((batch, most + layout.spare, pairs, size), layout.fill) for size in sizes]
        for cache, tensors in zip(caches, (sequences.k, sequences.v), strict=True):
            for i, n in enumerate(lengths):
                cache[i, :n] = tensors[i][:n]
        return {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": seqlens}
    pages = -(-(most + layout.spare) // layout.page_size)
    total = batch * pages + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(layout.seed))[: batch * pages]
    table = order.view(batch, pages).to(k.device, torch.int32)
    caches = [k.new_full((total, layout.page_size, pairs, size), layout.fill) for size in sizes]
    for cache, tensors in zip(caches, (sequences.k, sequences.v), strict=True):
        for i, n in enumerate(lengths):
            place = torch.arange(n, device=k.device)
            cache[table[i].long()[place // layout.page_size], place % layout.page_size] = tensors[i][:n]
    if not room:
        for i, n in enumerate(lengths):  # nobody looks up a page without keys
            table[i, -(-n // layout.page_size) :] = -(2**30)
    return {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": seqlens, "page_table": table}


def packed(rows: list[Tensor], spare: int = 0) -> dict[str, Any]:
    """Queries of several lengths in a row, and rows behind them that are nobody's."""
    lengths = [len(t) for t in rows]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(rows[0].device, torch.int32)
    q = torch.cat([*rows, rows[0].new_full((spare, *rows[0].shape[1:]), math.nan)])
    return {"q": q, "cu_seqlens_q": starts, "max_seqlen_q": max(lengths)}


def rows_of(
    sequences: Sequences, lengths: list[int], queries: list[int], layout: Layout, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each sequence's last ``queries`` of its first ``lengths`` tokens, all in one packed call."""
    chunks = [t[n - m : n] for t, n, m in zip(sequences.q, lengths, queries, strict=True)]
    found = attention_with_kv_cache(**packed(chunks), **cached(sequences, lengths, layout), **options, return_lse=True)
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    return [(found[0][a:b], found[1][:, a:b]) for a, b in zip(starts, starts[1:], strict=False)]
