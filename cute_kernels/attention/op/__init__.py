"""Attention on torch tensors: the public functions."""

from cute_kernels.attention.op.attention import attention

__all__ = ["attention"]
