"""New keys and values behind those of a cache, contiguous or in pages.

A thread moves 16 bytes of k and of v: gmem k, v -> registers -> gmem k_cache, v_cache. Where they go follows from the
lengths on the device.

Profile: ncu --clock-control none -k regex:Append python -m bench.bench_decode --filter prefill
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.config import AppendSpec
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

THREADS = 128
VECTOR = 8  # elements of 16 bytes


class Append:
    """See the module; arguments as in the builder ``append``."""

    def __init__(self, spec: AppendSpec):
        self.dtype = cutlass_dtype(spec.dtype)
        self.sizes = spec.head_size, spec.head_size_v
        self.vectors = max(self.sizes) // VECTOR
        self.packed, self.paged = spec.packed, spec.paged

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        cache_seqlens: cute.Tensor,
        page_table: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        max_seqlen: Int32,
        stream,
    ):
        ctas = cute.ceil_div(max_seqlen * k.shape[2] * self.vectors, THREADS)  # of a sequence
        self.kernel(k, v, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q).launch(
            grid=[ctas * cache_seqlens.shape[0], 1, 1],  # y ends at 65535
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        cache_seqlens: cute.Tensor,
        page_table: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        part, sequence = bidx // cache_seqlens.shape[0], bidx % cache_seqlens.shape[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # which wait for the end of this, and may get ready until then
        number = part * THREADS + tidx
        column, number = number % self.vectors, number // self.vectors
        head, token = number % k.shape[2], number // k.shape[2]
        dense, first, tokens = sequence, Int32(0), k.shape[1]
        if const_expr(self.packed):
            dense, first = Int32(0), cu_seqlens_q[sequence]
            tokens = cu_seqlens_q[sequence + 1] - first
        if token < tokens:
            page, row = sequence, cache_seqlens[sequence] + token
            if const_expr(self.paged):
                page_size = k_cache.shape[1]
                page, row = page_table[sequence, row // page_size], row % page_size
            vector = cute.make_rmem_tensor((VECTOR,), self.dtype)
            for source, target, size in ((k, k_cache, self.sizes[0]), (v, v_cache, self.sizes[1])):
                of_source, of_target = source[dense, first + token, head, None], target[page, row, head, None]
                if column < size // VECTOR:
                    cute.autovec_copy(cute.local_tile(of_source, (VECTOR,), (column,)), vector)
                    cute.autovec_copy(vector, cute.local_tile(of_target, (VECTOR,), (column,)))


@compiled
def append(arch: str, spec: AppendSpec) -> Program:
    """k (B, L, Hkv, D) and v (B, L, Hkv, Dv) behind the ``cache_seqlens`` first rows of caches (B, capacity, Hkv, D or
    Dv), or (pages, page size, Hkv, D or Dv) with ``page_table`` (B, pages of a sequence).

    Packed k and v are of one sequence that ``cu_seqlens_q`` (B + 1) cuts; none is longer than ``max_seqlen``.
    """
    dtype = cutlass_dtype(spec.dtype)
    batch, sequences, length, capacity, pages, pairs = (cute.sym_int() for _ in range(6))

    def operand(batch, length, size):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, pairs, size), (*strides, 1), assumed_align=16)

    def ints(*shape):
        strides = (cute.sym_int64(), 1) if len(shape) == 2 else (1,)
        return cute.runtime.make_fake_tensor(Int32, shape, strides, assumed_align=4)

    return Program(
        Append(spec),
        operand(batch, length, spec.head_size),
        operand(batch, length, spec.head_size_v),
        operand(pages, capacity, spec.head_size),
        operand(pages, capacity, spec.head_size_v),
        ints(sequences),
        ints(sequences, cute.sym_int()) if spec.paged else None,
        ints(cute.sym_int()) if spec.packed else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
