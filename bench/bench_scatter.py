"""Sums by an index beside torch: embedding's backward, and index_sum of elements, as a gather's backward has them.

    python -m bench.bench_scatter                                     every case, results printed
    python -m bench.bench_scatter --filter 'embedding_backward.*zipf' cases whose name matches
    python -m bench.bench_scatter --save                              and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_scatter --list                              the names of the cases

A case's name is op.direction.shape.dtype.variant, like embedding_backward.fwd.4096x128256x4096.bfloat16.uniform. The
shape is tokens x rows of the table x columns; of index_sum rows x columns x elements of a row. Ids are uniform, or row
r comes about as often as 1 / (r + 1) (zipf).
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
from cute_kernels import scatter
from jit_cache import command

TOKENS = (4096, 16384, 65536)
TABLE = (128256, 4096)
ELEMENTS = ((4096, 151936, 1), (16384, 256, 8))  # of log-probabilities by gather, of a router's top 8


@dataclass(frozen=True)
class Scatter:
    """One call. sizes: tokens, rows of the table, columns; or rows, columns, elements of a row."""

    op: str
    sizes: tuple[int, int, int]
    variant: str = "uniform"
    dtype: torch.dtype = torch.bfloat16
    directions: tuple[str, ...] = ("fwd",)

    def case(self, direction: str) -> harness.Case:
        first, rows, last = self.sizes
        moved = (first + rows) * last if self.op == "embedding_backward" else first * (2 * rows + 2 * last)
        return harness.Case(
            family="scatter",
            op=self.op,
            direction=direction,
            shape="x".join(map(str, self.sizes)),
            dtype=str(self.dtype).removeprefix("torch."),
            variant=self.variant,
            bytes=moved * self.dtype.itemsize + 8 * first * (1 if self.op == "embedding_backward" else last),
            flops=first * last,
        )


def scatters(quick: bool = False) -> list[Scatter]:
    """Every case."""
    tokens = TOKENS[1:2] if quick else TOKENS
    cases = [Scatter("embedding_backward", (n, *TABLE), v) for n in tokens for v in ("uniform", "zipf")]
    return cases + [Scatter("index_sum", sizes) for sizes in (ELEMENTS[1:] if quick else ELEMENTS)]


@dataclass(frozen=True)
class Inputs:
    """x: what is added to; None of an embedding's gradient."""

    x: Tensor | None
    index: Tensor
    source: Tensor


def make_inputs(case: Scatter, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.seed(case.case("fwd").name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    first, rows, last = case.sizes
    if case.op == "index_sum":
        index = torch.randint(rows, (first, last), generator=generator, device=device)
        return Inputs(torch.zeros(first, rows, device=device, dtype=case.dtype), index, randn(first, last))
    u = torch.rand(first, generator=generator, device=device)
    ids = (u * rows if case.variant == "uniform" else rows**u - 1).long().clamp(max=rows - 1)
    return Inputs(None, ids, randn(first, last))


def fp64_truth(case: Scatter, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> the result in fp64: of a table the rows that `sample` takes."""
    if inputs.x is not None:
        return {"fwd": {"y": inputs.x.double().scatter_add(1, inputs.index, inputs.source.double())}}
    rows = sampled_rows(inputs.index)
    found = [inputs.source[inputs.index == row].double().sum(0) for row in rows]
    return {"fwd": {"dweight": torch.stack(found)}}


def sampled_rows(ids: Tensor) -> Tensor:
    """Rows of the table that are compared: the most frequent ones of zipf, and those of some tokens."""
    return torch.cat([torch.arange(8, device=ids.device), ids[:: max(1, len(ids) // 24)][:24]])


def _calls(function: Callable[[], Tensor]) -> Calls:
    return forward_backward.autograd_calls(function, (), ())


def _cute_kernels(case: Scatter, inputs: Inputs) -> Calls:
    if inputs.x is None:
        return _calls(lambda: scatter.embedding_backward(inputs.source, inputs.index, case.sizes[1]))
    return _calls(lambda: scatter.index_sum(inputs.x, inputs.index, inputs.source, dim=1))


def _torch(case: Scatter, inputs: Inputs) -> Calls:
    if inputs.x is None:
        backward = torch.ops.aten.embedding_dense_backward
        return _calls(lambda: backward(inputs.source, inputs.index, case.sizes[1], -1, False))
    return _calls(lambda: inputs.x.scatter_add(1, inputs.index, inputs.source))


PROVIDERS: dict[str, Callable[[Scatter, Inputs], Calls | None]] = {"cute_kernels": _cute_kernels, "torch": _torch}


def compile_own_kernels(cases: Iterable[Scatter], device: harness.Device) -> None:
    few = (replace(case, sizes=(2, 64, case.sizes[2])) for case in cases)
    forward_backward.compile_kernels(lambda case: _cute_kernels(case, make_inputs(case, device.name)), few, device)


def measure_scatter(
    case: Scatter, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(case, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], case, inputs) for provider in providers}
    if inputs.x is None:
        options["sample"] = lambda dweight: dweight[sampled_rows(inputs.index)]
    return forward_backward.measure(case, directions, calls, fp64_truth(case, inputs), device, **options)


def run(cases: Sequence[Scatter], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return forward_backward.run(
        cases, measure_scatter, providers, packages={}, compile_own_kernels=compile_own_kernels, **settings
    )


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(scatters(quick))

    options = harness.parse(
        "scatter", __doc__.splitlines()[0], "a size an op", tuple(PROVIDERS), PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(scatters(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_scatter", main))
