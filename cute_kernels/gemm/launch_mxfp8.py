"""Launches of products of groups of rows with mxfp8 matrices; the operator is ``cute_kernels::grouped_rows_mxfp8``."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.gemm import reference
from cute_kernels.gemm.config_grouped import MAX_TILES, tiles_bound
from cute_kernels.gemm.config_mxfp8 import CTAS_PER_SM, GroupedMxfp8Spec, choose, scale_vec
from cute_kernels.gemm.launch import GemmLaunch
from cute_kernels.gemm.launch_grouped import grouped_rows
from cute_kernels.mxfp8 import dequantize
from cute_kernels.runtime import launches
from cute_kernels.runtime.checks import fail
from cute_kernels.runtime.launches import LaunchCache, bounded, observe, observers
from cute_kernels.runtime.operators import empty, functional_operator
from cute_kernels.runtime.rows import contiguous_dim
from cute_kernels.runtime.targets import Target

Sizes = tuple[int, int, int]  # rows, N, groups


class GroupedMxfp8Launches:
    """The launches of a Spec, by the products' sizes and kernel."""

    def __init__(self, target: Target, spec: GroupedMxfp8Spec) -> None:
        self._target, self._spec = target, spec
        self._launches: dict[tuple[Sizes, GemmConfig], GemmLaunch] = bounded()

    def of(self, sizes: Sizes, config: GemmConfig) -> GemmLaunch:
        """The launch of this kernel for these sizes."""
        launch = self._launches.get((sizes, config))
        if launch is None:
            launch = self._launches[sizes, config] = launch_of(self._target, self._spec, sizes, config)
        return launch


_mxfp8 = LaunchCache(GroupedMxfp8Launches)


def launch_of(target: Target, spec: GroupedMxfp8Spec, sizes: Sizes, config: GemmConfig) -> GemmLaunch:
    """The launch of a kernel.

    Raises:
        ValueError: there are more tiles than 32 bits count.
    """
    from cute_kernels.gemm import kernel_grouped_mxfp8

    rows, n, groups = sizes
    tiles = tiles_bound(rows, groups, n, config, True)
    if tiles > MAX_TILES:
        fail("grouped_mm", "a and b", f"be of at most {MAX_TILES} tiles", f"{tiles} of {rows}x{n} in {groups} groups")
    function = launches.load(kernel_grouped_mxfp8.grouped_mxfp8, target.arch, spec, config)
    return GemmLaunch(function, min(tiles, target.num_sms * CTAS_PER_SM), True, config, "grouped_rows_mxfp8")


@functional_operator(
    "grouped_rows_mxfp8",
    "Tensor a, Tensor b, Tensor b_scale, Tensor offs, ScalarType out_dtype",
    "Tensor",
    fake=lambda a, b, b_scale, offs, out_dtype: a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype),
    cpu=reference.grouped_rows_mxfp8,
)
def grouped_rows_mxfp8(a: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(R, N): rows a (R, K), those of group e times b[e] (K, N), whose transpose has scales (N, K / 32).

    Where groups have many rows, or TMA does not read the rows, or on SM100, the matrices are dequantized first, with
    the same bits.
    """
    (rows, k), n, groups = a.shape, b.shape[2], b.shape[0]
    if b.data_ptr() % 16:
        fail("grouped_mm", "b", "start on 16 bytes", f"address {b.data_ptr():#x}")
    config = choose(launches.target_of(a.get_device()).arch, rows, groups)
    if config is None or 0 in (rows, n, k, groups) or contiguous_dim(a, a.shape) != -1:
        return grouped_rows.function(a, dequantize(b.mT, b_scale).mT, offs, out_dtype)
    d = empty(a, (rows, n), out_dtype)
    spec = GroupedMxfp8Spec(out_dtype, scale_vec(k, b_scale.data_ptr()))
    launch = _mxfp8.get(a.get_device(), spec).of((rows, n, groups), config)
    if observers:
        observe(launch, (groups, rows, n, k), a.get_device())
    launch.function(a, b.mT, b_scale, d, offs, launch.num_ctas)
    return d
