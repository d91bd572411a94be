"""bmm on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.gemm import reference
from cute_kernels.gemm.checks import check_bmm
from cute_kernels.gemm.launch import gemm
from cute_kernels.runtime.autograd import apply, first_derivative_only
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Matrix products ``a[i] b[i]``, each with the bits of ``mm(a[i], b[i])``, in one launch.

    Args:
        a: (L, M, K) bf16 or fp16, of any strides; rows or columns that start on 16 bytes, in each entry, take the fast
            kernels. The entries may be one and the same (expanded), or overlap.
        b: (L, K, N) of a's dtype, of any strides.
        out_dtype: bf16, fp16 or fp32; a's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (L, M, N) in ``out_dtype``, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The contract ``serial_k16``: exact products, one fp32 accumulator over the whole K, ascending, in the tensor
        core's steps of 16, from zero; one rounding to the output's dtype. A row of the product, and of the gradient of
        a, has the same bits whatever L and M, the row's place, the other rows and the other entries. Kernels differ by
        shape, bits do not (on SM100 compiled, not shown). The incoming gradient is rounded to a's dtype. The gradient
        of b sums over the rows of a in their order: it is reproducible, and unchanged by rows of zeros at the end.
        Gradients of an expanded tensor are added over the entries by torch.

    Example:
        >>> import torch
        >>> from cute_kernels import bmm
        >>> a, b = torch.ones(5, 3, 16, dtype=torch.bfloat16), torch.ones(5, 16, 2, dtype=torch.bfloat16)
        >>> bmm(a, b).shape
        torch.Size([5, 3, 2])
    """
    if uses_reference("bmm", a, backend):
        return reference.bmm(a, b, out_dtype=out_dtype)
    check_bmm(a, b, out_dtype)
    if differentiates(a, b):
        return apply(_BmmFunction, a, b, out_dtype)
    return _bmm_forward(a, b, out_dtype)


def _bmm_forward(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    entries, m, _ = a.shape
    mode = mode_of(a, b)
    out = mode.empty(a, (entries, m, b.shape[2]), out_dtype or a.dtype)
    mode.of(gemm)(a, b, out, None, None, None, None, False, False, True)
    return out


class _BmmFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, out_dtype):
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        _, along_rows, along_columns = b.stride()
        ctx.by_columns = along_rows == 1 and along_columns != 1
        return _bmm_forward(a, b, out_dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        a, b = ctx.saved_tensors
        (entries, m, n), da, db = dout.shape, None, None
        dtype = (a if b is None else b).dtype
        dout, mode = dout.to(dtype), mode_of(dout, a, b)
        if ctx.needs_input_grad[0]:
            da = mode.empty(dout, (entries, m, b.shape[1]), dtype)
            mode.of(gemm)(dout, b, da)
        if ctx.needs_input_grad[1]:
            k = a.shape[2]
            if ctx.by_columns:  # as in mm
                db = mode.empty(dout, (entries, n, k), dtype)
                mode.of(gemm)(dout, a, db, None, None, None, None, False, True, True)
                db = db.mT
            else:
                db = mode.empty(dout, (entries, k, n), dtype)
                mode.of(gemm)(a, dout, db, None, None, None, None, False, True, True)
        return da, db, None
