"""Sinkhorn's iteration on each token's n x n matrix, forward and backward: one thread a matrix, all in registers.

"log": f_i = -lse_j(x_ij + g_j), g_j = -lse_i(x_ij + f_i), P = exp(f + x + g), no eps; in powers of two.
"softmax_eps": P = softmax_j(x) + eps, columns divided by their sum + eps, then rows and columns in turn.
"exp_clamp": P = exp(x - max_j x), rows and columns in turn divided by their sum, at least eps.

The backward runs the forward again and keeps what rows and columns were divided by (2 n values an iteration, in shared
memory): from its end the matrices are restored by multiplying.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.mhc.config import SinkhornBackwardSpec, SinkhornSpec
from cute_kernels.mhc.kernel.streams import WARP_SIZE, load_coefficients, symbolic_streams
from jit_cache import Program, compiled

LOG2_E = 1.4426950408889634


class Sinkhorn:
    """The iteration on matrices in registers, flat and row-major."""

    def __init__(self, n: int, variant: str, iterations: int, eps: float):
        self.n = n
        self.variant = variant
        self.iterations = iterations
        self.eps = eps

    def allocate(self, smem, lane):
        """Allocate for the backward of a warp's 32 matrices: history (n, rows | columns, iteration) and three matrices.

        The matrices, (n n,) each, are in registers, for 8 streams in shared memory: three of 64 elements do not fit.
        """
        shape = (self.n, 2, self.iterations, WARP_SIZE)
        stride = (WARP_SIZE, self.n * WARP_SIZE, 2 * self.n * WARP_SIZE, 1)
        history = smem.allocate_tensor(Float32, cute.make_layout(shape, stride=stride), byte_alignment=16)
        size = self.n**2
        if self.n < 8:
            matrices = [cute.make_rmem_tensor((size,), Float32) for _ in range(3)]
        else:
            layout = cute.make_layout((size, 3, WARP_SIZE), stride=(WARP_SIZE, size * WARP_SIZE, 1))
            shared = smem.allocate_tensor(Float32, layout, byte_alignment=16)
            matrices = [shared[None, i, lane] for i in range(3)]
        return history[None, None, None, lane], matrices

    @cute.jit
    def forward(self, logits: cute.Tensor, p: cute.Tensor, history=None):
        """Fill ``p`` from the logits, and ``history`` if there is one."""
        n = const_expr(self.n)
        if const_expr(self.variant == "log"):
            f = cute.make_rmem_tensor((n,), Float32)
            g = cute.make_rmem_tensor((n,), Float32)
            f.fill(0.0)
            g.fill(0.0)
            for t in cutlass.range(self.iterations):
                for i in cutlass.range_constexpr(n):
                    f[i] = negative_lse([logits[i * n + j] * LOG2_E + g[j] for j in range(n)])
                for j in cutlass.range_constexpr(n):
                    g[j] = negative_lse([logits[i * n + j] * LOG2_E + f[i] for i in range(n)])
                if const_expr(history is not None):
                    for i in cutlass.range_constexpr(n):
                        history[i, 0, t] = f[i]
                        history[i, 1, t] = g[i]
            for i in cutlass.range_constexpr(n):
                for j in cutlass.range_constexpr(n):
                    p[i * n + j] = exp2(f[i] + logits[i * n + j] * LOG2_E + g[j])
        else:
            self.start(logits, p)
            for t in cutlass.range(self.iterations):
                rows = const_expr(True) if const_expr(self.variant == "exp_clamp") else t > 0
                if rows:
                    self.divide(p, 1, n, 0, history, t)
                self.divide(p, n, 1, 1, history, t)

    @cute.jit
    def start(self, logits: cute.Tensor, p: cute.Tensor):
        """Set ``p`` to the matrix that the division of rows and columns starts from."""
        n = const_expr(self.n)
        for i in cutlass.range_constexpr(n):
            largest = logits[i * n]
            for j in cutlass.range_constexpr(1, n):
                largest = cute.arch.fmax(largest, logits[i * n + j], nan=True)
            total = Float32(0.0)
            for j in cutlass.range_constexpr(n):
                p[i * n + j] = exp2((logits[i * n + j] - largest) * LOG2_E)
                total = total + p[i * n + j]
            if const_expr(self.variant == "softmax_eps"):
                inverse = cute.arch.rcp_approx(total)
                for j in cutlass.range_constexpr(n):
                    p[i * n + j] = p[i * n + j] * inverse + self.eps

    @cute.jit
    def divide(self, p: cute.Tensor, inner: cutlass.Constexpr[int], outer: cutlass.Constexpr[int], which, history, t):
        """Divide each row (``inner`` 1, ``outer`` n) or column (n, 1) by its sum, eps as the variant has it."""
        n = const_expr(self.n)
        for a in cutlass.range_constexpr(n):
            total = p[a * outer]
            for b in cutlass.range_constexpr(1, n):
                total = total + p[a * outer + b * inner]
            if const_expr(self.variant == "softmax_eps"):
                total = total + self.eps
            else:
                total = cute.arch.fmax(total, Float32(self.eps), nan=True)
            inverse = cute.arch.rcp_approx(total)
            for b in cutlass.range_constexpr(n):
                p[a * outer + b * inner] = p[a * outer + b * inner] * inverse
            if const_expr(history is not None):
                history[a, which, t] = total

    @cute.jit
    def backward(self, logits: cute.Tensor, p: cute.Tensor, dp: cute.Tensor, history):
        """Turn the gradient of P in ``dp`` into that of the logits; ``p`` is room for P."""
        n = const_expr(self.n)
        self.forward(logits, p, history)
        if const_expr(self.variant == "log"):
            df = cute.make_rmem_tensor((n,), Float32)
            dg = cute.make_rmem_tensor((n,), Float32)
            df.fill(0.0)
            dg.fill(0.0)
            for i in cutlass.range_constexpr(n):
                for j in cutlass.range_constexpr(n):
                    dp[i * n + j] = dp[i * n + j] * p[i * n + j]
                    df[i] = df[i] + dp[i * n + j]
                    dg[j] = dg[j] + dp[i * n + j]
            for back in cutlass.range(self.iterations):
                t = self.iterations - 1 - back
                before = cute.make_rmem_tensor((n,), Float32)
                before.fill(0.0)
                if t > 0:
                    for j in cutlass.range_constexpr(n):
                        before[j] = history[j, 1, t - 1]
                for i in cutlass.range_constexpr(n):
                    for j in cutlass.range_constexpr(n):
                        x = logits[i * n + j] * LOG2_E + history[i, 0, t]
                        step = -dg[j] * exp2(x + history[j, 1, t])
                        df[i] = df[i] + step
                        dp[i * n + j] = dp[i * n + j] + step
                dg.fill(0.0)
                for i in cutlass.range_constexpr(n):
                    for j in cutlass.range_constexpr(n):
                        x = logits[i * n + j] * LOG2_E + history[i, 0, t]
                        step = -df[i] * exp2(x + before[j])
                        dg[j] = dg[j] + step
                        dp[i * n + j] = dp[i * n + j] + step
                df.fill(0.0)
        else:
            # u = P dP instead of dP: no division, hence nothing overflows where a sum is clamped to eps
            for j in cutlass.range_constexpr(n * n):
                dp[j] = dp[j] * p[j]
            for back in cutlass.range(self.iterations):
                t = self.iterations - 1 - back
                self.restore(p, dp, n, 1, 1, history, t)
                rows = const_expr(True) if const_expr(self.variant == "exp_clamp") else t > 0
                if rows:
                    self.restore(p, dp, 1, n, 0, history, t)
            if const_expr(self.variant == "softmax_eps"):
                self.start(logits, p)
                for i in cutlass.range_constexpr(n):
                    total = Float32(0.0)
                    for j in cutlass.range_constexpr(n):
                        softmax = p[i * n + j] - self.eps
                        dp[i * n + j] = dp[i * n + j] * softmax * cute.arch.rcp_approx(p[i * n + j])
                        p[i * n + j] = softmax
                        total = total + dp[i * n + j]
                    for j in cutlass.range_constexpr(n):
                        dp[i * n + j] = cute.math.fma(-p[i * n + j], total, dp[i * n + j])

    @cute.jit
    def restore(
        self,
        p: cute.Tensor,
        u: cute.Tensor,
        inner: cutlass.Constexpr[int],
        outer: cutlass.Constexpr[int],
        which,
        history,
        t,
    ):
        """Undo ``divide``: y = x / d has u_x = u_y - y sum(u_y); where d is the lower bound eps, u_y."""
        n = const_expr(self.n)
        for a in cutlass.range_constexpr(n):
            divisor = history[a, which, t]
            total = u[a * outer]
            for b in cutlass.range_constexpr(1, n):
                total = total + u[a * outer + b * inner]
            if const_expr(self.variant == "exp_clamp"):
                total = total if divisor > self.eps else Float32(0.0)
            for b in cutlass.range_constexpr(n):
                at = a * outer + b * inner
                u[at] = cute.math.fma(-p[at], total, u[at])
                p[at] = p[at] * divisor


def exp2(x):
    """2^x, by the hardware's approximation (2 ulp)."""
    return cute.math.exp2(x, fastmath=True)


def negative_lse(values: list):
    """-log2(sum 2^v) of a few values."""
    largest = values[0]
    for value in values[1:]:
        largest = cute.arch.fmax(largest, value)
    total = exp2(values[0] - largest)
    for value in values[1:]:
        total = total + exp2(value - largest)
    return -(largest + cute.math.log2(total, fastmath=True))


class SinkhornForward:
    """res (M, n n) from logits (M, n n)."""

    def __init__(self, n: int, variant: str, iterations: int, eps: float, align: int):
        self.iteration = Sinkhorn(n, variant, iterations, eps)
        self.align = align

    @cute.jit
    def __call__(self, logits: cute.Tensor, res: cute.Tensor, stream):
        self.kernel(logits, res).launch(
            grid=[cute.ceil_div(res.shape[0], WARP_SIZE), 1, 1], block=[WARP_SIZE, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, logits: cute.Tensor, res: cute.Tensor):
        cute.arch.griddepcontrol_wait()
        size = const_expr(self.iteration.n**2)
        row = cute.arch.block_idx()[0] * WARP_SIZE + cute.arch.thread_idx()[0]
        if row < res.shape[0]:
            p = cute.make_rmem_tensor((size,), Float32)
            self.iteration.forward(load_coefficients(logits, row, size, self.align), p)
            cute.autovec_copy(p, res[row, None])


class SinkhornBackward:
    """dlogits (M, n n) from logits and dres."""

    def __init__(self, n: int, variant: str, iterations: int, eps: float, aligns: tuple[int, int]):
        self.iteration = Sinkhorn(n, variant, iterations, eps)
        self.aligns = aligns

    @cute.jit
    def __call__(self, logits: cute.Tensor, dres: cute.Tensor, dlogits: cute.Tensor, stream):
        self.kernel(logits, dres, dlogits).launch(
            grid=[cute.ceil_div(dlogits.shape[0], WARP_SIZE), 1, 1],
            block=[WARP_SIZE, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, logits: cute.Tensor, dres: cute.Tensor, dlogits: cute.Tensor):
        cute.arch.griddepcontrol_wait()
        size = const_expr(self.iteration.n**2)
        lane = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * WARP_SIZE + lane
        history, (matrix, p, dp) = self.iteration.allocate(SmemAllocator(), lane)
        if row < dlogits.shape[0]:
            cute.autovec_copy(load_coefficients(logits, row, size, self.aligns[0]), matrix)
            cute.autovec_copy(load_coefficients(dres, row, size, self.aligns[1]), dp)
            self.iteration.backward(matrix, p, dp, history)
            cute.autovec_copy(dp, dlogits[row, None])


@compiled
def sinkhorn_forward(arch: str, spec: SinkhornSpec) -> Program:
    """res (M, n n) from logits (M, n n)."""
    rows, n = cute.sym_int(), spec.n
    return Program(
        SinkhornForward(n, spec.variant, spec.iterations, spec.eps, spec.align),
        symbolic_streams(Float32, rows, n * n, spec.align),
        symbolic_streams(Float32, rows, n * n, min(4, n * n)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def sinkhorn_backward(arch: str, spec: SinkhornBackwardSpec) -> Program:
    """dlogits (M, n n) from logits and dres."""
    rows, n = cute.sym_int(), spec.n
    return Program(
        SinkhornBackward(n, spec.variant, spec.iterations, spec.eps, (spec.align, spec.dres_align)),
        symbolic_streams(Float32, rows, n * n, spec.align),
        symbolic_streams(Float32, rows, n * n, spec.dres_align),
        symbolic_streams(Float32, rows, n * n, min(4, n * n)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
