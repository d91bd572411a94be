"""The bits of one row in batches of other sizes, ours beside torch's.

    python -m bench.bench_bits             every case, results printed
    python -m bench.bench_bits --save      and kept in bench/results/<gpu>.jsonl

A case's name is op.fwd.shape.dtype.variant, like linear.fwd.1024x14336x4096.bfloat16.plain; the shape is that of the
largest batch. The first row of each batch is the same; `differing` says, for each batch size, which share of that row's
outputs has other bits than in the batch of one row. Nothing is timed: --reps, --quick and --time-limit change nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cute_kernels
from bench import harness

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
OURS, TORCH = "cute_kernels", "torch"


@dataclass(frozen=True)
class Bits:
    """One op; sizes: (N, K) of a linear layer, (N,) of a norm."""

    op: str
    sizes: tuple[int, ...]

    @property
    def fields(self) -> dict[str, str]:
        """The fields of its lines that name it."""
        shape = "x".join(map(str, (BATCHES[-1], *self.sizes)))
        case = {"op": self.op, "direction": "fwd", "shape": shape, "dtype": "bfloat16", "variant": "plain"}
        return {"family": "bits", **case}

    @property
    def name(self) -> str:
        return "{op}.{direction}.{shape}.{dtype}.{variant}".format(**self.fields)


CASES = (
    Bits("linear", (4096, 4096)),
    Bits("linear", (14336, 4096)),
    Bits("linear", (4096, 14336)),
    Bits("rms_norm", (4096,)),
)


def make_inputs(case: Bits, device: str) -> list[Tensor]:
    """x of the largest batch, and the weight."""
    generator = torch.Generator(device).manual_seed(harness.seed(case.name))
    columns = case.sizes[-1]
    shapes = ((BATCHES[-1], columns), case.sizes)
    x, weight = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return [x.bfloat16(), (weight * columns**-0.5 if case.op == "linear" else weight).bfloat16()]


def ours(case: Bits) -> Callable[[Tensor, Tensor], Tensor]:
    return getattr(cute_kernels, case.op)


def torchs(case: Bits) -> Callable[[Tensor, Tensor], Tensor]:
    return F.linear if case.op == "linear" else lambda x, weight: F.rms_norm(x, case.sizes, weight, 1e-6)


PROVIDERS = {OURS: ours, TORCH: torchs}


def differing(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> dict[str, float]:
    """Batch size -> the share of the first row's outputs whose bits differ from those in a batch of one row."""
    alone = function(x[:1], weight)[0].view(torch.int16)
    rows = {batch: function(x[:batch], weight)[0].view(torch.int16) for batch in BATCHES}
    return {str(batch): round(float((row != alone).double().mean()), 6) for batch, row in rows.items()}


def run(
    cases: Iterable[Bits],
    providers: Sequence[str],
    device: str,
    *,
    pattern: str = "",
    commit: str | None = None,
    outputs: Sequence[Path] = (),
) -> list[dict[str, Any]]:
    """A line for each case whose name matches and each provider; appends them to `outputs`."""
    lines = []
    about = harness.environment(commit)
    for case in cases:
        if not re.search(pattern, case.name):
            continue
        inputs = make_inputs(case, device)
        for provider in providers:
            found = differing(PROVIDERS[provider](case), *inputs)
            lines.append({**about, **case.fields, "provider": provider, "differing": found})
            print(f"{case.name}: {provider} differs in {sum(map(bool, found.values()))} of {len(found)} batch sizes")
    for path in outputs:
        harness.append_lines(path, lines)
    return lines


def exit_status(lines: Sequence[dict[str, Any]]) -> int:
    """1 if nothing was measured or a bit of ours differs."""
    return int(not lines or any(any(line["differing"].values()) for line in lines if line["provider"] == OURS))


def main(arguments: Sequence[str] | None = None) -> int:
    options = harness.parse(
        "bits",
        __doc__.splitlines()[0],
        "the same cases",
        tuple(PROVIDERS),
        tuple(PROVIDERS),
        lambda quick: [case.name for case in CASES],
        arguments,
    )
    if isinstance(options, int):
        return options
    settings = {name: options.settings[name] for name in ("pattern", "commit", "outputs")}
    return exit_status(run(CASES, options.providers, "cuda", **settings))


if __name__ == "__main__":
    sys.exit(main())
