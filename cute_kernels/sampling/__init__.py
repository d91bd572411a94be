"""Tokens drawn from logits, each a function of its own row, seed and position."""

from cute_kernels.sampling.op import sample

__all__ = ["sample"]
