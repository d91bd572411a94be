"""embedding, embedding_backward and index_sum on torch tensors: the public functions, allocation, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.runtime.autograd import (
    apply,
    first_derivative_only,
    gradient_buffer,
    moved,
    needs_gradient,
)
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import detached, differentiates, mode_of, uses_reference
from cute_kernels.scatter import reference
from cute_kernels.scatter.checks import check_embedding, check_embedding_backward, check_index_sum
from cute_kernels.scatter.config import MAX_FEW
from cute_kernels.scatter.launch import sum_into_elements, sum_into_rows


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, backend: Backend | None = None) -> Tensor:
    """Rows of a table by their numbers; the gradient of a row sums its own tokens in their order.

    Args:
        ids: int64 or int32 of any shape, from 0 to V - 1.
        weight: (V, N) bf16, fp16 or fp32.
        padding_idx: a row whose gradient stays 0, as in torch; None: none.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (..., N) of weight's dtype: ``weight[ids]``.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels, in the backward.

    Numerics:
        The forward copies rows. The backward is ``embedding_backward``. If ``weight.main_grad`` (fp32) exists, a row's
        sum is added to it, rows without tokens are not touched, and ``weight.grad`` stays None; micro-batches are then
        deterministic, and have other bits than one batch. ``torch.autograd.grad`` of other tensors alone leaves it as
        it is; a compiled backward adds to it nonetheless. A hook of ``weight.register_hook``, which would get None, is
        an error in the backward; a compiled backward does not see it.

    Example:
        >>> import torch
        >>> from cute_kernels.scatter import embedding
        >>> weight = torch.zeros(4, 2, requires_grad=True)
        >>> embedding(torch.tensor([1, 3, 1]), weight).sum().backward()
        >>> weight.grad[:, 0]
        tensor([0., 2., 0., 1.])
    """
    if uses_reference("embedding", weight, backend):
        return reference.embedding(ids, weight, padding_idx=padding_idx)
    check_embedding("embedding", ids, weight, padding_idx)
    if differentiates(weight):
        return apply(_EmbeddingFunction, ids, weight, padding_idx)
    return F.embedding(ids, weight, padding_idx)


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding_idx):
        ctx.save_for_backward(ids, weight)
        ctx.call = padding_idx, getattr(weight, "main_grad", None)
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        (ids, weight), (padding_idx, main_grad) = ctx.saved_tensors, ctx.call
        if not needs_gradient(True, weight, main_grad):
            return None, None, None
        dweight, result = gradient_buffer("embedding", "weight", weight, main_grad)
        _sum_tokens(sum_into_rows, dy, ids, dweight, padding_idx, "add" if result is None else "write")
        return None, result, None


def embedding_backward(
    dy: Tensor,
    ids: Tensor,
    num_rows: int,
    *,
    padding_idx: int | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Gradient of an embedding's table: each row the sum of the gradients of the tokens that have its number.

    Args:
        dy: (..., N) bf16, fp16 or fp32. It is copied unless its rows are contiguous and of one stride.
        ids: (...) int64 or int32, the row of each token. One that is no row of the table adds nothing.
        num_rows: V, the table's rows.
        padding_idx: a row that is 0; None: none.
        out_dtype: bf16, fp16 or fp32; dy's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (V, N), contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The tokens of a row, in the order of ``ids``, are cut into segments of 256. A segment is added up one token
        after the other in fp32, from 0; the segments are added in ascending order; one rounding. So a row has the same
        bits whatever the other tokens, their number, and the table's size. Nothing is atomic.

    Example:
        >>> import torch
        >>> from cute_kernels.scatter import embedding_backward
        >>> embedding_backward(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 2]), 3)
        tensor([[2.],
                [0.],
                [5.]])
    """
    if uses_reference("embedding_backward", dy, backend):
        return reference.embedding_backward(dy, ids, num_rows, padding_idx=padding_idx, out_dtype=out_dtype)
    check_embedding_backward("embedding_backward", dy, ids, num_rows, padding_idx, out_dtype)
    dy = detached(dy)
    mode = mode_of(dy, ids)
    dweight = mode.empty(dy, (num_rows, dy.shape[-1]), out_dtype or dy.dtype)
    _sum_tokens(mode.of(sum_into_rows), dy, ids, dweight, padding_idx, "write")
    return dweight


def _sum_tokens(
    launch: Callable[..., None], dy: Tensor, ids: Tensor, dweight: Tensor, padding_idx: int | None, store: str
) -> None:
    rows = dy.reshape(ids.numel(), dy.shape[-1])
    launch(rows, ids.reshape(-1), dweight, -1 if padding_idx is None else padding_idx, store)


def index_sum(x: Tensor, index: Tensor, source: Tensor, *, dim: int = 0, backend: Backend | None = None) -> Tensor:
    """x and, added to its rows or elements, what an index sends there: torch's index_add, or its scatter_add.

    Args:
        x: bf16, fp16 or fp32 of any shape; copied.
        index: int64 or int32. (T,): slice t of ``source`` along ``dim`` goes to slice ``index[t]`` of x, torch's
            index_add. With as many dimensions as x: each element goes to its own place along ``dim``, torch's
            scatter_add. One that is no place of x along ``dim`` adds nothing.
        source: bf16, fp16 or fp32, of x's shape but for ``dim``, where it has as many as ``index``.
        dim: the dimension that the index is of.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        An element is x's own, then its sources in ascending order of their place along ``dim``, added one after the
        other in fp32, and one rounding. From the 257th on the sources are cut into segments of 256, each added up from
        0 and then added. So an element has the same bits whatever the others' sources. Nothing is atomic.

    Example:
        >>> import torch
        >>> from cute_kernels.scatter import index_sum
        >>> index_sum(torch.ones(3), torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 4.0]))
        tensor([3., 1., 6.])
    """
    if uses_reference("index_sum", x, backend):
        return reference.index_sum(x, index, source, dim=dim)
    elements = check_index_sum("index_sum", x, index, source, dim)
    if differentiates(x, source):
        return apply(_IndexSumFunction, x, index, source, dim, elements)
    return _index_sum(x, index, source, dim, elements)


class _IndexSumFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, source, dim, elements):
        ctx.save_for_backward(index)
        ctx.call = x.dtype, source.dtype, dim, elements
        return _index_sum(x, index, source, dim, elements)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        (index,), (x_dtype, source_dtype, dim, elements) = ctx.saved_tensors, ctx.call
        dx = dy.to(x_dtype) if ctx.needs_input_grad[0] else None
        dsource = None
        if ctx.needs_input_grad[2]:
            dsource = dy.gather(dim, index.long()) if elements else dy.index_select(dim, index)
            dsource = dsource.to(source_dtype)
        return dx, None, dsource, None, None


def _index_sum(x: Tensor, index: Tensor, source: Tensor, dim: int, elements: bool) -> Tensor:
    to = -1 if elements else 0
    out = x.detach().movedim(dim, to).clone(memory_format=torch.contiguous_format)
    if elements and x.dim() > 1:
        add_elements(out, index.movedim(dim, -1), source.detach().movedim(dim, -1))
    else:
        add_rows(out, index, source.detach().movedim(dim, to))
    return moved(out, to, dim)


def add_rows(out: Tensor, index: Tensor, source: Tensor) -> None:
    """Rows of ``source``, along the first dimension, onto those of out, which is contiguous, that ``index`` names."""
    if not out.numel():
        return
    columns = math.prod(out.shape[1:])
    rows = source.reshape(source.shape[0], columns)
    sum_into_rows(rows, index, out.view(out.shape[0], columns), -1, "onto")


def add_elements(out: Tensor, index: Tensor, source: Tensor) -> None:
    """Elements onto those along the last dimension of out, which is contiguous, in their row.

    Many of a row, which would each be compared with all, are sorted as the elements of one dimension.
    """
    n, few = out.shape[-1], index.shape[-1]
    if not index.numel() or not out.numel():
        return
    index, source = (t.reshape(index.numel() // few, few) for t in (index.long(), source))
    if few <= MAX_FEW:
        sum_into_elements(source, index, out.view(out.numel() // n, n))
        return
    inside = (index >= 0) & (index < n)
    first = torch.arange(0, out.numel(), n, device=index.device).unsqueeze(1)
    places = torch.where(inside, first + index, -1)
    sum_into_rows(source.reshape(-1, 1), places.reshape(-1), out.view(-1, 1), -1, "onto")
