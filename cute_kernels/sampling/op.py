"""sample on torch tensors: the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import detached, mode_of, uses_reference
from cute_kernels.runtime.real import as_float
from cute_kernels.sampling import reference
from cute_kernels.sampling.checks import check_sample
from cute_kernels.sampling.config import numbers_of
from cute_kernels.sampling.launch import sample_rows


def sample(
    logits: Tensor,
    *,
    seeds: Tensor,
    positions: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """A token of each row, drawn from ``softmax(logits / temperature)``: a function of row, seed and position alone.

    Args:
        logits: (B, V) bf16, fp16 or fp32; V up to 262,144; last dimension contiguous.
        seeds: (B,) int64, the seed of each row's sequence.
        positions: (B,) int64, the place of the token in its sequence, from 0 to 2^32 - 1. A pair of seed and position
            that comes again draws the same noise again.
        temperature: from 2^-100 to 2^100; 0: the largest logit, of equal ones the first.
        top_k: keep the k largest logits, of equal ones the first; None: all.
        top_p: in (0, 1]. Keep the fewest largest whose probabilities, among what top_k keeps, add up to this share or
            more, of equal ones the first; None: all.
        min_p: in [0, 1]. Keep what has at least this share of the largest probability; None: all.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (B,) int64.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The token is the argmax of ``logit * (1 / temperature) + g``, of equal ones the first, over what is kept. Noise
        g is ``-log(-log(1 - v))``, v = (w + 1/2) 2^-32, and w of column i word i % 4 of Philox-4x32-10 of the counter
        (i // 4, position, 0, 0) under the key seed. Probabilities of top_p are multiples of 2^-40 of the largest one,
        rounded down, and their sums exact; top_p is rounded to a multiple of 2^-24. Everything is integers, and fp32
        products and sums of one rounding each: kernels, plain torch, every GPU and CPU draw the same tokens, whatever
        the batch and the row's place in it. NaN is never drawn; of a row without a logit above -inf the token is 0.

    Source:
        Gumbel, Statistical Theory of Extreme Values, 1954; Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As
        Easy as 1, 2, 3, 2011.

    Example:
        >>> import torch
        >>> from cute_kernels import sample
        >>> seeds, positions = torch.tensor([7, 7]), torch.tensor([0, 1])
        >>> tokens = sample(torch.zeros(2, 1000), seeds=seeds, positions=positions)
        >>> torch.equal(tokens[1:], sample(torch.zeros(1, 1000), seeds=seeds[1:], positions=positions[1:]))
        True
        >>> sample(torch.tensor([[0.0, 9.0, 9.0]]), seeds=seeds[:1], positions=positions[:1], temperature=0.0)
        tensor([1])
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if uses_reference("sample", logits, backend):
        return reference.sample(logits, seeds=seeds, positions=positions, **options)
    temperature, top_p, min_p = (as_float(value) for value in (temperature, top_p, min_p))
    check_sample(logits, seeds, positions, temperature, top_k, top_p, min_p)
    logits = detached(logits)
    mode = mode_of(logits, seeds, positions)
    tokens = mode.empty(logits, logits.shape[:1], torch.int64)
    numbers = numbers_of(temperature, top_k, top_p, min_p)
    mode.of(sample_rows)(logits, seeds.contiguous(), positions.contiguous(), tokens, *numbers)
    return tokens
