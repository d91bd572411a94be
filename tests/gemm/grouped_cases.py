"""Helpers for the tests of grouped_mm: groups, inputs, products of each group by ``mm``, a choice of the kernel."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from cute_kernels import grouped_mm, mm
from cute_kernels.gemm import launch_grouped
from cute_kernels.runtime import launches
from tests.gemm.cases import BF16, FP16, FP32, kernel_name, name_of, only_kernel, randn, wide_range

__all__ = ["BF16", "FP16", "FP32", "kernel_name", "name_of", "randn", "wide_range"]

# Around the steps of the tensor core, warpgroups and tiles; first and last empty
EDGES = (0, 1, 7, 8, 15, 16, 17, 0, 63, 64, 65, 127, 128, 129, 500, 5, 0)
FEW = (3, 0, 16, 1, 40)
GROUPS = {
    "edges": EDGES,
    "few": FEW,
    "every start": (17,) * 17,  # of those modulo 16
    "one": (300,),
    "all in one": (0, 0, 391, 0),
    "none": (0, 0, 0),
    "mostly empty": (*(0,) * 500, 77, *(0,) * 522, 130),
}


@dataclass(frozen=True)
class Grouped:
    """Rows a (R, K) in groups, and a matrix (K, N) for each; ``rest``: rows beyond the last group."""

    groups: str
    n: int
    k: int
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None
    rest: int = 0
    layout: tuple[str, str] = ("k", "n")  # of a and b: which dimension has neighbours

    def __str__(self) -> str:
        words = [self.groups.replace(" ", "_"), f"{self.n}x{self.k}", name_of(self.dtype), "".join(self.layout)]
        if self.out is not None:
            words.append(f"out_{name_of(self.out)}")
        return "-".join(words + [f"rest_{self.rest}"] * (self.rest > 0))

    @property
    def sizes(self) -> tuple[int, ...]:
        return GROUPS[self.groups]

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.rest


def offs_of(sizes, device) -> Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=device)


def bounds_of(sizes) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def make_grouped(case: Grouped, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and offs: numbers whose sums show the order of summation."""
    make = wide_range if case.dtype is BF16 else randn
    a = make(case.rows, case.k, generator=generator).to(case.dtype)
    b = make(len(case.sizes), case.k, case.n, generator=generator).to(case.dtype)
    a = a if case.layout[0] == "k" else a.t().contiguous().t()
    b = b if case.layout[1] == "n" else b.mT.contiguous().mT
    return a, b, offs_of(case.sizes, generator.device)


def rows_by_mm(a: Tensor, b: Tensor, sizes, out_dtype: torch.dtype | None = None) -> Tensor:
    """Each group by ``mm``, of whose kernels all have the same bits; zeros behind the last."""
    out = a.new_zeros(a.shape[0], b.shape[2], dtype=out_dtype or a.dtype)
    with only_kernel(None, False):
        for e, (start, end) in enumerate(bounds_of(sizes)):
            if end > start:
                out[start:end] = mm(a[start:end], b[e], out_dtype=out_dtype)
    return out


def sums_by_mm(a: Tensor, b: Tensor, sizes, out_dtype: torch.dtype | None = None) -> Tensor:
    """Columns a (M, R) times rows b (R, N) of each group by ``mm``."""
    out = a.new_zeros(len(sizes), a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)
    with only_kernel(None, False):
        for e, (start, end) in enumerate(bounds_of(sizes)):
            if end > start:
                out[e] = mm(a[:, start:end], b[start:end], out_dtype=out_dtype)
    return out


def run_grouped(a: Tensor, b: Tensor, offs: Tensor, dout: Tensor, **options) -> dict[str, Tensor]:
    """The product and both gradients."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    out = grouped_mm(a, b, offs, **options)
    da, db = torch.autograd.grad(out, (a, b), dout)
    return {"out": out.detach(), "da": da, "db": db}


@contextlib.contextmanager
def only_grouped(config, transposed: bool = False, num_sms: int | None = None) -> Iterator[None]:
    """Within it every grouped product of rows, or of sums, runs on this kernel where it reads the operands."""
    launch_of = launch_grouped.launch_of

    def launch_of_this(target, spec, sizes):
        target = target if num_sms is None else target._replace(num_sms=num_sms)
        return launch_of(target, spec, sizes, (config, transposed))

    launches.forget()
    try:
        with mock.patch.object(launch_grouped, "launch_of", launch_of_this):
            yield
    finally:
        launches.forget()
