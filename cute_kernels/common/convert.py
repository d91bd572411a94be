"""Conversion to fp32 in as few instructions as there are."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

UPPER_HALF = -0x10000


def to_fp32(values):
    """A vector of any float dtype in fp32.

    A bf16 number is the upper half of its fp32 bits: of two in a word one is a shift and one a mask. The compiler takes
    a permutation and a shift for the second, on the pipe that is narrowest here. For values that differ in each turn of
    a loop: what does not is computed ahead of it, into twice the registers.
    """
    count = cute.size(values.shape)
    if values.dtype is not cutlass.BFloat16 or count % 2:
        return values.to(Float32)
    packed = cute.make_rmem_tensor((count,), values.dtype)
    packed.store(values)
    words = cute.recast_tensor(packed, Int32).load()
    bits = cute.make_rmem_tensor((2, count // 2), Int32)
    bits[0, None].store(words * 0x10000)
    bits[1, None].store(words & UPPER_HALF)
    return cute.recast_tensor(cute.make_tensor(bits.iterator, cute.make_layout(count)), Float32).load()
