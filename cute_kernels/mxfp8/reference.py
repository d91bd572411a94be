"""The quantizers in plain torch: the specification of the kernels, bit by bit, and what runs without a supported GPU.

Of a block of 32 values, amax = max |x| in fp32, NaN above all; E, m = exponent and mantissa bits:
rceil   s = the exponent of amax * fp32(1 / largest), rounded up to a power of two
floor   s = E - e;   ceil  s = E - e + (m != 0);   even  floor of amax rounded to the element's mantissa
        (largest = 448 or 57344, e = 8 or 15 for e4m3 or e5m2; s from 0 to 254, 255 for NaN and infinity, by even also
        for finite amax that it rounds beyond fp32: of bits from 0x7F780000 or 0x7F700000 on)
q = fp8(x * 2^(127 - s)), to nearest even, saturating;  x' = q * 2^(s - 127)
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mxfp8.checks import (
    SCALE,
    blocked_size,
    check_aligned,
    check_dequantize,
    check_from_blocked,
    check_quantize,
    check_to_blocked,
)
from cute_kernels.mxfp8.config import BLOCK
from cute_kernels.runtime.strict import has_address

E4M3 = torch.float8_e4m3fn
_RECIPROCAL = {E4M3: 0x3B124925, torch.float8_e5m2: 0x37924925}  # bits of fp32(1 / largest)
_EXPONENT = {E4M3: 8, torch.float8_e5m2: 15}
_HALF = {E4M3: 1 << 19, torch.float8_e5m2: 1 << 20}  # half a unit of the element's mantissa, in fp32 bits


def quantize_rowwise(
    x: Tensor, *, mode: str = "rceil", scale_layout: str = "plain", dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """Blocks of 1 x 32; see ``cute_kernels.quantize_rowwise``."""
    _check("quantize_rowwise", "x", x, 2, mode, scale_layout, dtype)
    return along_k(x, mode, scale_layout, dtype)


def quantize_colwise(
    x: Tensor, *, mode: str = "rceil", scale_layout: str = "plain", dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """Blocks of 32 x 1; see ``cute_kernels.quantize_colwise``."""
    _check("quantize_colwise", "x", x, 2, mode, scale_layout, dtype)
    return along_n(x, mode, scale_layout, dtype)


def quantize_dual(
    x: Tensor, *, mode: str = "rceil", scale_layout: str = "plain", dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both; see ``cute_kernels.quantize_dual``."""
    _check("quantize_dual", "x", x, 2, mode, scale_layout, dtype)
    return *along_k(x, mode, scale_layout, dtype), *along_n(x, mode, scale_layout, dtype)


def quantize_3d_colwise(
    w: Tensor,
    *,
    mode: str = "rceil",
    block: tuple[int, int] = (32, 1),
    scale_layout: str = "plain",
    dtype: torch.dtype = E4M3,
) -> tuple[Tensor, Tensor]:
    """Blocks along N, or of 32 x 32; see ``cute_kernels.quantize_3d_colwise``."""
    _check("quantize_3d_colwise", "w", w, 3, mode, scale_layout, dtype, block)
    return along_n(w, mode, scale_layout, dtype, block == (32, 32))


def quantize_3d_dual(
    w: Tensor,
    *,
    square: bool = False,
    mode: str = "rceil",
    scale_layout: str = "plain",
    dtype: torch.dtype = E4M3,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both operands of the expert weights; see ``cute_kernels.quantize_3d_dual``."""
    _check("quantize_3d_dual", "w", w, 3, mode, scale_layout, dtype)
    q_k, s_k = along_k(w, mode, scale_layout, dtype, square)
    q_n, s_n = along_n(w, mode, scale_layout, dtype, square)
    return q_k, s_k, q_n, s_k if square and scale_layout == "plain" else s_n


def dequantize(q: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values that fp8 elements and their scales stand for; see ``cute_kernels.dequantize``."""
    transposed, kind = check_dequantize(q, scale, dtype)
    if q.numel() and has_address(q):
        check_aligned("dequantize", "q", q)
    q = q.detach()
    if kind is None:
        return torch.empty_strided(q.shape, q.stride(), dtype=dtype, device=q.device)
    rows = q.mT if transposed else q
    s = scale.view(torch.uint8)
    if kind == "blocked":
        s = from_blocked(s, rows.shape[-2], rows.shape[-1] // BLOCK)
    elif kind == "rows":
        s = s.mT
    elif kind == "square":
        s = (s.mT if transposed else s).repeat_interleave(BLOCK, -2)
    s = s.to(torch.int32)
    bits = torch.where(s == 0, 0x00400000, torch.where(s == 255, 0x7FC00000, s << 23))
    values = rows.float().unflatten(-1, (rows.shape[-1] // BLOCK, BLOCK)) * bits.view(torch.float32).unsqueeze(-1)
    values = values.flatten(-2).to(dtype)
    return values.mT if transposed else values


def to_blocked(scale: Tensor) -> Tensor:
    """See ``cute_kernels.to_blocked``."""
    check_to_blocked(scale)
    rows, columns = scale.shape[-2:]
    padded = scale.new_zeros((*scale.shape[:-2], -(-rows // 128) * 128, -(-columns // 4) * 4), dtype=torch.uint8)
    padded[..., :rows, :columns] = scale.view(torch.uint8)
    atoms = padded.unflatten(-1, (padded.shape[-1] // 4, 4)).unflatten(-3, (padded.shape[-2] // 128, 4, 32))
    # (row of atoms, 4, 32, column of atoms, 4) -> (row of atoms, column of atoms, 32, 4, 4)
    order = [0, 3, 2, 1, 4] if scale.dim() == 2 else [0, 1, 4, 3, 2, 5]
    return atoms.permute(order).reshape(*scale.shape[:-2], blocked_size(rows, columns)).view(scale.dtype)


def from_blocked(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """See ``cute_kernels.from_blocked``."""
    check_from_blocked(blocked, rows, columns)
    tiles = (-(-rows // 128), -(-columns // 4))
    atoms = blocked.view(torch.uint8).unflatten(-1, (*tiles, 32, 4, 4))
    order = [0, 3, 2, 1, 4] if blocked.dim() == 1 else [0, 1, 4, 3, 2, 5]
    padded = atoms.permute(order).reshape(*blocked.shape[:-1], 128 * tiles[0], 4 * tiles[1])
    return padded[..., :rows, :columns].contiguous().view(blocked.dtype)


def along_k(x: Tensor, mode: str, scale_layout: str, dtype: torch.dtype, square: bool = False):
    """(q row-major, scales) of blocks along the last dimension, unchecked."""
    q, s, squares = _quantize(x.detach().contiguous(), mode, dtype, square)
    if scale_layout == "blocked":
        return q, to_blocked(s)
    return q, squares if square else s


def along_n(x: Tensor, mode: str, scale_layout: str, dtype: torch.dtype, square: bool = False):
    """(q column-major, scales) of blocks along the last dimension but one, unchecked."""
    q, s, squares = _quantize(x.detach().mT.contiguous(), mode, dtype, square)
    if scale_layout == "blocked":
        return q.mT, to_blocked(s)
    if square:
        s = squares
    # A copy even where a dimension of one element makes the transpose count as contiguous: the strides are its own
    return q.mT, s if x.dim() == 2 else s.mT.clone(memory_format=torch.contiguous_format)


def _check(op: str, name: str, x: Tensor, *options) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    check_quantize(op, name, x, *options)
    if x.numel() and has_address(x):
        check_aligned(op, name, x)


def _quantize(x: Tensor, mode: str, dtype: torch.dtype, square: bool):
    """(q, the scale of each block of each row, the scales of the squares or None)."""
    rows, columns = x.shape[-2:]
    blocks = x.float().unflatten(-1, (columns // BLOCK, BLOCK))
    amax = blocks.abs().amax(-1)
    squares = None
    if square:
        amax = amax.unflatten(-2, (rows // BLOCK, BLOCK)).amax(-2)
        squares = scales(amax, mode, dtype).to(torch.uint8).view(SCALE)
        amax = amax.repeat_interleave(BLOCK, -2)
    s = scales(amax, mode, dtype)
    factor = torch.where(s == 255, 0x7FC00000, (254 - s) << 23).view(torch.float32)
    largest = torch.finfo(dtype).max
    values = (blocks * factor.unsqueeze(-1)).clamp(-largest, largest)
    values = torch.where(values.isnan(), torch.nan, values)  # NaN has one form, the positive one
    return values.flatten(-2).to(dtype), s.to(torch.uint8).view(SCALE), squares


def scales(amax: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """The scales' bytes, int32, of fp32 largest magnitudes."""
    largest = _EXPONENT[dtype]
    if mode == "rceil":
        reciprocal = torch.tensor(_RECIPROCAL[dtype], dtype=torch.int32, device=amax.device).view(torch.float32)
        exponent, mantissa = _split(amax * reciprocal)
        s = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0).to(torch.int32)
    elif mode == "even":
        bits = amax.view(torch.int32) & 0x7FFFFFFF
        exponent = (torch.where(bits >= 0x7F800000, bits, bits + _HALF[dtype]) >> 23) & 255
        s = (exponent - largest).clamp(min=0)
    else:
        exponent, mantissa = _split(amax)
        s = (exponent - largest + (mode == "ceil") * (mantissa != 0).to(torch.int32)).clamp(min=0)
    return torch.where(exponent == 255, 255, s)


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    bits = values.view(torch.int32)
    return (bits >> 23) & 255, bits & 0x7FFFFF
