"""The arithmetic of scales in registers, and where a tile's scales lie in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.mxfp8.config import BLOCK, TILE, ScaleRule

Dtype = type[cutlass.Numeric]
MAGNITUDE = 0x7FFFFFFF


@cute.jit
def scale_of(bits: Int32, rule: cutlass.Constexpr[ScaleRule]) -> Int32:
    """The scale's byte of a block whose largest magnitude has these fp32 bits."""
    s = ((bits + rule.add) >> 23) - rule.sub
    s = Int32(0) if bits < rule.lower else s
    return Int32(255) if bits >= rule.upper else s


def largest_of_columns(rX: cute.Tensor) -> tuple[Int32, Int32]:
    """fp32 bits of the largest magnitude of each of two columns (2, 32)."""
    dtype = rX.element_type
    if dtype.width == 16:
        words = cute.recast_tensor(rX, Int32)
        return split(largest([words[i] for i in range(BLOCK)], dtype), dtype)
    low, high = (largest([rX[j, i] for i in range(BLOCK)], dtype) for j in range(2))
    return float_bits(low) & MAGNITUDE, float_bits(high) & MAGNITUDE


def largest_of_chunk(rX: cute.Tensor) -> Int32:
    """fp32 bits of the largest magnitude of 16 bytes."""
    dtype = rX.element_type
    if dtype.width == 16:
        words = cute.recast_tensor(rX, Int32)
        return cutlass.max(*split(largest([words[i] for i in range(4)], dtype), dtype))
    return float_bits(largest([rX[i] for i in range(4)], dtype)) & MAGNITUDE


def largest(words: list, dtype: Dtype):
    """Largest magnitude, NaN above all; of words that hold two numbers, of each half. Its sign means nothing."""
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2", Float32: "f32"}[dtype]
    while len(words) > 1:
        words = [
            cute.arch.inline_ptx(
                f"max.NaN.xorsign.abs.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
                write_only_types=[Float32 if dtype is Float32 else Int32],
                read_only_args=[words[i], words[i + 1]],
            )
            for i in range(0, len(words), 2)
        ]
    return words[0]


def split(word: Int32, dtype: Dtype) -> tuple[Int32, Int32]:
    """fp32 bits of the magnitudes of a word's two numbers."""
    if dtype is cutlass.BFloat16:
        return (word << 16) & MAGNITUDE, word & 0x7FFF0000
    pair = cute.make_rmem_tensor((2,), dtype)
    cute.make_tensor(cute.recast_ptr(pair.iterator, dtype=Int32), cute.make_layout(1))[0] = word
    wide = cute.make_rmem_tensor((2,), Float32)
    wide.store(pair.load().to(Float32))
    return float_bits(wide[0]) & MAGNITUDE, float_bits(wide[1]) & MAGNITUDE


def float_bits(value: Float32) -> Int32:
    """The bits of an fp32 value."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def as_float(bits: Int32) -> Float32:
    """The fp32 value of these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def byte_at(pointer: cute.Pointer) -> cute.Tensor:
    """The byte at a pointer, as a tensor of one element."""
    return cute.make_tensor(pointer, cute.make_layout(1))


def word_at(pointer: cute.Pointer) -> cute.Tensor:
    """The 32-bit word at a pointer to bytes that is aligned to it, as a tensor of one element."""
    return cute.make_tensor(cute.recast_ptr(pointer.align(4), dtype=Int32), cute.make_layout(1))


def put(target: cute.Tensor, value) -> None:
    """Store to a tensor of one element."""
    target[0] = value


def staged_at(kind: str, row, column):
    """Place of a tile's scale (row, column) in shared memory, in the order in which it is written out."""
    if kind == "blocked":
        return row % 32 * 16 + row // 32 * 4 + column
    return column * TILE + row if kind == "rows" else row * 4 + column


@cute.jit
def base_of(tensor: cute.Tensor, offset: Int32):
    """16-byte aligned pointer to 32-bit words at a byte offset, without the tensor's swizzle."""
    address = tensor.iterator.toint() + offset
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
