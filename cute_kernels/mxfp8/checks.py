"""The argument contract of the quantizers, shared by the kernels and the reference."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from cute_kernels.mxfp8.config import BLOCK, MODES
from cute_kernels.runtime.checks import FLOATS, expect, expect_dtype, expect_size, expect_tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE = torch.float8_e8m0fnu
ScaleLayout = Literal["plain", "blocked"]
SCALE_LAYOUTS = get_args(ScaleLayout)
MAX_SIZE = 2**31 - 128  # of a dimension: coordinates are 32-bit and run to the end of the last tile
MAX_TILES = 2**30  # a CTA each, and up to an eighth more in both directions where clusters are not full


def check_quantize(
    op: str, name: str, x: Tensor, rank: int, mode: str, scale_layout: str, dtype: torch.dtype, block=(32, 1)
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_tensor(op, name, x)
    expect_dtype(op, name, x.dtype, FLOATS)
    dimensions = "(M, K)" if rank == 2 else "(E, N, K)"
    expect(x.dim() == rank, op, name, f"have {rank} dimensions {dimensions}", f"shape {tuple(x.shape)}")
    good = all(size % BLOCK == 0 for size in x.shape[-2:])
    expect(good, op, name, f"have last dimensions that are multiples of {BLOCK}", f"shape {tuple(x.shape)}")
    good = all(size <= MAX_SIZE for size in x.shape[-2:])
    expect(good, op, name, f"have last dimensions of at most {MAX_SIZE}", f"shape {tuple(x.shape)}")
    tiles = -(-x.shape[-2] // 128) * -(-x.shape[-1] // 128) * (x.shape[0] if rank == 3 else 1)
    expect(tiles <= MAX_TILES, op, name, f"have at most {MAX_TILES} tiles of 128 x 128", f"shape {tuple(x.shape)}")
    expect(is_unit_stride(x), op, name, "have a contiguous last dimension or last but one", f"strides {x.stride()}")
    expect(mode in MODES, op, "mode", f"be one of {MODES}", repr(mode))
    expect(scale_layout in SCALE_LAYOUTS, op, "scale_layout", f"be one of {SCALE_LAYOUTS}", repr(scale_layout))
    expect_dtype(op, "dtype", dtype, FP8)
    good = isinstance(block, tuple) and block in ((32, 1), (32, 32))
    expect(good, op, "block", "be (32, 1) or (32, 32)", repr(block))


def check_aligned(op: str, name: str, x: Tensor) -> None:
    """What TMA asks of an input beyond the reference: raise ValueError."""
    unit = 16 // x.element_size()
    sizes = zip(x.shape, x.stride(), range(x.dim() - 1, -1, -1), strict=True)
    strides = [(stride, from_last) for size, stride, from_last in sizes if size > 1]
    good = x.data_ptr() % 16 == 0 and all(
        stride > 0 and stride % unit == 0 or (stride == 1 and from_last < 2) for stride, from_last in strides
    )
    got = f"strides {x.stride()} from address {x.data_ptr():#x}"
    expect(good, op, name, f"start on 16 bytes and have strides of positive multiples of {unit} elements", got)


def is_unit_stride(x: Tensor) -> bool:
    """Whether one of the last two dimensions is contiguous and rows do not overlap."""
    if x.numel() == 0:
        return True
    inner, outer = (-1, -2) if x.stride(-1) == 1 else (-2, -1)
    return x.stride(inner) == 1 and x.stride(outer) >= x.shape[inner]


def is_transposed(x: Tensor) -> bool:
    """Whether the last dimension but one is the contiguous one."""
    return x.stride(-1) != 1 and x.stride(-2) == 1


def check_to_blocked(scale: Tensor) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_tensor("to_blocked", "scale", scale)
    expect_dtype("to_blocked", "scale", scale.dtype, (SCALE, torch.uint8))
    expect(scale.dim() in (2, 3), "to_blocked", "scale", "be (R, C) or (E, R, C)", f"shape {tuple(scale.shape)}")


def check_from_blocked(blocked: Tensor, rows: int, columns: int) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_tensor("from_blocked", "blocked", blocked)
    expect_dtype("from_blocked", "blocked", blocked.dtype, (SCALE, torch.uint8))
    for name, size in (("rows", rows), ("columns", columns)):
        expect_size("from_blocked", name, size)
    size = blocked_size(rows, columns)
    if blocked.dim() not in (1, 2) or blocked.shape[-1] != size:  # a message would make a symbolic size a constant
        expect(False, "from_blocked", "blocked", f"have shape ({size},) or (E, {size})", tuple(blocked.shape))


def blocked_size(rows: int, columns: int) -> int:
    """Bytes of the blocked form of a matrix of scales."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def check_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> str:
    """How the scales lie: "blocked", "square", "columns" (R, C), "rows" (C, R); "empty" where there are none.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    op = "dequantize"
    expect_tensor(op, "q", q)
    expect_dtype(op, "q", q.dtype, FP8)
    expect_tensor(op, "scale", scale)
    expect_dtype(op, "scale", scale.dtype, (SCALE,))
    expect_dtype(op, "dtype", dtype, FLOATS)
    expect(q.dim() in (2, 3), op, "q", "be (M, K) or (E, N, K)", f"shape {tuple(q.shape)}")
    n, k = q.shape[-2:]
    good = n % BLOCK == 0 and k % BLOCK == 0
    expect(good, op, "q", f"have last dimensions that are multiples of {BLOCK}", f"shape {tuple(q.shape)}")
    if q.numel() == 0:
        return "empty"
    expect(is_packed(q), op, "q", "be row-major or column-major without gaps", f"strides {q.stride()}")
    expect(scale.device == q.device, op, "scale", f"be on {q.device}", scale.device)
    expect(scale.is_contiguous(), op, "scale", "be contiguous", f"strides {scale.stride()}")
    transposed = is_transposed(q)
    rows, columns = (k, n // BLOCK) if transposed else (n, k // BLOCK)
    experts = tuple(q.shape[:-2])
    kinds = [((*experts, blocked_size(rows, columns)), "blocked")]  # no dict: sizes of a traced call have no hash
    if experts:
        kinds.append(((*experts, n // BLOCK, k // BLOCK), "square"))
    if experts and transposed:
        kinds.append(((*experts, columns, rows), "rows"))
    else:
        kinds.append(((*experts, rows, columns), "columns"))
    shape = tuple(scale.shape)
    for wanted, kind in kinds:
        if shape == wanted:
            return kind
    expect(False, op, "scale", "have one of the shapes " + ", ".join(str(wanted) for wanted, _ in kinds), shape)
    raise AssertionError("not reached")


def is_packed(q: Tensor) -> bool:
    """Whether q is contiguous, or its last two dimensions' transpose is."""
    return q.is_contiguous() or q.mT.is_contiguous()
