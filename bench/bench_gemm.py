"""mm, bmm and linear, forward and both gradients, beside cuBLAS, quack and a batch-invariant Triton kernel.

    python -m bench.bench_gemm                                        every case, results printed
    python -m bench.bench_gemm --filter 'dB' --reps 30                cases whose name matches
    python -m bench.bench_gemm --filter decode --providers cute_kernels,cublas,read_floor
    python -m bench.bench_gemm --save                                 and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_gemm --list                                 the names of the cases

A case's name is op.direction.shape.dtype.variant, like mm.dA.4096x12288x4096.bfloat16.prefill. The shape is the
forward's MxNxK of y (M, N) = x (M, K) weight (N, K)^T; dA = dy weight, dB = dy^T x. Variants: prefill; decode (few
rows: the time is that of reading the weights); tokens (17 to 512 rows, K up to 25,600; of MORE_TOKENS no shape was
looked at when the kernels were chosen); bias_gelu (linear with both in the epilogue); accumulate (dB added to
an fp32 main_grad); batch (bmm of LxMxNxK, L such products).

What differs from the other families:
- The yardstick is cuBLAS (torch.mm, torch.bmm), for speed and for errors. Ratios are its time over ours: above 1 we
  are faster.
- A product that is limited by power slows what runs after it: every round takes the providers in another random
  order, after half a second of warm-up. Nothing is timed in a block of its own. Fewer than 20 repetitions say little.
- Errors are against fp64 on 64 random rows (all columns) and 64 random columns (all rows) of the output, of a batch of
  each entry, so every tile is looked at; on all of an output of up to 64 rows. The rest must be finite: it held NaN
  before.
- All write into an output that exists (linear and bmm allocate their own). Inputs are random normal bf16, scaled so
  that the outputs are O(1).
- read_floor is no product: it reads the weights of a decode case and does nothing else, in the fastest of the ways
  that triton_gemm.FLOOR_CANDIDATES has.
- quack's tuner tries its 44 configurations for each shape, with its shorter timer (triton's do_bench, cold L2, 30 ms
  each; its own takes 0.2 to 2 s each). quack_default is the same without tuning, not run unless named.
- Fused gelu: ours is exact, cuBLASLt's and quack's are the tanh approximation (the only one they have).
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import harness
from jit_cache import command

LAYERS = ((12288, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096))  # (N, K) of the weights
PREFILL = (
    *((4096, n, k) for n, k in LAYERS),
    (8192, 8192, 8192),
    (8192, 28672, 4096),
    (2048, 2048, 2048),
    (4096, 1024, 4096),
    (4096, 151936, 4096),
)
GRADIENTS = PREFILL[:6]
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_LAYERS = (*LAYERS, (1024, 4096))
TOKENS = (17, 24, 33, 48, 72, 80, 100, 128, 160, 224, 256, 320, 384, 512)
TOKENS_LAYERS = (
    *((2048, 768), (1536, 8960), (3584, 18944), (18944, 3584), (2048, 2048), (4096, 14336), (5120, 25600)),
    *((25600, 5120), (2880, 2880), (7168, 2048), (2112, 7168), (7168, 16384), (5120, 8192), (1024, 4096)),
    (151936, 4096),
)
MORE_TOKENS = ((56, 6144, 16384), (144, 3072, 12288), (448, 8192, 28672))
BIAS_GELU = ((4096, 14336, 4096), (16, 14336, 4096))
ACCUMULATE = ((4096, 4096, 4096), (4096, 14336, 4096))
# (L, M, N, K): attention's scores, what they weigh, of few tokens, and large ones
BATCH = ((64, 1024, 1024, 128), (64, 1024, 128, 1024), (256, 16, 1024, 128), (8, 4096, 4096, 4096))

DIRECTIONS = ("fwd", "dA", "dB")
YARDSTICK = "cublas"
FLOOR = "read_floor"
SAMPLED = 64  # rows, and columns, of an output that are compared with fp64
WARM_UP_SECONDS = 0.5

# Our goals. Prefill and gradients: cuBLAS's time over ours, geometric mean and on every shape; tokens: also on 95 % of
# the shapes; decode: on every shape, and, of up to 64 tokens, our time over that of reading the weights.
GOAL_MEAN, GOAL_EVERY = 0.97, 0.93
GOAL_TOKENS_MEAN, GOAL_TOKENS_MOST, GOAL_TOKENS_EVERY, MOST = 1.05, 0.97, 0.90, 0.95
GOAL_DECODE, GOAL_FLOOR, FLOOR_TOKENS = 1.0, 1.10, 64


@dataclass(frozen=True)
class Gemm:
    """One product; m, n, k are the forward's whatever the direction. ``entries``: of a batch, so many of them."""

    m: int
    n: int
    k: int
    direction: str = "fwd"
    variant: str = "prefill"
    entries: int | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dimensions of all tensors."""
        return () if self.entries is None else (self.entries,)

    @property
    def product(self) -> tuple[int, int, int]:
        """(rows, columns, summed) of what is computed."""
        return {
            "fwd": (self.m, self.n, self.k),
            "dA": (self.m, self.k, self.n),
            "dB": (self.n, self.k, self.m),
        }[self.direction]

    @property
    def case(self) -> harness.Case:
        return harness.Case(
            family="gemm",
            op={"prefill": "mm", "decode": "mm", "tokens": "mm", "batch": "bmm"}.get(self.variant, "linear"),
            direction=self.direction,
            shape="x".join(map(str, (*self.batch, self.m, self.n, self.k))),
            dtype="bfloat16",
            variant=self.variant,
            bytes=minimal_bytes(self),
            flops=2 * math.prod(self.batch) * self.m * self.n * self.k,
        )


def minimal_bytes(gemm: Gemm) -> int:
    """Both factors read once, the result written once (accumulate: an fp32 result, read and written)."""
    rows, cols, summed = gemm.product
    result = rows * cols * (8 if gemm.variant == "accumulate" else 2)
    one = 2 * (rows + cols) * summed + result + (2 * gemm.n if gemm.variant == "bias_gelu" else 0)
    return math.prod(gemm.batch) * one


def gemms(quick: bool = False) -> list[Gemm]:
    """Every case: prefill, its gradients, decode, some tokens, epilogues, batches."""
    if quick:
        return [
            Gemm(4096, 4096, 4096),
            Gemm(4096, 14336, 4096),
            Gemm(4096, 4096, 4096, "dA"),
            Gemm(4096, 4096, 4096, "dB"),
            *(Gemm(m, 4096, 4096, variant="decode") for m in (1, 16, 128)),
        ]
    return [
        *(Gemm(*shape) for shape in PREFILL),
        *(Gemm(*shape, direction) for direction in ("dA", "dB") for shape in GRADIENTS),
        *(Gemm(m, n, k, variant="decode") for n, k in DECODE_LAYERS for m in DECODE_TOKENS),
        *(Gemm(m, n, k, variant="tokens") for n, k in TOKENS_LAYERS for m in TOKENS),
        *(Gemm(*shape, variant="tokens") for shape in MORE_TOKENS),
        *(Gemm(*shape, variant="bias_gelu") for shape in BIAS_GELU),
        *(Gemm(*shape, "dB", "accumulate") for shape in ACCUMULATE),
        *(Gemm(*shape, variant="batch", entries=entries) for entries, *shape in BATCH),
    ]


@dataclass(frozen=True)
class Inputs:
    """The factors of the product, a (..., rows, summed) and b (..., summed, columns), as views of x, weight and dy.

    bias: (n,), bias_gelu only; start: what main_grad holds before the product is added, accumulate only.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    start: Tensor | None = None

    def new_out(self) -> Tensor:
        """Where the result goes; what is accumulated into starts as `start`."""
        shape = (*self.a.shape[:-1], self.b.shape[-1])
        return self.a.new_empty(shape) if self.start is None else self.start.clone()


def make_inputs(gemm: Gemm, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.seed(gemm.case.name))
    scale = gemm.product[2] ** -0.5  # of one factor, so that the outputs are O(1)

    def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(std).to(dtype)

    m, n, k = gemm.m, gemm.n, gemm.k
    if gemm.direction == "fwd":
        x, weight = normal(*gemm.batch, m, k), normal(*gemm.batch, n, k, std=scale)
        return Inputs(x, weight.mT, bias=normal(n) if gemm.variant == "bias_gelu" else None)
    if gemm.direction == "dA":
        return Inputs(normal(m, n), normal(n, k, std=scale))
    dy, x = normal(m, n, std=scale), normal(m, k)
    start = normal(n, k, dtype=torch.float32) if gemm.variant == "accumulate" else None
    return Inputs(dy.t(), x, start=start)


class Sample:
    """The sample of an output that is compared with fp64: random rows and columns, or all of it where rows are few."""

    def __init__(self, gemm: Gemm, device: str) -> None:
        rows, cols, _ = gemm.product
        generator = torch.Generator().manual_seed(harness.seed(f"sample {gemm.case.name}"))
        self.shape = (*gemm.batch, rows, cols)
        self.rows = torch.randperm(rows, generator=generator)[:SAMPLED].sort().values.to(device)
        self.cols = torch.randperm(cols, generator=generator)[:SAMPLED].sort().values.to(device)
        if rows <= SAMPLED:
            self.cols = self.cols[:0]  # all rows are there

    def __call__(self, output: Tensor) -> Tensor:
        """The rows, then the columns, in one dimension; NaN if the output holds one anywhere."""
        if output.shape != self.shape:
            return output
        found = torch.cat((output[..., self.rows, :].flatten(), output[..., self.cols].flatten()))
        return found if torch.isfinite(output).all() else torch.full_like(found, float("nan"))

    def truth(self, inputs: Inputs) -> Tensor:
        def exact(a: Tensor, b: Tensor, bias: Tensor | None, start: Tensor | None) -> Tensor:
            result = a.double() @ b.double()
            if start is not None:
                result += start
            return result if bias is None else F.gelu(result + bias.double())

        a, b, bias, start = inputs.a, inputs.b, inputs.bias, inputs.start
        of_rows = exact(a[..., self.rows, :], b, bias, None if start is None else start[self.rows])
        of_cols = exact(
            a,
            b[..., self.cols],
            None if bias is None else bias[self.cols],
            None if start is None else start[:, self.cols],
        )
        return torch.cat((of_rows.flatten(), of_cols.flatten()))


# Providers: each takes a case and its inputs and gives the call, or None if it has no such op.


def _cute_kernels(gemm: Gemm, inputs: Inputs) -> harness.Call | None:
    import cute_kernels

    if gemm.variant == "bias_gelu":
        return lambda: (cute_kernels.linear(inputs.a, inputs.b.t(), inputs.bias, activation="gelu"),)
    if gemm.variant == "accumulate":
        # As a training step does it: the backward of linear where the weight has a main_grad and x wants no gradient.
        weight = inputs.a.new_zeros((gemm.n, gemm.k)).requires_grad_()
        weight.main_grad = inputs.new_out()
        dy = inputs.a.t()
        y = cute_kernels.linear(inputs.b, weight)

        def accumulate() -> Sequence[Tensor]:
            torch.autograd.backward(y, dy, retain_graph=True)
            return (weight.main_grad,)

        return accumulate
    if gemm.variant == "batch":
        return lambda: (cute_kernels.bmm(inputs.a, inputs.b),)
    out = inputs.new_out()
    return lambda: (cute_kernels.mm(inputs.a, inputs.b, out=out),)


def _cublas(gemm: Gemm, inputs: Inputs) -> harness.Call | None:
    a, b, out = inputs.a, inputs.b, inputs.new_out()
    if gemm.variant == "bias_gelu":  # one kernel of cuBLASLt; F.linear and F.gelu would be two
        return lambda: (torch._addmm_activation(inputs.bias, a, b, use_gelu=True, out=out),)
    if gemm.variant == "accumulate":
        return lambda: (torch.addmm(out, a, b, out_dtype=torch.float32, out=out),)
    if gemm.variant == "batch":
        return lambda: (torch.bmm(a, b, out=out),)
    return lambda: (torch.mm(a, b, out=out),)


def _quack(gemm: Gemm, inputs: Inputs, tuned: bool = True) -> harness.Call | None:
    if gemm.variant in ("batch", "tokens"):  # tuned for each of so many shapes it takes an hour
        return None
    import triton
    from quack import gemm_interface as quack

    # Without a timer of its own the tuner takes 0.2 s and more for each of 44 configurations, for each shape.
    quack.gemm_tuned._do_bench = functools.partial(triton.testing.do_bench, warmup=5, rep=25)
    a, b, out = inputs.a, inputs.b, inputs.new_out()
    if gemm.variant == "bias_gelu":
        options = {"bias": inputs.bias, "activation": "gelu_tanh_approx", "store_preact": False, "tuned": tuned}
        return lambda: quack.gemm_act(a, b, postact_out=out, **options)[1:]

    if gemm.variant == "accumulate":

        def accumulate() -> Sequence[Tensor]:
            quack.gemm_add_inplace(a, b, out, tuned=tuned)
            return (out,)

        return accumulate
    return lambda: (quack.gemm(a, b, out=out, tuned=tuned),)


def _batch_invariant_triton(gemm: Gemm, inputs: Inputs) -> harness.Call | None:
    if gemm.case.op != "mm":
        return None
    from bench import triton_gemm

    out = inputs.new_out()
    return lambda: (triton_gemm.matmul(inputs.a, inputs.b, out),)


def _read_floor(gemm: Gemm, inputs: Inputs) -> harness.Call | None:
    if gemm.variant != "decode":
        return None
    from bench import triton_gemm

    read = triton_gemm.ReadFloor(inputs.b.t())
    return lambda: (read(),)


PROVIDERS: dict[str, Callable[[Gemm, Inputs], harness.Call | None]] = {
    "cute_kernels": _cute_kernels,
    "cublas": _cublas,
    "quack": _quack,
    "batch_invariant_triton": _batch_invariant_triton,
    FLOOR: _read_floor,
    "quack_default": functools.partial(_quack, tuned=False),
}
DEFAULT_PROVIDERS = tuple(provider for provider in PROVIDERS if provider != "quack_default")
PACKAGES = {  # what a provider imports, where it is not torch
    "quack": ("quack", "triton"),
    "quack_default": ("quack", "triton"),
    "batch_invariant_triton": ("triton",),
    FLOOR: ("triton",),
}


def compile_own_kernels(cases: Iterable[Gemm], device: harness.Device) -> None:
    """Compiles our kernels of these cases.

    Done before any peer is imported: quack changes classes of the CuTe DSL process-wide.
    """
    for gemm in cases:
        with contextlib.suppress(Exception):  # raised again, and reported, where the case is measured
            call = PROVIDERS["cute_kernels"](gemm, make_inputs(gemm, device.name))
            if call is not None:
                call()
    device.synchronize()


def measure_gemm(
    gemm: Gemm, providers: Sequence[str], device: harness.Device, *, repetitions: int, breakdown: bool
) -> harness.Measurement:
    inputs = make_inputs(gemm, device.name)
    sample = Sample(gemm, device.name)
    output = {"fwd": "y", "dA": "dx", "dB": "dw"}[gemm.direction]
    makers = {provider: functools.partial(PROVIDERS[provider], gemm, inputs) for provider in providers}
    floors = {FLOOR: makers.pop(FLOOR)} if FLOOR in makers else {}
    return harness.measure(
        gemm.case,
        makers,
        {output: sample.truth(inputs)},
        device,
        repetitions=repetitions,
        breakdown=breakdown,
        yardstick=YARDSTICK,
        sample=sample,
        start=None if inputs.start is None else {output: inputs.start},
        floors=floors,
    )


def run(cases: Sequence[Gemm], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return harness.run(
        [(gemm, [gemm.case]) for gemm in cases],
        lambda gemm, directions, *rest, **options: [measure_gemm(gemm, *rest, **options)],
        [*providers, YARDSTICK],
        lambda: harness.CudaDevice(warm_up_seconds=WARM_UP_SECONDS, shuffled=True),
        packages=PACKAGES,
        compile_own_kernels=compile_own_kernels,
        **settings,
    )


def print_table(measurements: Sequence[harness.Measurement], console: Console | None = None) -> None:
    """One row a case: our time, the peers', cuBLAS's and the best peer's over ours, ours over the floor, our error."""
    console = console or harness.wide_console()
    present = {provider for m in measurements for provider in [*m.results, *m.failures]}
    others = [provider for provider in PROVIDERS if provider in present and provider != "cute_kernels"]
    table = Table(box=None, pad_edge=False)
    for column in ("op", "dir", "shape", "variant"):
        table.add_column(column, no_wrap=True)
    ratios = (f"{YARDSTICK}/ours", "best peer/ours", "ours/floor")
    for column in ("ours us", "TFLOP/s", *others, *ratios, "error", "host us"):
        table.add_column(column, justify="right", no_wrap=True)
    for m in measurements:
        us = {provider: result.us for provider, result in m.results.items()}
        ours = m.results.get("cute_kernels")
        peers = [us[provider] for provider in others if provider in us and provider != FLOOR]
        table.add_row(
            m.case.op,
            m.case.direction,
            m.case.shape,
            m.case.variant,
            harness.number(ours and ours.us, ".1f", "FAILED" if "cute_kernels" in m.failures else "-"),
            harness.number(ours and 1e-6 * m.case.flops / ours.us, ".0f"),
            *(
                harness.number(us.get(provider), ".1f", "failed" if provider in m.failures else "-")
                for provider in others
            ),
            harness.number(us[YARDSTICK] / ours.us if ours and YARDSTICK in us else None, ".3f"),
            harness.number(min(peers) / ours.us if ours and peers else None, ".3f"),
            harness.number(ours.us / us[FLOOR] if ours and FLOOR in us else None, ".3f"),
            harness.number(max(ours.error.values()) if ours else None, ".1e"),
            harness.number(ours and ours.host_us, ".1f"),
        )
    console.print(table)


@dataclass(frozen=True)
class Summary:
    """The summary of the cases of one direction and variant; ratio: cuBLAS's time over ours.

    most: the ratio that all but 1 - MOST of the cases reach.
    floor, floor_shape: the largest of our time over the floor's, up to FLOOR_TOKENS, and where; None without a floor.
    """

    direction: str
    variant: str
    cases: int
    mean: float
    least: float
    least_shape: str
    most: float
    floor: float | None
    floor_shape: str

    @property
    def verdict(self) -> str:
        """The goals that apply, each met or not."""
        if self.variant == "prefill":
            goals = [
                (f"mean >= {GOAL_MEAN}", self.mean >= GOAL_MEAN),
                (f"every >= {GOAL_EVERY}", self.least >= GOAL_EVERY),
            ]
        elif self.variant == "decode":
            goals = [(f"every >= {GOAL_DECODE}", self.least >= GOAL_DECODE)]
            if self.floor is not None:
                goals.append((f"floor, M <= {FLOOR_TOKENS}, <= {GOAL_FLOOR:.2f}", self.floor <= GOAL_FLOOR))
        elif self.variant == "tokens":
            goals = [
                (f"mean >= {GOAL_TOKENS_MEAN}", self.mean >= GOAL_TOKENS_MEAN),
                (f"{MOST:.0%} >= {GOAL_TOKENS_MOST}", self.most >= GOAL_TOKENS_MOST),
                (f"every >= {GOAL_TOKENS_EVERY}", self.least >= GOAL_TOKENS_EVERY),
            ]
        else:
            goals = []
        return ", ".join(f"{text} {'ok' if met else '--'}" for text, met in goals) or "-"


def summarize(times: Iterable[tuple[str, str, str, Mapping[str, float]]]) -> list[Summary]:
    """times: (direction, variant, shape, provider -> us) of each case; those without ours or cuBLAS do not count."""
    groups: dict[tuple[str, str], list[tuple[str, Mapping[str, float]]]] = {}
    for direction, variant, shape, us in times:
        if "cute_kernels" in us and YARDSTICK in us:
            groups.setdefault((direction, variant), []).append((shape, us))
    summaries = []
    for (direction, variant), cases in groups.items():
        ratio = {shape: us[YARDSTICK] / us["cute_kernels"] for shape, us in cases}
        few = [(shape, us) for shape, us in cases if FLOOR in us and int(shape.partition("x")[0]) <= FLOOR_TOKENS]
        floor = {shape: us["cute_kernels"] / us[FLOOR] for shape, us in few}
        least_shape = min(ratio, key=ratio.__getitem__)
        floor_shape = max(floor, key=floor.__getitem__, default="")
        mean = statistics.geometric_mean(ratio.values())
        least, floor_ratio = ratio[least_shape], floor.get(floor_shape)
        most = sorted(ratio.values())[int((1 - MOST) * len(ratio))]
        found = Summary(direction, variant, len(cases), mean, least, least_shape, most, floor_ratio, floor_shape)
        summaries.append(found)
    return summaries


def print_summary(measurements: Sequence[harness.Measurement], console: Console | None = None) -> None:
    console = console or harness.wide_console()
    table = Table(title=f"{YARDSTICK}/ours", box=None, pad_edge=False)
    for column in ("dir", "variant", "cases", "geometric mean", "least", "at", "ours/floor", "at", "goals"):
        table.add_column(column, no_wrap=True)
    for s in summarize(
        (m.case.direction, m.case.variant, m.case.shape, {name: found.us for name, found in m.results.items()})
        for m in measurements
    ):
        numbers = (str(s.cases), f"{s.mean:.3f}", f"{s.least:.3f}", s.least_shape, harness.number(s.floor, ".3f"))
        table.add_row(s.direction, s.variant, *numbers, s.floor_shape, s.verdict)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [gemm.case.name for gemm in gemms(quick)]

    options = harness.parse(
        "gemm", __doc__.splitlines()[0], "seven cases", tuple(PROVIDERS), DEFAULT_PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(gemms(options.quick), options.providers, **options.settings)
    print_table(measurements)
    print_summary(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_gemm", main))
