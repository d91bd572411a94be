"""The gate of an expert, h = silu(g) u, and its gradients, a warp a row, 16 bytes of each a lane.

Other gates are of this form, too, h = g s(g) u: of gelu s is the normal distribution's function, and without a gate u
is 1. A bias is added to z in fp32, which is kept without it.

The backward makes h of z again, with the forward's bits, so that no one keeps it. With weights it finds in the same
pass what the weights' gradients are, the product of dh and h, and the weighted h, a factor of the next product.
"""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.gemm_epilogue import GELU_END, LOG2_PHI
from cute_kernels.moe.config import WARP, WARPS, GateSpec
from cute_kernels.moe.kernel.warp_rows import load, row_of_warp, store, symbolic_list, symbolic_rows, warp_grid, wide
from jit_cache import Program, compiled

LOG2_E = 1.4426950408889634
# Vectors of g and u that a lane has in flight. H200, 8192 rows of 2880: one is 0.80 of the copy, two are 0.91
PAIRS = 2


class Gate:
    """h of z; see the builder ``gate``."""

    def __init__(self, spec: GateSpec):
        self.interleaved, self.limit, self.alpha = spec.interleaved, spec.limit, spec.alpha
        self.weighted, self.biased = spec.weighted, spec.biased
        self.has_u, self.is_gelu = spec.function != "silu", spec.function == "geglu"

    @cute.jit
    def __call__(self, z, slots, experts, bias, h, stream):
        self.kernel(z, slots, experts, bias, h).launch(
            grid=warp_grid(h.shape[0]), block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, z, slots, experts, bias, h):
        row, lane = row_of_warp()
        vectors = h.shape[1] * h.element_type.width // 128
        cute.arch.griddepcontrol_wait()
        if row < h.shape[0]:
            expert = Int32(-1)
            if const_expr(self.biased):
                slot = slots[row]
                expert = experts[cutlass.max(slot, 0)] if slot >= 0 else Int32(-1)
            for begin in cutlass.range(lane, vectors, PAIRS * WARP):
                places = [begin + i * WARP for i in range(PAIRS)]
                # Beyond the row's end its last vector, so that no load waits for a condition
                inside = [cutlass.min(place, vectors - 1) for place in places]
                pairs = [self.load_pair(z, bias, expert, row, v, vectors) for v in inside]
                for i in cutlass.range_constexpr(PAIRS):
                    if places[i] < vectors:
                        self.store_value(pairs[i], h, row, places[i])

    @cute.jit
    def store_value(self, pair, h, row: Int32, v: Int32):
        """A vector of h, of its g and u."""
        g, u = pair
        values = cute.make_rmem_tensor(g.shape, Float32)
        for i in cutlass.range_constexpr(cute.size(g)):
            values[i] = self.value(*self.gated(g[i], u[i])[:3])
        store(values, h, row, v)

    @cute.jit
    def load_part(self, z, bias, expert: Int32, row: Int32, v: Int32):
        """16 bytes of z, in fp32, with the expert's bias."""
        values = wide(load(z, row, v, True))
        if const_expr(self.biased):
            values.store(values.load() + wide(load(bias, cutlass.max(expert, 0), v, expert >= 0)).load())
        return values

    @cute.jit
    def load_pair(self, z, bias, expert: Int32, row: Int32, v: Int32, vectors: Int32):
        """g and u of a vector of h, in fp32; without u g twice."""
        if const_expr(not self.has_u):
            g = self.load_part(z, bias, expert, row, v)
            return g, g
        if const_expr(not self.interleaved):
            return self.load_part(z, bias, expert, row, v), self.load_part(z, bias, expert, row, v + vectors)
        low = self.load_part(z, bias, expert, row, 2 * v)
        high = self.load_part(z, bias, expert, row, 2 * v + 1)
        size = const_expr(cute.size(low))
        g, u = cute.make_rmem_tensor((size,), Float32), cute.make_rmem_tensor((size,), Float32)
        for i in cutlass.range_constexpr(size // 2):
            g[i], u[i] = low[2 * i], low[2 * i + 1]
            g[i + size // 2], u[i + size // 2] = high[2 * i], high[2 * i + 1]
        return g, u

    @cute.jit
    def gated(self, g: Float32, u: Float32):
        """(g, u + 1 or u, s(g), whether g and u are within the limit)."""
        g_free, u_free = cutlass.Boolean(True), cutlass.Boolean(True)
        if const_expr(self.limit is not None):
            g_free, u_free = g <= self.limit, (u <= self.limit) & (u >= -self.limit)
            g = g if g <= self.limit or g != g else Float32(self.limit)
            u = u if u <= self.limit or u != u else Float32(self.limit)
            u = u if u >= -self.limit or u != u else Float32(-self.limit)
        alpha = const_expr(1.0 if self.alpha is None else self.alpha)
        if const_expr(self.alpha is not None):
            u = u + 1.0
        if const_expr(not self.has_u):
            u = Float32(1.0)
        if const_expr(self.is_gelu):
            return g, u, normal(g), g_free, u_free
        sigmoid = cute.arch.rcp_approx(1.0 + cute.math.exp2(g * (-LOG2_E * alpha), fastmath=True))
        return g, u, sigmoid, g_free, u_free

    def value(self, g: Float32, u: Float32, sigmoid: Float32) -> Float32:
        """h."""
        return g * sigmoid * u


class GateBackward(Gate):
    """dz, and with weights the weighted h and their gradients; see the builder ``gate_backward``."""

    @cute.jit
    def __call__(self, dh, z, slots, weights, experts, bias, dz, h, dweights, stream):
        self.kernel(dh, z, slots, weights, experts, bias, dz, h, dweights).launch(
            grid=warp_grid(dh.shape[0]), block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, dh, z, slots, weights, experts, bias, dz, h, dweights):
        row, lane = row_of_warp()
        vectors = dh.shape[1] * dh.element_type.width // 128
        alpha = const_expr(1.0 if self.alpha is None else self.alpha)
        cute.arch.griddepcontrol_wait()
        if row < dh.shape[0]:
            slot, weight, total, expert = Int32(-1), Float32(1.0), Float32(0.0), Int32(-1)
            if const_expr(self.weighted or self.biased):
                slot = slots[row]
            if const_expr(self.biased):
                expert = experts[cutlass.max(slot, 0)] if slot >= 0 else Int32(-1)
            if const_expr(self.weighted):
                weight = weights[cutlass.max(slot, 0)] if slot >= 0 else Float32(0.0)
            for v in cutlass.range(lane, vectors, WARP):
                g, u = self.load_pair(z, bias, expert, row, v, vectors)
                gradient = wide(load(dh, row, v, True))
                dg, du = cute.make_rmem_tensor(g.shape, Float32), cute.make_rmem_tensor(g.shape, Float32)
                values = cute.make_rmem_tensor(g.shape, Float32)
                for i in cutlass.range_constexpr(cute.size(g)):
                    gi, ui, sigmoid, g_free, u_free = self.gated(g[i], u[i])
                    values[i] = self.value(gi, ui, sigmoid)
                    scaled = gradient[i] * weight
                    slope = sigmoid * (1.0 + alpha * gi * (1.0 - sigmoid))
                    if const_expr(self.is_gelu):
                        slope = cute.math.fma(gi, density(gi), sigmoid)
                    dg[i] = scaled * ui * slope if g_free else Float32(0.0)
                    du[i] = scaled * gi * sigmoid if u_free else Float32(0.0)
                if const_expr(self.weighted):
                    rounded = cute.make_rmem_tensor(g.shape, dh.element_type)
                    rounded.store(values.load().to(dh.element_type))
                    kept = wide(rounded)
                    for i in cutlass.range_constexpr(cute.size(g)):
                        total = cute.math.fma(gradient[i], kept[i], total)
                        kept[i] = kept[i] * weight if slot >= 0 else Float32(0.0)
                    store(kept, h, row, v)
                self.store_pair(dg, du, dz, row, v, vectors, slot)
            if const_expr(self.weighted):
                total = cute.arch.warp_reduction(total, operator.add)
                if slot >= 0 and lane == 0:
                    dweights[slot] = total

    @cute.jit
    def store_pair(self, dg, du, dz, row: Int32, v: Int32, vectors: Int32, slot: Int32):
        """Gradients of g and u to where these lie; zeros of a row that no slot has."""
        if const_expr(self.weighted):
            if slot < 0:
                dg.fill(0.0)
                du.fill(0.0)
        if const_expr(not self.has_u):
            store(dg, dz, row, v)
        elif const_expr(not self.interleaved):
            store(dg, dz, row, v)
            store(du, dz, row, v + vectors)
        else:
            size = const_expr(cute.size(dg))
            low, high = cute.make_rmem_tensor((size,), Float32), cute.make_rmem_tensor((size,), Float32)
            for i in cutlass.range_constexpr(size // 2):
                low[2 * i], low[2 * i + 1] = dg[i], du[i]
                high[2 * i], high[2 * i + 1] = dg[i + size // 2], du[i + size // 2]
            store(low, dz, row, 2 * v)
            store(high, dz, row, 2 * v + 1)


@cute.jit
def normal(x: Float32) -> Float32:
    """Phi(x), the normal distribution's function; its tail by the polynomial of the products' gelu."""
    size = x if x >= 0.0 else -x
    size = size if size < GELU_END else Float32(GELU_END)
    log2_phi = Float32(LOG2_PHI[-1])
    for coefficient in LOG2_PHI[-2::-1]:
        log2_phi = cute.math.fma(log2_phi, size, Float32(coefficient))
    tail = cute.math.exp2(log2_phi, fastmath=True)
    return 1.0 - tail if x >= 0.0 else tail


def density(x: Float32) -> Float32:
    """The normal distribution's."""
    return cute.math.exp2(x * x * (-0.5 * LOG2_E), fastmath=True) * (2 * math.pi) ** -0.5


def _bias(spec: GateSpec, slots, wide_columns) -> tuple:
    """(the slots' experts, the experts' bias) where there is one."""
    if not spec.biased:
        return None, None
    return symbolic_list(Int32, slots), symbolic_rows(cutlass_dtype(spec.dtype), cute.sym_int(), wide_columns)


@compiled
def gate(arch: str, spec: GateSpec) -> Program:
    """h (R, I) = g sigmoid(g) u of z (R, 2 I); in fp32, rounded once."""
    dtype, rows, columns, wide_columns, slots = cutlass_dtype(spec.dtype), *(cute.sym_int() for _ in range(4))
    return Program(
        Gate(spec),
        symbolic_rows(dtype, rows, wide_columns),
        symbolic_list(Int32, rows) if spec.biased else None,
        *_bias(spec, slots, wide_columns),
        symbolic_rows(dtype, rows, columns),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def gate_backward(arch: str, spec: GateSpec) -> Program:
    """dz of dh and z. ``weighted``: of dh times the weight of the row's slot; h times it; and dweights, dh times h."""
    dtype, rows, columns, wide_columns, slots = cutlass_dtype(spec.dtype), *(cute.sym_int() for _ in range(4))
    weighted = spec.weighted
    return Program(
        GateBackward(spec),
        symbolic_rows(dtype, rows, columns),
        symbolic_rows(dtype, rows, wide_columns),
        symbolic_list(Int32, rows) if weighted or spec.biased else None,
        symbolic_list(Float32, slots) if weighted else None,
        *_bias(spec, slots, wide_columns),
        symbolic_rows(dtype, rows, wide_columns),
        symbolic_rows(dtype, rows, columns) if weighted else None,
        symbolic_list(Float32, slots) if weighted else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
