"""attention forward beside torch's attention (cuDNN, flash, flex_attention), flash-attn-3 and flash-attn-4.

    python -m bench.bench_attention                                       every case, results printed
    python -m bench.bench_attention --filter '8192x.*causal' --reps 30    cases whose name matches
    python -m bench.bench_attention --providers config_0,config_3         the usual config and another one
    python -m bench.bench_attention --save                                and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_attention --list                                the names of the cases

Parts, for runs that are cut short, as filters: 'x64\\..*(causal|full)|mm', '(?<!192)x128\\..*causal|mm',
'x128\\..*full|mm', 'x256\\.|mm', 'x192x|x96\\.|x80\\.|packed|window|mm'.

A case's name is op.direction.shape.dtype.variant, like attention.fwd.2x8192x32x8x128.bfloat16.causal. The shape is
batch x length x query heads x heads of keys and values x head size (x that of v). Variants: causal, full, a window of
128 keys with sinks, one of 4096, packed sequences of 17 to 8192 tokens. ``torch`` is torch's attention with cuDNN, of
windows and packed sequences its flex_attention, which is ``torch_flex`` for other masks; ``torch_flash`` is torch's
with its flash backend, ``flash_attn_3`` is ``flash_attn_interface``, ``flash_attn_4`` is ``flash_attn.cute``.
``one_split`` is our kernel with splits that no sequence ends: their price. The case mm is a product of 8192 cubed: the
limit. ``config_0``, ``config_1`` and so on are the configs of ``FORWARD_CONFIGS`` for the case's head sizes, behind
them those of smaller kernels that no call takes yet. The TFLOP/s of each provider are below the table, of the products
that the mask leaves, and their share of it.
``torch_flex`` compiles for each shape: it is measured if --providers names it.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from bench import forward_backward, harness
from bench.forward_backward import Calls
from cute_kernels import attention
from cute_kernels.attention import reference
from cute_kernels.attention.config import (
    FORWARD_CONFIGS,
    ForwardConfig,
    ForwardSpec,
    Grid,
    forward_config,
    grid_for,
    kernel_sizes,
)
from cute_kernels.attention.launch import forward
from cute_kernels.attention.launch.forward import ForwardLaunch
from cute_kernels.attention.op.gradients import CALLS
from cute_kernels.runtime.launches import bounded
from cute_kernels.runtime.targets import target_of
from jit_cache import command
from jit_cache import compile as jit_compile

TOKENS, WIDTH = 16384, 2048  # of a batch; of all heads
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_SIZES = (64, 128, 256)
GQA_LENGTHS = (4096, 8192, 32768)  # of 32 heads on 8, of 128
WINDOWS = {"window128_sinks": 128, "window4096": 4096}  # variant -> keys before a query's place, and its own
# Batch, length, heads, heads of keys, head size, variant: no power of two, groups of 3, a head size that is padded
OTHERS = ((3, 5000, 12, 4, 128, "causal"), (7, 1500, 20, 20, 64, "full"), (2, 6000, 15, 5, 80, "causal"))
PACKED = "packed"  # a variant: causal, sequences of 17 to 8192 tokens
NO_SPLIT = 1 << 20  # keys of a split that no sequence here ends
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
    head_size_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    directions: tuple[str, ...] = ("fwd",)

    @property
    def causal(self) -> bool:
        return self.variant != "full"

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_size, self.head_size_v or self.head_size

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return (WINDOWS[self.variant] - 1, 0) if self.variant in WINDOWS else None

    @property
    def has_sinks(self) -> bool:
        return self.variant.endswith("sinks")

    @property
    def lengths(self) -> list[int]:
        """The length of each sequence."""
        return packed_lengths(self.length) if self.variant == PACKED else [self.length] * self.batch

    def case(self, direction: str) -> harness.Case:
        seen = sum(self.seen_keys(n) for n in self.lengths)
        tokens, size = sum(self.lengths), sum(self.sizes)
        of_head = "x".join(map(str, dict.fromkeys(self.sizes)))
        return harness.Case(
            family="attention",
            op="attention",
            direction=direction,
            shape=f"{self.batch}x{self.length}x{self.heads}x{self.pairs}x{of_head}",
            dtype=str(self.dtype).removeprefix("torch."),
            variant=self.variant,
            bytes=tokens * (self.heads + self.pairs) * size * self.dtype.itemsize,
            flops=2 * self.heads * seen * size,
        )

    def seen_keys(self, length: int) -> int:
        """By all queries of a sequence: all, half of them where the mask is causal, or what the window leaves."""
        if not self.causal:
            return length * length
        if self.window is None:
            return length * length // 2
        inside = min(WINDOWS[self.variant], length)
        return inside * length - inside * inside // 2


@functools.cache
def packed_lengths(tokens: int) -> list[int]:
    """Random sequence lengths, 17 to 8192 each, that sum to ``tokens``: as many short as long ones on a log scale."""
    generator, lengths = random.Random(0), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(round(17 * (8192 / 17) ** generator.random()), left))
    return lengths


def attentions(quick: bool = False) -> list[Attention]:
    """Every case."""
    cases = []
    for variant in ("causal", "full"):
        for d in HEAD_SIZES:
            for length in (8192,) if quick else LENGTHS:
                cases.append(Attention(TOKENS // length, length, WIDTH // d, WIDTH // d, d, variant))
    lengths = GQA_LENGTHS[1:2] if quick else GQA_LENGTHS
    cases += [Attention(max(TOKENS // n, 1), n, 32, 8, 128, "causal") for n in lengths]
    cases += [Attention(1, TOKENS, 16, 16, 128, PACKED), Attention(2, 8192, 64, 8, 64, "window128_sinks")]
    if not quick:
        cases += [Attention(TOKENS // n, n, 24, 24, 192, "causal", 128) for n in (4096, 8192)]
        cases += [Attention(4, 4096, 16, 16, 96, variant) for variant in ("causal", "full")]
        cases += [Attention(1, TOKENS, 32, 8, 128, "window4096"), *(Attention(*other) for other in OTHERS)]
    return cases


@dataclass(frozen=True)
class Product:
    """A square matrix product by cuBLAS, which attention's products are compared with."""

    size: int = 8192
    dtype: torch.dtype = torch.bfloat16
    directions: tuple[str, ...] = ("fwd",)

    def case(self, direction: str) -> harness.Case:
        n = self.size
        dtype = str(self.dtype).removeprefix("torch.")
        bytes, flops = 3 * n * n * self.dtype.itemsize, 2 * n**3
        return harness.Case("attention", "mm", direction, f"{n}x{n}x{n}", dtype, "limit", bytes, flops)

    def measure(self, device: harness.Device, **options: Any) -> list[harness.Measurement]:
        generator = torch.Generator(device.name).manual_seed(0)
        a, b = (
            torch.randn(self.size, self.size, generator=generator, device=device.name, dtype=self.dtype)
            for _ in range(2)
        )
        makers = {"torch": lambda: lambda: (a @ b,)}
        truth = {"out": a[:CHECKED_ROWS].double() @ b.double()}
        return [harness.measure(self.case("fwd"), makers, truth, device, sample=lambda t: t[:CHECKED_ROWS], **options)]


def every_case(quick: bool = False) -> list[Attention | Product]:
    return [Product(), *attentions(quick)]


@dataclass(frozen=True)
class Inputs:
    """(batch, length, heads, head size), packed sequences (all rows, heads, head size)."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    starts: Tensor | None  # of packed sequences
    dout: Tensor | None = None  # of a backward


def checked_rows(length: int) -> list[int]:
    """Those of a sequence that are compared, the first and the last among them."""
    return torch.linspace(0, length - 1, min(CHECKED_ROWS, length)).long().tolist()


def make_inputs(case: Attention, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.seed(case.case("fwd").name))
    of_rows = (sum(case.lengths),) if case.variant == PACKED else (case.batch, case.length)

    def randn(heads: int, size: int) -> Tensor:
        return torch.randn((*of_rows, heads, size), generator=generator, device=device, dtype=case.dtype)

    d, dv = case.sizes
    sinks = torch.randn(case.heads, generator=generator, device=device) if case.has_sinks else None
    starts = torch.tensor([0, *case.lengths]).cumsum(0).int().to(device) if case.variant == PACKED else None
    return Inputs(randn(case.heads, d), randn(case.pairs, d), randn(case.pairs, dv), sinks, starts)


def sequences(case: Attention, t: Tensor) -> list[Tensor]:
    """(length, heads, head size) of each."""
    return list(t.split(case.lengths)) if case.variant == PACKED else list(t)


def fp64_truth(case: Attention, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> some rows of the result in fp64, a row and a sequence at a time."""
    found = []
    for q, k, v in zip(*(sequences(case, t) for t in (inputs.q, inputs.k, inputs.v)), strict=True):
        for row in checked_rows(len(q)):
            end = row + 1 if case.causal else len(k)
            first = max(0, end - WINDOWS[case.variant]) if case.window else 0
            seen = (t[None, first:end].double() for t in (k, v))
            found.append(reference.attention(q[None, row : row + 1].double(), *seen, sinks=inputs.sinks)[0, 0])
    return {"fwd": {"out": torch.stack(found)}}


def sample(case: Attention, out: Tensor) -> Tensor:
    """The rows of a result that ``fp64_truth`` has."""
    return torch.cat([one[checked_rows(len(one))] for one in sequences(case, out)])


def _calls(function: Callable[..., Tensor], inputs: Inputs) -> Calls:
    incoming = () if inputs.dout is None else (inputs.dout,)
    return forward_backward.autograd_calls(function, (inputs.q, inputs.k, inputs.v), incoming)


def _cute_kernels(
    case: Attention,
    inputs: Inputs,
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Calls:
    """Our calls, each in a context."""
    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "sinks": inputs.sinks}
    if inputs.starts is not None:
        longest = max(case.lengths)
        options |= {"cu_seqlens_q": inputs.starts, "cu_seqlens_k": inputs.starts}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context():
            return attention(q, k, v, **options)

    return _calls(call, inputs)


def _sdpa(case: Attention, inputs: Inputs, backend: SDPBackend) -> Calls | None:
    if case.variant not in ("causal", "full"):
        return None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.pairs)
        return out.transpose(1, 2)

    return _calls(call, inputs)


def _torch(case: Attention, inputs: Inputs) -> Calls:
    """cuDNN; of packed sequences and windows flex_attention, which is compiled for the mask."""
    backend = SDPBackend.CUDNN_ATTENTION if inputs.q.is_cuda else SDPBackend.MATH
    return _sdpa(case, inputs, backend) or _flex(case, inputs)


def _flex(case: Attention, inputs: Inputs) -> Calls:
    packed, device = inputs.starts is not None, inputs.q.device
    length = len(inputs.q) if packed else case.length
    width = WINDOWS.get(case.variant, length)
    number = torch.repeat_interleave(torch.tensor(case.lengths)).to(device) if packed else None

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = (j <= i) & (i - j < width)
        return inside if number is None else inside & (number[i] == number[j])

    if inputs.dout is not None:  # the backward of one forward runs again and again
        from torch._functorch import config

        config.donated_buffer = False
    block_mask = create_block_mask(seen, None, None, length, length, device=device.type) if case.causal else None
    flex = torch.compile(flex_attention) if inputs.q.is_cuda else flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = ((t[None] if packed else t).transpose(1, 2) for t in (q, k, v))
        options = {"block_mask": block_mask, "enable_gqa": case.heads != case.pairs}
        if inputs.sinks is None:
            out = flex(q, k, v, **options)
        else:  # one more logit scales what is without it
            out, aux = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
            out = (out * torch.sigmoid(aux.lse - inputs.sinks[:, None]).unsqueeze(-1)).to(q.dtype)
        out = out.transpose(1, 2)
        return out[0] if packed else out

    return _calls(call, inputs)


def _torch_flex(case: Attention, inputs: Inputs) -> Calls | None:
    """Where ``torch`` is not the same."""
    return _flex(case, inputs) if case.variant in ("causal", "full") else None


def _torch_flash(case: Attention, inputs: Inputs) -> Calls | None:
    return _sdpa(case, inputs, SDPBackend.FLASH_ATTENTION)


@functools.cache
def with_split(spec: ForwardSpec, split: int) -> ForwardLaunch:
    """Our forward with splits of so many keys: another grid, so other bits. It is in no other cache."""
    from cute_kernels.attention import kernel_forward_sm90

    config = forward_config(spec)
    with mock.patch.object(kernel_forward_sm90, "grid_for", lambda *sizes: Grid(grid_for(*sizes).block, split)):
        program = kernel_forward_sm90.forward_sm90.build("sm_90a", spec, config)
        data, _ = jit_compile._compile_program(program, "sm_90a")
    return ForwardLaunch(jit_compile._load_object(data), spec, config, target_of(0).num_sms)


def spec_of_one_split(case: Attention) -> ForwardSpec | None:
    """Whether the case has several splits and a mask that needs no other tensor."""
    d, dv = case.sizes
    plain = case.variant in ("causal", "full") and kernel_sizes(d, dv) == (d, dv)
    return ForwardSpec(case.dtype, d, case.causal, dv) if plain and case.length > grid_for(d, dv).split else None


def _one_split(case: Attention, inputs: Inputs) -> Calls | None:
    spec = spec_of_one_split(case)
    if spec is None:
        return None
    launch, scale = with_split(spec, NO_SPLIT), case.head_size**-0.5

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        launch.run(q, k, v, out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32), scale)
        return out

    return _calls(call, inputs)


def configs_of(case: Attention) -> list[tuple[tuple[int, int], ForwardConfig]]:
    """(Head sizes of the kernel, config): what calls of the case may take, and smaller kernels that none takes yet."""
    usual = kernel_sizes(*case.sizes)
    fitting = [s for s in FORWARD_CONFIGS if case.sizes[0] <= s[0] < usual[0] and case.sizes[1] <= s[1]]
    return [(sizes, config) for sizes in (usual, *fitting) for config in FORWARD_CONFIGS[sizes]]


def with_config(number: int, case: Attention, inputs: Inputs) -> Calls | None:
    """Our forward with one of ``configs_of``; None: there are fewer."""
    candidates = configs_of(case)
    if number >= len(candidates):
        return None
    sizes, config = candidates[number]
    choices = {"forward_config": lambda *arguments: config, "kernel_sizes": lambda *arguments: sizes}
    guarded = bounded()

    @contextlib.contextmanager
    def with_kernel() -> Iterator[None]:
        with mock.patch.multiple(forward, **choices), mock.patch.object(CALLS, "guarded", guarded):
            yield

    return _cute_kernels(case, inputs, with_kernel)


def _flash_attn_3(case: Attention, inputs: Inputs) -> Calls | None:
    """It has no sinks."""
    if inputs.sinks is not None:
        return None
    import flash_attn_interface

    return _flash_attn(case, inputs, flash_attn_interface)


def _flash_attn_4(case: Attention, inputs: Inputs, deterministic: bool = False) -> Calls:
    import flash_attn.cute

    return _flash_attn(case, inputs, flash_attn.cute, deterministic)


def _flash_attn(case: Attention, inputs: Inputs, package: Any, deterministic: bool = False) -> Calls:
    options: dict[str, Any] = {"causal": case.causal and case.window is None, "deterministic": deterministic}
    if case.window is not None:
        options["window_size"] = case.window
    if inputs.sinks is not None:
        options["learnable_sink"] = inputs.sinks.to(case.dtype)
    function = package.flash_attn_func
    if inputs.starts is not None:
        function, longest = package.flash_attn_varlen_func, max(case.lengths)
        options |= {"cu_seqlens_q": inputs.starts, "cu_seqlens_k": inputs.starts}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found

    return _calls(call, inputs)


PROVIDERS: dict[str, Callable[[Attention, Inputs], Calls | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "torch_flash": _torch_flash,
    "torch_flex": _torch_flex,
    "flash_attn_3": _flash_attn_3,
    "flash_attn_4": _flash_attn_4,
    "one_split": _one_split,
}
MOST_CONFIGS = max(len(configs_of(Attention(1, 1, 1, 1, d, "full", dv))) for d, dv in FORWARD_CONFIGS)
CONFIGS = {f"config_{i}": functools.partial(with_config, i) for i in range(MOST_CONFIGS)}
DEFAULTS = tuple(name for name in PROVIDERS if name != "torch_flex")
# What a provider imports, where it is not torch
PACKAGES = {"flash_attn_3": ("flash_attn_interface",), "flash_attn_4": ("flash_attn.cute",)}


def compile_own_kernels(
    cases: Iterable[Attention | Product], device: harness.Device, providers: Sequence[str] = ()
) -> None:
    cases = [case for case in cases if isinstance(case, Attention)]

    def few(case: Attention) -> Inputs:
        inputs = make_inputs(case, device.name)
        if case.variant == PACKED:
            return inputs
        return replace(inputs, **{name: getattr(inputs, name)[:1] for name in ("q", "k", "v")})

    forward_backward.compile_kernels(lambda case: _cute_kernels(case, few(case)), cases, device)
    for spec in dict.fromkeys(map(spec_of_one_split, cases)) if "one_split" in providers else ():
        if spec is not None:
            with_split(spec, NO_SPLIT)


def measure_attention(
    case: Attention | Product,
    directions: Sequence[str],
    providers: Sequence[str],
    device: harness.Device,
    **options: Any,
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    if isinstance(case, Product):
        return case.measure(device, **options)
    inputs = make_inputs(case, device.name)
    calls = {provider: functools.partial((PROVIDERS | CONFIGS)[provider], case, inputs) for provider in providers}
    truth = fp64_truth(case, inputs)
    return forward_backward.measure(
        case, directions, calls, truth, device, sample=lambda out: sample(case, out), **options
    )


def run(cases: Sequence[Attention | Product], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    compile_own = functools.partial(compile_own_kernels, providers=providers)
    return forward_backward.run(
        cases, measure_attention, providers, packages=PACKAGES, compile_own_kernels=compile_own, **settings
    )


def print_rates(measurements: Sequence[harness.Measurement]) -> None:
    """TFLOP/s of each provider, and their share of those of a product, if one was measured."""

    def rate(m: harness.Measurement, result: harness.Result) -> float:
        return m.case.flops / result.us / 1e6

    limit = max((rate(m, m.results["torch"]) for m in measurements if m.case.op == "mm" and m.results), default=None)
    for m in measurements:
        rates = {provider: rate(m, result) for provider, result in m.results.items()}
        shares = {provider: f" ({found / limit:.2f})" if limit else "" for provider, found in rates.items()}
        listed = (f"{provider} {found:.0f}{shares[provider]}" for provider, found in rates.items())
        print(f"{m.case.name}: {', '.join(listed)} TFLOP/s")


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(every_case(quick))

    options = harness.parse(
        "attention", __doc__.splitlines()[0], "length 8192", (*PROVIDERS, *CONFIGS), DEFAULTS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(every_case(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_attention", main))
