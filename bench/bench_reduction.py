"""softmax, log_softmax, sums, logsumexp and cumsum, forward and backward, beside torch, torch.compile, quack and Liger.

    python -m bench.bench_reduction                                          every case, results printed
    python -m bench.bench_reduction --filter 'softmax.bwd.*4096' --reps 30   cases whose name matches
    python -m bench.bench_reduction --save                                   and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_reduction --list                                   the names of the cases

A case's name is op.direction.shape.dtype.variant, like softmax.bwd.8192x4096.bfloat16.plain. Sums are of rows (variant
rows), of columns (columns) or of all (whole), to fp32. Odd rows do not start on 16 bytes, few are wide.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import forward_backward, harness
from bench.forward_backward import Calls
from cute_kernels import reduction
from jit_cache import command

SHAPES = (
    (32768, 1024),
    (8192, 4096),
    (2048, 16384),
    (4096, 4096),
    (2048, 4096),
    (1_000_000, 64),
    (43691, 768),
    (4096, 32000),
    (1024, 151936),
    (64, 151936),
)
ODD_GOAL = 0.85  # share of the same-bytes copy's speed, in both directions
# The last three of each were looked at last
ODD_SHAPES = ((134085, 1001), (4194, 32003), (2671, 50257), (885, 151643), (60001, 2235), (13411, 10007), (2192, 61229))
FEW_SHAPES = ((5, 262144), (1, 131072), (32, 65536), (64, 262144), (16, 32768), (3, 200704), (24, 98304), (50, 40960))
QUICK_SHAPES = ((8192, 4096), (1024, 151936))
SUM_SHAPES = ((8192, 4096), (32768, 1024), (1024, 151936))
# A small loss, what one CTA of a row's kernel held at most, a weight's gradient
WHOLE_SHAPES = (*SUM_SHAPES, (1, 4096), (512, 512), (4096, 4096))
OPS = ("softmax", "log_softmax", "sum", "logsumexp", "cumsum")
FLOPS_PER_ELEMENT = {"softmax": 5, "log_softmax": 5, "sum": 1, "logsumexp": 4, "cumsum": 1}


@dataclass(frozen=True)
class Reduction:
    """One op at one size."""

    op: str
    rows: int
    cols: int
    dtype: torch.dtype = torch.bfloat16
    variant: str = "plain"

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.cols}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def directions(self) -> tuple[str, ...]:
        return ("fwd", "bwd") if self.op in OPS[:2] else ("fwd",)

    def case(self, direction: str) -> harness.Case:
        elements = self.rows * self.cols
        return harness.Case(
            family="reduction",
            op=self.op,
            direction=direction,
            shape=self.shape,
            dtype=self.dtype_name,
            variant=self.variant,
            bytes=minimal_bytes(self, direction),
            flops=FLOPS_PER_ELEMENT[self.op] * elements,
            goal=ODD_GOAL if self.variant == "odd" else None,
        )


def minimal_bytes(case: Reduction, direction: str) -> int:
    """x and y; backward y, dy and dx; of a sum, or logsumexp, x and fp32 results."""
    elements, size = case.rows * case.cols, case.dtype.itemsize
    if case.op == "sum":
        return elements * size + 4 * {"columns": case.cols, "whole": 1}.get(case.variant, case.rows)
    if case.op == "logsumexp":
        return elements * size + 4 * case.rows
    return (2 if direction == "fwd" else 3) * elements * size


def reductions(quick: bool = False) -> list[Reduction]:
    """Every case."""
    shapes = QUICK_SHAPES if quick else SHAPES
    cases = [Reduction(op, *shape) for op in OPS[:2] for shape in shapes]
    sums = SUM_SHAPES[:1] if quick else SUM_SHAPES
    cases += [Reduction("sum", *shape, variant=variant) for shape in sums for variant in ("rows", "columns")]
    cases += [Reduction("sum", *shape, variant="whole") for shape in (sums if quick else WHOLE_SHAPES)]
    if not quick:
        cases += [Reduction("sum", *QUICK_SHAPES[0], dtype=torch.float32, variant="whole")]
        cases += [Reduction(op, *shape, dtype=torch.float32) for op in OPS[:2] for shape in QUICK_SHAPES]
        cases += [Reduction(op, *shape) for op in OPS[3:] for shape in SUM_SHAPES]
        cases += [Reduction(op, *shape, variant="odd") for op in OPS[:4] for shape in ODD_SHAPES]
        cases += [Reduction(op, *shape, variant="few") for op in OPS[:2] for shape in FEW_SHAPES]
    return cases


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    dy: Tensor


def make_inputs(case: Reduction, device: str = "cuda") -> Inputs:
    seed = harness.seed(f"{case.op}.{case.shape}.{case.dtype_name}.{case.variant}")
    generator = torch.Generator(device).manual_seed(seed)
    x, dy = (torch.randn(case.rows, case.cols, generator=generator, device=device).to(case.dtype) for _ in range(2))
    return Inputs(x.requires_grad_(case.op in OPS[:2]), dy)


def fp64_truth(case: Reduction, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> the result in fp64."""
    x = inputs.x.detach().double().requires_grad_(case.op in OPS[:2])
    if case.op == "sum":
        return {"fwd": {"y": x.sum(_dim(case))}}
    y = _torch_function(case)(x)
    if not x.requires_grad:
        return {"fwd": {"y": y}}
    (dx,) = torch.autograd.grad(y, x, inputs.dy.double())
    return {"fwd": {"y": y.detach()}, "bwd": {"dx": dx}}


def _dim(case: Reduction) -> int | None:
    return {"columns": 0, "whole": None}.get(case.variant, 1)


def _calls(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Calls:
    return forward_backward.autograd_calls(function, [inputs.x], (inputs.dy,))


def _cute_kernels(case: Reduction, inputs: Inputs) -> Calls:
    if case.op == "sum":
        return _calls(lambda x: reduction.sum(x, _dim(case), out_dtype=torch.float32), inputs)
    if case.op == "logsumexp":
        return _calls(lambda x: reduction.logsumexp(x, out_dtype=torch.float32), inputs)
    return _calls(getattr(reduction, case.op), inputs)


def _torch_function(case: Reduction) -> Callable[[Tensor], Tensor]:
    if case.op == "sum":
        return lambda x: torch.sum(x, _dim(case), dtype=torch.float32)
    if case.op == "logsumexp":
        return lambda x: torch.logsumexp(x.float() if x.dtype is torch.bfloat16 else x, -1)
    return lambda x: getattr(torch, case.op)(x, -1)


def _torch(case: Reduction, inputs: Inputs) -> Calls:
    return _calls(_torch_function(case), inputs)


def _torch_compile(case: Reduction, inputs: Inputs) -> Calls:
    # As in bench_norm
    from torch._functorch import config

    config.donated_buffer = False
    torch._dynamo.reset()
    return _calls(torch.compile(_torch_function(case), dynamic=False, fullgraph=True), inputs)


def _quack(case: Reduction, inputs: Inputs) -> Calls | None:
    if case.op != "softmax":
        return None
    from quack import softmax

    return _calls(softmax, inputs)


def _liger(case: Reduction, inputs: Inputs) -> Calls | None:
    if case.op != "softmax":
        return None
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return _calls(LigerSoftmaxFunction.apply, inputs)


PROVIDERS: dict[str, Callable[[Reduction, Inputs], Calls | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "torch_compile": _torch_compile,
    "quack": _quack,
    "liger": _liger,
}
PACKAGES = {"quack": ("quack",), "liger": ("liger_kernel",)}  # what a provider imports, where it is not torch


def compile_own_kernels(cases: Iterable[Reduction], device: harness.Device) -> None:
    few = (dataclasses.replace(case, rows=min(case.rows, 512)) for case in cases)
    forward_backward.compile_kernels(lambda case: _cute_kernels(case, make_inputs(case, device.name)), few, device)


def measure_reduction(
    case: Reduction, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(case, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], case, inputs) for provider in providers}
    return forward_backward.measure(case, directions, calls, fp64_truth(case, inputs), device, **options)


def run(cases: Sequence[Reduction], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return forward_backward.run(
        cases, measure_reduction, providers, packages=PACKAGES, compile_own_kernels=compile_own_kernels, **settings
    )


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(reductions(quick))

    options = harness.parse(
        "reduction", __doc__.splitlines()[0], "two shapes an op", tuple(PROVIDERS), PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(reductions(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_reduction", main))
