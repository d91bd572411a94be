"""sample beside torch: softmax and multinomial, with the filters as transformers has them; argmax where greedy.

    python -m bench.bench_sampling                                    every case, results printed
    python -m bench.bench_sampling --filter '64x151936.*top_p'        cases whose name matches
    python -m bench.bench_sampling --save                             and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_sampling --list                             the names of the cases

A case's name is op.direction.shape.dtype.variant, like sample.fwd.64x151936.bfloat16.top_p. The variants: plain,
greedy, top_k (50), top_p (0.9), all three filters. The bytes are those of the logits, read once. torch's own draws
other tokens: its results are no reference, and the error of ours is the share of tokens that plain torch on the CPU
does not find. Each provider also copies its tokens to fp32, which the comparison wants.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench import forward_backward, harness
from bench.forward_backward import Calls
from cute_kernels import sample
from jit_cache import command

SHAPES = ((1, 151936), (64, 151936), (256, 151936), (64, 128256))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
}


@dataclass(frozen=True)
class Sampling:
    """One call."""

    rows: int
    columns: int
    variant: str = "plain"
    dtype: torch.dtype = torch.bfloat16
    directions: tuple[str, ...] = ("fwd",)

    def case(self, direction: str) -> harness.Case:
        return harness.Case(
            family="sampling",
            op="sample",
            direction=direction,
            shape=f"{self.rows}x{self.columns}",
            dtype=str(self.dtype).removeprefix("torch."),
            variant=self.variant,
            bytes=self.rows * self.columns * self.dtype.itemsize,
            flops=self.rows * self.columns,
        )


def samplings(quick: bool = False) -> list[Sampling]:
    """Every case."""
    shapes = SHAPES[1:2] if quick else SHAPES
    return [Sampling(*shape, variant) for shape in shapes for variant in VARIANTS]


@dataclass(frozen=True)
class Inputs:
    logits: Tensor
    seeds: Tensor
    positions: Tensor


def make_inputs(case: Sampling, device: str = "cuda") -> Inputs:
    """A few tokens are likely, as in a model's logits."""
    generator = torch.Generator(device).manual_seed(harness.seed(case.case("fwd").name))
    logits = 3 * torch.randn(case.rows, case.columns, generator=generator, device=device)
    logits[:, :: max(case.columns // 3, 1)] += 12
    seeds = torch.arange(case.rows, device=device)
    return Inputs(logits.to(case.dtype), seeds, seeds + 7)


def fp64_truth(case: Sampling, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> whether a token is the one that plain torch finds."""
    return {"fwd": {"is_right": torch.ones(case.rows, dtype=torch.float64, device=inputs.seeds.device)}}


def _calls(function: Callable[[], Tensor]) -> Calls:
    return forward_backward.autograd_calls(function, (), ())


def _cute_kernels(case: Sampling, inputs: Inputs) -> Calls:
    options = {"seeds": inputs.seeds, "positions": inputs.positions, **VARIANTS[case.variant]}
    return _calls(lambda: sample(inputs.logits, **options).float())


def _torch(case: Sampling, inputs: Inputs) -> Calls:
    options = VARIANTS[case.variant]

    def call() -> Tensor:
        x = inputs.logits
        if options.get("temperature") == 0.0:
            return x.argmax(-1).float()
        if "top_k" in options:
            x = x.masked_fill(x < x.topk(options["top_k"])[0][:, -1:], -torch.inf)
        if "top_p" in options:
            values, order = x.sort(descending=False)
            removed = values.softmax(-1).cumsum(-1) <= 1 - options["top_p"]
            removed[:, -1] = False
            x = x.masked_fill(removed.scatter(1, order, removed), -torch.inf)
        p = x.float().softmax(-1)
        if "min_p" in options:
            p = p.masked_fill(p < options["min_p"] * p.amax(-1, keepdim=True), 0.0)
        return torch.multinomial(p, 1).squeeze(1).float()

    return _calls(call)


PROVIDERS: dict[str, Callable[[Sampling, Inputs], Calls | None]] = {"cute_kernels": _cute_kernels, "torch": _torch}


def compile_own_kernels(cases: Iterable[Sampling], device: harness.Device) -> None:
    few = (replace(case, rows=2) for case in cases)
    forward_backward.compile_kernels(lambda case: _cute_kernels(case, make_inputs(case, device.name)), few, device)


def measure_sampling(
    case: Sampling, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(case, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], case, inputs) for provider in providers}
    given = [t.cpu() for t in (inputs.logits, inputs.seeds, inputs.positions)]
    right = sample(given[0], seeds=given[1], positions=given[2], **VARIANTS[case.variant]).to(inputs.seeds.device)
    return forward_backward.measure(
        case, directions, calls, fp64_truth(case, inputs), device, sample=lambda t: (t == right).double(), **options
    )


def run(cases: Sequence[Sampling], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return forward_backward.run(
        cases, measure_sampling, providers, packages={}, compile_own_kernels=compile_own_kernels, **settings
    )


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(samplings(quick))

    options = harness.parse(
        "sampling", __doc__.splitlines()[0], "a shape", tuple(PROVIDERS), PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(samplings(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_sampling", main))
