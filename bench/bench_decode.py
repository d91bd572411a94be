"""attention over a cache, decode and chunks of a prompt, beside torch, flash-attn-4 and a kernel that only reads.

    python -m bench.bench_decode                                 every case, results printed
    python -m bench.bench_decode --filter 'decode.16x8192'       cases whose name matches
    python -m bench.bench_decode --save                          and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_decode --list                          the names of the cases

Parts, for runs that are cut short, as filters: 'x(1024|4096)x32x8x128', 'x8192x32x8x128', 'decode.*x32768x32x8x128',
'x131072x32x8x128|prefill|append', 'x8x1x128', 'x64x8x64', 'decode.*(x40x8|x28x4)'.

A case's name is op.direction.shape.dtype.variant: attention_with_kv_cache.decode.16x8192x32x8x128.bfloat16.paged16. The
shape is batch x keys x query heads x heads of keys and values x head size; a chunk's begins with its queries:
512q1x32768x32x8x128. Variants: contiguous, paged16, paged128 (pages in a random order), ragged (pages of 16, lengths
from 1/16 of the keys to all of them). The direction ``append`` writes new keys and values alone: 1q16x8192x8x128.

``torch`` is torch's attention with cuDNN, over gathered keys where they lie in pages: the gathering is not timed.
``flash_attn_4`` is ``flash_attn.cute``, which has one split on Hopper. Both are full: their causal mask is top-left or
the same for one query. ``merges_last`` and ``merges_late`` are ours whose splits a tile's last CTA merges, and all CTAs
at the end. ``flash_attn_3`` chooses its splits itself. ``flashinfer`` plans its splits for the lengths;
the plan is not timed. ``read_floor`` only reads as many bytes as the keys and values have.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench import harness
from cute_kernels import attention_with_kv_cache
from cute_kernels.attention import reference_cache
from cute_kernels.attention.config import DecodeConfig, decode_config
from cute_kernels.attention.launch import attention_append, decode
from cute_kernels.runtime.launches import LaunchCache
from jit_cache import command

BATCHES = (1, 4, 16, 17, 36, 64, 128)
KEYS = (1024, 4096, 8192, 32768, 131072)
HEADS = ((32, 8, 128), (8, 1, 128), (64, 8, 64))
MAX_BYTES = 40 * 10**9  # of keys and values
CHUNKS, CONTEXT = (512, 2048), 32768
# Shapes that no table of ours has: any batch, groups of 5 and 7, keys that are no power of two; a chunk of 300
OTHERS = (
    (23, 6000, 40, 8, 128, "contiguous", 1),
    (9, 10000, 28, 4, 128, "paged16", 1),
    (3, 20000, 28, 4, 128, "paged16", 300),
)
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
    cases += [Decode(*other) for other in OTHERS]
    return [case for case in cases if case.cached_bytes <= MAX_BYTES]


@dataclass(frozen=True)
class Append:
    """New keys and values of each sequence behind those that are cached, all of the cache but them."""

    batch: int
    keys: int
    variant: str
    queries: int = 1
    pairs: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def case(self) -> harness.Case:
        return harness.Case(
            family="attention",
            op="attention_with_kv_cache",
            direction="append",
            shape=f"{self.queries}q{self.batch}x{self.keys}x{self.pairs}x{self.head_size}",
            dtype=str(self.dtype).removeprefix("torch."),
            variant=self.variant,
            bytes=4 * self.batch * self.queries * self.pairs * self.head_size * self.dtype.itemsize,
            flops=0,
        )

    @property
    def decode(self) -> Decode:
        """The decode case with the same cache."""
        return Decode(self.batch, self.keys, self.pairs, self.pairs, self.head_size, self.variant, self.queries)


def appends(quick: bool = False) -> list[Append]:
    """Every case."""
    if quick:
        return [Append(16, 8192, "paged16")]
    cases = [Append(batch, 8192, variant) for batch in (1, 16, 128) for variant in ("contiguous", "paged16")]
    return [*cases, Append(1, CONTEXT, "paged16", 2048)]


def every_case(quick: bool = False) -> list[Decode | Append]:
    return [*decodes(quick), *appends(quick)]


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


@functools.cache
def _launches(merges_late: bool) -> LaunchCache:
    return LaunchCache(decode.DecodeLaunches)


def _merges(merges_late: bool, case: Decode, inputs: Inputs) -> harness.Call:
    """Our call with one of the ways to merge splits."""

    def config(*sizes: int) -> DecodeConfig:
        found = decode_config(*sizes)
        return replace(found, merges_late=merges_late and not found.sequential)

    call, entries = _cute_kernels(case, inputs), _launches(merges_late)

    def with_config() -> tuple[Tensor]:
        with mock.patch.multiple(decode, decode_config=config, _decode=entries):
            return call()

    return with_config


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


def _flash_attn_3(case: Decode, inputs: Inputs) -> harness.Call:
    from flash_attn_interface import flash_attn_with_kvcache

    def call() -> tuple[Tensor]:
        found = flash_attn_with_kvcache(inputs.q, inputs.k, inputs.v, **inputs.cache, causal=True)
        return (found[0] if isinstance(found, tuple) else found,)

    return call


def _flashinfer(case: Decode, inputs: Inputs) -> harness.Call | None:
    """Keys that lie contiguous are pages of 16 to it, where they are whole ones."""
    import flashinfer

    size, (k, v), table = case.page_size, (inputs.k, inputs.v), inputs.page_table
    if table is None:
        size = 16
        if case.keys % size:
            return None
        k, v = (t.view(-1, size, *t.shape[2:]) for t in (k, v))
        table = torch.arange(len(k), dtype=torch.int32, device=k.device).view(case.batch, -1)
    pages = [-(-n // size) for n in case.lengths]
    starts = torch.tensor([0, *pages], device=k.device).cumsum(0).int()
    indices = torch.cat([row[:n] for row, n in zip(table, pages, strict=True)])
    last = torch.tensor([n - (p - 1) * size for n, p in zip(case.lengths, pages, strict=True)]).int().to(k.device)
    memory = torch.empty(512 << 20, dtype=torch.uint8, device=k.device)
    heads, dtypes = (case.heads, case.pairs, case.head_size), {"q_data_type": case.dtype, "kv_data_type": case.dtype}
    q = inputs.q.flatten(0, 1)
    if case.queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, indices, last, *heads, size, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD")
        rows = torch.arange(case.batch + 1, dtype=torch.int32, device=k.device) * case.queries
        wrapper.plan(rows, starts, indices, last, *heads, size, causal=True, **dtypes)
    return lambda: (wrapper.run(q, (k, v)).view(inputs.q.shape),)


def _read_floor(case: Decode, inputs: Inputs) -> harness.Call | None:
    if case.queries > 1:  # a chunk's products take longer than reading
        return None
    from bench import triton_gemm

    source = torch.empty(case.cached_bytes // 2, dtype=case.dtype, device=inputs.q.device).normal_()
    read = triton_gemm.ReadFloor(source.view(-1, case.head_size))
    return lambda: (read(),)


PROVIDERS: dict[str, Callable[[Decode, Inputs], harness.Call | None]] = {
    "cute_kernels": _cute_kernels,
    "merges_last": functools.partial(_merges, False),
    "merges_late": functools.partial(_merges, True),
    "torch": _torch,
    "flash_attn_3": _flash_attn_3,
    "flash_attn_4": _flash_attn_4,
    "flashinfer": _flashinfer,
    FLOOR: _read_floor,
}
DEFAULTS = tuple(name for name in PROVIDERS if not name.startswith("merges"))
PACKAGES = {
    "flash_attn_3": ("flash_attn_interface",),
    "flash_attn_4": ("flash_attn.cute",),
    "flashinfer": ("flashinfer",),
    FLOOR: ("triton",),
}  # what a provider imports, where it is not torch


class NewRows:
    """The new k and v that an ``Append`` writes, the caches that it writes to, and the number of cached keys."""

    def __init__(self, case: Append, device: str = "cuda") -> None:
        inputs = make_inputs(case.decode, device)
        generator = torch.Generator(device).manual_seed(harness.seed(case.case.name))
        shape = case.batch, case.queries, case.pairs, case.head_size
        self.k, self.v = (torch.randn(shape, generator=generator, device=device).to(case.dtype) for _ in range(2))
        self.caches, self.table, self.queries = (inputs.k, inputs.v), inputs.page_table, case.queries
        self.lengths = inputs.lengths - case.queries
        place = self.lengths[:, None].long() + torch.arange(case.queries, device=device)
        first = torch.arange(case.batch, device=device)[:, None].expand_as(place)
        if self.table is not None:
            first, place = self.table.long().gather(1, place // case.decode.page_size), place % case.decode.page_size
        self.places = first, place

    def of(self, cache: Tensor) -> Tensor:
        """The new rows of a cache."""
        return cache[self.places]

    def ours(self) -> tuple[Tensor, Tensor]:
        attention_append(self.k, self.v, *self.caches, self.lengths, self.table, None, self.queries)
        return self.caches

    def torchs(self) -> tuple[Tensor, Tensor]:
        for cache, new in zip(self.caches, (self.k, self.v), strict=True):
            cache[self.places] = new
        return self.caches


def measure_append(
    case: Append, providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement; torch indexes with what is computed before."""
    rows = NewRows(case, device.name)
    calls = {"cute_kernels": rows.ours, "torch": rows.torchs}
    makers = {name: functools.partial(lambda call: call, calls[name]) for name in providers if name in calls}
    truth = {"k_cache": rows.k.double(), "v_cache": rows.v.double()}
    return [harness.measure(case.case, makers, truth, device, sample=rows.of, **options)]


def measure_decode(
    case: Decode | Append, cases: Sequence[harness.Case], providers: Sequence[str], device: harness.Device, **options
) -> list[harness.Measurement]:
    """One measurement."""
    if isinstance(case, Append):
        return measure_append(case, providers, device, **options)
    inputs = make_inputs(case, device.name)
    makers = {name: functools.partial(PROVIDERS[name], case, inputs) for name in providers}
    floors = {FLOOR: makers.pop(FLOOR)} if FLOOR in makers else {}
    truth = fp64_truth(inputs)
    return [harness.measure(case.case, makers, truth, device, floors=floors, sample=lambda out: out[:, -1:], **options)]


def compile_own_kernels(cases: Sequence[Decode | Append], device: harness.Device) -> None:
    """Before a peer is imported: quack changes classes of the DSL."""
    for case in cases:
        if isinstance(case, Append):
            NewRows(Append(1, 128, case.variant), device.name).ours()
            continue
        inputs = make_inputs(Decode(1, 128, case.heads, case.pairs, case.head_size, case.variant), device.name)
        _cute_kernels(case, inputs)()
    device.synchronize()


def run(cases: Sequence[Decode | Append], providers: Sequence[str], **settings) -> list[harness.Measurement]:
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
    """GB/s, our time over that of reading the same bytes, our host's time over torch's."""
    for m in measurements:
        ours, floor, torchs = (m.results.get(name) for name in ("cute_kernels", FLOOR, "torch"))
        if ours:
            ratio = harness.number(ours.us / floor.us if floor else None, ".2f")
            host = harness.number(ours.host_us / torchs.host_us if torchs else None, ".2f")
            print(
                f"{m.case.name}: {m.case.bytes / ours.us / 1e3:.0f} GB/s, {ratio} of the time of reading; "
                f"host {ours.host_us:.1f} us, {host} of torch's"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [case.case.name for case in every_case(quick)]

    options = harness.parse(
        "decode", __doc__.splitlines()[0], "8192 keys", tuple(PROVIDERS), DEFAULTS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(every_case(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_rates(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_decode", main))
