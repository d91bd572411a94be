"""The quantizers on torch tensors: the public functions."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mxfp8 import launch, reference
from cute_kernels.mxfp8.checks import ScaleLayout, check_dequantize, check_quantize
from cute_kernels.mxfp8.config import Mode
from cute_kernels.runtime.checks import Backend, fail
from cute_kernels.runtime.operators import detached, uses_reference

E4M3 = torch.float8_e4m3fn


def quantize_rowwise(
    x: Tensor,
    *,
    mode: Mode = "rceil",
    scale_layout: ScaleLayout = "plain",
    dtype: torch.dtype = E4M3,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """fp8 of a matrix with one power-of-two scale for each 1 x 32 block of a row.

    Args:
        x: (M, K) bf16, fp16 or fp32; M and K multiples of 32; row-major or the transpose of a row-major matrix, with
            rows (columns) that start on 16 bytes.
        mode: how a scale follows from a block's largest magnitude amax. "rceil": amax / largest rounded up to a power
            of two, nothing saturates; "floor": by amax's exponent alone, up to an eighth saturates; "ceil": the same,
            rounded up; "even": the same from amax rounded to the element's mantissa.
        scale_layout: "plain", or "blocked": the layout that tensor cores read (``to_blocked``), padded by zeros.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (q, scale): q (M, K) of ``dtype``, row-major; scale float8_e8m0fnu, plain (M, K / 32), blocked (roundup(M, 128)
        * roundup(K / 32, 4),).

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        Bit by bit those of the reference: scale byte s = 0 to 254, q = fp8(x * 2^(127 - s)) to nearest even,
        saturating. NaN or infinity anywhere in a block: s = 255, and NaN (0x7F) for all its elements. Mode "even" gives
        the same where amax, rounded, is beyond fp32: from 0x7F780000 (e5m2: 0x7F700000) on. Zeros: s = 0 and q = +-0.
        Not differentiable: a call belongs inside an autograd.Function.

    Source:
        OCP Microscaling Formats specification 1.0, section 6.3; rceil: Mishra et al., Recipes for Pre-training LLMs
        with MXFP8, 2025, arXiv 2506.08027.

    Example:
        >>> import torch
        >>> from cute_kernels import quantize_rowwise
        >>> q, scale = quantize_rowwise(torch.ones(32, 64))
        >>> q.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([32, 2]))
        >>> q[0, 0].item(), scale[0, 0].item()  # 256 * 2^-8
        (256.0, 0.00390625)
    """
    if uses_reference("quantize_rowwise", x, backend, has_cpu_operator=True):
        return reference.quantize_rowwise(x, mode=mode, scale_layout=scale_layout, dtype=dtype)
    check_quantize("quantize_rowwise", "x", x, 2, mode, scale_layout, dtype)
    return launch.quantize(detached(x), dtype, True, False, False, mode, scale_layout)


def quantize_colwise(
    x: Tensor,
    *,
    mode: Mode = "rceil",
    scale_layout: ScaleLayout = "plain",
    dtype: torch.dtype = E4M3,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """fp8 of a matrix with one power-of-two scale for each 32 x 1 block of a column.

    Args:
        x: (M, K) bf16, fp16 or fp32; M and K multiples of 32; row-major or the transpose of a row-major matrix, with
            rows (columns) that start on 16 bytes.
        mode: how a scale follows from a block's largest magnitude amax. "rceil": amax / largest rounded up to a power
            of two, nothing saturates; "floor": by amax's exponent alone, up to an eighth saturates; "ceil": the same,
            rounded up; "even": the same from amax rounded to the element's mantissa.
        scale_layout: "plain", or "blocked": the layout that tensor cores read (``to_blocked``), padded by zeros.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (q, scale): q (M, K) of ``dtype``, column-major (strides 1, M); scale float8_e8m0fnu, plain (K, M / 32), blocked
        (roundup(K, 128) * roundup(M / 32, 4),).

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        Bit by bit those of the reference: scale byte s = 0 to 254, q = fp8(x * 2^(127 - s)) to nearest even,
        saturating. NaN or infinity anywhere in a block: s = 255, and NaN (0x7F) for all its elements. Mode "even" gives
        the same where amax, rounded, is beyond fp32: from 0x7F780000 (e5m2: 0x7F700000) on. Zeros: s = 0 and q = +-0.
        Not differentiable: a call belongs inside an autograd.Function.

    Source:
        OCP Microscaling Formats specification 1.0, section 6.3; rceil: Mishra et al., Recipes for Pre-training LLMs
        with MXFP8, 2025, arXiv 2506.08027.

    Example:
        >>> import torch
        >>> from cute_kernels import quantize_colwise
        >>> q, scale = quantize_colwise(torch.ones(32, 64))
        >>> q.stride(), scale.shape
        ((1, 32), torch.Size([64, 1]))
    """
    if uses_reference("quantize_colwise", x, backend, has_cpu_operator=True):
        return reference.quantize_colwise(x, mode=mode, scale_layout=scale_layout, dtype=dtype)
    check_quantize("quantize_colwise", "x", x, 2, mode, scale_layout, dtype)
    return launch.quantize(detached(x), dtype, False, True, False, mode, scale_layout)


def quantize_dual(
    x: Tensor,
    *,
    mode: Mode = "rceil",
    scale_layout: ScaleLayout = "plain",
    dtype: torch.dtype = E4M3,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``quantize_rowwise`` and ``quantize_colwise`` from one read of x.

    Args:
        x: (M, K) bf16, fp16 or fp32; M and K multiples of 32; row-major or the transpose of a row-major matrix, with
            rows (columns) that start on 16 bytes.
        mode: how a scale follows from a block's largest magnitude amax. "rceil": amax / largest rounded up to a power
            of two, nothing saturates; "floor": by amax's exponent alone, up to an eighth saturates; "ceil": the same,
            rounded up; "even": the same from amax rounded to the element's mantissa.
        scale_layout: "plain", or "blocked": the layout that tensor cores read (``to_blocked``), padded by zeros.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (q, scale, q, scale): the pair of the rows, then the pair of the columns, with the bits and layouts of the two
        functions. Rows: q (M, K) row-major; scale plain (M, K / 32), blocked (roundup(M, 128) * roundup(K / 32, 4),).
        Columns: q (M, K) column-major; scale plain (K, M / 32), blocked (roundup(K, 128) * roundup(M / 32, 4),).

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        Bit by bit those of the reference: scale byte s = 0 to 254, q = fp8(x * 2^(127 - s)) to nearest even,
        saturating. NaN or infinity anywhere in a block: s = 255, and NaN (0x7F) for all its elements. Mode "even" gives
        the same where amax, rounded, is beyond fp32: from 0x7F780000 (e5m2: 0x7F700000) on. Zeros: s = 0 and q = +-0.
        Not differentiable: a call belongs inside an autograd.Function.

    Source:
        OCP Microscaling Formats specification 1.0, section 6.3; rceil: Mishra et al., Recipes for Pre-training LLMs
        with MXFP8, 2025, arXiv 2506.08027.

    Example:
        >>> import torch
        >>> from cute_kernels import quantize_dual
        >>> q_rows, scale_rows, q_columns, scale_columns = quantize_dual(torch.ones(32, 64))
        >>> scale_rows.shape, scale_columns.shape
        (torch.Size([32, 2]), torch.Size([64, 1]))
    """
    if uses_reference("quantize_dual", x, backend, has_cpu_operator=True):
        return reference.quantize_dual(x, mode=mode, scale_layout=scale_layout, dtype=dtype)
    check_quantize("quantize_dual", "x", x, 2, mode, scale_layout, dtype)
    return launch.quantize_dual(detached(x), dtype, True, True, False, mode, scale_layout)


def quantize_3d_colwise(
    w: Tensor,
    *,
    mode: Mode = "rceil",
    block: tuple[int, int] = (32, 1),
    scale_layout: ScaleLayout = "plain",
    dtype: torch.dtype = E4M3,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """fp8 of expert weights with scales along N: the column-major operand of a grouped product over N.

    Args:
        w: (E, N, K) bf16, fp16 or fp32; N and K multiples of 32, E from 0 to the number that 2^30 tiles of 128 x 128
            allow. K contiguous, or (the transpose of such a tensor) N contiguous; rows and experts start on 16 bytes.
        mode: how a scale follows from a block's largest magnitude amax. "rceil": amax / largest rounded up to a power
            of two, nothing saturates; "floor": by amax's exponent alone, up to an eighth saturates; "ceil": the same,
            rounded up; "even": the same from amax rounded to the element's mantissa.
        block: (32, 1): a scale for 32 neighbours along N; (32, 32): one for 32 x 32.
        scale_layout: "plain", or "blocked": the layout that tensor cores read (``to_blocked``), padded by zeros.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (q, scale): q (E, N, K) of ``dtype`` with strides (N K, 1, N); scale float8_e8m0fnu, plain (E, N / 32, K), with
        squares (E, N / 32, K / 32), blocked (E, roundup(K, 128) * roundup(N / 32, 4)). The blocked row of an expert is
        the blocked form of the matrix (K, N / 32), in which a square's scale is repeated for its 32 rows.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        Bit by bit those of the reference: scale byte s = 0 to 254, q = fp8(x * 2^(127 - s)) to nearest even,
        saturating. NaN or infinity anywhere in a block: s = 255, and NaN (0x7F) for all its elements. Mode "even" gives
        the same where amax, rounded, is beyond fp32: from 0x7F780000 (e5m2: 0x7F700000) on. Zeros: s = 0 and q = +-0.
        Not differentiable: a call belongs inside an autograd.Function.

    Source:
        OCP Microscaling Formats specification 1.0, section 6.3; rceil: Mishra et al., Recipes for Pre-training LLMs
        with MXFP8, 2025, arXiv 2506.08027. The layouts are those of torch._scaled_grouped_mm's second operand, as
        pytorch/ao's pull request 3002 introduced them.

    Example:
        >>> import torch
        >>> from cute_kernels import quantize_3d_colwise
        >>> q, scale = quantize_3d_colwise(torch.ones(2, 32, 64))
        >>> q.stride(), scale.shape
        ((2048, 1, 32), torch.Size([2, 1, 64]))
    """
    if uses_reference("quantize_3d_colwise", w, backend, has_cpu_operator=True):
        return reference.quantize_3d_colwise(w, mode=mode, block=block, scale_layout=scale_layout, dtype=dtype)
    check_quantize("quantize_3d_colwise", "w", w, 3, mode, scale_layout, dtype, block)
    return launch.quantize(detached(w), dtype, False, True, block == (32, 32), mode, scale_layout)


def quantize_3d_dual(
    w: Tensor,
    *,
    square: bool = False,
    mode: Mode = "rceil",
    scale_layout: ScaleLayout = "plain",
    dtype: torch.dtype = E4M3,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both operands of expert weights from one read: for the forward scaled along K, for dgrad scaled along N.

    Args:
        w: (E, N, K) bf16, fp16 or fp32; N and K multiples of 32, E from 0 to the number that 2^30 tiles of 128 x 128
            allow. K contiguous, or (the transpose of such a tensor) N contiguous; rows and experts start on 16 bytes.
        square: blocks of 32 x 32, whose scales and elements serve both operands.
        mode: how a scale follows from a block's largest magnitude amax. "rceil": amax / largest rounded up to a power
            of two, nothing saturates; "floor": by amax's exponent alone, up to an eighth saturates; "ceil": the same,
            rounded up; "even": the same from amax rounded to the element's mantissa.
        scale_layout: "plain", or "blocked": the layout that tensor cores read (``to_blocked``), padded by zeros.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (q, scale, q, scale): the pair of the forward, then the pair of dgrad. Forward: q (E, N, K) row-major; scale
        plain (E, N, K / 32), blocked (E, roundup(N, 128) * roundup(K / 32, 4)). Dgrad: q (E, N, K) of ``dtype`` with
        strides (N K, 1, N); scale float8_e8m0fnu, plain (E, N / 32, K), with squares (E, N / 32, K / 32), blocked (E,
        roundup(K, 128) * roundup(N / 32, 4)). The blocked row of an expert is the blocked form of the matrix (K, N /
        32), in which a square's scale is repeated for its 32 rows. With squares the plain scales are one tensor (E, N /
        32, K / 32), returned twice.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        Bit by bit those of the reference: scale byte s = 0 to 254, q = fp8(x * 2^(127 - s)) to nearest even,
        saturating. NaN or infinity anywhere in a block: s = 255, and NaN (0x7F) for all its elements. Mode "even" gives
        the same where amax, rounded, is beyond fp32: from 0x7F780000 (e5m2: 0x7F700000) on. Zeros: s = 0 and q = +-0.
        Not differentiable: a call belongs inside an autograd.Function.

    Source:
        OCP Microscaling Formats specification 1.0, section 6.3; rceil: Mishra et al., Recipes for Pre-training LLMs
        with MXFP8, 2025, arXiv 2506.08027. The layouts are those of torch._scaled_grouped_mm's second operand, as
        pytorch/ao's pull request 3002 introduced them.

    Example:
        >>> import torch
        >>> from cute_kernels import quantize_3d_dual
        >>> q_k, scale_k, q_n, scale_n = quantize_3d_dual(torch.ones(2, 32, 64))
        >>> scale_k.shape, scale_n.shape
        (torch.Size([2, 32, 2]), torch.Size([2, 1, 64]))
    """
    if not isinstance(square, bool):
        fail("quantize_3d_dual", "square", "be a bool", repr(square), TypeError)
    if uses_reference("quantize_3d_dual", w, backend, has_cpu_operator=True):
        return reference.quantize_3d_dual(w, square=square, mode=mode, scale_layout=scale_layout, dtype=dtype)
    check_quantize("quantize_3d_dual", "w", w, 3, mode, scale_layout, dtype)
    if square and scale_layout == "plain":
        q_k, s, q_n = launch.quantize_squares(detached(w), dtype, True, True, True, mode, scale_layout)
        return q_k, s, q_n, s
    return launch.quantize_dual(detached(w), dtype, True, True, square, mode, scale_layout)


def dequantize(
    q: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16, backend: Backend | None = None
) -> Tensor:
    """The values ``q * 2^(s - 127)`` that the quantizers' results stand for.

    Args:
        q: (M, K) or (E, N, K) float8_e4m3fn or float8_e5m2, row-major (blocks along the last dimension) or column-major
            (blocks along the last but one), without gaps.
        scale: float8_e8m0fnu in any of the layouts that the quantizers return; its shape tells which.
        dtype: bf16, fp16 or fp32.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The values in ``dtype``, of q's shape and strides.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The product in fp32, where it is exact unless it overflows, and one rounding to ``dtype``.

    Source:
        OCP Microscaling Formats specification 1.0, section 6.2.

    Example:
        >>> import torch
        >>> from cute_kernels import dequantize, quantize_rowwise
        >>> x = torch.full((32, 32), 0.75)
        >>> torch.equal(dequantize(*quantize_rowwise(x), dtype=torch.float32), x)
        True
    """
    if uses_reference("dequantize", q, backend, has_cpu_operator=True):
        return reference.dequantize(q, scale, dtype=dtype)
    transposed, _ = check_dequantize(q, scale, dtype)
    return launch.dequantize(q, scale, dtype, transposed)


def to_blocked(scale: Tensor) -> Tensor:
    """Scales in the layout that tensor cores read: atoms of 128 x 4, padded by zeros.

    Plain torch on every device.

    Args:
        scale: (R, C) or (E, R, C) float8_e8m0fnu (or uint8) of any strides; R counts rows of the operand, C blocks of a
            row. (For plain scales (E, N / 32, K) of ``quantize_3d_colwise`` pass their ``.mT``.)

    Returns:
        (roundup(R, 128) * roundup(C, 4),), or such a row for each expert. Scale (i, j) lies at ((i // 128) *
        (roundup(C, 4) // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Source:
        NVIDIA cuBLAS documentation, 1D block scaling factors layout.

    Example:
        >>> import torch
        >>> from cute_kernels import to_blocked
        >>> blocked = to_blocked(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
        >>> blocked.shape, blocked[16:18].tolist()  # row 1 lies 16 bytes behind row 0
        (torch.Size([512]), [3, 4])
    """
    return reference.to_blocked(scale)


def from_blocked(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of ``to_blocked``.

    Plain torch on every device.

    Args:
        blocked: the result of ``to_blocked``, float8_e8m0fnu or uint8: one row, or two-dimensional with a row for each
            expert.
        rows, columns: of the scales, without their padding.

    Returns:
        (rows, columns), or (E, rows, columns) from two-dimensional ``blocked``, contiguous, in its dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Example:
        >>> import torch
        >>> from cute_kernels import from_blocked, to_blocked
        >>> scale = torch.arange(8, dtype=torch.uint8).view(4, 2)
        >>> torch.equal(from_blocked(to_blocked(scale), 4, 2), scale)
        True
    """
    return reference.from_blocked(blocked, rows, columns)
