"""grouped_mm at the sizes of models with experts, forward, dA and dW, beside torch's grouped_mm and others.

    python -m bench.bench_moe                                          every case, results printed
    python -m bench.bench_moe --filter 'fwd.*qwen3' --reps 30          cases whose name matches
    python -m bench.bench_moe --save                                   and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_moe --providers cute_kernels,config_2        the chosen kernel and another one
    python -m bench.bench_moe --providers cute_kernels,quack           those cases in which quack runs
    python -m bench.bench_moe --list                                   the names of the cases

A case's name is op.direction.shape.dtype.variant, like grouped_mm.fwd.qwen3-30b-up-65536x128x1536x2048.bfloat16.skew.
The shape is rows x experts x N x K of y (R, N), each row times its expert's weight (N, K)^T; dA = dy weight, dW sums
dy^T x over the rows of each expert, dW_into onto fp32. Variants: equal (as many rows for each expert); random and skew
(experts' popularity, as logits, has a deviation of 0.3 and 0.7); decode (few rows: the time is that of reading
weights); mxfp8 (the same, of weights that are mxfp8; torch and ``bf16``, which is ours, read them dequantized).
deepseek-v3 has 64 of its 256 experts, as one of four ranks.

The cases are these of each model, in this order, and no others; under --time-limit the last ones are missing:

    up     random  8192 tokens          fwd, dA, dW, dW_into
    both   decode  1, 8, 32, 128        fwd
    up     skew    8192                 fwd, dA, dW, dW_into
    up     random  2048                 fwd, dA, dW, dW_into
    up     equal   8192                 fwd, dA
    both   decode  2, 4, 16, 64, 256    fwd
    down   random  8192                 fwd, dA, dW, dW_into
    up     random  16384                fwd
    up     mxfp8   1, 8, 32, 128        fwd
    up     skew    2048                 fwd
    up     equal   2048                 fwd

quack, which is tuned for each shape, and DeepGEMM, which compiles for each, run where they are named as providers, in
up, random, 8192 tokens and in up, decode, 128 tokens: then these are all cases. ``equal_bmm`` is our bmm of as many
rows in equal groups, of few tokens those of the experts that have rows; ``dense`` torch.mm of as many rows with one
weight: what the groups cost; ``read`` a maximum over the weights of the experts that have rows. None computes the
case's result, so that none is checked. Errors are against fp64 on 64 rows, of dW on two experts. All cases of a layer's
matrix have the same weights; host times are medians of five calls.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import harness
from cute_kernels import bmm, dequantize, grouped_mm, quantize_rowwise
from cute_kernels.gemm import launch_grouped
from cute_kernels.gemm.config_grouped import candidates
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from jit_cache import command

MODELS = {  # experts, k, H, I
    "qwen3-30b": (128, 8, 2048, 768),
    "qwen3-235b": (128, 8, 4096, 1536),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v3": (64, 8, 7168, 2048),
    "small": (64, 6, 2048, 1408),
}
SKEW = {"equal": None, "random": 0.3, "skew": 0.7, "decode": 0.3, "mxfp8": 0.3}
FEW = ("decode", "mxfp8")
PADDING = 128  # DeepGEMM's groups begin at multiples of so many rows
DIRECTIONS = ("fwd", "dA", "dW", "dW_into")
SUMS = DIRECTIONS[2:]
# Parts, variant, tokens, directions of each model's products, the most wanted first
CASES: tuple[tuple[tuple[str, ...], str, tuple[int, ...], tuple[str, ...]], ...] = (
    (("up",), "random", (8192,), DIRECTIONS),
    (("up", "down"), "decode", (1, 8, 32, 128), ("fwd",)),
    (("up",), "skew", (8192,), DIRECTIONS),
    (("up",), "random", (2048,), DIRECTIONS),
    (("up",), "equal", (8192,), ("fwd", "dA")),
    (("up", "down"), "decode", (2, 4, 16, 64, 256), ("fwd",)),
    (("down",), "random", (8192,), DIRECTIONS),
    (("up",), "random", (16384,), ("fwd",)),
    (("up",), "mxfp8", (1, 8, 32, 128), ("fwd",)),
    (("up",), "skew", (2048,), ("fwd",)),
    (("up",), "equal", (2048,), ("fwd",)),
)
WITH_PEERS = (("up", "random", 8192), ("up", "decode", 128))  # where quack and DeepGEMM run
CHECKED_ROWS, CHECKED_EXPERTS = 64, 2


@dataclass(frozen=True)
class Product:
    """One product of all experts of a layer."""

    model: str
    part: str
    tokens: int
    direction: str
    variant: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(rows, experts, N, K)"""
        experts, k, hidden, width = MODELS[self.model]
        n_k = (2 * width, hidden) if self.part == "up" else (hidden, width)
        return self.tokens * k, experts, *n_k

    @property
    def slots(self) -> int:
        """Experts of a token."""
        return MODELS[self.model][1]

    @property
    def has_peers(self) -> bool:
        """Whether quack and DeepGEMM run."""
        return (self.part, self.variant, self.tokens) in WITH_PEERS

    @property
    def case(self) -> harness.Case:
        rows, experts, n, k = self.sizes
        active = round(experts * (1 - (1 - self.slots / experts) ** self.tokens))
        of_weights = active * n * k * (8 if self.direction == "dW_into" else 33 / 32 if self.variant == "mxfp8" else 2)
        return harness.Case(
            family="moe",
            op="grouped_mm",
            direction=self.direction,
            shape=f"{self.model}-{self.part}-{rows}x{experts}x{n}x{k}",
            dtype="bfloat16",
            variant=self.variant,
            bytes=int(of_weights) + 2 * rows * (n + k),
            flops=2 * rows * n * k,
        )


def products(quick: bool = False) -> list[Product]:
    """Every case; those of the same weights are neighbours."""
    if quick:
        return [Product("qwen3-30b", p, 8192, d, "random") for p in ("up", "down") for d in DIRECTIONS]
    return [
        Product(model, part, t, d, variant)
        for parts, variant, tokens, directions in CASES
        for model in MODELS
        for part in parts
        for t in tokens
        for d in directions
    ]


@dataclass(frozen=True)
class Inputs:
    """x (R, K), weight (E, N, K), dy (R, N), offs (E,), main_grad (E, N, K) of sums onto it; mxfp8's parts."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    offs: Tensor
    main_grad: Tensor | None = None
    quantized: tuple[Tensor, Tensor] | None = None

    @property
    def active(self) -> Tensor:
        """Which experts have rows."""
        return self.offs.diff(prepend=self.offs.new_zeros(1)) > 0


@functools.lru_cache(maxsize=1)
def make_weight(sizes: tuple[int, int, int], device: str) -> Tensor:
    """(E, N, K) bf16; the last one is kept: it is up to 3.8 GB, and the next case's as a rule."""
    generator = torch.Generator(device).manual_seed(harness.seed(f"weight {sizes}"))
    weight = torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)
    return weight.mul_(sizes[2] ** -0.5)


@functools.lru_cache(maxsize=1)
def make_mxfp8(sizes: tuple[int, int, int], device: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The same weight from mxfp8, and in it."""
    q, scale = (t.view(*sizes[:2], -1) for t in quantize_rowwise(make_weight(sizes, device).view(-1, sizes[2])))
    return dequantize(q, scale), (q, scale)


def make_inputs(product: Product, device: str = "cuda") -> Inputs:
    rows, *sizes = product.sizes
    experts, n, k = sizes
    generator = torch.Generator(device).manual_seed(harness.seed(product.case.name))

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    skew, slots = SKEW[product.variant], product.slots
    if skew is None:
        counts = torch.full((experts,), rows // experts, device=device)
    else:
        logits = randn(product.tokens, experts, dtype=torch.float32) + skew * randn(experts, dtype=torch.float32)
        counts = torch.bincount(logits.topk(slots, 1).indices.flatten(), minlength=experts)
    weight, quantized = make_weight((experts, n, k), device), None
    if product.variant == "mxfp8":
        weight, quantized = make_mxfp8((experts, n, k), device)
    main_grad = randn(experts, n, k, dtype=torch.float32) if product.direction == "dW_into" else None
    return Inputs(randn(rows, k), weight, randn(rows, n), counts.cumsum(0).int(), main_grad, quantized)


@dataclass(frozen=True)
class Sample:
    """Some rows, or some experts' sums, which are compared."""

    product: Product
    inputs: Inputs

    @property
    def places(self) -> Tensor:
        is_sum = self.product.direction in SUMS
        size = len(self.inputs.offs) if is_sum else len(self.inputs.x)
        most = CHECKED_EXPERTS if is_sum else CHECKED_ROWS
        return torch.linspace(0, size - 1, min(most, size), device=self.inputs.x.device).long()

    def __call__(self, out: Tensor) -> Tensor:
        is_padded = self.product.direction not in SUMS and len(out) > len(self.inputs.x)
        if is_padded:
            return out[padded_rows(self.inputs, self.product.variant in FEW)[self.places]]
        return out[self.places]

    def truth(self) -> Tensor:
        x, weight, dy, offs, main_grad, _ = vars(self.inputs).values()
        ends = [0, *offs.tolist()]
        if self.product.direction in SUMS:
            groups = [slice(ends[e], ends[e + 1]) for e in self.places.tolist()]
            sums = torch.stack([dy[rows].double().t() @ x[rows].double() for rows in groups])
            return sums if main_grad is None else main_grad[self.places].double() + sums
        expert = torch.searchsorted(offs, self.places, right=True)
        rows, matrices = (x, weight.mT) if self.product.direction == "fwd" else (dy, weight)
        pairs = zip(self.places.tolist(), expert.tolist(), strict=True)
        return torch.stack([rows[row].double() @ matrices[e].double() for row, e in pairs])


def padded_counts(inputs: Inputs, equal: bool = False) -> Tensor:
    """How many rows each expert has with those of zeros behind its own, for DeepGEMM; equal: as many for each."""
    counts = (inputs.offs.diff(prepend=inputs.offs.new_zeros(1)) + PADDING - 1) // PADDING * PADDING
    return counts.max().expand_as(counts) if equal else counts


def padded_rows(inputs: Inputs, equal: bool = False) -> Tensor:
    """Where each row is among these."""
    rows = torch.arange(len(inputs.x), device=inputs.x.device)
    expert = torch.searchsorted(inputs.offs, rows, right=True)
    counts = padded_counts(inputs, equal)
    starts = counts.cumsum(0) - counts
    return rows + (starts - torch.nn.functional.pad(inputs.offs, (1, -1)))[expert]


def _operands(product: Product, inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, weight, dy, *_ = vars(inputs).values()
    return {"fwd": (x, weight.mT), "dA": (dy, weight)}.get(product.direction, (dy.t(), x))


def _cute_kernels(product: Product, inputs: Inputs) -> harness.Call:
    operands, offs = _operands(product, inputs), inputs.offs
    if inputs.quantized is not None:
        q, scale = inputs.quantized
        return lambda: (grouped_mm(inputs.x, q.mT, offs, b_scale=scale),)
    if inputs.main_grad is None:
        return lambda: (grouped_mm(*operands, offs),)
    into = inputs.main_grad.clone()
    return lambda: (grouped_mm(*operands, offs, accumulate_into=into),)


def _candidate(number: int, product: Product, inputs: Inputs) -> harness.Call | None:
    arch = launches.target_of(inputs.x.get_device()).arch
    known = candidates(arch, "sums" if product.direction in SUMS else "rows")[1:]  # the first one is for any strides
    if number >= len(known):
        return None
    call, cache = _cute_kernels(product, inputs), LaunchCache(launch_grouped.GroupedLaunches)
    launch_of = functools.partial(launch_grouped.launch_of, candidate=known[number])

    def call_with_candidate() -> Sequence[Tensor]:
        with mock.patch.multiple(launch_grouped, _grouped=cache, launch_of=launch_of):
            return call()

    return call_with_candidate


def _torch(product: Product, inputs: Inputs) -> harness.Call:
    operands, offs = _operands(product, inputs), inputs.offs
    if inputs.main_grad is None:
        return lambda: (torch._grouped_mm(*operands, offs=offs),)
    into = inputs.main_grad.clone()
    return lambda: (into.add_(torch._grouped_mm(*operands, offs=offs)),)


def _quack(product: Product, inputs: Inputs, tuned: bool = True) -> harness.Call | None:
    from quack import gemm_interface as quack
    from triton.testing import do_bench

    # Its own way takes 250 calls of each of 22 kernels, of sums 44: a minute of sums that take 6 ms. This takes 11
    quack.gemm_tuned._do_bench = functools.partial(do_bench, warmup=5, rep=25)
    operands, ends = _operands(product, inputs), torch.nn.functional.pad(inputs.offs, (1, 0))
    groups = "cu_seqlens_k" if product.direction in SUMS else "cu_seqlens_m"
    options = {groups: ends, "tuned": tuned}
    if inputs.main_grad is None:
        return lambda: (quack.gemm(*operands, **options),)
    into = inputs.main_grad.clone()

    def call() -> tuple[Tensor]:
        quack.gemm_add_inplace(*operands, into, **options)
        return (into,)

    return call


def _deep_gemm(product: Product, inputs: Inputs) -> harness.Call | None:
    import deep_gemm

    x, weight, dy, offs, main_grad, _ = vars(inputs).values()
    if product.direction == "dW" or product.variant == "mxfp8":  # its sums are fp32, its fp8 products of both operands
        return None
    is_masked = product.variant in FEW
    counts, places = padded_counts(inputs, is_masked), padded_rows(inputs, is_masked)
    sizes = counts.tolist()

    def padded(rows: Tensor) -> Tensor:
        return rows.new_zeros(sum(sizes), *rows.shape[1:]).index_copy_(0, places, rows)

    if main_grad is not None:
        into, operands = main_grad.clone(), (padded(dy), padded(x))

        def call() -> tuple[Tensor]:
            deep_gemm.k_grouped_bf16_gemm_tn_contiguous(*operands, into, sizes, counts, into)
            return (into,)

        return call
    if is_masked:  # a matrix of as many rows for each expert, of which it has ``used``
        matrices, used = padded(x).unflatten(0, (len(offs), -1)), offs.diff(prepend=offs.new_zeros(1))
        result, mean = matrices.new_empty(*matrices.shape[:2], weight.shape[1]), max(1, len(x) // len(offs))

        def call_masked() -> tuple[Tensor]:
            deep_gemm.m_grouped_bf16_gemm_nt_masked(matrices, weight, result, used, mean)
            return (result.flatten(0, 1),)

        return call_masked
    is_forward = product.direction == "fwd"
    suffix = "nt" if is_forward else "nn"
    function = getattr(deep_gemm, f"m_grouped_bf16_gemm_{suffix}_contiguous")
    expert = torch.searchsorted(offs, torch.arange(len(x), device=x.device), right=True, out_int32=True)
    rows, layout = padded(x if is_forward else dy), padded(expert + 1) - 1  # of rows of zeros -1
    out = rows.new_empty(len(rows), weight.shape[1 if is_forward else 2])

    def call() -> tuple[Tensor]:
        function(rows, weight, out, layout)
        return (out,)

    return call


def _equal_bmm(product: Product, inputs: Inputs) -> harness.Call | None:
    x, weight, dy, offs, *_ = vars(inputs).values()
    if product.variant == "mxfp8":
        return None
    if product.variant == "decode":
        weight = weight[inputs.active]
        of_mean = x[: -(-len(x) // len(weight))].expand(len(weight), -1, -1).contiguous()
        return lambda: (bmm(of_mean, weight.mT),)
    x, dy = (t.unflatten(0, (len(offs), -1)) for t in (x, dy))
    operands = {"fwd": (x, weight.mT), "dA": (dy, weight)}.get(product.direction, (dy.mT, x))
    return lambda: (bmm(*operands),)


def _dense(product: Product, inputs: Inputs) -> harness.Call | None:
    if product.variant in FEW:
        return None
    x, weight, dy, *_ = vars(inputs).values()
    operands = {"fwd": (x, weight[0].t()), "dA": (dy, weight[0])}.get(product.direction, (dy.t(), x))
    return lambda: (torch.mm(*operands),)


def _bf16(product: Product, inputs: Inputs) -> harness.Call | None:
    if inputs.quantized is None:
        return None
    return lambda: (grouped_mm(inputs.x, inputs.weight.mT, inputs.offs),)


def _read(product: Product, inputs: Inputs) -> harness.Call | None:
    if product.variant not in FEW:
        return None
    weight = inputs.weight if inputs.quantized is None else inputs.quantized[0]
    active = weight.view(torch.int64)[inputs.active].flatten(1)
    return lambda: (active.amax(1),)


PROVIDERS: dict[str, Callable[[Product, Inputs], harness.Call | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "deep_gemm": _deep_gemm,
    "quack": _quack,
    "quack_default": functools.partial(_quack, tuned=False),
}
CONFIGS = {f"config_{i}": functools.partial(_candidate, i) for i in range(len(candidates("sm_90a", "rows")) - 1)}
DEFAULT_PROVIDERS = ("cute_kernels", "torch")
PACKAGES = {"deep_gemm": ("deep_gemm",), "quack": ("quack", "triton"), "quack_default": ("quack", "triton")}
FLOORS = {"equal_bmm": _equal_bmm, "dense": _dense, "bf16": _bf16, "read": _read}


def compile_own_kernels(cases: Sequence[Product], device: harness.Device) -> None:
    """Before a peer is imported: quack changes classes of the DSL."""
    for case in cases:
        inputs = make_inputs(case, device.name)
        for make in (_cute_kernels, _equal_bmm, _bf16):
            with contextlib.suppress(Exception):  # raised again, and reported, where the case is measured
                call = make(case, inputs)
                if call is not None:
                    call()
    device.synchronize()


def measure_product(
    product: Product, directions: Any, providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    inputs = make_inputs(product, device.name)
    sample = Sample(product, inputs)
    known = PROVIDERS | CONFIGS
    makers = {provider: functools.partial(known[provider], product, inputs) for provider in providers}
    floors = {name: functools.partial(make, product, inputs) for name, make in FLOORS.items()}
    start = None if inputs.main_grad is None else {"out": inputs.main_grad}
    found = harness.measure(
        product.case, makers, {"out": sample.truth()}, device, sample=sample, floors=floors, start=start, **options
    )
    return [found]


def run(cases: Sequence[Product], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases, beside torch, whose error is the yardstick."""
    selected = [(case, [case.case]) for case in cases]
    settings = {"packages": PACKAGES, **settings}
    if with_peers(providers):
        settings["compile_own_kernels"] = compile_own_kernels
    # A hundred calls of milliseconds each, for the host's times alone, would last longer than all else
    device = functools.partial(harness.CudaDevice, host_batches=1, calls_per_batch=5)
    return harness.run(selected, measure_product, [*providers, "torch"], device, **settings)


def with_peers(providers: Sequence[str]) -> bool:
    return not PACKAGES.keys().isdisjoint(providers)


def print_rates(measurements: Sequence[harness.Measurement]) -> None:
    """TFLOP/s of each provider."""
    for m in measurements:
        rates = (f"{provider} {m.case.flops / result.us / 1e6:.0f}" for provider, result in m.results.items())
        print(f"{m.case.name}: {', '.join(rates)} TFLOP/s")


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [product.case.name for product in products(quick)]

    what, known = __doc__.splitlines()[0], (*PROVIDERS, *CONFIGS)
    options = harness.parse("moe", what, "qwen3-30b, 8192 tokens", known, DEFAULT_PROVIDERS, names, arguments)
    if isinstance(options, int):
        return options
    cases = products(options.quick)
    if with_peers(options.providers):
        cases = [product for product in cases if product.has_peers]
    measurements = run(cases, options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_moe", main))
