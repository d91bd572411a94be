"""Sums of rows, or of elements, that an index sends to the same place: embedding's gradient, index_sum."""

from cute_kernels.scatter.op import embedding, embedding_backward, index_sum

__all__ = ["embedding", "embedding_backward", "index_sum"]
