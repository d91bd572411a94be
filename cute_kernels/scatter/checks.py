"""The argument contract of embedding, embedding_backward and index_sum, shared by the kernels and the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.runtime.checks import MAX_SIZE, expect_dtype, expect_floats, expect_int, expect_tensor, fail

INDICES = (torch.int64, torch.int32)


def _check_ids(op: str, ids: Tensor) -> None:
    expect_tensor(op, "ids", ids)
    if ids.dtype not in INDICES:
        expect_dtype(op, "ids", ids.dtype, INDICES)
    if ids.numel() > MAX_SIZE:
        fail(op, "ids", f"have at most {MAX_SIZE} elements", ids.numel())


def _check_padding(op: str, padding_idx: int | None, num_rows: int) -> None:
    if padding_idx is None:
        return
    expect_int(op, "padding_idx", padding_idx)
    if not 0 <= padding_idx < num_rows:
        fail(op, "padding_idx", f"be None or a row of {num_rows}", padding_idx)


def check_embedding(op: str, ids: Tensor, weight: Tensor, padding_idx: int | None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    _check_ids(op, ids)
    expect_floats(op, "weight", weight)
    if weight.dim() != 2:
        fail(op, "weight", "be a matrix (rows, columns)", f"shape {tuple(weight.shape)}")
    if max(weight.shape) > MAX_SIZE:
        fail(op, "weight", f"have at most {MAX_SIZE} rows and columns", tuple(weight.shape))
    if weight.device != ids.device:
        fail(op, "weight", f"be on {ids.device}", weight.device)
    _check_padding(op, padding_idx, weight.shape[0])


def check_embedding_backward(
    op: str, dy: Tensor, ids: Tensor, num_rows: int, padding_idx: int | None, out_dtype: torch.dtype | None
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats(op, "dy", dy)
    _check_ids(op, ids)
    expect_int(op, "num_rows", num_rows)
    if not 0 <= num_rows <= MAX_SIZE:
        fail(op, "num_rows", f"be from 0 to {MAX_SIZE}", num_rows)
    if dy.dim() != ids.dim() + 1 or dy.shape[:-1] != ids.shape:
        fail(op, "dy", f"have shape {(*ids.shape, 'columns')}", tuple(dy.shape))
    if dy.shape[-1] > MAX_SIZE:
        fail(op, "dy", f"have at most {MAX_SIZE} columns", dy.shape[-1])
    if ids.device != dy.device:
        fail(op, "ids", f"be on {dy.device}", ids.device)
    _check_padding(op, padding_idx, num_rows)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype)


def check_index_sum(op: str, x: Tensor, index: Tensor, source: Tensor, dim: int) -> bool:
    """Whether ``index`` is of elements, not of rows; raises TypeError or ValueError naming argument, expected, got."""
    expect_floats(op, "x", x)
    expect_tensor(op, "index", index)
    if index.dtype not in INDICES:
        expect_dtype(op, "index", index.dtype, INDICES)
    expect_floats(op, "source", source)
    expect_int(op, "dim", dim)
    if not x.dim():
        fail(op, "x", "have at least one dimension", "shape ()")
    if not -x.dim() <= dim < x.dim():
        fail(op, "dim", f"be of {x.dim()} dimensions", dim)
    dim %= x.dim()
    if index.dim() not in (1, x.dim()):
        fail(op, "index", f"have 1 dimension, or x's {x.dim()}", f"shape {tuple(index.shape)}")
    elements = index.dim() > 1
    along = index.shape[dim] if elements else index.shape[0]
    wanted = (*x.shape[:dim], along, *x.shape[dim + 1 :])
    if elements and index.shape != wanted:
        fail(op, "index", f"have shape {wanted}", tuple(index.shape))
    if source.shape != wanted:
        fail(op, "source", f"have shape {wanted}", tuple(source.shape))
    if index.numel() > MAX_SIZE:
        fail(op, "index", f"have at most {MAX_SIZE} elements", index.numel())
    for name, t in (("index", index), ("source", source)):
        if t.device != x.device:
            fail(op, name, f"be on {x.device}", t.device)
    return elements
