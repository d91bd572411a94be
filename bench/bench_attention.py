"""attention forward beside torch's attention (cuDNN and flash) and flash-attn-4.

    python -m bench.bench_attention                                       every case, results printed
    python -m bench.bench_attention --filter '8192x.*causal' --reps 30    cases whose name matches
    python -m bench.bench_attention --save                                and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_attention --list                                the names of the cases

A case's name is op.direction.shape.dtype.variant, like attention.fwd.2x8192x32x8x128.bfloat16.causal. The shape is
batch x length x query heads x heads of keys and values x head size. ``torch`` is torch's attention with cuDNN,
``torch_flash`` with its flash backend, ``flash_attn_4`` is ``flash_attn.cute``. The TFLOP/s of each provider are below
the table, half of the products counted where the mask is causal.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import forward_backward, harness
from bench.forward_backward import Calls
from cute_kernels import attention
from cute_kernels.attention import reference
from jit_cache import command

TOKENS, WIDTH = 16384, 2048  # of a batch; of all heads
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_SIZES = (64, 128)
GQA_LENGTHS = (4096, 8192, 32768)  # of 32 heads on 8, of 128
CHECKED_ROWS = 32  # of each sequence: fp64 scores of all rows of 16384 tokens would be 34 GB


@dataclass(frozen=True)
class Attention:
    """One call."""

    batch: int
    length: int
    heads: int
    pairs: int
    head_size: int
    variant: str
    dtype: torch.dtype = torch.bfloat16
    directions: tuple[str, ...] = ("fwd",)

    @property
    def causal(self) -> bool:
        return self.variant == "causal"

    def case(self, direction: str) -> harness.Case:
        per_head = self.length * self.head_size
        flops = 4 * self.batch * self.heads * self.length * per_head // (2 if self.causal else 1)
        num_bytes = 2 * self.batch * (self.heads + self.pairs) * per_head * self.dtype.itemsize
        return harness.Case(
            family="attention",
            op="attention",
            direction=direction,
            shape=f"{self.batch}x{self.length}x{self.heads}x{self.pairs}x{self.head_size}",
            dtype=str(self.dtype).removeprefix("torch."),
            variant=self.variant,
            bytes=num_bytes,
            flops=flops,
        )


def attentions(quick: bool = False) -> list[Attention]:
    """Every case."""
    cases = []
    for variant in ("causal", "full"):
        for d in HEAD_SIZES:
            for length in (8192,) if quick else LENGTHS:
                cases.append(Attention(TOKENS // length, length, WIDTH // d, WIDTH // d, d, variant))
    lengths = GQA_LENGTHS[1:2] if quick else GQA_LENGTHS
    cases += [Attention(max(TOKENS // n, 1), n, 32, 8, 128, "causal") for n in lengths]
    return cases


@dataclass(frozen=True)
class Inputs:
    """(batch, length, heads, head size)"""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def rows(self) -> Tensor:
        """Those that are compared, the first and the last among them."""
        length = self.q.shape[1]
        return torch.linspace(0, length - 1, min(CHECKED_ROWS, length), device=self.q.device).long()


def make_inputs(case: Attention, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.seed(case.case("fwd").name))

    def randn(heads: int) -> Tensor:
        shape = case.batch, case.length, heads, case.head_size
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    return Inputs(randn(case.heads), randn(case.pairs), randn(case.pairs))


def fp64_truth(case: Attention, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> some rows of the result in fp64, a row and a sequence at a time."""
    found = []
    for q, k, v in zip(inputs.q, inputs.k, inputs.v, strict=True):
        rows = []
        for row in inputs.rows.tolist():
            end = row + 1 if case.causal else case.length
            seen = (t[None, :end].double() for t in (k, v))
            rows.append(reference.attention(q[None, row : row + 1].double(), *seen)[0, 0])
        found.append(torch.stack(rows))
    return {"fwd": {"out": torch.stack(found)}}


def _calls(function: Callable[..., Tensor], inputs: Inputs) -> Calls:
    return forward_backward.autograd_calls(function, (inputs.q, inputs.k, inputs.v), ())


def _cute_kernels(case: Attention, inputs: Inputs) -> Calls:
    return _calls(lambda q, k, v: attention(q, k, v, causal=case.causal), inputs)


def _sdpa(case: Attention, inputs: Inputs, backend: SDPBackend) -> Calls:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.pairs)
        return out.transpose(1, 2)

    return _calls(call, inputs)


def _torch(case: Attention, inputs: Inputs) -> Calls:
    backend = SDPBackend.CUDNN_ATTENTION if inputs.q.is_cuda else SDPBackend.MATH
    return _sdpa(case, inputs, backend)


def _torch_flash(case: Attention, inputs: Inputs) -> Calls:
    return _sdpa(case, inputs, SDPBackend.FLASH_ATTENTION)


def _flash_attn_4(case: Attention, inputs: Inputs) -> Calls:
    from flash_attn.cute import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q, k, v, causal=case.causal)
        return found[0] if isinstance(found, tuple) else found

    return _calls(call, inputs)


PROVIDERS: dict[str, Callable[[Attention, Inputs], Calls | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "torch_flash": _torch_flash,
    "flash_attn_4": _flash_attn_4,
}
PACKAGES = {"flash_attn_4": ("flash_attn.cute",)}  # what a provider imports, where it is not torch


def compile_own_kernels(cases: Iterable[Attention], device: harness.Device) -> None:
    few = (replace(case, batch=1, length=128, heads=1, pairs=1) for case in cases)
    forward_backward.compile_kernels(lambda case: _cute_kernels(case, make_inputs(case, device.name)), few, device)


def measure_attention(
    case: Attention, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(case, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], case, inputs) for provider in providers}
    truth = fp64_truth(case, inputs)
    return forward_backward.measure(
        case, directions, calls, truth, device, sample=lambda out: out[:, inputs.rows], **options
    )


def run(cases: Sequence[Attention], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return forward_backward.run(
        cases, measure_attention, providers, packages=PACKAGES, compile_own_kernels=compile_own_kernels, **settings
    )


def print_rates(measurements: Sequence[harness.Measurement]) -> None:
    """TFLOP/s of each provider."""
    for m in measurements:
        rates = (f"{provider} {m.case.flops / result.us / 1e6:.0f}" for provider, result in m.results.items())
        print(f"{m.case.name}: {', '.join(rates)} TFLOP/s")


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(attentions(quick))

    options = harness.parse(
        "attention", __doc__.splitlines()[0], "length 8192", tuple(PROVIDERS), PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(attentions(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_attention", main))
