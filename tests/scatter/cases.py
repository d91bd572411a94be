"""Cases of sums by an index: ids, and the contract in torch, bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.scatter.config import SEGMENT

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """An embedding's gradient; ``kind``: how ids are distributed."""

    tokens: int
    rows: int
    columns: int
    kind: str = "uniform"
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None

    def __str__(self) -> str:
        out = "" if self.out is None else f"-to-{str(self.out).removeprefix('torch.')}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens}x{self.rows}x{self.columns}-{self.kind}-{dtype}{out}"


def make_ids(tokens: int, rows: int, kind: str, generator: torch.Generator) -> Tensor:
    """uniform; zipf: row r about as often as 1 / (r + 1); one: all the same; blocks: segments that end beside others'
    beginnings."""
    device = generator.device
    if kind == "one":
        return torch.full((tokens,), rows // 2, device=device)
    if kind == "blocks":
        lengths = [SEGMENT, 1, SEGMENT + 1, SEGMENT - 1, 2 * SEGMENT, 2, 2 * SEGMENT + 1, 3 * SEGMENT + 7, 255, 257]
        ids = torch.arange(tokens, device=device) * 0 + rows - 1
        at = 0
        for row, length in enumerate(lengths[: rows - 1]):
            ids[at : at + length] = row
            at += length
        return ids[torch.randperm(tokens, generator=generator, device=device)]
    u = torch.rand(tokens, generator=generator, device=device)
    return ((rows**u - 1) if kind == "zipf" else u * rows).long().clamp(max=rows - 1)


def make_inputs(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(dy, ids)"""
    dy = torch.randn(case.tokens, case.columns, generator=generator, device=generator.device).to(case.dtype)
    return dy, make_ids(case.tokens, case.rows, case.kind, generator)


def contract(source: Tensor, index: Tensor, rows: int, start: Tensor | None = None) -> Tensor:
    """Sums in fp32, in the order that is promised; ``start``: what comes before the first source of a row."""
    keys, order = torch.sort(index.long(), stable=True)
    rank = torch.arange(len(keys), device=keys.device) - torch.searchsorted(keys, keys)
    begins = rank % SEGMENT == 0
    segment = begins.cumsum(0) - 1
    number = int(begins.sum())
    sums = torch.zeros(number, source.shape[1], device=source.device)
    if start is not None:
        sums[segment[rank == 0]] = start[keys[rank == 0]].float()
    for step in range(min(SEGMENT, int(rank.max()) + 1 if len(rank) else 0)):
        here = rank % SEGMENT == step
        sums[segment[here]] += source[order[here]].float()
    total = torch.zeros(rows, source.shape[1], device=source.device) if start is None else start.float().clone()
    for first in range(0, int(rank.max()) + 1 if len(rank) else 0, SEGMENT):
        here = rank == first
        added = sums[segment[here]]
        total[keys[here]] = added if first == 0 else total[keys[here]] + added
    return total


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int16 if a.itemsize == 2 else torch.int32
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def where_different(a: Tensor, b: Tensor) -> str:
    """For a failing test: how many rows, the first ones, the largest distance."""
    rows = (a.reshape(len(a), -1) != b.reshape(len(b), -1)).any(1).nonzero().flatten()
    distance = (a.double() - b.double()).abs().max().item()
    return f"{len(rows)} of {len(a)} rows differ, first {rows[:8].tolist()}, by up to {distance:.3g}"
