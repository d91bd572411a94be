"""Shared by the tests of the quantizers: cases, inputs, byte comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

import cute_kernels
from cute_kernels.mxfp8 import launch, reference  # noqa: F401
from cute_kernels.mxfp8.checks import SCALE  # noqa: F401
from cute_kernels.mxfp8.config import GRIDS, MODES  # noqa: F401
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import Target
from tests.fakes import fake_kernels
from tests.norm.cases import seeded_generator  # noqa: F401

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (BF16, FP32, FP16)
LAYOUTS = ("plain", "blocked")
# Where modes and forms of the computation differ, and the ends of the range
SPECIAL_FP32 = (
    *(0x04600001, 0x047FFFFF, 0x04600000, 0x04000000, 0x00000001, 0x007FFFFF, 0x00800000),
    *(0x7F7FFFFF, 0x7F780000, 0x7F77FFFF, 0x7F800000, 0x7FC00000, 0x3F800000, 0x3FE00000, 0x3FE00001, 0x00000000),
)
VARIANTS = ("rowwise", "colwise", "dual", "3d_colwise", "3d_colwise_square", "3d_dual", "3d_dual_square")
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", E4M3: "e4m3", E5M2: "e5m2"}


@dataclass(frozen=True)
class Case:
    """One call of a quantizer: of (M, K) or (E, N, K).

    ``transposed``: the last dimension but one is contiguous; ``gap``: elements between rows, and between experts.
    """

    variant: str
    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    mode: str = "rceil"
    scale_layout: str = "plain"
    out: torch.dtype = E4M3
    transposed: bool = False
    gap: int = 0

    def __str__(self) -> str:
        words = [self.variant, "x".join(map(str, self.shape)), NAMES[self.dtype], self.mode, self.scale_layout]
        words += [NAMES[self.out]] * (self.out is not E4M3) + ["transposed"] * self.transposed
        return "-".join(words + [f"gap_{self.gap}"] * (self.gap > 0))

    @property
    def name(self) -> str:
        return "quantize_" + self.variant.removesuffix("_square")

    @property
    def options(self) -> dict:
        """Keyword arguments of the call."""
        options = {"mode": self.mode, "scale_layout": self.scale_layout, "dtype": self.out}
        if self.variant == "3d_colwise_square":
            options["block"] = (32, 32)
        if self.variant == "3d_dual_square":
            options["square"] = True
        return options


def every_variant(shape: tuple[int, int, int], **options) -> list[Case]:
    """A case a variant and layout; the matrices are the experts' one below the other."""
    rows = (shape[0] * shape[1], shape[2])
    return [
        Case(variant, shape if variant.startswith("3d") else rows, scale_layout=layout, **options)
        for variant in VARIANTS
        for layout in LAYOUTS
    ]


def call(case: Case, x: Tensor, module=cute_kernels) -> list[Tensor]:
    """[q, scale] or both pairs, by the public function, or the one of ``reference``."""
    return list(getattr(module, case.name)(x, **case.options))


def make_input(case: Case, generator: torch.Generator) -> Tensor:
    """Blocks of very different sizes, some of zeros, with a few NaN, infinities, signed zeros and subnormal numbers."""
    return laid_out(case, wide(case.shape, case.dtype, generator))


def wide(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random values of ``shape`` whose exponent changes from block to block, with special values here and there."""
    device, count = generator.device, torch.Size(shape).numel()
    values = torch.randn(count, generator=generator, device=device)
    info = torch.finfo(dtype)
    reach = 8 if dtype is FP16 else 60
    # The same exponent in a square of 32 x 32, so that it is in the blocks of either orientation
    columns = shape[-1]
    place = torch.arange(count, device=device)
    squares = place // columns // 32 * (columns // 32) + place % columns // 32
    exponents = torch.randint(-reach, reach, (count // 32 + 1,), generator=generator, device=device)[squares]
    values = torch.ldexp(values, exponents).to(dtype)
    specials = torch.tensor(
        [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal, info.smallest_normal / 2, 448, 449, -57344],
        dtype=torch.float64,
    )
    specials = torch.cat([specials, torch.tensor([torch.nan, torch.inf, -torch.inf])]).to(dtype).to(device)
    at = torch.randint(max(count, 1), (count // 640,), generator=generator, device=device)
    which = torch.randint(len(specials), (count // 640,), generator=generator, device=device)
    values[at] = specials[which]
    if count >= 2048:
        values[:1024] = 0.0
    return values.view(shape)


def laid_out(case: Case, x: Tensor) -> Tensor:
    """A copy in the memory order and with the gaps of the case."""
    x = x.mT if case.transposed else x
    rows, columns = x.shape[-2:]
    if case.gap:
        wide_rows = x.new_full((*x.shape[:-2], rows + 1, columns + case.gap), torch.nan)
        wide_rows[..., :rows, :columns] = x
        x = wide_rows[..., :rows, :columns]
    else:
        x = x.contiguous()
    return x.mT if case.transposed else x


def amax_inputs(dtype: torch.dtype, largest: Tensor, generator: torch.Generator) -> Tensor:
    """(32 n, 1024): blocks along either dimension whose largest magnitudes are ``largest`` (1024 n values of dtype).

    Each value is alone in its row's block and in its column's block, with random sign and in a random place; the rest
    of the block is smaller, or zero.
    """
    n = len(largest) // 1024
    device = generator.device
    values = largest.view(n, 32, 32)
    # In a square (i, j) of 32 x 32 row r has its value in column (r + shift) % 32
    shift = torch.randint(32, (n, 32), generator=generator, device=device)
    sign = torch.randint(0, 2, (n, 32, 32), generator=generator, device=device) * 2 - 1
    x = torch.zeros(n, 32, 32, 32, dtype=dtype, device=device)  # (n, square, row, column)
    row = torch.arange(32, device=device)
    column = (row + shift[:, :, None]) % 32
    x.scatter_(3, column[..., None], (values * sign).to(dtype)[..., None])
    return x.permute(0, 2, 1, 3).reshape(32 * n, 1024)


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Same number, dtypes, shapes, strides and bytes."""
    assert len(found) == len(wanted)
    for i, (one, two) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype is two.dtype and one.shape == two.shape, (i, one.dtype, one.shape, two.dtype, two.shape)
        assert one.numel() == 0 or one.stride() == two.stride(), (i, one.stride(), two.stride())
        differing = one.view(torch.uint8) != two.view(torch.uint8).to(one.device)
        if differing.any():
            at = tuple(differing.nonzero()[0].tolist())
            got, want = one.view(torch.uint8)[at].item(), two.view(torch.uint8)[at].item()
            raise AssertionError(
                f"output {i} of shape {tuple(one.shape)}: {int(differing.sum())} bytes differ, the first at {at}: "
                f"{got:#04x}, not {want:#04x}"
            )


@contextlib.contextmanager
def poisoned(byte: int = 0xA5) -> Iterator[None]:
    """The memory that a launch allocates to return holds this byte."""
    real = launch.empty_strided

    def empty_strided(like, shape, strides, dtype):
        t = real(like, shape, strides, dtype)
        t.as_strided((t.numel(),), (1,)).view(torch.uint8).fill_(byte)
        return t

    with mock.patch.object(launch, "empty_strided", empty_strided):
        yield


def opcheck(operator, arguments: tuple) -> None:
    """torch.library.opcheck; what it cannot do with 8-bit numbers, which torch does not multiply, by hand."""
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=checks)
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    found = operator(*arguments)
    found = found if isinstance(found, tuple) else (found,)
    for one, two in zip(tensors, before, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
    memory = [t.untyped_storage().data_ptr() for t in (*tensors, *found) if t.numel()]
    assert len(set(memory)) == len(memory)


def kernels_of(cases: list[Case], arch: str) -> list[tuple]:
    """(builder, arguments) of the kernels that the cases, few tiles or many, and the way back need."""
    with fake_kernels(arch) as jobs:
        for case in cases:
            x = laid_out(case, torch.zeros((*case.shape[:-2], 32, 32), dtype=case.dtype))
            for tiles in GRIDS:
                with as_many_tiles(tiles):
                    found = call(case, x)
            for i in range(0, len(found), 2):
                cute_kernels.dequantize(found[i], found[i + 1])
    return list(dict.fromkeys(jobs))


@contextlib.contextmanager
def as_many_tiles(tiles: tuple[int, int, int]) -> Iterator[None]:
    """Within it the kernels for so many tiles run (see quantize_config), whatever the size."""
    real = launch.quantize_config

    def config(arch, itemsize, row_kind, col_kind, _):
        return real(arch, itemsize, row_kind, col_kind, tiles)

    with mock.patch.object(launch, "quantize_config", config), new_launches():
        yield


@contextlib.contextmanager
def few_sms(count: int = 2) -> Iterator[None]:
    """Within it a CTA that walks over tiles has several of a small matrix, and uses its slots and buffers again."""
    real = launches.target_of

    def target_of(device_index):
        return Target(real(device_index).arch, count)

    with mock.patch.object(launches, "target_of", target_of), new_launches():
        yield


@contextlib.contextmanager
def new_launches() -> Iterator[None]:
    """Within it each launch is made anew, and forgotten behind it."""
    launches.forget()
    try:
        yield
    finally:
        launches.forget()
