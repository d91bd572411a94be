"""Attention whose row has one set of bits, whatever the batch, the row's place and its neighbours."""

from cute_kernels.attention.op import attention

__all__ = ["attention"]
