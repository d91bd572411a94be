"""sample in plain torch: the specification, and what runs without a supported GPU.

The arithmetic is fp32 additions and products, each rounded once, and integers: the kernels and every CPU and GPU find
the same tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.runtime.real import as_float
from cute_kernels.sampling.checks import check_sample
from cute_kernels.sampling.config import (
    BELOW_ONE,
    EXP,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG,
    LOG2_E,
    SQRT_HALF,
    TOP_P_BITS,
    WEIGHT_BITS,
    Numbers,
    numbers_of,
)

MASK = 0xFFFFFFFF


def sample(
    logits: Tensor,
    *,
    seeds: Tensor,
    positions: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """One token a row; see ``cute_kernels.sample``."""
    temperature, top_p, min_p = (as_float(value) for value in (temperature, top_p, min_p))
    check_sample(logits, seeds, positions, temperature, top_k, top_p, min_p)
    return tokens_of(logits, seeds, positions, numbers_of(temperature, top_k, top_p, min_p))


def tokens_of(logits: Tensor, seeds: Tensor, positions: Tensor, numbers: Numbers) -> Tensor:
    """``sample`` of checked arguments."""
    x = logits.float()
    x = torch.where(x.isnan(), -math.inf, x) + 0.0  # -0 becomes 0
    if not numbers.noisy:
        return _first_largest(x)
    scaled = x * torch.tensor(numbers.scale, dtype=torch.float32, device=x.device)
    kept = torch.ones_like(x, dtype=torch.bool)
    order = torch.sort(x, dim=-1, descending=True, stable=True)[1]  # of equal logits the lower index first
    largest = scaled.amax(-1, keepdim=True)
    distance = torch.where(scaled == largest, 0.0, scaled - largest)
    kept.scatter_(1, order[:, numbers.top_k :], False)
    if numbers.top_p:
        weights = torch.where(kept, weight(distance), 0).gather(1, order)
        masses = weights.cumsum(-1)  # of integers
        need = least_mass(masses[:, -1:], numbers.top_p)
        kept &= torch.zeros_like(kept).scatter_(1, order, masses - weights < need)
    kept &= distance >= torch.tensor(numbers.log_min_p, dtype=torch.float32, device=x.device)
    noise = gumbel(random_words(seeds, positions, x.shape[1]))
    return _first_largest(torch.where(kept, scaled + noise, -math.inf))


def _first_largest(values: Tensor) -> Tensor:
    """argmax; of equal ones the first."""
    largest = values == values.amax(-1, keepdim=True)
    return largest.to(torch.uint8).argmax(-1) if values.is_cuda else largest.int().argmax(-1)


def least_mass(total: Tensor, top_p: int) -> Tensor:
    """The mass of integers that is at least top_p, a multiple of 2^-24, of the total; at least 1."""
    low = total & (2**TOP_P_BITS - 1)
    return ((total >> TOP_P_BITS) * top_p + (low * top_p >> TOP_P_BITS)).clamp_min(1)


def weight(distance: Tensor) -> Tensor:
    """exp(distance) as a multiple of 2^-40, rounded down; distances are at most 0."""
    distance = distance.clamp_min(-64.0)
    n = torch.floor(distance * LOG2_E + 0.5)
    r = (distance + n * -LN2_HIGH) + n * -LN2_LOW
    power = (_polynomial(EXP, r) * (r * r) + r) + 1.0
    mantissa, shift = (power * 2.0**24).long(), n.long() + (WEIGHT_BITS - 24)
    return torch.where(shift >= 0, mantissa << shift.clamp_min(0), mantissa >> (-shift).clamp(0, 63))


def gumbel(words: Tensor) -> Tensor:
    """-log(-log(1 - v)) of v = (word + 1/2) 2^-32 in fp32."""
    v = words.to(torch.float32) * 2.0**-32 + 2.0**-33
    v = v.clamp_max(BELOW_ONE)
    rest = 1.0 - v
    exponent, f = _split(rest)
    f = torch.where(exponent == 0, -v, f)  # 1 - v was rounded
    return -_log(*_split(-_log(exponent, f)))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, f) of x = 2^n (1 + f), where 1 + f is from sqrt(1/2) to sqrt(2)."""
    bits = x.view(torch.int32)
    n = (bits - SQRT_HALF) >> 23
    return n.float(), (bits - (n << 23)).view(torch.float32) - 1.0


def _log(n: Tensor, f: Tensor) -> Tensor:
    square = f * f
    return ((_polynomial(LOG, f) * (square * f) + square * -0.5) + f) + n * LN2


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def random_words(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """(rows, columns) words of 32 bits: word i % 4 of Philox-4x32-10 of the counter (i // 4, position, 0, 0).

    Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
    """
    groups = torch.arange(-(-columns // 4), device=seeds.device).unsqueeze(0)
    zero = torch.zeros_like(groups)
    words = [groups, positions.unsqueeze(1) & MASK, zero, zero]
    keys = [(seeds.unsqueeze(1) >> shift) & MASK for shift in (0, 32)]
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(words[0], 0xD2511F53), _product(words[2], 0xCD9E8D57)
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(key + step) & MASK for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    rows = len(seeds)
    return torch.stack([word.expand(rows, -1) for word in words], -1).view(rows, -1)[:, :columns]


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """(high, low) words of a product of words, of which 64 signed bits hold the halves."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    middle = (low >> 16) + high
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)
