"""Cases of softmax, log_softmax and sums: inputs, fp64 results with bounds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fakes import fake_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP32_EPS = 2.0**-24  # half a unit in the last place
FUNCTIONS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}


@dataclass(frozen=True)
class SoftmaxCase:
    op: str
    n: int
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None

    def __str__(self) -> str:
        out = "" if self.out is None else f"-to-{str(self.out).removeprefix('torch.')}"
        return f"{self.op}-{self.n}-{str(self.dtype).removeprefix('torch.')}{out}"


def make_inputs(case: SoftmaxCase, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x, of a spread that leaves some probabilities near 1 and many near 0, and dy."""
    device = generator.device
    x = (4 * torch.randn(rows, case.n, generator=generator, device=device)).to(case.dtype)
    dy = torch.randn(rows, case.n, generator=generator, device=device).to(case.out or case.dtype)
    return x.requires_grad_(), dy


def rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of one rounding."""
    info = torch.finfo(dtype)
    return 0.5 * info.eps * exact.abs().clamp_min(info.smallest_normal)


def exact_softmax(case: SoftmaxCase, x: Tensor, dy: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (fp64 result, bound of the error)}; the backward from ``y`` as it was stored.

    The exponential is off by its argument's rounding and, where results are of half precision, by 2^-22.
    """
    out = case.out or case.dtype
    z, dy, y = x.detach().double(), dy.double(), y.detach().double()
    distance = z.amax(-1, keepdim=True) - z
    steps = 2 * FP32_EPS * (96 + distance) + 2.0**-22  # of a sum of exponentials, and of one of them
    exact = FUNCTIONS[case.op](z, -1)
    if case.op == "softmax":
        bound = rounding(exact, out) + steps * exact
        dot, size = (dy * y).sum(-1, keepdim=True), (dy * y).abs().sum(-1, keepdim=True)
        dx, error = y * (dy - dot), 128 * FP32_EPS * y.abs() * (dy.abs() + size)
    else:
        bound = rounding(exact, out) + steps.amin(-1, keepdim=True) * 2 + 4 * FP32_EPS * (distance + exact.abs())
        total, size = dy.sum(-1, keepdim=True), dy.abs().sum(-1, keepdim=True)
        power = y.exp()
        dx = dy - power * total
        error = power * (128 * FP32_EPS * size + (2.0**-22 + 4 * FP32_EPS * y.abs()) * total.abs())
        error = error + 2 * FP32_EPS * (dy.abs() + power * total.abs())
    return {"y": (exact, bound), "dx": (dx, rounding(dx, case.dtype) + error)}


def kernels_of(cases: list[SoftmaxCase], arch: str) -> list[tuple]:
    """(builder, arguments) of the kernels that the cases' forward and backward need."""
    from cute_kernels import reduction

    with fake_kernels(arch) as jobs:
        for case in cases:
            x, dy = make_inputs(case, 2, torch.Generator())
            getattr(reduction, case.op)(x, out_dtype=case.out).backward(dy)
    return jobs
