"""The argument contract of the quantizers, shared by the kernels and the reference."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from cute_kernels.mxfp8.config import BLOCK, MODES
from cute_kernels.runtime.checks import FLOATS, expect_dtype, expect_floats, expect_size, expect_tensor, fail

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE = torch.float8_e8m0fnu
SCALES = (SCALE,)
BLOCK_SHAPES = ((32, 1), (32, 32))
ScaleLayout = Literal["plain", "blocked"]
SCALE_LAYOUTS = get_args(ScaleLayout)
MAX_SIZE = 2**31 - 128  # of a dimension: coordinates are 32-bit and run to the end of the last tile
MAX_TILES = 2**30  # a CTA each, and up to an eighth more in both directions where clusters are not full


def check_quantize(
    op: str, name: str, x: Tensor, rank: int, mode: str, scale_layout: str, dtype: torch.dtype, block=(32, 1)
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats(op, name, x)
    shape = x.shape
    if len(shape) != rank:
        fail(op, name, f"have {rank} dimensions {'(M, K)' if rank == 2 else '(E, N, K)'}", f"shape {tuple(shape)}")
    n, k = shape[-2], shape[-1]
    if n % BLOCK or k % BLOCK:
        fail(op, name, f"have last dimensions that are multiples of {BLOCK}", f"shape {tuple(shape)}")
    if n > MAX_SIZE or k > MAX_SIZE:
        fail(op, name, f"have last dimensions of at most {MAX_SIZE}", f"shape {tuple(shape)}")
    if -(-n // 128) * -(-k // 128) * (shape[0] if rank == 3 else 1) > MAX_TILES:
        fail(op, name, f"have at most {MAX_TILES} tiles of 128 x 128", f"shape {tuple(shape)}")
    if not x.is_contiguous() and not is_unit_stride(x):
        fail(op, name, "have a contiguous last dimension or last but one", f"strides {x.stride()}")
    if mode not in MODES:
        fail(op, "mode", f"be one of {MODES}", repr(mode))
    if scale_layout not in SCALE_LAYOUTS:
        fail(op, "scale_layout", f"be one of {SCALE_LAYOUTS}", repr(scale_layout))
    if not isinstance(dtype, torch.dtype) or dtype not in FP8:
        expect_dtype(op, "dtype", dtype, FP8)
    if not isinstance(block, tuple) or block not in BLOCK_SHAPES:
        fail(op, "block", "be (32, 1) or (32, 32)", repr(block))


def check_aligned(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless TMA can read the input; the reference takes more."""
    if not is_aligned(x):
        expected = f"start on 16 bytes and have strides of positive multiples of {16 // x.itemsize} elements"
        fail(op, name, expected, f"strides {x.stride()} from address {x.data_ptr():#x}")


def is_aligned(x: Tensor) -> bool:
    """Whether TMA can read a tensor of unit stride: it starts on 16 bytes, and so do its rows and experts."""
    strides, unit = x.stride(), 16 // x.itemsize
    if x.data_ptr() & 15 or max(strides[-2:]) % unit:
        return False
    return len(strides) == 2 or x.shape[0] == 1 or (strides[0] > 0 and strides[0] % unit == 0)


def is_unit_stride(x: Tensor) -> bool:
    """Whether one of the last two dimensions is contiguous and rows do not overlap."""
    if x.numel() == 0:
        return True
    strides = x.stride()
    inner, outer = (-1, -2) if strides[-1] == 1 else (-2, -1)
    return strides[inner] == 1 and strides[outer] >= x.shape[inner]


def is_transposed(x: Tensor) -> bool:
    """Whether the last dimension but one is the contiguous one."""
    return x.stride(-1) != 1 and x.stride(-2) == 1


def check_to_blocked(scale: Tensor) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_tensor("to_blocked", "scale", scale)
    expect_dtype("to_blocked", "scale", scale.dtype, (SCALE, torch.uint8))
    if scale.dim() not in (2, 3):
        fail("to_blocked", "scale", "be (R, C) or (E, R, C)", f"shape {tuple(scale.shape)}")


def check_from_blocked(blocked: Tensor, rows: int, columns: int) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_tensor("from_blocked", "blocked", blocked)
    expect_dtype("from_blocked", "blocked", blocked.dtype, (SCALE, torch.uint8))
    for name, size in (("rows", rows), ("columns", columns)):
        expect_size("from_blocked", name, size)
    size = blocked_size(rows, columns)
    if blocked.dim() not in (1, 2) or blocked.shape[-1] != size:  # a message would make a symbolic size a constant
        fail("from_blocked", "blocked", f"have shape ({size},) or (E, {size})", tuple(blocked.shape))


def blocked_size(rows: int, columns: int) -> int:
    """Bytes of the blocked form of a matrix of scales."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def check_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[bool, str | None]:
    """Whether q is column-major, and how the scales lie: ``scale_kind``, None where there are none.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    op = "dequantize"
    expect_floats(op, "q", q, FP8)
    expect_floats(op, "scale", scale, SCALES)
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        expect_dtype(op, "dtype", dtype)
    shape = q.shape
    if len(shape) != 2 and len(shape) != 3:
        fail(op, "q", "be (M, K) or (E, N, K)", f"shape {tuple(shape)}")
    if shape[-2] % BLOCK or shape[-1] % BLOCK:
        fail(op, "q", f"have last dimensions that are multiples of {BLOCK}", f"shape {tuple(shape)}")
    if q.numel() == 0:
        return is_transposed(q), None
    transposed = not q.is_contiguous()
    if transposed and not is_column_major(shape, q.stride()):
        fail(op, "q", "be row-major or column-major without gaps", f"strides {q.stride()}")
    if scale.device != q.device:
        fail(op, "scale", f"be on {q.device}", scale.device)
    if not scale.is_contiguous():
        fail(op, "scale", "be contiguous", f"strides {scale.stride()}")
    kind = scale_kind(shape, scale.shape, transposed)
    if kind is None:
        wanted = ", ".join(str(shape) for shape in _scale_shapes(shape, transposed))
        fail(op, "scale", f"have one of the shapes {wanted}", tuple(scale.shape))
    return transposed, kind


def scale_kind(shape: torch.Size, scale_shape: torch.Size, transposed: bool) -> str | None:
    """How the scales of q lie: "blocked", "square", "columns" (R, C), "rows" (C, R); None: they do not fit.

    No dict of shapes: sizes of a traced call have no hash.
    """
    n, k, rank, scale_rank = shape[-2], shape[-1], len(shape), len(scale_shape)
    if rank == 3 and (not scale_rank or scale_shape[0] != shape[0]):
        return None
    rows, columns = (k, n // BLOCK) if transposed else (n, k // BLOCK)
    if scale_rank == rank - 1:
        return "blocked" if scale_shape[-1] == blocked_size(rows, columns) else None
    if scale_rank != rank:
        return None
    blocks, size = scale_shape[-2], scale_shape[-1]
    if rank == 3 and blocks == n // BLOCK and size == k // BLOCK:
        return "square"
    if rank == 3 and transposed:
        return "rows" if blocks == columns and size == rows else None
    return "columns" if blocks == rows and size == columns else None


def _scale_shapes(shape: torch.Size, transposed: bool) -> list[tuple[int, ...]]:
    """The shapes of scales that ``scale_kind`` knows for q."""
    *experts, n, k = shape
    rows, columns = (k, n // BLOCK) if transposed else (n, k // BLOCK)
    shapes = [(blocked_size(rows, columns),)]
    if experts:
        shapes += [(n // BLOCK, k // BLOCK), (columns, rows) if transposed else (rows, columns)]
    else:
        shapes.append((rows, columns))
    return [(*experts, *shape) for shape in shapes]


def is_column_major(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether the transpose of the last two dimensions, of more than one element each, is contiguous."""
    if strides[-2] != 1 or strides[-1] != shape[-2]:
        return False
    return len(shape) == 2 or shape[0] == 1 or strides[0] == shape[-2] * shape[-1]
