"""grouped_mm at the sizes of models with experts, forward, dA and dW, beside torch's grouped_mm.

    python -m bench.bench_moe                                          every case, results printed
    python -m bench.bench_moe --filter 'fwd.*qwen3' --reps 30          cases whose name matches
    python -m bench.bench_moe --save                                   and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_moe --list                                   the names of the cases

A case's name is op.direction.shape.dtype.variant, like grouped_mm.fwd.qwen3-30b-up-65536x128x1536x2048.bfloat16.skew.
The shape is rows x experts x N x K of y (R, N), each row times its expert's weight (N, K)^T; dA = dy weight, dW sums
dy^T x over the rows of each expert. Variants: equal (as many rows for each expert); random and skew (experts'
popularity, as logits, has a deviation of 0.3 and 0.7); decode (few rows: the time is that of reading weights).

``equal_bmm`` is our bmm of as many rows in equal groups, ``dense`` torch.mm of as many rows with one weight: what the
groups cost. Neither computes the case's result, so that neither is checked. Errors are against fp64 on 64 rows, of dW
on two experts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import harness
from cute_kernels import bmm, grouped_mm
from jit_cache import command

MODELS = {  # experts, k, H, I
    "qwen3-30b": (128, 8, 2048, 768),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
TOKENS, DECODE_TOKENS = (2048, 8192), (1, 8, 32, 128)
SKEW = {"equal": None, "random": 0.3, "skew": 0.7, "decode": 0.3}
DIRECTIONS = ("fwd", "dA", "dW")
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
    def case(self) -> harness.Case:
        rows, experts, n, k = self.sizes
        return harness.Case(
            family="moe",
            op="grouped_mm",
            direction=self.direction,
            shape=f"{self.model}-{self.part}-{rows}x{experts}x{n}x{k}",
            dtype="bfloat16",
            variant=self.variant,
            bytes=2 * (min(experts, rows) * n * k + rows * (n + k)),
            flops=2 * rows * n * k,
        )


def products(quick: bool = False) -> list[Product]:
    """Every case."""
    models = list(MODELS)[:1] if quick else MODELS
    cases = [
        Product(model, part, tokens, direction, variant)
        for model in models
        for part in ("up", "down")
        for tokens in (TOKENS[-1:] if quick else TOKENS)
        for variant in ("random",)
        if quick or part == "down"
        for direction in DIRECTIONS
    ]
    if not quick:
        cases += [
            Product(model, "up", tokens, direction, variant)
            for model in models
            for tokens in TOKENS
            for variant in ("equal", "random", "skew")
            for direction in DIRECTIONS
        ]
        cases += [
            Product(model, part, t, "fwd", "decode")
            for model in models
            for part in ("up", "down")
            for t in DECODE_TOKENS
        ]
    return cases


@dataclass(frozen=True)
class Inputs:
    """x (R, K), weight (E, N, K), dy (R, N), offs (E,)."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    offs: Tensor


def make_inputs(product: Product, device: str = "cuda") -> Inputs:
    rows, experts, n, k = product.sizes
    generator = torch.Generator(device).manual_seed(harness.seed(product.case.name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    skew, slots = SKEW[product.variant], MODELS[product.model][1]
    if skew is None:
        counts = torch.full((experts,), rows // experts, device=device)
    else:
        popularity = skew * torch.randn(experts, generator=generator, device=device)
        logits = torch.randn(product.tokens, experts, generator=generator, device=device) + popularity
        counts = torch.bincount(logits.topk(slots, 1).indices.flatten(), minlength=experts)
    return Inputs(randn(rows, k), randn(experts, n, k) * k**-0.5, randn(rows, n), counts.cumsum(0).int())


@dataclass(frozen=True)
class Sample:
    """Some rows, or some experts' sums, which are compared."""

    product: Product
    inputs: Inputs

    @property
    def places(self) -> Tensor:
        size = len(self.inputs.offs) if self.product.direction == "dW" else len(self.inputs.x)
        most = CHECKED_EXPERTS if self.product.direction == "dW" else CHECKED_ROWS
        return torch.linspace(0, size - 1, min(most, size), device=self.inputs.x.device).long()

    def __call__(self, out: Tensor) -> Tensor:
        return out[self.places]

    def truth(self) -> Tensor:
        x, weight, dy, offs = vars(self.inputs).values()
        ends = [0, *offs.tolist()]
        if self.product.direction == "dW":
            groups = [slice(ends[e], ends[e + 1]) for e in self.places.tolist()]
            return torch.stack([dy[rows].double().t() @ x[rows].double() for rows in groups])
        expert = torch.searchsorted(offs, self.places, right=True)
        rows, matrices = (x, weight.mT) if self.product.direction == "fwd" else (dy, weight)
        pairs = zip(self.places.tolist(), expert.tolist(), strict=True)
        return torch.stack([rows[row].double() @ matrices[e].double() for row, e in pairs])


def _call(function: Callable[..., Tensor], product: Product, inputs: Inputs) -> harness.Call:
    x, weight, dy, offs = vars(inputs).values()
    operands = {"fwd": (x, weight.mT), "dA": (dy, weight), "dW": (dy.t(), x)}[product.direction]
    return lambda: (function(*operands, offs=offs),)


def _equal_bmm(product: Product, inputs: Inputs) -> harness.Call | None:
    x, weight, dy, offs = vars(inputs).values()
    if len(x) % len(offs):
        return None
    x, dy = (t.unflatten(0, (len(offs), -1)) for t in (x, dy))
    operands = {"fwd": (x, weight.mT), "dA": (dy, weight), "dW": (dy.mT, x)}[product.direction]
    return lambda: (bmm(*operands),)


def _dense(product: Product, inputs: Inputs) -> harness.Call:
    x, weight, dy, _ = vars(inputs).values()
    operands = {"fwd": (x, weight[0].t()), "dA": (dy, weight[0]), "dW": (dy.t(), x)}[product.direction]
    return lambda: (torch.mm(*operands),)


PROVIDERS: dict[str, Callable[[Product, Inputs], harness.Call | None]] = {
    "cute_kernels": functools.partial(_call, grouped_mm),
    "torch": functools.partial(_call, torch._grouped_mm),
}
FLOORS = {"equal_bmm": _equal_bmm, "dense": _dense}


def measure_product(
    product: Product, directions: Any, providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    inputs = make_inputs(product, device.name)
    sample = Sample(product, inputs)
    makers = {provider: functools.partial(PROVIDERS[provider], product, inputs) for provider in providers}
    floors = {name: functools.partial(make, product, inputs) for name, make in FLOORS.items()}
    found = harness.measure(
        product.case, makers, {"out": sample.truth()}, device, sample=sample, floors=floors, **options
    )
    return [found]


def run(cases: Sequence[Product], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases, beside torch, whose error is the yardstick."""
    selected = [(case, [case.case]) for case in cases]
    return harness.run(selected, measure_product, [*providers, "torch"], harness.CudaDevice, **settings)


def print_rates(measurements: Sequence[harness.Measurement]) -> None:
    """TFLOP/s of each provider."""
    for m in measurements:
        rates = (f"{provider} {m.case.flops / result.us / 1e6:.0f}" for provider, result in m.results.items())
        print(f"{m.case.name}: {', '.join(rates)} TFLOP/s")


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [product.case.name for product in products(quick)]

    options = harness.parse(
        "moe", __doc__.splitlines()[0], "qwen3-30b, 8192 tokens", tuple(PROVIDERS), PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(products(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_moe", main))
