"""The block-scaled quantizers beside torch.compile of their reference and, on SM100, torchao's kernels.

    python -m bench.bench_mxfp8                                             every case, results printed
    python -m bench.bench_mxfp8 --filter '3d_dual.*8192x5120' --reps 30     cases whose name matches
    python -m bench.bench_mxfp8 --providers cute_kernels                    ours alone: nothing else is compiled
    python -m bench.bench_mxfp8 --save                                      and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_mxfp8 --list                                      the names of the cases

A case's name is op.direction.shape.dtype.variant, like quantize_3d_dual.fwd.8x8192x5120.bfloat16.plain. Variants:
plain; blocked (the scales' layout); square (32 x 32); square_blocked; transposed (N contiguous); of dequantize rows and
columns (where the blocks lie). The results' error is that of their bytes, which must be the reference's: 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cute_kernels
from bench import harness
from cute_kernels.mxfp8 import reference
from jit_cache import command

LLAMA4 = tuple((experts, 8192, 5120) for experts in (1, 2, 4, 8, 16, 32, 64))
DEEPSEEK = tuple((experts, 7168, 2048) for experts in (1, 8, 32))
AWKWARD = ((8, 1408, 2048), (4, 2880, 2880))
MATRICES = tuple((rows, columns) for columns in (2048, 7168) for rows in (8192, 32768, 131072))
VARIANT_SHAPE = (8, 7168, 2048)
QUICK_SHAPES = ((1, 8192, 5120), (8, 7168, 2048), (32768, 2048))

OPS = ("quantize_3d_colwise", "quantize_3d_dual")
MATRIX_OPS = ("quantize_rowwise", "quantize_colwise", "quantize_dual")
OUTPUTS = {  # of each op that quantizes; "k" and "n": the dimension along which the blocks lie
    "quantize_rowwise": ("q", "scale"),
    "quantize_colwise": ("q", "scale"),
    "quantize_dual": ("q_k", "scale_k", "q_n", "scale_n"),
    "quantize_3d_colwise": ("q", "scale"),
    "quantize_3d_dual": ("q_k", "scale_k", "q_n", "scale_n"),
    "dequantize": ("y",),
}
# Share of the same-bytes copy's speed
GOAL, GOAL_SMALL, GOAL_DUAL = 0.90, 0.80, 1 / 1.10
LARGE = 8192 * 5120  # elements from which GOAL holds
GOAL_FLAT = 0.05  # between the shares at 1 and at 32 experts
SAMPLE = 1 << 16  # bytes of an expert's output that are compared
YARDSTICK = "cute_kernels"


@dataclass(frozen=True)
class Quantize:
    """One op at one size."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    variant: str = "plain"

    @property
    def square(self) -> bool:
        return "square" in self.variant

    @property
    def blocked(self) -> bool:
        return "blocked" in self.variant

    @property
    def is_dual(self) -> bool:
        return self.op.endswith("dual")

    @property
    def case(self) -> harness.Case:
        return harness.Case(
            family="mxfp8",
            op=self.op,
            direction="fwd",
            shape="x".join(map(str, self.shape)),
            dtype=str(self.dtype).removeprefix("torch."),
            variant=self.variant,
            bytes=minimal_bytes(self),
            flops=math.prod(self.shape) * (1 + self.is_dual),
            goal=goal(self),
        )


def goal(quantize: Quantize) -> float | None:
    """The share of the copy's speed that we aim at, of bf16 experts and matrices."""
    if quantize.dtype is not torch.bfloat16 or quantize.variant not in ("plain", "blocked"):
        return None
    if quantize.is_dual:
        return GOAL_DUAL
    return GOAL_SMALL if quantize.shape in AWKWARD or math.prod(quantize.shape) < LARGE else GOAL


def minimal_bytes(quantize: Quantize) -> int:
    """The input read once, elements and scales of each orientation written once, padding included where there is any.

    Squares with plain scales have one scale for both orientations; dequantize reads what the others write.
    """
    *experts, n, k = quantize.shape
    size, blocks = math.prod(quantize.shape), n // 32 * (k // 32)
    count = math.prod(experts)
    orientations = 1 + quantize.is_dual
    if quantize.blocked:
        along_k, along_n = _padded(n, k // 32), _padded(k, n // 32)
        each = {"quantize_rowwise": along_k, "quantize_colwise": along_n, "quantize_3d_colwise": along_n}
        scales = count * each.get(quantize.op, along_k + along_n)
    elif quantize.square:
        scales = count * blocks
    else:
        scales = count * blocks * 32 * orientations
    return size * (quantize.dtype.itemsize + orientations) + scales


def _padded(rows: int, columns: int) -> int:
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def quantizes(quick: bool = False) -> list[Quantize]:
    """Every case, the shapes with a goal first."""
    if quick:
        return [
            Quantize(op, shape)
            for shape in QUICK_SHAPES
            for op in (OPS if len(shape) == 3 else ("quantize_rowwise", "quantize_dual"))
        ]
    cases = [Quantize(op, shape) for op in OPS for shape in (*LLAMA4, *DEEPSEEK, *AWKWARD)]
    cases += [Quantize(op, shape) for op in MATRIX_OPS for shape in MATRICES]
    blocked = ((1, 8192, 5120), (8, 8192, 5120), (1, 7168, 2048), *AWKWARD)
    cases += [Quantize(op, shape, variant="blocked") for op in OPS for shape in blocked]
    for op in OPS:
        variants = ("square", "square_blocked", "transposed")
        cases += [Quantize(op, VARIANT_SHAPE, variant=variant) for variant in variants]
        cases += [Quantize(op, VARIANT_SHAPE, dtype=dtype) for dtype in (torch.float32, torch.float16)]
    for shape in (VARIANT_SHAPE, (32768, 7168)):
        cases += [Quantize("dequantize", shape, variant=variant) for variant in ("rows", "columns")]
    return cases


def make_input(quantize: Quantize, device: str = "cuda") -> Tensor:
    """Normal numbers; an expert at a time, so that no larger matrix of fp32 is needed on the way."""
    generator = torch.Generator(device).manual_seed(harness.seed(quantize.case.name))
    swapped = quantize.variant == "transposed"
    *experts, n, k = quantize.shape
    x = torch.empty(*experts, *((k, n) if swapped else (n, k)), dtype=quantize.dtype, device=device)
    for part in x if experts else (x,):
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    return x.mT if swapped else x


Function = Callable[..., Sequence[Tensor]]


def public_function(quantize: Quantize, module: object) -> Function:
    """The op of `cute_kernels` or of its reference with the case's options; its results as a tuple."""
    options: dict[str, object] = {}
    if quantize.op == "dequantize":
        return lambda q, scale: (module.dequantize(q, scale, dtype=quantize.dtype),)
    options["scale_layout"] = "blocked" if quantize.blocked else "plain"
    if quantize.square:
        options |= {"square": True} if quantize.is_dual else {"block": (32, 32)}
    return functools.partial(getattr(module, quantize.op), **options)


def operands(quantize: Quantize, x: Tensor) -> tuple[Tensor, ...]:
    """The op's arguments: x, or the elements and scales of x for ``dequantize``."""
    if quantize.op != "dequantize":
        return (x,)
    rows, columns = ("rowwise", "colwise") if x.dim() == 2 else ("3d_dual", "3d_colwise")
    along_k = quantize.variant == "rows"
    function = getattr(cute_kernels, f"quantize_{rows if along_k else columns}")
    return tuple(function(x)[:2])


class Sample:
    """Bytes of a dense tensor of E experts (or of a matrix), the same places of each expert, as fp64."""

    def __init__(self, experts: int, device: str):
        self._experts = experts
        self._device = device

    def __call__(self, output: Tensor) -> Tensor:
        return self._pick(output, self._experts)

    def truth(self, quantize: Quantize, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The reference's, an expert at a time."""
        function = public_function(quantize, reference)
        parts = [inputs] if len(quantize.shape) == 2 else zip(*(t.split(1) for t in inputs), strict=True)
        picked = [[self._pick(output, 1) for output in function(*part)] for part in parts]
        return {
            name: torch.cat(of_experts)
            for name, of_experts in zip(OUTPUTS[quantize.op], zip(*picked, strict=True), strict=True)
        }

    def _pick(self, output: Tensor, experts: int) -> Tensor:
        bytes_ = output.as_strided((output.numel(),), (1,)).view(torch.uint8).view(experts, -1)
        return bytes_[:, _places(bytes_.shape[1], self._device)].double()


@functools.lru_cache(maxsize=8)
def _places(size: int, device: str) -> Tensor:
    """Where bytes are taken: everywhere if there are few; else both ends and places between them."""
    if size <= SAMPLE:
        return torch.arange(size, device=device)
    ends, generator = SAMPLE // 8, torch.Generator().manual_seed(size)
    between = torch.randint(size, (SAMPLE - 2 * ends,), generator=generator)
    return torch.cat([torch.arange(ends), between, torch.arange(size - ends, size)]).to(device)


# Providers: each takes a case and its inputs and gives the call, or None if it has no such op.


def _cute_kernels(quantize: Quantize, inputs: Sequence[Tensor]) -> harness.Call:
    return functools.partial(public_function(quantize, cute_kernels), *inputs)


def _torch_compile(quantize: Quantize, inputs: Sequence[Tensor]) -> harness.Call:
    # Every case is a program of its own with static sizes: nothing of the last case is left
    torch._dynamo.reset()
    compiled = torch.compile(public_function(quantize, reference), dynamic=False, fullgraph=True)
    return lambda: compiled(*inputs)


def _torchao(quantize: Quantize, inputs: Sequence[Tensor]) -> harness.Call | None:
    (x, *_) = inputs
    if quantize.op == "quantize_3d_colwise" and quantize.variant == "blocked":
        from torchao.prototype.moe_training.kernels.mxfp8 import mxfp8_quantize_cuda_3d

        return lambda: mxfp8_quantize_cuda_3d(x, 32, "rceil")
    if quantize.op not in MATRIX_OPS or quantize.variant != "plain":
        return None
    from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0, triton_to_mxfp8_dim1

    kernels = {
        "quantize_rowwise": (triton_to_mxfp8_dim0,),
        "quantize_colwise": (triton_to_mxfp8_dim1,),
        "quantize_dual": (triton_to_mxfp8_dim0, triton_to_mxfp8_dim1),
    }[quantize.op]
    return lambda: tuple(output for kernel in kernels for output in kernel(x, 32, "rceil"))


PROVIDERS: dict[str, Callable[[Quantize, Sequence[Tensor]], harness.Call | None]] = {
    "cute_kernels": _cute_kernels,
    "torch_compile": _torch_compile,
    "torchao": _torchao,
}
PACKAGES = {"torchao": ("torchao",)}  # what a provider imports, where it is not torch


def measure_quantize(
    quantize: Quantize, providers: Sequence[str], device: harness.Device, *, repetitions: int, breakdown: bool
) -> harness.Measurement:
    """Times the providers; one with a byte that is not the reference's has failed."""
    inputs = operands(quantize, make_input(quantize, device.name))
    sample = Sample(math.prod(quantize.shape[:-2]), device.name)
    found = harness.measure(
        quantize.case,
        {provider: functools.partial(PROVIDERS[provider], quantize, inputs) for provider in providers},
        sample.truth(quantize, inputs),
        device,
        repetitions=repetitions,
        breakdown=breakdown,
        yardstick=YARDSTICK,
        sample=sample,
    )
    wrong = {
        provider: "other bytes than the reference's: "
        + ", ".join(f"{name} {error:.1e}" for name, error in result.error.items() if error != 0)
        for provider, result in found.results.items()
        if any(result.error.values())
    }
    results = {provider: result for provider, result in found.results.items() if provider not in wrong}
    return dataclasses.replace(found, results=results, failures=found.failures | wrong)


def run(cases: Sequence[Quantize], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return harness.run(
        [(quantize, [quantize.case]) for quantize in cases],
        lambda quantize, directions, *rest, **options: [measure_quantize(quantize, *rest, **options)],
        [YARDSTICK, *providers],
        harness.CudaDevice,
        packages=PACKAGES,
        **settings,
    )


def flatness(measurements: Iterable[harness.Measurement]) -> dict[str, tuple[float, float]]:
    """op, matrix and variant -> our share of the copy's speed with 1 and with 32 experts, where both are known."""
    shares: dict[str, dict[str, float]] = {}
    for m in measurements:
        experts, _, matrix = m.case.shape.partition("x")
        if matrix.count("x") == 1 and "cute_kernels" in m.results:
            name = f"{m.case.op} {matrix} {m.case.dtype} {m.case.variant}"
            shares.setdefault(name, {})[experts] = m.copy_us / m.results["cute_kernels"].us
    return {name: (found["1"], found["32"]) for name, found in shares.items() if {"1", "32"} <= found.keys()}


def print_flatness(measurements: Iterable[harness.Measurement]) -> None:
    console = harness.wide_console()
    for name, (one, many) in flatness(measurements).items():
        verdict = "ok" if abs(one - many) <= GOAL_FLAT else "--"
        text = f"{name}: {one:.3f} of the copy with 1 expert, {many:.3f} with 32; goal: within {GOAL_FLAT} {verdict}"
        console.print(text, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [quantize.case.name for quantize in quantizes(quick)]

    options = harness.parse(
        "mxfp8", __doc__.splitlines()[0], "three shapes", tuple(PROVIDERS), tuple(PROVIDERS), names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(quantizes(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_flatness(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_mxfp8", main))
