"""bmm on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from cute_kernels.gemm import reference
from cute_kernels.gemm.checks import check_bmm
from cute_kernels.gemm.launch import _forced, calls, gemm_op, plan_product
from cute_kernels.gemm.op import _run
from cute_kernels.runtime.autograd import eager_apply, first_derivative_only
from cute_kernels.runtime.checks import Backend, expect
from cute_kernels.runtime.operators import is_plain


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
    if not isinstance(a, Tensor) or backend is not None or not a.is_cuda:
        expect(backend in (None, "reference"), "bmm", "backend", "be None or 'reference'", repr(backend))
        return reference.bmm(a, b, out_dtype=out_dtype)
    try:
        call = key = None
        if not is_dynamo_compiling() and not _forced:
            key = ("bmm", a.shape, b.shape, out_dtype, is_grad_enabled())
            call = calls.find(key, a, b)
        if call is not None:
            product, differentiates = call
            return _apply_bmm(a, b, (product, out_dtype)) if differentiates else product(a, b, None)[0]
        eager = is_plain(a, b)
        differentiates = is_grad_enabled() and (a.requires_grad or b.requires_grad)
        differentiates = differentiates or forward_ad._current_level >= 0  # autograd refuses tangents
        product = plan_product("bmm", a, b, None, None, out_dtype, False) if eager else None
        if differentiates:
            result = (_apply_bmm if eager else _BmmFunction.apply)(a, b, (product, out_dtype))
        else:
            result = _bmm_forward(a, b, product, out_dtype)
        if eager and key is not None:
            calls.remember(key, (product, differentiates), a, b)
        return result
    except Exception:  # an argument that is no batch, or no dtype, or what the kernel's entry refuses
        check_bmm(a, b, out_dtype)
        raise


def _bmm_forward(a: Tensor, b: Tensor, product: Callable | None, out_dtype: torch.dtype | None) -> Tensor:
    if product is not None:
        return product(a, b, None)[0]
    check_bmm(a, b, out_dtype)
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2], dtype=out_dtype or a.dtype)
    gemm_op(a, b, out, trans_b=True)
    return out


class _BmmFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, options):
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        _, along_rows, along_columns = b.stride()
        ctx.by_columns = along_rows == 1 and along_columns != 1
        return _bmm_forward(a, b, *options)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        a, b = ctx.saved_tensors
        (entries, m, n), da, db = dout.shape, None, None
        dout = dout.to((a if b is None else b).dtype)
        if ctx.needs_input_grad[0]:
            da = dout.new_empty(entries, m, b.shape[1])
            _run(dout, b, da)
        if ctx.needs_input_grad[1]:
            if ctx.by_columns:  # as in mm
                db = dout.new_empty(entries, n, a.shape[2])
                _run(dout, a, db, trans_a=True, trans_b=True)
                db = db.mT
            else:
                db = dout.new_empty(entries, a.shape[2], n)
                _run(a, dout, db, trans_a=True, trans_b=True)
        return da, db, None


_apply_bmm = eager_apply(_BmmFunction)
