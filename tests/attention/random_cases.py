"""Random cases of one promise: a row has the same bits in the training forward, in chunks of a prompt and in decode.

A source is sequences of one head size and the rows that the forward gives them, alone, packed or in a padded batch. A
case is a batch over a cache: some of these sequences, cut somewhere, decode and chunks beside each other, contiguous or
in pages of any order, new keys written by the call or before it. Source and case follow from two numbers:

    PYTHONPATH=. python -c "from tests.attention.random_cases import check; check(3, 17)"
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import attention, attention_with_kv_cache
from cute_kernels.attention.config import grid_for
from tests.attention.cache_cases import WAYS, Layout, Sequences, cached, packed
from tests.attention.cases import BF16, FP16, bits


class Kind(NamedTuple):
    """The facts that kernels are compiled for.

    Attributes:
        head_size, dtype, head_size_v: the latter 0: as the former.
        window, softcap: options of a call.
        has_sinks: whether a call has them.
    """

    head_size: int
    dtype: torch.dtype
    head_size_v: int = 0
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_size, self.head_size_v or self.head_size


# Of each kind the rows of a page that one copy brings, for packed and dense queries
KINDS = {
    Kind(128, BF16): {True: (0, 16, 32, 64, 128), False: (0, 16)},
    Kind(64, BF16): {True: (0, 16, 128), False: (16,)},
    Kind(128, FP16): {True: (16,), False: ()},
}
# Kinds of shorter sequences, one of each source behind those of KINDS
OTHERS = {
    Kind(96, BF16): {True: (16,), False: ()},
    Kind(192, BF16, 128): {True: (16,), False: ()},
    Kind(256, BF16): {True: (16,), False: ()},
    Kind(128, BF16, window=(300, 0)): {True: (16,), False: ()},
    Kind(128, BF16, softcap=20.0): {True: (16,), False: ()},
    Kind(64, BF16, window=(50, 0), has_sinks=True): {True: (16,), False: ()},
}
SOURCES = 24  # of KINDS
PAGE_SIZES = {0: (0,), 16: (16,), 32: (32,), 64: (64,), 128: (128, 256, 384)}


@dataclass(frozen=True)
class Limits:
    """How large cases are: keys of the longest sequence, keys of a source's sequences, query rows of a case."""

    longest: int
    keys: int
    rows: int


LARGE, FAR, TINY = Limits(6000, 20000, 1500), Limits(131072, 300000, 700), Limits(70, 200, 40)
SHORT = Limits(4500, 9000, 600)  # a split and more of all head sizes


@dataclass(frozen=True)
class Source:
    """Sequences, and the (out, lse) of each one's rows by the forward."""

    seed: int
    limits: Limits
    kind: Kind
    sequences: Sequences
    options: dict[str, Any]
    wanted: list[tuple[Tensor, Tensor]]
    way: str

    @property
    def lengths(self) -> list[int]:
        return [len(t) for t in self.sequences.q]


@dataclass(frozen=True)
class Case:
    """A call: of each place of the batch a sequence, its keys and its queries, which are the last ones.

    Attributes:
        order, lengths, queries: of each place.
        page_size, page_seed: of the cache.
        appended: keys and values of the queries are new.
        is_packed: queries are packed; else each has the same number.
        way: one of WAYS.
    """

    order: tuple[int, ...]
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    page_size: int
    page_seed: int
    appended: bool
    is_packed: bool
    way: str


def limits_of(seed: int) -> Limits:
    """Every eighth source has long sequences, those of other kinds short ones."""
    if seed >= SOURCES:
        return SHORT
    return FAR if seed % 8 == 7 else LARGE


def a_length(rng: random.Random, most: int, grid: tuple[int, int]) -> int:
    """From 1 to ``most``: of every size alike, or at a border of the grid."""
    if rng.random() < 0.4:
        step = rng.choice((16, 64, *grid))
        if step <= most:
            return min(max(rng.randint(1, most // step) * step + rng.choice((-1, 0, 1)), 1), most)
    return min(round(2 ** rng.uniform(0, most.bit_length())), most)


def source_of(seed: int, device: str, limits: Limits | None = None) -> Source:
    rng, limits = random.Random(seed), limits or limits_of(seed)
    kind = rng.choice(tuple(KINDS)) if seed < SOURCES else tuple(OTHERS)[(seed - SOURCES) % len(OTHERS)]
    d, dv = kind.sizes
    group = rng.randint(1, 16)
    pairs = 1 if limits is FAR or group > 8 else rng.randint(1, 3)
    if limits is FAR:
        group = min(group, 4)
    lengths = [limits.longest]
    while len(lengths) < 12 and sum(lengths) < limits.keys:
        lengths.append(a_length(rng, min(limits.longest, limits.keys - sum(lengths)), grid_for(d, dv)))
    generator = torch.Generator(device).manual_seed(seed)
    sequences = Sequences.make(lengths, group * pairs, pairs, d, kind.dtype, generator, dv)
    way, options = rng.choice(("alone", "packed", "padded")), {"window": kind.window, "softcap": kind.softcap}
    if kind.has_sinks:
        options["sinks"] = torch.randn(group * pairs, generator=generator, device=device)
    wanted = forward_rows(sequences, way, generator, options)
    return Source(seed, limits, kind, sequences, options, wanted, way)


def forward_rows(
    sequences: Sequences, way: str, generator: torch.Generator, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each sequence, by the forward: one call for each, one of packed ones, one of a padded batch."""
    tensors, lengths = (sequences.q, sequences.k, sequences.v), [len(t) for t in sequences.q]
    options = {**options, "causal": True, "return_lse": True}
    if way == "alone":
        found = [attention(*(t[i][None] for t in tensors), **options) for i in range(len(lengths))]
        return [(out[0], lse[0]) for out, lse in found]
    if way == "packed":
        q = packed(sequences.q)
        places = {f"{name}_{of}": q[f"{name}_q"] for name in ("cu_seqlens", "max_seqlen") for of in "qk"}
        out, lse = attention(*map(torch.cat, tensors), **places, **options)
        starts = q["cu_seqlens_q"].tolist()
        return [(out[a:b], lse[:, a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    batch = []  # what is behind a row is finite and is not seen
    for rows in tensors:
        shape = len(lengths), max(lengths), *rows[0].shape[1:]
        pad = torch.randn(shape, generator=generator, device=generator.device).to(rows[0].dtype)
        for i, t in enumerate(rows):
            pad[i, : len(t)] = t
        batch.append(pad)
    out, lse = attention(*batch, **options)
    return [(out[i, :n], lse[i, :, :n]) for i, n in enumerate(lengths)]


def case_of(source: Source, number: int) -> Case:
    rng, limits = random.Random(f"{source.seed} {number}"), source.limits
    grid = grid_for(*source.kind.sizes)
    of_kind = (KINDS | OTHERS)[source.kind]
    is_packed = not of_kind[False] or rng.random() < 0.7
    page_size = rng.choice(PAGE_SIZES[rng.choice(of_kind[is_packed])])
    places = rng.randint(1, 12)
    same = rng.choice((1, 1, 2, 5, rng.randint(1, 70)))  # queries of each, where they are dense
    order, lengths, queries, room = [], [], [], limits.rows
    for _ in range(places):
        i = rng.randrange(len(source.lengths))
        n = a_length(rng, source.lengths[i], grid)
        m = same
        if is_packed:
            m = min(rng.choice((1, 1, 1, rng.randint(1, 16), a_length(rng, n, grid), n)), n)
        if m > min(n, room):
            continue
        room -= m
        order.append(i)
        lengths.append(n)
        queries.append(m)
    if not order:
        order, lengths, queries = [0], [source.lengths[0]], [same if not is_packed else 1]
    return Case(
        tuple(order), tuple(lengths), tuple(queries), page_size, rng.randrange(1000), rng.random() < 0.5, is_packed,
        rng.choice(WAYS if source.kind.sizes[1] <= 192 else WAYS[:2]),
    )  # fmt: skip


def rows_of(source: Source, case: Case) -> tuple[Tensor, Tensor, Any]:
    """out (rows, heads, head size) and lse (heads, rows) of all queries, in order, and the cache."""
    sequences = source.sequences.of(list(case.order))
    before = [n - m * case.appended for n, m in zip(case.lengths, case.queries, strict=True)]
    cache = cached(sequences, before, Layout(case.page_size, seed=case.page_seed), room=max(case.lengths))

    def chunks(tensors: list[Tensor]) -> list[Tensor]:
        return [t[n - m : n] for t, n, m in zip(tensors, case.lengths, case.queries, strict=True)]

    q, k, v = map(chunks, (sequences.q, sequences.k, sequences.v))
    rows = packed(q) if case.is_packed else {"q": torch.stack(q)}
    new = {}
    if case.appended:
        new = {name: (torch.cat if case.is_packed else torch.stack)(t) for name, t in (("k", k), ("v", v))}
    out, lse = attention_with_kv_cache(**rows, **cache, **new, **source.options, return_lse=True)
    if not case.is_packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return out, lse, cache


def differing(source: Source, case: Case) -> Tensor:
    """Rows whose bits are not the forward's, on the device: (queries,) of bool."""
    out, lse, _ = rows_of(source, case)
    places = [(i, slice(n - m, n)) for i, n, m in zip(case.order, case.lengths, case.queries, strict=True)]
    wanted = torch.cat([source.wanted[i][0][rows] for i, rows in places])
    of_rows = torch.cat([source.wanted[i][1][:, rows] for i, rows in places], 1)
    return (bits(out) != bits(wanted)).flatten(1).any(1) | (bits(lse) != bits(of_rows)).any(0)


def describe(source: Source, number: int, wrong: Tensor) -> str:
    """One line that makes the case again."""
    case = case_of(source, number)
    rows = wrong.nonzero().flatten().tolist()
    return f"check({source.seed}, {number}): {len(rows)} of {len(wrong)} rows, from {rows[0]}; {source.way}, {case}"


def check(seed: int, number: int, device: str = "cuda") -> None:
    """One case of the GPU's sources."""
    source = source_of(seed, device)
    wrong = differing(source, case_of(source, number))
    assert not wrong.any(), describe(source, number, wrong)
