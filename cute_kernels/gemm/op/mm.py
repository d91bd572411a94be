"""mm on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from cute_kernels.gemm import reference
from cute_kernels.gemm.checks import check_mm, check_separate
from cute_kernels.gemm.launch import GemmCall, gemm
from cute_kernels.runtime.autograd import apply, eager_apply, first_derivative_only
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.guarded import GuardedCache, guardable
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference


def mm(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Matrix product ``a b``, the bits of a row independent of the other rows.

    Args:
        a: (M, K) bf16 or fp16, of any strides; rows or columns that start on 16 bytes take the fast kernels.
        b: (K, N) of a's dtype, of any strides.
        out_dtype: bf16, fp16 or fp32; a's (or out's) if None.
        out: (M, N) to write to, last dimension contiguous, in memory of its own; only where neither a gradient nor a
            tangent is wanted. torch.compile may drop a copy that was made for it, which is then an error.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (M, N) in ``out_dtype``, row-major; ``out`` if given.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The contract ``serial_k16``: exact products, one fp32 accumulator over the whole K, ascending, in the tensor
        core's steps of 16, from zero; one rounding to the output's dtype. A row of the product, and of the gradient of
        a, has the same bits whatever M, the row's place, and the other rows. Kernels differ by shape, bits do not (on
        SM100 compiled, not shown). The incoming gradient is rounded to a's dtype. The gradient of b sums over the rows
        of a in their order: it is reproducible, and unchanged by rows of zeros at the end.

    Example:
        >>> import torch
        >>> from cute_kernels import mm
        >>> a, b = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(16, 2, dtype=torch.bfloat16)
        >>> mm(a, b, out_dtype=torch.float32)[0]
        tensor([16., 16.])
    """
    may_be_cached = (
        not is_dynamo_compiling()
        and out is None
        and backend is None
        and (out_dtype is None or type(out_dtype) is torch.dtype)
    )
    if may_be_cached:
        call = CALLS.get(out_dtype, a, b)
        if call is not None:
            return call.run(a, b)
    if uses_reference("mm", a, backend):
        return reference.mm(a, b, out_dtype=out_dtype, out=out)
    check_mm(a, b, out_dtype, out)
    if out is not None:
        return _mm_into(out, a, b)
    wants_gradient = differentiates(a, b)
    if may_be_cached and guardable(a, b):
        forward = GemmCall.of(a, b, None, out_dtype or a.dtype, None, False, True)
        if forward is not None:
            call = MmCall(forward, wants_gradient)
            product = call.run(a, b)
            CALLS.put(out_dtype, call, a, b)
            return product
    if wants_gradient:
        return apply(_MmFunction, a, b, out_dtype, None)
    return _mm_forward(a, b, out_dtype)


def _mm_forward(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    mode = mode_of(a, b)
    out = mode.empty(a, (a.shape[0], b.shape[1]), out_dtype or a.dtype)
    mode.of(gemm)(a, b, out, None, None, None, None, False, False, True)
    return out


def _mm_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mode = mode_of(a, b, out)
    if mode.eager:  # a registered operator looks at the memory, and tells autograd, by itself
        check_separate(out, a, b)
    mode.of(gemm)(a, b, out, None, None, None, None, False, False, True)
    if mode.eager:
        increment_version(out)
    return out


class MmCall(NamedTuple):
    """A product that is ready to be launched, and whether a gradient is wanted."""

    forward: GemmCall
    differentiates: bool

    def run(self, a: Tensor, b: Tensor) -> Tensor:
        """a b."""
        if self.differentiates:
            return _eager_mm(a, b, None, self.forward)
        return self.forward.run(a, b, None)[0]


CALLS: GuardedCache[MmCall] = GuardedCache()


class _MmFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, out_dtype, call):
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        along_rows, along_columns = b.stride()
        ctx.by_columns = along_rows == 1 and along_columns != 1
        return _mm_forward(a, b, out_dtype) if call is None else call.run(a, b, None)[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        a, b = ctx.saved_tensors
        (m, n), da, db = dout.shape, None, None
        dtype = (a if b is None else b).dtype
        dout, mode = dout.to(dtype), mode_of(dout, a, b)
        if ctx.needs_input_grad[0]:
            da = mode.empty(dout, (m, b.shape[0]), dtype)
            mode.of(gemm)(dout, b, da)
        if ctx.needs_input_grad[1]:
            k = a.shape[1]
            if ctx.by_columns:  # the transpose of a row-major matrix: its gradient is one, too
                db = mode.empty(dout, (n, k), dtype)
                mode.of(gemm)(dout, a, db, None, None, None, None, False, True, True)
                db = db.t()
            else:
                db = mode.empty(dout, (k, n), dtype)
                mode.of(gemm)(a, dout, db, None, None, None, None, False, True, True)
        return da, db, None, None


_eager_mm = eager_apply(_MmFunction)
