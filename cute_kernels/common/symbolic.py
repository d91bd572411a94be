"""Tensors as the compiler sees them: sizes and strides that a call brings."""

import cutlass
import cutlass.cute as cute

Dtype = type[cutlass.Numeric]


def symbolic_matrix(dtype: Dtype, shape, aligned: bool, any_stride: bool = False):
    """A matrix, or a batch of some, as the compiler sees it, row-major.

    ``aligned``: its base and its rows start on 16 bytes.
    """
    itemsize = dtype.width // 8
    divisor = 16 // itemsize if aligned else 1
    strides = [cute.sym_int64(divisibility=1 if any_stride else divisor) for _ in shape]
    if not any_stride:
        strides[-1] = 1
    return cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=16 if aligned else itemsize)
