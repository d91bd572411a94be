"""Launches of grouped products: a Spec of the call's tensors, the kernel for its sizes, the launch.

The operators are ``cute_kernels::grouped_rows`` and ``cute_kernels::grouped_sums``, which return their result, and
``cute_kernels::grouped_sums_into``, which adds to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.gemm import reference
from cute_kernels.gemm.config_grouped import (
    MAX_TILES,
    GroupedSpec,
    begins_anywhere,
    choose_rows,
    choose_sums,
    grouped_arguments,
    tiles_bound,
)
from cute_kernels.gemm.launch import GemmLaunch
from cute_kernels.runtime import launches
from cute_kernels.runtime.checks import fail
from cute_kernels.runtime.launches import LaunchCache, bounded, observe, observers
from cute_kernels.runtime.operators import empty, functional_operator, operator
from cute_kernels.runtime.rows import contiguous_dim
from cute_kernels.runtime.targets import Target

Sizes = tuple[int, int, int, int]  # M, N, K, groups; of sums K is the rows, of rows M


class GroupedLaunches:
    """The launches of a Spec, by the products' sizes."""

    def __init__(self, target: Target, spec: GroupedSpec) -> None:
        self._target, self._spec = target, spec
        self._launches: dict[Sizes, GemmLaunch] = bounded()

    def of(self, sizes: Sizes) -> GemmLaunch:
        """The launch of the kernel that is chosen for these sizes."""
        launch = self._launches.get(sizes)
        if launch is None:
            launch = self._launches[sizes] = launch_of(self._target, self._spec, sizes)
        return launch


_grouped = LaunchCache(GroupedLaunches)


def launch_of(target: Target, spec: GroupedSpec, sizes: Sizes, candidate: tuple | None = None) -> GemmLaunch:
    """The launch of one kernel, the one that is chosen or another ``candidate``: (config, transposed).

    Raises:
        ValueError: there are more tiles than 32 bits count.
    """
    from cute_kernels.gemm import kernel_grouped

    m, n, k, groups = sizes
    is_rows = spec.ragged == "rows"
    if candidate is None:
        if is_rows:
            candidate = choose_rows(target.arch, m, groups, n, target.num_sms, spec.b_major)
        else:
            candidate = choose_sums(target.arch, m, n, k, groups, spec.accumulate)
    config, transposed = candidate
    if config is None or spec.a_major is None:
        config, transposed = None, False
    if is_rows:
        tiles = tiles_bound(m, groups, n, config, transposed)
    else:
        tile, pair = ((64, 64), (1, 1)) if config is None else (config.tile, config.cluster)
        tiles = groups * -(-m // (tile[0] * pair[0])) * -(-n // (tile[1] * pair[1]))
    if tiles > MAX_TILES:
        fail("grouped_mm", "a and b", f"be of at most {MAX_TILES} tiles", f"{tiles} of {m}x{n} in {groups} groups")
    cluster = 1 if config is None else config.cluster[0] * config.cluster[1]
    function = launches.load(kernel_grouped.grouped, *grouped_arguments(target.arch, spec, k, config, transposed))
    clusters = min(tiles, max(target.num_sms // cluster, 1))
    return GemmLaunch(function, clusters * cluster, transposed, config, f"grouped_{spec.ragged}")


def _rows_shape(a: Tensor, b: Tensor) -> tuple[int, int]:
    return a.shape[0], b.shape[2]


def _sums_shape(a: Tensor, b: Tensor, offs: Tensor) -> tuple[int, int, int]:
    return offs.shape[0], a.shape[0], b.shape[1]


@functional_operator(
    "grouped_rows",
    "Tensor a, Tensor b, Tensor offs, ScalarType out_dtype",
    "Tensor",
    fake=lambda a, b, offs, out_dtype: a.new_empty(_rows_shape(a, b), dtype=out_dtype),
    cpu=reference.grouped_rows,
)
def grouped_rows(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(R, N): rows a (R, K), those of group e times b[e] (K, N); zeros beyond the last group."""
    d = empty(a, _rows_shape(a, b), out_dtype)
    (m, k), n, groups = a.shape, b.shape[2], b.shape[0]
    if not (m and n):
        return d
    if not (k and groups):
        return d.zero_()
    by_tma = n * d.itemsize % 16 == 0
    _launch("rows", a, b.mT, d, offs, (m, n, k, groups), by_tma, False)
    return d


@functional_operator(
    "grouped_sums",
    "Tensor a, Tensor b, Tensor offs, ScalarType out_dtype",
    "Tensor",
    fake=lambda a, b, offs, out_dtype: a.new_empty(_sums_shape(a, b, offs), dtype=out_dtype),
    cpu=reference.grouped_sums,
)
def grouped_sums(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(E, M, N): columns a (M, R) of group e times rows b (R, N) of it."""
    d = empty(a, _sums_shape(a, b, offs), out_dtype)
    if not d.numel():
        return d
    if not a.shape[1]:
        return d.zero_()
    _sum_into(a, b, offs, d, False)
    return d


@operator("grouped_sums_into", "Tensor a, Tensor b, Tensor offs, Tensor(a!) d")
def grouped_sums_into(a: Tensor, b: Tensor, offs: Tensor, d: Tensor) -> None:
    """``grouped_sums`` whose accumulators start from d (E, M, N) fp32; a group without rows leaves its d alone."""
    if d.numel() and a.shape[1]:
        _sum_into(a, b, offs, d, True)


def _sum_into(a: Tensor, b: Tensor, offs: Tensor, d: Tensor, accumulate: bool) -> None:
    (m, k), n = a.shape, b.shape[1]
    by_tma = n * d.itemsize % 16 == 0 and d.data_ptr() % 16 == 0
    _launch("sums", a, b.mT, d, offs, (m, n, k, offs.shape[0]), by_tma, accumulate)


def _launch(
    ragged: str, a: Tensor, b: Tensor, d: Tensor, offs: Tensor, sizes: Sizes, by_tma: bool, accumulate: bool
) -> None:
    """Launch the product of a (M, K) and b (N, K), or (E, N, K), into contiguous d."""
    a_dim, b_dim = contiguous_dim(a, a.shape), contiguous_dim(b, b.shape)
    a_major = b_major = None
    if a_dim and b_dim and by_tma and (b.dim() == 2 or b.stride(0) > 0):
        a_major, b_major = ("k" if a_dim == -1 else "m"), ("k" if b_dim == -1 else "n")
        if not begins_anywhere(ragged, a_major, b_major):
            a_major = b_major = None
    spec = GroupedSpec(a.dtype, d.dtype, ragged, accumulate, a_major, b_major)
    launch = _grouped.get(a.get_device(), spec).of(sizes)
    if observers:
        observe(launch, (sizes[3], *sizes[:3]), a.get_device())
    if launch.config is None:
        if a.is_neg() or b.is_neg():
            a, b = a.resolve_neg(), b.resolve_neg()
    else:
        a, b = (a.mT if a_dim == -2 else a), (b.mT if b_dim == -2 else b)
    if launch.transposed:
        a, b = b, a
    launch.function(a, b, d, offs, launch.num_ctas)
