"""Products of fp32 matrices by tensor cores: one chain over the products of their exact bf16 parts."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.gemm.launch import gemm

BF16 = torch.bfloat16
# (part of a, part of b), 0 the largest, along K: the smallest products first. Those left out are below 2^-24 of the sum
ORDER = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a b of (..., M, K) and (..., K, N) fp32, by a product of 6 K bf16.

    A row's bits do not depend on the others. Infinities give NaN, and so do numbers that bf16 rounds to one.
    """
    of_a, of_b = parts(a), parts(b)
    wide = torch.cat([of_a[i] for i, _ in ORDER], -1), torch.cat([of_b[j] for _, j in ORDER], -2)
    out = a.new_empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype)
    gemm(*wide, out, None, None, None, None, False, False, True)
    return out


def parts(t: Tensor) -> list[Tensor]:
    """Three bf16 tensors whose sum is t: 8 bits of a number each."""
    found = []
    for _ in range(3):
        found.append(t.to(BF16))
        t = t - found[-1].float()
    return found
