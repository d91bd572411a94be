"""The CuTe kernel of sampling without filters, for SM90 and SM100, and the builder of both kernels.

The CTAs of a cluster share a row; a thread reads ``vec`` logits at a time. The row is read once, all vectors of a
thread at the same time; the words of a group of four logits come from one Philox counter. Leading zeros of words bound
values from above and below: only groups that may hold the CTA's largest value take logarithms. Greedy choices make no
words.

Profile: ncu --clock-control none -k regex:Sample python -m bench.bench_sampling --filter sample.fwd.64x151936
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_FIRST
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.sampling.config import THREADS, SampleSpec
from cute_kernels.sampling.kernel_arithmetic import LEAST_NOISE, add, choose, largest_noise, least_noise, multiply
from cute_kernels.sampling.kernel_filters import SampleFiltered
from cute_kernels.sampling.kernel_rows import LARGEST_FINITE, LAST, WARP_SIZE, SampleRows, largest_of
from jit_cache import Program, compiled

HELD = 5  # vectors that a thread loads at once: its part of 151936 logits in bf16


class SamplePlain(SampleRows):
    """One token of each row, of all logits."""

    @cute.kernel
    def kernel(
        self,
        logits: cute.Tensor,
        seeds: cute.Tensor,
        positions: cute.Tensor,
        tokens: cute.Tensor,
        scale: Float32,
        noisy: Int32,
        top_k: Int32,
        top_p: Int32,
        min_p: Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        row, rank = bidx // self.cluster, bidx % self.cluster
        n = logits.shape[1]
        span = cute.ceil_div(n, self.cluster * self.vec) * self.vec
        begin = rank * span
        end = cutlass.min(begin + span, n)
        smem = SmemAllocator()
        values = smem.allocate_tensor(Float32, cute.make_layout(self.warps), byte_alignment=16)
        indices = smem.allocate_tensor(Int32, cute.make_layout(self.warps), byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        line = cute.make_tensor(logits.iterator + Int64(row) * logits.stride[0], cute.make_layout(n))
        slice_ = line, begin, end, scale, noisy, Uint32(positions[row]), Uint64(seeds[row])
        best, token = self.draw(*slice_, values, tidx)
        self.first_largest(best, token, values, indices, tidx, row, rank, tokens)

    @cute.jit
    def draw(
        self,
        line: cute.Tensor,
        begin: Int32,
        end: Int32,
        scale: Float32,
        noisy: Int32,
        position: Uint32,
        seed: Uint64,
        values: cute.Tensor,
        tidx: Int32,
    ):
        """The largest value of the slice, and its column, in the thread that has it; others may have smaller ones.

        Bounds of a group's values need its words, no logarithm. Only groups whose bound reaches what a value of the
        CTA is at least are computed: a few.
        """
        best, token, least = Float32(-math.inf), Int32(LAST), Float32(-LARGEST_FINITE)
        least_of_all = choose(noisy != 0, Float32(LEAST_NOISE), Float32(0.0))
        stride, groups = const_expr(THREADS * self.vec), const_expr(self.vec // self.group)
        for chunk in cutlass.range(begin, end, HELD * stride, unroll=1):
            first = chunk + tidx * self.vec
            places = [cutlass.min(first + v * stride, end - self.vec) for v in range(HELD)]
            held = [self.vector(line, place, self.vec, Int64(EVICT_FIRST)) for place in places]
            bounds = cute.make_rmem_tensor((groups, HELD), Float32)
            for v in cutlass.range_constexpr(HELD):
                x = self.numbers(held[v])
                is_there = first + v * stride < end
                for g in cutlass.range_constexpr(groups):
                    most = multiply(largest_of([x[g * self.group + i] for i in range(self.group)]), scale)
                    bounds[g, v] = choose(is_there, most, Float32(-math.inf))
                    least = cute.arch.fmax(least, add(bounds[g, v], least_of_all))
                if noisy != 0:
                    most = largest_of([bounds[g, v] for g in range(groups)])
                    if add(most, largest_noise(Uint32(0))) >= least:
                        for g in cutlass.range_constexpr(groups):
                            words = self.words(first + v * stride + g * self.group, position, seed)
                            word, logit = words[0], x[g * self.group]
                            for i in cutlass.range_constexpr(1, self.group):
                                is_less = words[i] < word
                                logit = choose(is_less, x[g * self.group + i], logit)
                                word = choose(is_less, words[i], word)
                            low = choose(is_there, multiply(logit, scale), Float32(-math.inf))
                            least = cute.arch.fmax(least, add(low, least_noise(word)))
                            bounds[g, v] = add(bounds[g, v], largest_noise(word))
            least = self.largest_of_cta(least, values, tidx)
            found = Int32(0)
            for v in cutlass.range_constexpr(HELD):
                for g in cutlass.range_constexpr(groups):
                    found = found | choose(bounds[g, v] >= least, Int32(1 << (v * groups + g)), Int32(0))
            while found != 0:
                place = Int32(31) - cute.arch.clz(found & -found).to(Int32)
                column = first + place // groups * stride + place % groups * self.group
                group = self.load(line, column, self.group), column, scale, noisy, position, seed
                best, token = self.larger(best, token, *group, None, None, None)
                found = found & (found - 1)
            least = cute.arch.fmax(least, best)
        return best, token

    @cute.jit
    def largest_of_cta(self, value: Float32, values: cute.Tensor, tidx: Int32) -> Float32:
        value = cute.arch.warp_reduction(value, cute.arch.fmax)
        if tidx % WARP_SIZE == 0:
            values[tidx // WARP_SIZE] = value
        cute.arch.barrier()
        for w in cutlass.range_constexpr(self.warps):
            value = cute.arch.fmax(value, values[w])
        cute.arch.barrier()
        return value


@compiled
def sample_rows(arch: str, spec: SampleSpec) -> Program:
    """Tokens of (rows, n) logits. ``scale``: 1 / temperature. ``top_p``: times 2^24; 0: none. ``min_p``: its log."""
    dtype, rows = cutlass_dtype(spec.logits), cute.sym_int()
    columns, stride = cute.sym_int(divisibility=spec.vec), cute.sym_int64(divisibility=spec.vec)
    align = spec.vec * dtype.width // 8
    return Program(
        (SampleFiltered if spec.filtered else SamplePlain)(dtype, spec),
        cute.runtime.make_fake_tensor(dtype, (rows, columns), (stride, 1), assumed_align=align),
        *(symbolic_vector(Int64, rows) for _ in range(3)),
        Float32(1.0),
        Int32(1),
        Int32(1),
        Int32(1),
        Float32(0.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
