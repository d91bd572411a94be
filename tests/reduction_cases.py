"""Cases of softmax, log_softmax and sums: inputs, fp64 results with bounds, and a stand-in for the kernels."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.reduction import launch
from tests.entry import check_entry

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


@contextlib.contextmanager
def stand_in(arch: str = "sm_90a") -> Iterator[list[tuple]]:
    """Within it CPU tensors go where CUDA tensors would; what runs instead of a kernel is plain torch.

    Yields the list of builder calls, (builder, arguments): the kernels that a GPU would have needed.
    """
    from cute_kernels.reduction import kernel

    jobs: list[tuple] = []

    def replaced(name: str, compute: Callable) -> Callable:
        builder = getattr(kernel, name)

        def build(*arguments):
            jobs.append((builder, arguments))
            static, program = inspect.signature(builder.build).bind(*arguments).arguments, builder.build(*arguments)

            def function(*values):
                check_entry(program, values)
                compute(static, *values)

            return function

        return build

    functions = {
        "softmax_forward": _softmax,
        "softmax_backward": _softmax_backward,
        "row_sums": _row_sums,
        "column_sums": _column_sums,
    }
    with contextlib.ExitStack() as stack:
        for name, compute in functions.items():
            stack.enter_context(mock.patch.object(kernel, name, replaced(name, compute)))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)))
        stack.enter_context(mock.patch.object(launch, "arch_of", lambda index: arch))
        stack.enter_context(mock.patch.object(launch, "sm_count", lambda index: 132))
        stack.enter_context(mock.patch.dict(launch._plans, clear=True))
        library = stack.enter_context(torch.library._scoped_library("cute_kernels", "IMPL"))
        library.impl("softmax_forward", launch.run_softmax, "CPU")
        library.impl("softmax_backward", launch.run_softmax_backward, "CPU")
        library.impl("sum_rows", launch.run_sum, "CPU")
        yield jobs


def kernels_of(cases: list[SoftmaxCase], arch: str) -> list[tuple]:
    """(builder, arguments) of the kernels that the cases' forward and backward need."""
    from cute_kernels import reduction

    with stand_in(arch) as jobs:
        for case in cases:
            x, dy = make_inputs(case, 2, torch.Generator())
            getattr(reduction, case.op)(x, out_dtype=case.out).backward(dy)
    return jobs


def _softmax(static, x, y, clusters) -> None:
    assert clusters >= 1 and static["config"].layout.n == x.shape[1]
    # fp64: what torch's sums owe to the number of rows is then gone with the rounding
    y.copy_(FUNCTIONS["log_softmax" if static["log"] else "softmax"](x.double(), -1))


def _softmax_backward(static, y, dy, dx, clusters) -> None:
    y, dy = y.double(), dy.double()
    if static["log"]:
        dx.copy_(dy - y.exp() * dy.sum(-1, keepdim=True))
    else:
        dx.copy_(y * (dy - (dy * y).sum(-1, keepdim=True)))


def _row_sums(static, x, y, scale, clusters) -> None:
    assert clusters >= 1 and static["config"].layout.n == x.shape[1]
    y.copy_(x.double().sum(1).float() * scale)


def _column_sums(static, x, y, scale) -> None:
    from cute_kernels.reduction.config import COLUMN_ROWS

    assert y.shape == (x.shape[0], math.ceil(x.shape[1] / COLUMN_ROWS), x.shape[2])
    assert x.shape[2] % static["vec"] == 0  # or the last access of the last row would end beyond the matrix
    parts = [part.double().sum(1).float() * scale for part in x.split(COLUMN_ROWS, 1)]
    y.copy_(torch.stack(parts, 1))
