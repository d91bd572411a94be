"""attention backward beside torch's attention (cuDNN and flash) and flash-attn-4, deterministic and not.

    python -m bench.bench_attention_backward                                       every case, results printed
    python -m bench.bench_attention_backward --filter '8192x.*causal' --reps 30    cases whose name matches
    python -m bench.bench_attention_backward --save                                and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_attention_backward --list                                the names of the cases

Cases are those of bench_attention, and are named as there. ``flash_attn_4`` adds to dq in the order in which its blocks
arrive, ``flash_attn_4_deterministic`` in a fixed one, as this library does. The TFLOP/s are of five products, half of
them counted where the mask is causal.
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

from bench import bench_attention, forward_backward, harness
from bench.bench_attention import Attention, print_rates
from bench.forward_backward import Calls
from cute_kernels import attention
from jit_cache import command

NAMES = "dq", "dk", "dv"


@dataclass(frozen=True)
class AttentionBackward(Attention):
    """One call's backward."""

    directions: tuple[str, ...] = ("bwd",)

    def case(self, direction: str) -> harness.Case:
        forward = super().case(direction)
        num_bytes = 2 * forward.bytes  # q, out and their gradients; k, v and theirs
        return replace(forward, flops=forward.flops // 2 * 5, bytes=num_bytes)


def backwards(quick: bool = False) -> list[AttentionBackward]:
    """Every case."""
    names = "batch", "length", "heads", "pairs", "head_size", "variant"
    return [
        AttentionBackward(*(getattr(case, name) for name in names)) for case in bench_attention.attentions(quick=quick)
    ]


@dataclass(frozen=True)
class Inputs:
    """(batch, length, heads, head size)"""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def make_inputs(case: Attention, device: str = "cuda") -> Inputs:
    forward = bench_attention.make_inputs(case, device)
    generator = torch.Generator(device).manual_seed(harness.seed(case.case("bwd").name))
    dout = torch.randn(forward.q.shape, generator=generator, device=device, dtype=case.dtype)
    return Inputs(*(t.requires_grad_() for t in (forward.q, forward.k, forward.v)), dout)


def fp64_truth(case: Attention, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """Gradients of the first sequence and of one head of keys in fp64, a tile of queries at a time."""
    group, rows = case.heads // case.pairs, 512
    k, v = (t[0, :, 0].detach().double() for t in (inputs.k, inputs.v))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    scale, heads = case.head_size**-0.5, []
    for head in range(group):
        parts = []
        for first in range(0, case.length, rows):
            q, dout = (t[0, first : first + rows, head].detach().double() for t in (inputs.q, inputs.dout))
            scores = q @ k.T * scale
            if case.causal:
                places = torch.arange(first, first + len(q), device=q.device).unsqueeze(1)
                scores.masked_fill_(torch.arange(case.length, device=q.device) > places, -torch.inf)
            p = scores.softmax(-1)
            dp = dout @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            parts.append(ds @ k * scale)
            dk += ds.T @ q * scale
            dv += p.T @ dout
        heads.append(torch.cat(parts))
    return {"bwd": {"dq": torch.stack(heads, 1), "dk": dk.unsqueeze(1), "dv": dv.unsqueeze(1)}}


def first_group(case: Attention, gradient: Tensor) -> Tensor:
    """What ``fp64_truth`` has of a gradient."""
    return gradient[0, :, : max(gradient.shape[2] // case.pairs, 1)]


def _calls(function: Callable[..., Tensor], inputs: Inputs) -> Calls:
    return forward_backward.autograd_calls(function, inputs.leaves, (inputs.dout,))


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
    return _sdpa(case, inputs, SDPBackend.CUDNN_ATTENTION if inputs.q.is_cuda else SDPBackend.MATH)


def _torch_flash(case: Attention, inputs: Inputs) -> Calls:
    return _sdpa(case, inputs, SDPBackend.FLASH_ATTENTION)


def _flash_attn_4(case: Attention, inputs: Inputs, deterministic: bool = False) -> Calls:
    from flash_attn.cute import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q, k, v, causal=case.causal, deterministic=deterministic)
        return found[0] if isinstance(found, tuple) else found

    return _calls(call, inputs)


PROVIDERS: dict[str, Callable[[Attention, Inputs], Calls | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "torch_flash": _torch_flash,
    "flash_attn_4": _flash_attn_4,
    "flash_attn_4_deterministic": functools.partial(_flash_attn_4, deterministic=True),
}
PACKAGES = dict.fromkeys(("flash_attn_4", "flash_attn_4_deterministic"), ("flash_attn.cute",))


def compile_own_kernels(cases: Iterable[Attention], device: harness.Device) -> None:
    few = (replace(case, batch=1, length=128, heads=case.heads // case.pairs, pairs=1) for case in cases)
    forward_backward.compile_kernels(lambda case: _cute_kernels(case, make_inputs(case, device.name)), few, device)


def measure_attention(
    case: Attention, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(case, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], case, inputs) for provider in providers}
    sample = functools.partial(first_group, case)
    return forward_backward.measure(
        case, directions, calls, fp64_truth(case, inputs), device, sample=sample, **options
    )  # fmt: skip


def run(cases: Sequence[Attention], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return forward_backward.run(
        cases, measure_attention, providers, packages=PACKAGES, compile_own_kernels=compile_own_kernels, **settings
    )


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(backwards(quick))

    what, which = __doc__.splitlines()[0], tuple(PROVIDERS)
    options = harness.parse("attention_backward", what, "length 8192", which, PROVIDERS, names, arguments)
    if isinstance(options, int):
        return options
    measurements = run(backwards(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_attention_backward", main))
