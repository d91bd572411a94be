"""The dropout mask of expand_combine: counter-based random numbers, the same in forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_dropout
from cute_kernels.runtime.checks import expect, expect_size
from cute_kernels.runtime.real import as_float

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def dropout_mask(seed: Tensor | int, num_tokens: int, K: int, dropout_p: float, device: torch.device) -> Tensor:
    """The mask of ``expand_combine``'s dropout: True where an element is kept.

    Element k, in the order of memory, of token m is kept if word k % 4 of Philox-4x32-10 with counter (k // 4, m, 0, 0)
    and key (low, high word of seed) is at least floor(dropout_p * 2^32). The seed is not read on the host.

    Args:
        seed: int64 tensor of one element on ``device``, or an int.
        num_tokens: tokens of the residual.
        K: n * C, elements of a token.
        dropout_p: probability that an element is dropped, in [0, 1).
        device: of the mask.

    Returns:
        (num_tokens, K) bool.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Source:
        Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> mask = mhc.dropout_mask(0, 64, 64, 0.25, torch.device("cpu"))
        >>> mask.shape, round(mask.float().mean().item(), 1)
        (torch.Size([64, 64]), 0.8)
        >>> torch.equal(mask[:8], mhc.dropout_mask(0, 8, 64, 0.25, torch.device("cpu")))
        True
    """
    op, device = "dropout_mask", torch.empty(0, device=device).device  # "cuda" is the current one
    expect(seed is not None, op, "seed", "be an int64 tensor or an int", "None", TypeError)
    dropout_p = as_float(dropout_p)
    check_dropout(op, dropout_p, seed, device)
    for name, size in (("num_tokens", num_tokens), ("K", K)):
        expect_size(op, name, size)
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device).reshape(())
    quads = torch.arange(-(-K // 4), device=device)
    tokens = torch.arange(num_tokens, device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox4x32((quads, tokens, zero, zero), (seed & WORD, (seed >> 32) & WORD))
    return torch.stack(words, -1).flatten(1)[:, :K] >= int(dropout_p * 2**32)


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of the device, which checkpointing restores before it computes again."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four random words for four words of counter and two of key, each 32 bits in an int64 tensor.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) word. The product wraps to a negative int64 above 2^63; its bits are the right ones."""
    product = b * a
    return (product >> 32) & WORD, product & WORD
