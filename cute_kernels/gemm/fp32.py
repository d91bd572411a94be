"""Products of fp32 matrices by tensor cores: one chain over the products of their exact bf16 parts."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.gemm.launch import gemm
from cute_kernels.runtime.operators import functional_operator

BF16 = torch.bfloat16
# (part of a, part of b), 0 the largest, along K: the smallest products first. Those left out are below 2^-24 of the sum
ORDER = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))


def product(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """a b + bias of (..., M, K) and (..., K, N) fp32, by a product of 6 K bf16.

    A row's bits do not depend on the others. Infinities give NaN, and so do numbers that bf16 rounds to one. One factor
    may be bf16: it is its own first part, those of 0 are left out, and no bit changes where K is a multiple of 16.
    ``into``: fp32 that the sums start from and are written to.
    """
    of_a, of_b = parts(a), parts(b)
    pairs = [(of_a[i], of_b[j]) for i, j in ORDER if i < len(of_a) and j < len(of_b)]
    wide = torch.cat([part for part, _ in pairs], -1), torch.cat([part for _, part in pairs], -2)
    out = a.new_empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype) if into is None else into
    gemm(*wide, out, None, bias, None, None, into is not None, False, True)
    return out


def parts(t: Tensor) -> list[Tensor]:
    """Three bf16 tensors whose sum is t: 8 bits of a number each; of a bf16 tensor itself."""
    return [t] if t.dtype is BF16 else list(_split(t))


def _parts_of(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = []
    for _ in range(3):
        found.append(t.to(BF16))
        t = t - found[-1].float()
    return tuple(found)


# An operator, since Inductor leaves a cast to bf16 out where one to fp32 follows: the second part would be 0
_split = functional_operator(
    "fp32_parts",
    "Tensor t",
    "(Tensor, Tensor, Tensor)",
    fake=lambda t: tuple(torch.empty_like(t, dtype=BF16) for _ in range(3)),
    cpu=_parts_of,
)(_parts_of)
