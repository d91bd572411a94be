"""Launches of sums by an index: the order of the sources, a Spec of the call's tensors, what launches it, the launch.

Each launch is also an operator, ``cute_kernels::<name>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import empty, operator
from cute_kernels.runtime.targets import Target
from cute_kernels.scatter.config import SEGMENT, ElementsSpec, RowsSpec, lanes_for

INT32_ROWS = 2**31 - 1


@operator("sum_into_rows", "Tensor source, Tensor index, Tensor(a!) out, int padding_idx, str store")
def sum_into_rows(source: Tensor, index: Tensor, out: Tensor, padding_idx: int, store: str) -> None:
    """out's rows and the rows of ``source`` (T, N) that ``index`` (T,) sends there, as ``config.Store`` says.

    Rows of ``source`` are copied unless they are contiguous. ``padding_idx``: a row that gets none; -1: each may. An
    index that is no row of out adds nothing.
    """
    if not out.numel() or (store != "write" and not index.numel()):
        return
    if not index.numel():
        out.zero_()
        return
    if source.shape[1] > 1 and source.stride(1) != 1:
        source = source.contiguous()
    # The sorted keys are exact, and the sort is stable: the sources of a row stay in their order
    narrow = index
    if out.shape[0] <= INT32_ROWS and index.dtype == torch.int64:  # an id beyond int32 would wrap onto a row
        narrow = index.clamp(-1, out.shape[0]).to(torch.int32)
    keys, order = torch.sort(narrow, stable=True)
    if store == "write":
        rows = torch.arange(out.shape[0] + 1, dtype=keys.dtype, device=keys.device)
        bounds = torch.searchsorted(keys, rows, out_int32=True)
        begins, ends = bounds[:-1], bounds[1:]
    else:
        begins, ends = (torch.searchsorted(keys, keys, right=right, out_int32=True) for right in (False, True))
    columns = out.shape[1]
    partials = empty(out, (2 * -(-keys.shape[0] // SEGMENT), columns), torch.float32)
    vec = _vec(columns, source, out)
    spec = RowsSpec(source.dtype, out.dtype, keys.dtype, vec, lanes_for(columns, vec), store)
    launch = _rows.get(source.get_device(), spec)
    if keys.shape[0] > SEGMENT:
        launch.segments(source, keys, order, begins, ends, out, partials, padding_idx)
    launch.sums(source, keys, order, begins, ends, partials, out, padding_idx)


@operator("sum_into_elements", "Tensor source, Tensor index, Tensor(a!) out")
def sum_into_elements(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Elements of ``source`` (R, k), k few, onto those of out (R, N) that ``index`` (R, k) names, in their row."""
    if index.numel():
        _elements.get(source.get_device(), ElementsSpec(source.dtype, out.dtype))(source, index, out)


def _vec(columns: int, *matrices: Tensor) -> int:
    """Consecutive elements that move at once: 16 bytes of the widest dtype, where all rows allow it."""
    vec = math.gcd(16 // max(t.itemsize for t in matrices), columns)
    for t in matrices:
        vec = math.gcd(vec, t.stride(0) if t.shape[0] > 1 else columns, t.data_ptr() // t.itemsize)
    return vec


class RowsLaunch(NamedTuple):
    """The two kernels of sums of rows; the first where a row may have more than SEGMENT sources."""

    segments: Callable[..., None]
    sums: Callable[..., None]


def _make_rows(target: Target, spec: RowsSpec) -> RowsLaunch:
    from cute_kernels.scatter import kernel

    return RowsLaunch(*(launches.load(b, target.arch, spec) for b in (kernel.segment_sums, kernel.grouped_sums)))


def _make_elements(target: Target, spec: ElementsSpec) -> Callable[..., None]:
    from cute_kernels.scatter import kernel

    return launches.load(kernel.element_sums, target.arch, spec)


_rows = LaunchCache(_make_rows)
_elements = LaunchCache(_make_elements)
