"""Two Triton kernels of our own that bench_gemm.py measures beside ours: a peer and a floor.

`matmul` is what users run today for a product whose rows do not depend on the batch: a persistent kernel with one
fixed tile for every M, N and K (128x128x64, 8 warps, 3 stages, tiles walked in groups of 8 rows of tiles: the
constants of the published batch-invariant kernels), one fp32 accumulator over the whole K, no split of K, no tuning.
A row's sum is formed in the same order whatever M is, and at M = 1 a tile of 128 rows is computed for it.

`ReadFloor` only reads a matrix: a product with few rows cannot take less time than reading its weights.
"""

from __future__ import annotations

import functools
import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_M, TILE_N, TILE_K = 128, 128, 64
GROUP_M = 8  # rows of tiles that are walked together, so that their columns of B stay in L2
NUM_WARPS = 8
NUM_STAGES = 3
STEP = 8  # elements of a 16-byte access

# Programs an SM, elements a step and priority in L2 among which the fastest reader is chosen.
FLOOR_CANDIDATES = tuple(itertools.product((2, 4, 8), (2048, 4096, 8192, 16384), ("", "evict_first")))


@triton.jit
def _matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    num_programs,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    group_m: tl.constexpr,
    even_k: tl.constexpr,
):
    # A tile's first element is found in 64 bits, its elements relative to it in 32: no matrix is too large.
    tiles_m = tl.cdiv(m, tile_m)
    tiles_n = tl.cdiv(n, tile_n)
    steps = tl.cdiv(k, tile_k)
    in_m = tl.arange(0, tile_m)
    in_n = tl.arange(0, tile_n)
    in_k = tl.arange(0, tile_k)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, num_programs, flatten=True):
        first_tile_m = tile // (group_m * tiles_n) * group_m
        rows_of_tiles = tl.minimum(tiles_m - first_tile_m, group_m)
        in_group = tile % (group_m * tiles_n)
        first_m = (first_tile_m + in_group % rows_of_tiles) * tile_m
        first_n = in_group // rows_of_tiles * tile_n

        # Rows and columns outside are read as the tile's first one (never stored) and not masked: the loads stay wide.
        rows = tl.max_contiguous(tl.multiple_of(tl.where(first_m + in_m < m, in_m, 0), tile_m), tile_m)
        cols = tl.max_contiguous(tl.multiple_of(tl.where(first_n + in_n < n, in_n, 0), tile_n), tile_n)
        a_tile = a_ptr + first_m.to(tl.int64) * stride_am + (rows[:, None] * stride_am + in_k[None, :] * stride_ak)
        b_tile = b_ptr + first_n.to(tl.int64) * stride_bn + (in_k[:, None] * stride_bk + cols[None, :] * stride_bn)
        sums = tl.zeros((tile_m, tile_n), dtype=tl.float32)
        for step in range(steps):
            if even_k:
                a = tl.load(a_tile)
                b = tl.load(b_tile)
            else:
                inside = in_k < k - step * tile_k
                a = tl.load(a_tile, mask=inside[None, :], other=0.0)
                b = tl.load(b_tile, mask=inside[:, None], other=0.0)
            sums = tl.dot(a, b, sums)
            a_tile += tile_k * stride_ak
            b_tile += tile_k * stride_bk

        c_tile = c_ptr + first_m.to(tl.int64) * stride_cm + first_n.to(tl.int64) * stride_cn
        stored = (first_m + in_m < m)[:, None] & (first_n + in_n < n)[None, :]
        tl.store(
            c_tile + (in_m[:, None] * stride_cm + in_n[None, :] * stride_cn),
            sums.to(c_ptr.dtype.element_ty),
            mask=stored,
        )


def matmul(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out (M, N) = a (M, K) @ b (K, N), each with one dimension whose elements are neighbours."""
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or out.shape != (m, n) or not a.dtype == b.dtype:
        raise ValueError(f"matmul: {tuple(a.shape)} @ {tuple(b.shape)} into {tuple(out.shape)}, {a.dtype}, {b.dtype}")
    for tensor, outer in ((a, 0), (b, 1)):
        if tensor.stride(outer) == 1 and tensor.stride(1 - outer) != 1 and tensor.shape[outer] % STEP:
            raise ValueError("matmul: rows (columns) that are neighbours must be a multiple of 8")
    num_programs = min(_num_sms(a.device.index), triton.cdiv(m, TILE_M) * triton.cdiv(n, TILE_N))
    _matmul[(num_programs,)](
        a,
        b,
        out,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        *out.stride(),
        num_programs,
        tile_m=TILE_M,
        tile_n=TILE_N,
        tile_k=TILE_K,
        group_m=GROUP_M,
        even_k=k % TILE_K == 0,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


@triton.jit
def _read(source_ptr, sums_ptr, numel, num_programs, block: tl.constexpr, priority: tl.constexpr):
    lanes = tl.arange(0, block)
    sums = tl.zeros((block,), dtype=tl.float32)
    for index in tl.range(tl.program_id(0), tl.cdiv(numel, block), num_programs):
        first = tl.cast(index, tl.int64) * block
        mask = first + lanes < numel
        read = tl.load(source_ptr + first + lanes, mask=mask, other=0.0, eviction_policy=priority)
        sums += read.to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(sums))


class ReadFloor:
    """Reads every element of a contiguous matrix and writes one sum a program; the fastest of FLOOR_CANDIDATES."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        grid, *self.options = _fastest_reader(source)
        self.sums = torch.empty(grid, dtype=torch.float32, device=source.device)

    def __call__(self) -> Tensor:
        _launch_read(self.source, self.sums, *self.options)
        return self.sums


_READERS: dict[tuple, tuple[int, int, str]] = {}  # (elements, dtype, device) -> grid, block, priority


def _fastest_reader(source: Tensor) -> tuple[int, int, str]:
    """Measured once for each size, with a cold L2. A reader whose sum is wrong is an error."""
    key = (source.numel(), source.dtype, source.device)
    if key not in _READERS:
        total, spread = float(source.double().sum()), float(source.double().abs().sum())
        found = {}
        for programs, *options in FLOOR_CANDIDATES:
            sums = torch.empty(programs * _num_sms(source.device.index), dtype=torch.float32, device=source.device)
            launch = functools.partial(_launch_read, source, sums, *options)
            launch()
            if not abs(float(sums.double().sum()) - total) <= 1e-5 * spread:
                raise RuntimeError(f"the reading kernel's sum is wrong: {float(sums.double().sum())}, not {total}")
            found[(len(sums), *options)] = triton.testing.do_bench(launch, warmup=5, rep=20, return_mode="median")
        _READERS[key] = min(found, key=found.__getitem__)
    return _READERS[key]


def _launch_read(source: Tensor, sums: Tensor, block: int, priority: str) -> None:
    _read[(len(sums),)](source, sums, source.numel(), len(sums), block=block, priority=priority, num_warps=8)


@functools.lru_cache
def _num_sms(device: int | None) -> int:
    return torch.cuda.get_device_properties(device or 0).multi_processor_count
