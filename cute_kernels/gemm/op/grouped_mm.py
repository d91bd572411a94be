"""grouped_mm on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cute_kernels.gemm import reference
from cute_kernels.gemm.checks import check_grouped_mm, check_grouped_mm_mxfp8
from cute_kernels.gemm.launch_grouped import grouped_rows, grouped_sums, grouped_sums_into
from cute_kernels.gemm.launch_mxfp8 import grouped_rows_mxfp8
from cute_kernels.gemm.op.bmm import bmm
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import Mode, differentiates, mode_of, uses_reference


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Matrix products of groups of rows, a row's bits independent of all other rows and groups.

    The four forms of ``torch.nn.functional.grouped_mm``; group e has the rows from ``offs[e - 1]`` up to ``offs[e]``:

    ========== ========== =========== ==============================================================
    a          b          result      is
    ========== ========== =========== ==============================================================
    (R, K)     (E, K, N)  (R, N)      each group's rows times its matrix: experts, and their dx
    (M, R)     (R, N)     (E, M, N)   each group's columns times its rows: the weights' gradients
    (E, M, K)  (K, R)     (M, R)      each group's matrix times its columns; stored by columns
    (E, M, K)  (E, K, N)  (E, M, N)   ``bmm``, without ``offs``
    ========== ========== =========== ==============================================================

    Args:
        a: bf16 or fp16, of any strides. The fast kernels take tokens as rows, contiguous and on 16 bytes (or their
            transpose, where tokens are columns), and matrices whose rows or columns are; a slow one takes the others.
        b: like a. Gradients of a leaf b (E, K, N) that has a ``main_grad`` (fp32) are added to it.
        offs: (E,) int32 on a's device: where each group ends, ascending; E at most 1024. A group may be empty, and may
            start at any row. No value of it is read by the host.
        b_scale: with the first form, for bf16 rows and matrices in mxfp8: (E, N, K / 32) float8_e8m0fnu, contiguous. b
            is then float8_e4m3fn, the ``.mT`` of contiguous elements (E, N, K) that start on 16 bytes, as
            ``quantize_rowwise`` makes them of (E N, K). N and K are multiples of 32. Inference alone: no gradients.
        out_dtype: bf16, fp16 or fp32; a's if None.
        accumulate_into: with the second form: (E, M, N) fp32, contiguous, that the sums start from and are written to,
            without autograd. The part of a group without rows stays as it is.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch, which reads
            ``offs`` on the host and raises ValueError where it does not ascend.

    Returns:
        As above, in ``out_dtype``; rows beyond the last group are zeros. ``accumulate_into`` if given.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels: neither a Hopper nor a data-centre Blackwell.

    Numerics:
        The contract ``serial_k16``. A row of the first form has the bits of ``mm(a[r : r + 1], b[e])``, a column of the
        third those of ``mm(a[e], b[:, r : r + 1])``, whatever the other rows, the sizes and the number of groups, and
        the kernel; so has a row of the gradient of a. NaN in a row reaches no other. A group of the second form has the
        bits of ``mm(a[:, rows], b[rows])``: its sums run over its rows in their order, 16 at a time from its first one,
        so they are reproducible, independent of other groups, and unchanged by rows of zeros at its end, or by a
        multiple of 16 of them in front. With ``accumulate_into``, or a ``main_grad``, the accumulators start from it:
        calls one after the other have the bits of one call where each group's rows are cut at multiples of 16.
        With ``b_scale`` the result has the bits of ``grouped_mm(a, dequantize(b.mT, b_scale).mT, offs)``. Up to a mean
        of 64 rows a group the elements become bf16 on their way to the tensor cores, so that half the bytes are read.
        For more rows, and on SM100, the matrices are dequantized first, into memory that the call allocates. An element
        that is NaN while its scale is not, which no quantizer makes, counts as 480 where rows are few on SM90.
        An ``offs`` that does not ascend, or goes beyond the rows, gives wrong results, but reads and writes no other
        memory: an end counts as at least the one before, and at most R.

    Example:
        >>> import torch
        >>> from cute_kernels import grouped_mm
        >>> a, b = torch.ones(5, 16, dtype=torch.bfloat16), torch.ones(3, 16, 2, dtype=torch.bfloat16)
        >>> grouped_mm(a, b, torch.tensor([2, 2, 4], dtype=torch.int32))[:, 0].tolist()
        [16.0, 16.0, 16.0, 16.0, 0.0]
    """
    if uses_reference("grouped_mm", a, backend, has_cpu_operator=True):
        options = {"b_scale": b_scale, "out_dtype": out_dtype, "accumulate_into": accumulate_into}
        return reference.grouped_mm(a, b, offs, **options)
    if b_scale is not None:
        check_grouped_mm_mxfp8(a, b, b_scale, offs, out_dtype, accumulate_into)
        return mode_of(a, b, b_scale, offs).of(grouped_rows_mxfp8)(a, b, b_scale, offs, out_dtype or a.dtype)
    check_grouped_mm(a, b, offs, out_dtype, accumulate_into)
    if offs is None:
        return bmm(a, b, out_dtype=out_dtype)
    if accumulate_into is not None:
        mode = mode_of(a, b, offs, accumulate_into)
        mode.of(grouped_sums_into)(a, b, offs, accumulate_into)
        if mode.eager:
            increment_version(accumulate_into)
        return accumulate_into
    dtype = out_dtype or a.dtype
    if a.dim() == b.dim() == 2:
        return apply(_SumsFunction, a, b, offs, dtype) if differentiates(a, b) else _sums_forward(a, b, offs, dtype)
    if a.dim() == 3:
        return _rows(b.t(), a.mT, offs, dtype).t()
    return _rows(a, b, offs, dtype)


def _rows(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    if differentiates(a, b):
        return apply(_RowsFunction, a, b, offs, out_dtype)
    return _rows_forward(a, b, offs, out_dtype)


def _rows_forward(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return mode_of(a, b, offs).of(grouped_rows)(a, b, offs, out_dtype)


def _sums_forward(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return mode_of(a, b, offs).of(grouped_sums)(a, b, offs, out_dtype)


class _RowsFunction(torch.autograd.Function):
    """Rows a (R, K) times b (E, K, N)."""

    @staticmethod
    def forward(ctx, a, b, offs, out_dtype):
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b, offs)
        ctx.main_grad = getattr(b, "main_grad", None)
        return _rows_forward(a, b, offs, out_dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        a, b, offs = ctx.saved_tensors
        da = db = None
        mode = mode_of(dout, a, b, offs, ctx.main_grad)
        dout = _readable(dout.to(b.dtype), mode.eager)
        if ctx.needs_input_grad[0]:
            da = mode.of(grouped_rows)(dout, b.mT, offs, b.dtype)
        if needs_gradient(ctx.needs_input_grad[1], b, ctx.main_grad):
            db = weight_gradient(mode, "grouped_mm", "b", a, dout, offs, b, ctx.main_grad, False)
        return da, db, None, None


def weight_gradient(
    mode: Mode,
    op: str,
    name: str,
    a: Tensor,
    dout: Tensor,
    offs: Tensor,
    weight: Tensor,
    main_grad: Tensor | None,
    by_columns: bool,
) -> Tensor | None:
    """The gradient of a weight (E, K, N), or (E, N, K) that is ``by_columns``, of rows a (R, K) and dout (R, N).

    What autograd gets: None where it was added to main_grad.
    """
    of_columns = not by_columns and weight.stride(1) == 1 and weight.stride(2) != 1  # (E, K, N) as a view of (E, N, K)
    if main_grad is not None:
        target, dweight = gradient_buffer(op, name, weight, main_grad)
        if dweight is None:
            mode.of(grouped_sums_into)(*((dout.t(), a) if by_columns else (a.t(), dout)), offs, target)
            return None
    sums = mode.of(grouped_sums)
    if by_columns or of_columns:
        dweight = sums(dout.t(), a, offs, weight.dtype)
        return dweight.mT if of_columns else dweight
    return sums(a.t(), dout, offs, weight.dtype)


class _SumsFunction(torch.autograd.Function):
    """Columns a (M, R) times rows b (R, N) of each group."""

    @staticmethod
    def forward(ctx, a, b, offs, out_dtype):
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offs)
        return _sums_forward(a, b, offs, out_dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        a, b, offs = ctx.saved_tensors
        dtype = (a if b is None else b).dtype
        mode = mode_of(dout, a, b, offs)
        dout, rows = _readable(dout.to(dtype), mode.eager), mode.of(grouped_rows)
        da = rows(b, dout.mT, offs, dtype).t() if ctx.needs_input_grad[0] else None
        db = rows(a.t(), dout, offs, dtype) if ctx.needs_input_grad[1] else None
        return da, db, None, None


def _readable(dout: Tensor, eager: bool) -> Tensor:
    """An incoming gradient; of an expanded number or row a copy, which the fast kernels read."""
    return dout if not eager or all(dout.stride()) else dout.contiguous()


__all__ = ["grouped_mm", "weight_gradient"]
