"""attention over a cache, decode and chunks of a prompt, beside torch, flash-attn-4 and a kernel that only reads.

    python -m bench.bench_decode                                 every case, results printed
    python -m bench.bench_decode --filter 'decode.16x8192'       cases whose name matches
    python -m bench.bench_decode --save                          and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_decode --list                          the names of the cases

A case's name is op.direction.shape.dtype.variant: attention_with_kv_cache.decode.16x8192x32x8x128.bfloat16.paged16. The
shape is batch x keys x query heads x heads of keys and values x head size; a chunk's begins with its queries:
512q1x32768x32x8x128. Variants: contiguous, paged16, paged128 (pages in a random order), ragged (pages of 16, lengths
from 1/16 of the keys to all of them).

``torch`` is torch's attention with cuDNN, over gathered keys where they lie in pages: the gathering is not timed.
``flash_attn_4`` is ``flash_attn.cute``, which has one split on Hopper. Both are full: their causal mask is top-left or
the same for one query. ``read_floor`` only reads as many bytes as the keys and values have.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench import harness
from cute_kernels import attention_with_kv_cache
from cute_kernels.attention import reference_cache
from jit_cache import command

BATCHES = (1, 4, 16, 17, 36, 64, 128)
KEYS = (1024, 4096, 8192, 32768, 131072)
HEADS = ((32, 8, 128), (8, 1, 128), (64, 8, 64))
MAX_BYTES = 40 * 10**9  # of keys and values
CHUNKS, CONTEXT = (512, 2048), 32768
FLOOR = "read_floor"


@dataclass(frozen=True)
class Decode:
    """One call: ``queries`` of each sequence over its keys, themselves among them."""

    batch: int
    keys: int
    heads: int
    pairs: int
    head_size: int
    variant: str = "contiguous"
    queries: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def page_size(self) -> int:
        """0: contiguous."""
        return {"contiguous": 0, "paged128": 128}.get(self.variant, 16)

    @property
    def lengths(self) -> list[int]:
        if self.variant != "ragged":
            return [self.keys] * self.batch
        rng = random.Random(self.batch)
        return [rng.randint(self.keys // 16, self.keys) for _ in range(self.batch)]

    @property
    def cached_bytes(self) -> int:
        return 2 * sum(self.lengths) * self.pairs * self.head_size * self.dtype.itemsize

    @property
    def case(self) -> harness.Case:
        rows = self.batch * self.queries * self.heads * self.head_size
        chunk = f"{self.queries}q" if self.queries > 1 else ""
        return harness.Case(
            family="attention",
            op="attention_with_kv_cache",
            direction="prefill" if chunk else "decode",
            shape=f"{chunk}{self.batch}x{self.keys}x{self.heads}x{self.pairs}x{self.head_size}",
            dtype=str(self.dtype).removeprefix("torch."),
            variant=self.variant,
            bytes=self.cached_bytes + 2 * rows * self.dtype.itemsize,
            flops=4 * sum(self.lengths) * self.queries * self.heads * self.head_size,
        )


def decodes(quick: bool = False) -> list[Decode]:
    """Every case."""
    if quick:
        variants = ("contiguous", "paged16")
        return [Decode(batch, 8192, 32, 8, 128, variant) for batch in (16, 64) for variant in variants]
    cases = [
        Decode(batch, keys, *heads, variant)
        for heads in HEADS
        for keys in KEYS
        for batch in BATCHES
        for variant in ("contiguous", "paged16", "paged128", "ragged")
        if variant == "contiguous" or (heads == HEADS[0] and keys in (8192, 32768) and batch >= 16)
    ]
    cases += [
        Decode(1, CONTEXT, 32, 8, 128, variant, queries) for queries in CHUNKS for variant in ("paged16", "paged128")
    ]
    return [case for case in cases if case.cached_bytes <= MAX_BYTES]


@dataclass(frozen=True)
class Inputs:
    """q (batch, queries, heads, head size), the cache as the variant has it, and the same contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None

    @property
    def cache(self) -> dict[str, Tensor | None]:
        return {"cache_seqlens": self.lengths, "page_table": self.page_table}

    def gathered(self) -> tuple[Tensor, Tensor]:
        """k and v, contiguous."""
        if self.page_table is None:
            return self.k, self.v
        k, v = (t[self.page_table.long()].flatten(1, 2) for t in (self.k, self.v))
        return k, v


def make_inputs(case: Decode, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.seed(case.case.name))
    size, rows = case.page_size, case.batch * case.keys
    shape = (rows // size, size) if size else (case.batch, case.keys)
    k, v = (
        torch.empty(*shape, case.pairs, case.head_size, device=device, dtype=case.dtype).normal_(generator=generator)
        for _ in range(2)
    )
    q = torch.randn(
        case.batch, case.queries, case.heads, case.head_size, generator=generator, device=device, dtype=case.dtype
    )
    table = None
    if size:
        order = torch.randperm(rows // size, generator=generator, device=device)
        table = order.view(case.batch, -1).to(torch.int32)
    return Inputs(q, k, v, torch.tensor(case.lengths, dtype=torch.int32, device=device), table)


def fp64_truth(inputs: Inputs) -> dict[str, Tensor]:
    """out in fp64, of each sequence's last query, a sequence at a time."""
    found = []
    for i, length in enumerate(inputs.lengths.tolist()):
        k, v = (reference_cache.gathered(t, inputs.page_table, i, length).double()[None] for t in (inputs.k, inputs.v))
        q, one = inputs.q[i : i + 1, -1:].double(), inputs.lengths[i : i + 1]
        found.append(reference_cache.attention_with_kv_cache(q, k, v, cache_seqlens=one))
    return {"out": torch.cat(found)}


def _cute_kernels(case: Decode, inputs: Inputs) -> harness.Call:
    return lambda: (attention_with_kv_cache(inputs.q, inputs.k, inputs.v, **inputs.cache),)


def _torch(case: Decode, inputs: Inputs) -> harness.Call:
    k, v = (t.transpose(1, 2) for t in inputs.gathered())
    q, gqa = inputs.q.transpose(1, 2), case.heads != case.pairs
    if case.variant == "ragged":
        mask = (torch.arange(case.keys, device=q.device) < inputs.lengths[:, None])[:, None, None]
        return lambda: (F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa).transpose(1, 2),)
    mask = causal_lower_right(case.queries, case.keys) if case.queries > 1 else None
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda and mask is None else SDPBackend.FLASH_ATTENTION

    def call() -> tuple[Tensor]:
        with sdpa_kernel([backend, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        return (out.transpose(1, 2),)

    return call


def _flash_attn_4(case: Decode, inputs: Inputs) -> harness.Call | None:
    if case.page_size:
        return None
    from flash_attn.cute import flash_attn_func

    def call() -> tuple[Tensor]:
        found = flash_attn_func(inputs.q, inputs.k, inputs.v, causal=case.queries > 1)
        return (found[0] if isinstance(found, tuple) else found,)

    return call


def _read_floor(case: Decode, inputs: Inputs) -> harness.Call:
    from bench import triton_gemm

    source = torch.empty(case.cached_bytes // 2, dtype=case.dtype, device=inputs.q.device).normal_()
    read = triton_gemm.ReadFloor(source.view(-1, case.head_size))
    return lambda: (read(),)


PROVIDERS: dict[str, Callable[[Decode, Inputs], harness.Call | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "flash_attn_4": _flash_attn_4,
    FLOOR: _read_floor,
}
PACKAGES = {"flash_attn_4": ("flash_attn.cute",), FLOOR: ("triton",)}  # what a provider imports, where it is not torch


def measure_decode(
    case: Decode, cases: Sequence[harness.Case], providers: Sequence[str], device: harness.Device, **options
) -> list[harness.Measurement]:
    """One measurement."""
    inputs = make_inputs(case, device.name)
    makers = {name: functools.partial(PROVIDERS[name], case, inputs) for name in providers}
    floors = {FLOOR: makers.pop(FLOOR)} if FLOOR in makers else {}
    truth = fp64_truth(inputs)
    return [harness.measure(case.case, makers, truth, device, floors=floors, sample=lambda out: out[:, -1:], **options)]


def compile_own_kernels(cases: Sequence[Decode], device: harness.Device) -> None:
    """Before a peer is imported: quack changes classes of the DSL."""
    for case in cases:
        inputs = make_inputs(Decode(1, 128, case.heads, case.pairs, case.head_size, case.variant), device.name)
        _cute_kernels(case, inputs)()
    device.synchronize()


def run(cases: Sequence[Decode], providers: Sequence[str], **settings) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return harness.run(
        [(case, [case.case]) for case in cases],
        measure_decode,
        [*providers, "torch"],  # torch's error is the yardstick
        harness.CudaDevice,
        packages=PACKAGES,
        compile_own_kernels=compile_own_kernels,
        **settings,
    )


def print_rates(measurements: Sequence[harness.Measurement]) -> None:
    """Our time over that of reading the same bytes, and GB/s."""
    for m in measurements:
        ours, floor = m.results.get("cute_kernels"), m.results.get(FLOOR)
        if ours:
            ratio = harness.number(ours.us / floor.us if floor else None, ".2f")
            print(f"{m.case.name}: {m.case.bytes / ours.us / 1e3:.0f} GB/s, {ratio} of the time of reading")


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [case.case.name for case in decodes(quick)]

    options = harness.parse(
        "decode", __doc__.splitlines()[0], "8192 keys", tuple(PROVIDERS), tuple(PROVIDERS), names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(decodes(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_decode", main))
