"""Cases of attention: inputs, errors against fp64, bits."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention import reference
from cute_kernels.attention.config import grid_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_SIZES = (64, 128)
BLOCK, SPLIT = grid_for(128)
# Around the steps of the tensor core, warps, warpgroups, blocks, tiles and splits
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 500, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 77)


class Inputs(NamedTuple):
    """(batch, length, heads, head size)"""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Case:
    batch: int
    len_q: int
    len_k: int
    heads: int
    pairs: int
    head_size: int = 128
    causal: bool = True
    dtype: torch.dtype = BF16
    head_size_v: int | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_size, self.head_size_v or self.head_size

    def __str__(self) -> str:
        of_head = "x".join(map(str, dict.fromkeys(self.sizes)))
        sizes = f"{self.batch}x{self.len_q}x{self.len_k}-{self.heads}of{self.pairs}-{of_head}"
        return f"{sizes}-{'causal' if self.causal else 'full'}-{str(self.dtype).removeprefix('torch.')}"


def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Scores have a spread that leaves some weights large and many small."""

    def randn(length: int, heads: int, size: int, spread: float) -> Tensor:
        shape = case.batch, length, heads, size
        return (spread * torch.randn(shape, generator=generator, device=generator.device)).to(case.dtype)

    d, dv = case.sizes
    return Inputs(
        randn(case.len_q, case.heads, d, 2.0),
        randn(case.len_k, case.pairs, d, 1.0),
        randn(case.len_k, case.pairs, dv, 1.0),
    )


def make_packed(
    case: Case, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], generator: torch.Generator
) -> tuple[Inputs, dict]:
    """Packed sequences of these lengths, and the arguments that tell them apart; ``case`` has all else."""
    one = dataclasses.replace(case, batch=1, len_q=sum(lengths_q), len_k=sum(lengths_k))
    tensors = Inputs(*(t[0] for t in make_inputs(one, generator)))
    starts = (torch.tensor([0, *n], device=generator.device).cumsum(0).int() for n in (lengths_q, lengths_k))
    return tensors, dict(
        zip(
            ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
            (*starts, max(lengths_q), max(lengths_k)),
            strict=True,
        )
    )


def exact(case: Case, inputs: Inputs, **options) -> tuple[Tensor, Tensor]:
    """out and lse in fp64, of inputs as they are rounded."""
    wide = [t.double() for t in inputs]
    return reference.attention(*wide, causal=case.causal, return_lse=True, **options)


def rms(t: Tensor) -> float:
    return t.double().square().mean().sqrt().item()


def bits(t: Tensor) -> Tensor:
    """A tensor's bits, which NaN and signs of zero are a part of."""
    return t.contiguous().view(torch.int16 if t.itemsize == 2 else torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def gradients_of(function, inputs, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of what returns out, or (out, lse), for incoming gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [(t, g.to(t.dtype)) for t, g in zip(results, (dout, dlse), strict=False) if g is not None]
    outputs, gradients = zip(*wanted, strict=True)
    return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True)
