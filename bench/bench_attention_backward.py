"""attention backward beside torch's attention (cuDNN and flash) and flash-attn-4, deterministic and not.

    python -m bench.bench_attention_backward                                       every case, results printed
    python -m bench.bench_attention_backward --filter '8192x.*causal' --reps 30    cases whose name matches
    python -m bench.bench_attention_backward --save                                and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_attention_backward --list                                the names of the cases
    python -m bench.bench_attention_backward --providers cute_kernels,config_3     the chosen config and another one

Cases are those of bench_attention, and are named as there; besides a batch of one, and heads that share keys without a
mask. ``flash_attn_4`` adds to dq in the order in which its blocks arrive, ``flash_attn_4_deterministic`` in a fixed
one, as this library does. ``config_0``, ``config_1`` and so on are the configs of ``BACKWARD_CONFIGS`` for the case's
head size; all give the same bits. The TFLOP/s are of five products, of what the mask leaves. peak is what a backward
holds at once beside its inputs: the gradients, and its workspace.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import bench_attention, forward_backward, harness
from bench.bench_attention import Attention, Inputs, print_rates
from bench.forward_backward import Calls
from cute_kernels.attention.config import BACKWARD_CONFIGS, backward_sizes
from cute_kernels.attention.launch import backward
from cute_kernels.runtime.launches import LaunchCache
from jit_cache import command


@dataclass(frozen=True)
class AttentionBackward(Attention):
    """One call's backward."""

    directions: tuple[str, ...] = ("bwd",)

    def case(self, direction: str) -> harness.Case:
        forward = super().case(direction)
        num_bytes = 2 * forward.bytes  # q, out and their gradients; k, v and theirs
        d, dv = self.sizes
        return replace(forward, flops=forward.flops // (d + dv) * (3 * d + 2 * dv), bytes=num_bytes)


def backwards(quick: bool = False) -> list[AttentionBackward]:
    """Every case."""
    names = "batch", "length", "heads", "pairs", "head_size", "variant", "head_size_v"
    cases = bench_attention.attentions(quick=quick)
    cases += [Attention(2, 8192, 32, 8, 128, "full")]
    if not quick:
        cases += [Attention(1, 4096, 32, 8, 128, variant) for variant in ("causal", "full")]
        cases += [Attention(1, 8192, 32, 8, 64, "causal")]
    return [AttentionBackward(*(getattr(case, name) for name in names)) for case in cases]


def make_inputs(case: Attention, device: str = "cuda") -> Inputs:
    inputs = bench_attention.make_inputs(case, device)
    generator = torch.Generator(device).manual_seed(harness.seed(case.case("bwd").name))
    shape = *inputs.q.shape[:-1], case.sizes[1]
    dout = torch.randn(shape, generator=generator, device=device, dtype=case.dtype)
    return replace(inputs, dout=dout, **{name: getattr(inputs, name).requires_grad_() for name in ("q", "k", "v")})


def fp64_truth(case: Attention, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """Gradients of the first sequence and of one head of keys in fp64, a tile of queries at a time."""
    group, rows, length = case.heads // case.pairs, 512, case.lengths[0]
    q_all, k_all, v_all, dout_all = (
        bench_attention.sequences(case, t.detach())[0] for t in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    k, v = (t[:, 0].double() for t in (k_all, v_all))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    scale, heads = case.head_size**-0.5, []
    for head in range(group):
        parts = []
        for first in range(0, length, rows):
            q, dout = (t[first : first + rows, head].double() for t in (q_all, dout_all))
            scores = q @ k.T * scale
            if case.causal:
                behind = torch.arange(first, first + len(q), device=q.device).unsqueeze(1)
                behind = behind - torch.arange(length, device=q.device)  # how far a key is behind a query
                seen = (behind >= 0) & (behind < bench_attention.WINDOWS.get(case.variant, length))
                scores.masked_fill_(~seen, -torch.inf)
            lse = scores.logsumexp(-1, keepdim=True)
            if inputs.sinks is not None:
                lse = torch.logaddexp(lse, inputs.sinks[head].double())
            p = (scores - lse).exp()
            dp = dout @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            parts.append(ds @ k * scale)
            dk += ds.T @ q * scale
            dv += p.T @ dout
        heads.append(torch.cat(parts))
    return {"bwd": {"dq": torch.stack(heads, 1), "dk": dk.unsqueeze(1), "dv": dv.unsqueeze(1)}}


def first_group(case: Attention, gradient: Tensor) -> Tensor:
    """The part of ``gradient`` that ``fp64_truth`` computes: the first sequence, the first group of heads."""
    return bench_attention.sequences(case, gradient)[0][:, : max(gradient.shape[-2] // case.pairs, 1)]


def with_config(number: int, case: Attention, inputs: Inputs) -> Calls | None:
    """This library's calls, the backward with one of its configs; None: the head size has fewer."""
    configs = BACKWARD_CONFIGS[backward_sizes(*case.sizes)]
    if number >= len(configs):
        return None
    forward, make_backward = bench_attention.PROVIDERS["cute_kernels"](case, inputs)
    launches = LaunchCache(lambda target, spec: backward.BackwardLaunch.of(target, spec, configs[number]))

    def make_with_config() -> harness.Call:
        call = make_backward()

        def call_with_config():
            with mock.patch.object(backward, "_backward", launches):
                return call()

        return call_with_config

    return forward, make_with_config


PROVIDERS: dict[str, Callable[[Attention, Inputs], Calls | None]] = {
    **{name: make for name, make in bench_attention.PROVIDERS.items() if name != "one_split"},
    "flash_attn_4_deterministic": functools.partial(bench_attention.PROVIDERS["flash_attn_4"], deterministic=True),
}
CONFIGS = {f"config_{i}": functools.partial(with_config, i) for i in range(max(map(len, BACKWARD_CONFIGS.values())))}
DEFAULTS = tuple(name for name in PROVIDERS if name != "torch_flex")
PACKAGES = bench_attention.PACKAGES | {"flash_attn_4_deterministic": bench_attention.PACKAGES["flash_attn_4"]}


def compile_own_kernels(cases: Iterable[Attention], device: harness.Device) -> None:
    def few(case: Attention) -> Attention:
        return case if case.variant == bench_attention.PACKED else replace(case, batch=1)

    ours = PROVIDERS["cute_kernels"]
    forward_backward.compile_kernels(lambda case: ours(case, make_inputs(few(case), device.name)), cases, device)


def measure_attention(
    case: Attention, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(case, device.name)
    known = PROVIDERS | CONFIGS
    calls = {provider: functools.partial(known[provider], case, inputs) for provider in providers}
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

    what, which = __doc__.splitlines()[0], (*PROVIDERS, *CONFIGS)
    options = harness.parse("attention_backward", what, "length 8192", which, DEFAULTS, names, arguments)
    if isinstance(options, int):
        return options
    measurements = run(backwards(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    for measurement in measurements:
        peaks = (f"{provider} {r.peak_bytes / 2**20:.0f}" for provider, r in measurement.results.items())
        print(f"{measurement.case.name}: peak {', '.join(peaks)} MiB")
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_attention_backward", main))
