"""The host's time of one call of norms, products, experts' products and attention, beside torch's and a floor.

    python -m bench.bench_host             every case, results printed
    python -m bench.bench_host --save      and kept in bench/results/<gpu>.jsonl

A case's name is op.fwd.shape.dtype.variant, like rms_norm.fwd.64x4096.bfloat16.training. Variants: inference (no
gradient wanted); training (x and the parameters want theirs). launch_floor is what a call cannot do without: its
outputs allocated, and one kernel launched that takes them and does nothing, through the same entry as ours; in training
inside of a torch.autograd.Function that saves what a backward needs.

The CPU has other users, who make it 1.5 times as slow for seconds: a case is measured in rounds, and the one counts in
which the floor took the least.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

import cute_kernels
from bench import harness
from cute_kernels.runtime.autograd import eager_apply
from cute_kernels.runtime.operators import contiguous_strides, empty_strided
from cute_kernels.runtime.targets import arch_of
from jit_cache import command

ROWS, COLUMNS = 64, 4096
ROUNDS = 8
HEADS = 32  # of attention, whose q, k and v have these rows and columns
OPS = ("rms_norm", "layer_norm", "mm", "linear", "grouped_mm", "attention")
PRODUCTS = ("mm", "linear")
GROUPS = 8  # of rows, of grouped_mm: as many bytes of matrices as of the other products
QKV = 1, ROWS, HEADS, COLUMNS // HEADS
GOALS = {"inference": 1.0, "training": 1.35}  # our time over torch's, at most
OURS, TORCH, FLOOR = "cute_kernels", "torch", "launch_floor"


@dataclass(frozen=True)
class HostCase:
    """One op on 64 rows of 4096 columns.

    A product has as many outputs, one of groups an eighth of these a group; attention has one sequence.
    """

    op: str
    variant: str

    @property
    def case(self) -> harness.Case:
        if self.op == "attention":
            shape, elements = "x".join(map(str, QKV)), 4 * ROWS * COLUMNS
            return harness.Case(
                "host", self.op, "fwd", shape, "bfloat16", self.variant, 2 * elements, 4 * ROWS**2 * COLUMNS
            )
        if self.op == "grouped_mm":
            n = COLUMNS // GROUPS
            elements = ROWS * (COLUMNS + n) + COLUMNS**2
            shape = f"{ROWS}x{n}x{COLUMNS}x{GROUPS}"
            return harness.Case(
                "host", self.op, "fwd", shape, "bfloat16", self.variant, 2 * elements, 2 * ROWS * n * COLUMNS
            )
        shape = f"{ROWS}x{COLUMNS}" + f"x{COLUMNS}" * (self.op in PRODUCTS)
        elements = 2 * ROWS * COLUMNS + (COLUMNS**2 if self.op in PRODUCTS else 0)
        flops = 2 * ROWS * COLUMNS**2 if self.op in PRODUCTS else 4 * ROWS * COLUMNS
        return harness.Case("host", self.op, "fwd", shape, "bfloat16", self.variant, 2 * elements, flops)


def host_cases() -> list[HostCase]:
    return [HostCase(op, variant) for op in OPS for variant in GOALS]


def make_inputs(host: HostCase, device: str = "cuda") -> list[Tensor]:
    """x, weight and, of layer_norm, bias, of grouped_mm the groups' ends; of attention q, k, v."""
    generator = torch.Generator(device).manual_seed(harness.seed(host.case.name))
    x = (ROWS, COLUMNS)
    shapes = {"rms_norm": [x, (COLUMNS,)], "layer_norm": [x, (COLUMNS,), (COLUMNS,)], "attention": [QKV] * 3}
    shapes["grouped_mm"] = [x, (GROUPS, COLUMNS, COLUMNS // GROUPS)]
    ends = torch.arange(1, GROUPS + 1, dtype=torch.int32, device=device) * (ROWS // GROUPS)
    return [
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_(
            host.variant == "training"
        )
        for shape in shapes.get(host.op, [x, (COLUMNS, COLUMNS)])
    ] + [ends] * (host.op == "grouped_mm")


def ours(host: HostCase, _: Tensor) -> Callable[..., Tensor]:
    return getattr(cute_kernels, host.op)


def torchs(host: HostCase, _: Tensor) -> Callable[..., Tensor]:
    return {
        "rms_norm": lambda x, weight: F.rms_norm(x, (COLUMNS,), weight, 1e-6),
        "layer_norm": lambda x, weight, bias: F.layer_norm(x, (COLUMNS,), weight, bias),
        "mm": torch.mm,
        "linear": F.linear,
        "grouped_mm": lambda x, weight, ends: torch._grouped_mm(x, weight, offs=ends),
        "attention": _torchs_attention,
    }[host.op]


def exact(host: HostCase, inputs: Sequence[Tensor]) -> Tensor:
    """In fp64; torch has no grouped product of such."""
    wide = [t.detach().double() if t.is_floating_point() else t for t in inputs]
    if host.op == "grouped_mm":
        return cute_kernels.grouped_mm(*wide, backend="reference")
    return torchs(host, inputs[0])(*wide)


def _torchs_attention(*qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in qkv)).transpose(1, 2)


def floor(host: HostCase, like: Tensor) -> Callable[..., Tensor]:
    """Allocations and a launch; of training saved for a backward that nobody calls."""
    from bench.empty_kernel import empty

    statistics = {"rms_norm": 1, "layer_norm": 2}.get(host.op, 0) if host.variant == "training" else 0
    if host.op == "attention":
        statistics = HEADS  # lse
    function = empty(arch_of(torch.cuda.current_device()), host.op, statistics > 0)

    def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        shape = (ROWS, COLUMNS // GROUPS) if host.op == "grouped_mm" else x.shape
        y = empty_strided(like, shape, contiguous_strides(shape), x.dtype)
        saved = empty_strided(like, (statistics, ROWS), (ROWS, 1), torch.float32) if statistics else None
        function(x, weight, bias, y, saved, 1e-6, 1)
        return y, saved

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            y, saved = launch(*tensors)
            ctx.save_for_backward(*tensors, saved)
            return y

    if host.variant == "training":
        return eager_apply(Saving)
    return lambda *tensors: launch(*tensors)[0]


PROVIDERS = {OURS: ours, TORCH: torchs, FLOOR: floor}


def measure_host(
    host: HostCase, providers: Sequence[str], device: harness.Device, *, repetitions: int, breakdown: bool
) -> harness.Measurement:
    """One case, in the round in which the floor, or without it torch, took the least.

    The floor among the providers is not checked, since it computes nothing.
    """
    inputs = make_inputs(host, device.name)
    makers = {name: functools.partial(_call, PROVIDERS[name], host, inputs) for name in providers}
    floors = {FLOOR: makers.pop(FLOOR)} if FLOOR in makers else {}
    options = {"repetitions": repetitions, "breakdown": breakdown, "yardstick": TORCH, "floors": floors}
    rounds = [harness.measure(host.case, makers, {"y": exact(host, inputs)}, device, **options) for _ in range(ROUNDS)]
    guide = FLOOR if FLOOR in providers else TORCH
    return min(rounds, key=lambda m: m.results[guide].host_us if guide in m.results else math.inf)


def run(cases: Sequence[HostCase], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return harness.run(
        [(host, [host.case]) for host in cases],
        lambda host, directions, *rest, **options: [measure_host(host, *rest, **options)],
        [*providers, TORCH],  # torch's error is the yardstick
        lambda: harness.CudaDevice(host_batches=50, calls_per_batch=50),
        **settings,
    )


def _call(provider: Callable, host: HostCase, inputs: Sequence[Tensor]) -> harness.Call:
    function = provider(host, inputs[0])
    return lambda: (function(*inputs),)


def print_table(measurements: Sequence[harness.Measurement]) -> None:
    """One row a case: the host's time of each provider in us, ours over torch's, and the goal of that."""
    table = Table(box=None, pad_edge=False)
    for column in ("op", "variant"):
        table.add_column(column, no_wrap=True)
    for column in (*PROVIDERS, "ours / torch", "goal", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for m in measurements:
        hosts = [f"{m.results[name].host_us:.1f}" if name in m.results else "-" for name in PROVIDERS]
        ratio = "-"
        if OURS in m.results and TORCH in m.results:
            ratio = f"{m.results[OURS].host_us / m.results[TORCH].host_us:.2f}"
        error = f"{max(m.results[OURS].error.values()):.1e}" if OURS in m.results else "FAILED"
        table.add_row(m.case.op, m.case.variant, *hosts, ratio, f"{GOALS[m.case.variant]:.2f}", error)
    harness.wide_console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    options = harness.parse(
        "host",
        __doc__.splitlines()[0],
        "the same cases",
        tuple(PROVIDERS),
        PROVIDERS,
        lambda quick: [host.case.name for host in host_cases()],
        arguments,
    )
    if isinstance(options, int):
        return options
    measurements = run(host_cases(), options.providers, **options.settings)
    print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_host", main))
