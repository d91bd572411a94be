"""Attention on torch tensors: the public functions."""

from cute_kernels.attention.op.attention import attention
from cute_kernels.attention.op.cache import attention_with_kv_cache
from cute_kernels.attention.op.merge import merge_attention

__all__ = ["attention", "attention_with_kv_cache", "merge_attention"]
