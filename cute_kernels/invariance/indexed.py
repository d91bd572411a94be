"""Replacements of torch's operators that add where an index says, and of those that leave ties open.

As in ``aten.py``: a function takes an operator's arguments, and returns NotImplemented for those it has no kernel for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import canonicalize_dim

from cute_kernels.runtime.checks import FLOATS
from cute_kernels.scatter.launch import sum_into_rows
from cute_kernels.scatter.op import add_elements, add_rows, embedding_backward

aten = torch.ops.aten


def _is_float(*tensors: Tensor) -> bool:
    return all(t.dtype in FLOATS for t in tensors)


def _embedding_backward(dy: Tensor, ids: Tensor, num_rows: int, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    if scale_grad_by_freq or not _is_float(dy):
        return NotImplemented
    return embedding_backward(dy, ids, num_rows, padding_idx=padding_idx if padding_idx >= 0 else None)


def _added(add: Callable[..., bool], in_place: bool, x: Tensor, *arguments: Any) -> Tensor:
    """``add`` onto x, or onto a copy of it; it takes what is contiguous and says whether it could."""
    out = x if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    if not add(out, *arguments):
        return NotImplemented
    return x.copy_(out) if in_place and out is not x else out


def _index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, in_place: bool = False
) -> Tensor:
    if not _is_float(x, source):
        return NotImplemented
    return _added(_add_slices, in_place, x, dim, index, source, alpha)


def _add_slices(out: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float) -> bool:
    if not out.dim():
        out, source = out.view(1), source.reshape(-1)
    dim = canonicalize_dim(out.dim(), dim)
    source = source if alpha == 1 else source.float() * alpha
    if dim == 0:
        add_rows(out, index.reshape(-1), source)
    else:
        rows = out.movedim(dim, 0).contiguous()
        add_rows(rows, index.reshape(-1), source.movedim(dim, 0))
        out.copy_(rows.movedim(0, dim))
    return True


def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, in_place: bool = False) -> Tensor:
    if not _is_float(x, source):
        return NotImplemented
    return _added(_add_by_place, in_place, x, dim, index, source)


def _add_by_place(out: Tensor, dim: int, index: Tensor, source: Tensor) -> bool:
    """As torch, which looks at as much of ``source``, and of out beside ``dim``, as ``index`` has."""
    if not index.numel():
        return True
    out, index, source = (t if t.dim() else t.view(1) for t in (out, index, source))
    dim = canonicalize_dim(out.dim(), dim)
    source = source[tuple(slice(size) for size in index.shape)]
    if dim == out.dim() - 1 and index.shape[:-1] == out.shape[:-1]:
        add_elements(out, index, source)
        return True
    places = index.long() * out.stride(dim)
    for d, size in enumerate(index.shape):
        if d != dim:
            steps = torch.arange(size, device=index.device) * out.stride(d)
            places = places + steps.view([size if e == d else 1 for e in range(out.dim())])
    places = torch.where((index >= 0) & (index < out.shape[dim]), places, -1)
    # The sources of an element in ascending order of their place along dim
    places, source = (t.movedim(dim, 0).reshape(-1) for t in (places, source))
    sum_into_rows(source.unsqueeze(1), places, out.view(-1, 1), -1, "onto")
    return True


def _scatter_reduce(
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    in_place: bool = False,
) -> Tensor:
    if reduce in ("amax", "amin"):
        torchs = aten.scatter_reduce_ if in_place else aten.scatter_reduce
        return torchs.two(x, dim, index, source, reduce, include_self=include_self)
    if reduce not in ("sum", "add") or not _is_float(x, source):
        return NotImplemented
    if not include_self:
        x = x.scatter_(dim, index, 0.0) if in_place else x.scatter(dim, index, 0.0)
    return _scatter_add(x, dim, index, source, in_place=in_place)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False, *, in_place: bool = False) -> Tensor:
    if not accumulate:
        return (aten.put_ if in_place else aten.put).default(x, index, source, False)
    if not _is_float(x, source):
        return NotImplemented
    index = torch.where(index < 0, index + x.numel(), index).reshape(-1)
    return _added(_add_flat, in_place, x, index, source.reshape(-1))


def _add_flat(out: Tensor, index: Tensor, source: Tensor) -> bool:
    add_rows(out.view(-1), index, source)
    return True


def _index_put(
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
    *,
    in_place: bool = False,
) -> Tensor:
    if not accumulate:
        return (aten.index_put_ if in_place else aten.index_put).default(x, indices, values, False)
    if not _is_float(x, values):
        return NotImplemented
    return _added(_add_indexed, in_place, x, indices, values)


def _add_indexed(out: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> bool:
    """Rows of the dimensions without an index, at the places that the indices of the others name together."""
    index = _of_dimensions(indices, out.dim())
    indexed = [d for d, t in enumerate(index) if t is not None]
    if not indexed:
        return False
    others = [d for d, t in enumerate(index) if t is None]
    given = torch.broadcast_tensors(*(index[d] for d in indexed))
    places = torch.zeros_like(given[0])
    inside = torch.ones_like(given[0], dtype=torch.bool)
    for d, t in zip(indexed, given, strict=True):
        size = out.shape[d]
        t = torch.where(t < 0, t + size, t)
        inside = inside & (t >= 0) & (t < size)
        places = places * size + t
    places = torch.where(inside, places, -1).reshape(-1)
    # The places of the indices stand where they are in x if they are neighbours there, else first
    shape, dims = given[0].shape, given[0].dim()
    first = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    rest = [out.shape[d] for d in others]
    values = values.expand(*rest[:first], *shape, *rest[first:])
    values = values.movedim(tuple(range(first, first + dims)), tuple(range(dims)))
    rows = out.permute(*indexed, *others)
    table = rows.contiguous()
    columns = math.prod(rest)
    flat = table.view(table.numel() // max(columns, 1), columns)
    add_rows(flat, places, values.reshape(len(places), columns))
    if table.data_ptr() != out.data_ptr():
        rows.copy_(table)
    return True


def _of_dimensions(indices: Sequence[Tensor | None], dims: int) -> list[Tensor | None]:
    """An index of integers, or None, of each dimension: a mask is the places where it holds."""
    found: list[Tensor | None] = []
    for t in indices:
        if t is not None and t.dtype in (torch.bool, torch.uint8):
            found += t.nonzero().unbind(1)
        else:
            found.append(None if t is None else t.long())
    return found + [None] * (dims - len(found))


# Ties: of equal values the one of the lower index comes first


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _sort_stable(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return _sort(x, dim, descending)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The first k of a stable sort; NaN counts as the largest."""
    if not x.dim():
        return aten.topk.default(x, k, dim, largest, sorted)
    values, indices = _sort(x, dim, largest)
    return values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()


def _both(name: str, overload: str, function: Callable[..., Tensor]) -> dict[str, Callable[..., Any]]:
    """Entries of an operator and of its form in place."""
    return {
        f"{name}.{overload}": function,
        f"{name}_.{overload}": functools.partial(function, in_place=True),
    }


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward.default": _embedding_backward,
    **_both("index_add", "default", _index_add),
    **_both("scatter_add", "default", _scatter_add),
    **_both("scatter_reduce", "two", _scatter_reduce),
    **_both("scatter", "reduce", _scatter_reduce),
    **_both("put", "default", _put),
    **_both("index_put", "default", _index_put),
    "_index_put_impl_.default": functools.partial(_index_put, in_place=True),
    "sort.default": _sort,
    "sort.stable": _sort_stable,
    "topk.default": _topk,
}
