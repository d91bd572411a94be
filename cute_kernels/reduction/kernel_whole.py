"""CuTe kernel of sums of any length: whole tensors, and rows that no cluster holds.

A CTA adds up a part of WHOLE_PART elements, and one CTA the parts' sums; nothing is specialised on the length. The
order of additions follows from the length alone (``reference.whole_sum`` has it), not from dtype, alignment or GPU.

Profile: ncu --clock-control none -k regex:ReduceWhole python -m bench.bench_reduction --filter sum.fwd.4096x4096
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_FIRST, load_vector
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.row_layout import WARP_SIZE
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.reduction.config import WHOLE_PART, WHOLE_SUMS, WHOLE_THREADS, WholeSumSpec
from jit_cache import Program, compiled

WARPS = WHOLE_THREADS // WARP_SIZE
OWN = WHOLE_SUMS // WHOLE_THREADS  # running sums of a thread
PARTIALS_VEC = 4
CTAS_PER_SM = 4  # without a bound the compiler keeps fewer loads in flight, to use fewer registers
CARVEOUT = 32  # percent of an SM's shared memory and L1: room for the sums of 8 CTAs


class ReduceWhole:
    """y = scale sum(x), or of squares, of each line of x.

    gmem --loads--> registers: WHOLE_SUMS running sums (fp32) of a CTA --> smem: a sum a thread --> shuffles: a warp's
    --> smem --> partials, one a part. A second CTA, launched behind the first ones, adds the partials of a line the
    same way. A single part's sum is y at once, and there is no second kernel.
    """

    def __init__(self, vec: int, squares: bool):
        self.vec, self.squares = vec, squares

    @cute.jit
    def __call__(self, x: cute.Tensor, n: Int64, partials: cute.Tensor, y: cute.Tensor, scale: Float32, stream):
        """``n``: elements of a line, which a shape's 32 bits may not hold."""
        lines, parts = partials.shape
        self.add_parts(x, n, partials, y, scale).launch(
            grid=[parts * lines, 1, 1],
            block=[WHOLE_THREADS, 1, 1],
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=CARVEOUT,
            stream=stream,
            use_pdl=True,
        )
        if parts > 1:
            self.add_partials(partials, y, scale).launch(
                grid=[lines, 1, 1],
                block=[WHOLE_THREADS, 1, 1],
                min_blocks_per_mp=CTAS_PER_SM,
                preferred_smem_carveout=CARVEOUT,
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def add_parts(self, x: cute.Tensor, n: Int64, partials: cute.Tensor, y: cute.Tensor, scale: Float32):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        part, line = bidx % partials.shape[1], bidx // partials.shape[1]
        first = Int64(part) * WHOLE_PART
        length = Int32(cutlass.min(n - first, Int64(WHOLE_PART)))
        cute.arch.griddepcontrol_wait()
        source = x.iterator + (Int64(line) * x.stride[0] + first)
        total = self.add(source, length, self.vec, self.squares, Int64(EVICT_FIRST))
        if tidx == 0:
            if partials.shape[1] == 1:
                y[line] = (total * scale).to(y.element_type)
            else:
                partials[line, part] = total

    @cute.kernel
    def add_partials(self, partials: cute.Tensor, y: cute.Tensor, scale: Float32):
        tidx, _, _ = cute.arch.thread_idx()
        line, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        source = partials.iterator + Int64(line) * partials.stride[0]
        total = self.add(source, partials.shape[1], PARTIALS_VEC, False, None)
        if tidx == 0:
            y[line] = (total * scale).to(y.element_type)

    @cute.jit
    def add(self, source: cute.Pointer, length: Int32, vec: cutlass.Constexpr, squares: cutlass.Constexpr, policy):
        """The sum of ``length`` elements from ``source`` on, which is aligned to ``vec`` of them; known to all threads.

        Running sum r takes elements r, r + WHOLE_SUMS, ... A thread has ``vec`` neighbours, or several times so many.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % WARP_SIZE, cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        dtype = source.value_type
        times, batch = const_expr(OWN // vec), const_expr(vec)  # OWN loads of a thread in flight
        smem = SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout(WHOLE_SUMS), byte_alignment=16)
        of_warps = smem.allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        sums = cute.make_rmem_tensor((OWN,), Float32)
        sums.fill(0.0)
        whole = length // vec * vec
        for first in cutlass.range(0, whole, WHOLE_SUMS * batch, unroll=1):
            loaded = cute.make_rmem_tensor((OWN, batch), dtype)
            loaded.fill(0)
            for b in cutlass.range_constexpr(batch):
                for i in cutlass.range_constexpr(times):
                    at = first + (b * WHOLE_SUMS + i * WHOLE_THREADS * vec) + tidx * vec
                    if at < whole:
                        target = vector_of(loaded[None, b], i, vec)
                        load_vector((source + at).align(vec * dtype.width // 8), target, policy)
            for b in cutlass.range_constexpr(batch):
                value = to_fp32(loaded[None, b].load())
                if const_expr(squares):
                    sums.store(cute.math.fma(value, value, sums.load()))
                else:
                    sums.store(sums.load() + value)
        if const_expr(vec > 1):
            if whole < length:  # what is left is less than a vector, the last of its thread
                place = whole // vec % (times * WHOLE_THREADS)
                for i in cutlass.range_constexpr(times):
                    if place == i * WHOLE_THREADS + tidx:
                        for v in cutlass.range_constexpr(vec - 1):
                            if whole + v < length:
                                value = source[whole + v].to(Float32)
                                if const_expr(squares):
                                    sums[i * vec + v] = cute.math.fma(value, value, sums[i * vec + v])
                                else:
                                    sums[i * vec + v] = sums[i * vec + v] + value
        for i in cutlass.range_constexpr(times):
            target = (shared.iterator + (i * WHOLE_THREADS + tidx) * vec).align(4 * min(vec, 4))
            cute.autovec_copy(vector_of(sums, i, vec), cute.make_tensor(target, cute.make_layout(vec)))
        cute.arch.barrier()
        total = shared[tidx]
        for i in cutlass.range_constexpr(1, OWN):
            total = total + shared[i * WHOLE_THREADS + tidx]
        total = cute.arch.warp_reduction(total, operator.add)
        if lane == 0:
            of_warps[warp] = total
        cute.arch.barrier()
        total = of_warps[0]
        for w in cutlass.range_constexpr(1, WARPS):
            total = total + of_warps[w]
        return total


def vector_of(fragment: cute.Tensor, i: int, vec: int) -> cute.Tensor:
    """The i-th vector of what a thread has in registers."""
    return cute.make_tensor(fragment.iterator + i * vec, cute.make_layout(vec))


@compiled
def whole_sums(arch: str, spec: WholeSumSpec) -> Program:
    """Sums of lines of any length, or of their squares: (lines, n) by way of (lines, parts) to (lines,)."""
    x, y, vec = cutlass_dtype(spec.x), cutlass_dtype(spec.y), spec.vec
    lines = cute.sym_int()
    stride = (cute.sym_int64(divisibility=vec), 1)
    partials = (cute.sym_int64(divisibility=PARTIALS_VEC), 1)
    return Program(
        ReduceWhole(vec, spec.squares),
        cute.runtime.make_fake_tensor(x, (lines, cute.sym_int64()), stride, assumed_align=vec * x.width // 8),
        Int64(1),
        cute.runtime.make_fake_tensor(Float32, (lines, cute.sym_int()), partials, assumed_align=16),
        symbolic_vector(y, lines),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
