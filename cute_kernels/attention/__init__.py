"""Attention whose row has one set of bits, whatever the batch, the row's place and its neighbours."""

from cute_kernels.attention.op import attention, attention_with_kv_cache, merge_attention

__all__ = ["attention", "attention_with_kv_cache", "merge_attention"]
