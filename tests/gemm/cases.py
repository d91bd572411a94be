"""Shared by the tests of mm and linear: inputs, raw-bit comparison, fp64 oracle, bounds, a choice of the kernel."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import linear
from cute_kernels.gemm import launch
from cute_kernels.gemm.config import GemmConfig, choose
from cute_kernels.runtime import launches
from tests.fakes import fake_kernels
from tests.norm.cases import BF16, FP16, FP32, name_of, seeded_generator, strided

__all__ = ["BF16", "FP16", "FP32", "name_of", "seeded_generator", "strided"]

# Widths (N, K) of models: qkv, output, up, down, vocabulary
TARGETS = [(12288, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096)]
# Numbers of tokens: below, at and beyond the tiles of each kernel
TOKENS = [1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 100, 128, 257, 512, 4096]
# Rows and columns of calls that together get every kernel
SIZES = [*TOKENS, 9, 32, 48, 192, 200, 256, 1024, 2048, 3072, 6144, 8192, *(n for n, _ in TARGETS), 151936]
SIZES += [24, 72, 80, 112, 160, 224, 320, 384, 448, 1536, 2880, 3584, 5120, 7168, 18944, 25600]
ACTIVATIONS = ["relu", "silu", "gelu"]
# Which dimension of a (M, K) and b (K, N) has neighbouring elements
LAYOUTS = [("k", "k"), ("k", "n"), ("m", "k"), ("m", "n")]


def here() -> str:
    """The architecture of this machine's GPU; sm_90a where there is none, so that tests can be collected."""
    return "sm_100a" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10 else "sm_90a"


@functools.cache
def kernels(arch: str = here(), epilogues: tuple[str, ...] = ("store", "accumulate")) -> list[tuple]:
    """(config, transposed) of every kernel that the dispatcher can choose; the one for any stride comes first."""
    calls = itertools.product(SIZES, SIZES, (64, 1024, 4096, 16384), (132,), epilogues, (1,), (True, False))
    return [(None, False), *dict.fromkeys(choose(arch, *call) for call in calls)]


def kernel_name(kernel: tuple) -> str:
    config, transposed = kernel
    tile = "any" if config is None else "x".join(str(size) for size in config.tile)
    shape = "" if config is None else f"-cluster_{config.cluster[0]}x{config.cluster[1]}-stages_{config.stages}"
    turns = "-ping_pong" * (config is not None and config.ping_pong)
    order = "-most_rows_first" * getattr(config, "most_rows_first", False)
    overlapping = "-overlapping" * (config is not None and config.overlapping)
    return tile + shape + turns + order + overlapping + "-transposed" * transposed


# Inputs


@dataclass(frozen=True)
class Case:
    """One call of ``linear``; ``bias`` is a dtype, None where there is none; 0 is a good size."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None
    bias: torch.dtype | None = None
    activation: str | None = None
    x_gap: int = 0  # elements between the rows of x, NaN
    w_gap: int = 0
    dy_gap: int = 0
    offset: int = 0  # elements from a 16-byte boundary to the first row of each

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", name_of(self.dtype)]
        for word in ("out", "bias"):
            if getattr(self, word) is not None:
                words.append(f"{word}_{name_of(getattr(self, word))}")
        words += [self.activation] * (self.activation is not None)
        for word in ("x_gap", "w_gap", "dy_gap", "offset"):
            words += [f"{word}_{getattr(self, word)}"] * (getattr(self, word) > 0)
        return "-".join(words)

    @property
    def options(self) -> dict:
        return {"out_dtype": self.out, "activation": self.activation}


@dataclass
class Inputs:
    """Tensors of a call; x, weight and bias require grad."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"dx": self.x, "dw": self.weight, "db": self.bias}
        return {name: leaf for name, leaf in named.items() if leaf is not None and leaf.requires_grad}


def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Standard normal x, bias and dy; weights of variance 1/K, so that z is of the activation's scale."""

    def matrix(rows: int, columns: int, dtype: torch.dtype, gap: int, scale: float = 1.0) -> Tensor:
        values = (randn(rows, columns, generator=generator) * scale).to(dtype)
        return strided(values, gap, case.offset) if gap or case.offset else values

    x = matrix(case.m, case.k, case.dtype, case.x_gap).requires_grad_()
    weight = matrix(case.n, case.k, case.dtype, case.w_gap, max(case.k, 1) ** -0.5).requires_grad_()
    bias = None
    if case.bias is not None:
        bias = randn(case.n, generator=generator).to(case.bias).requires_grad_()
    return Inputs(x, weight, bias, matrix(case.m, case.n, case.out or case.dtype, case.dy_gap))


@dataclass(frozen=True)
class Batch:
    """One call of ``bmm``; how each operand lies: "k", "m" or "n", the dimension with neighbours.

    ``expanded``: operands that are one entry again and again. ``between``: the entries' rows lie between each other's.
    ``gap``: elements behind each row or column, and rows or columns behind each entry, NaN.
    """

    entries: int
    m: int
    n: int
    k: int
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None
    layout: tuple[str, str] = ("k", "n")
    expanded: str = ""
    between: bool = False
    gap: int = 0

    def __str__(self) -> str:
        words = [f"{self.entries}x{self.m}x{self.n}x{self.k}", name_of(self.dtype), "".join(self.layout)]
        if self.out is not None:
            words.append(f"out_{name_of(self.out)}")
        words += [f"expanded_{self.expanded}"] * bool(self.expanded) + ["between"] * self.between
        return "-".join(words + [f"gap_{self.gap}"] * (self.gap > 0))


def make_batch(case: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """a (L, M, K) and b (L, K, N), numbers whose sums show the order of summation."""

    def operand(name: str, rows: int, columns: int, by_rows: bool) -> Tensor:
        entries = 1 if name in case.expanded else case.entries
        shape = (entries, rows, columns) if by_rows else (entries, columns, rows)
        make = wide_range if case.dtype is BF16 else randn  # fp16 has no wide range
        values = make(*shape, generator=generator).to(case.dtype)
        memory = [size + case.gap * (i > 0) for i, size in enumerate(shape)]
        if case.between:
            memory = [memory[1], memory[0], memory[2]]
        t = torch.full(memory, float("nan"), dtype=case.dtype, device=generator.device)
        t = (t.transpose(0, 1) if case.between else t)[:, : shape[1], : shape[2]].copy_(values)
        return (t if by_rows else t.mT).expand(case.entries, rows, columns)

    a_major, b_major = case.layout
    return operand("a", case.m, case.k, a_major == "k"), operand("b", case.k, case.n, b_major == "n")


def run_batch(product: Callable, a: Tensor, b: Tensor, dout: Tensor, **options) -> dict[str, Tensor]:
    """The product and both gradients, of ``mm`` or ``bmm``, on memory of these very strides."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    out = product(a, b, **options)
    da, db = torch.autograd.grad(out, (a, b), dout)
    return {"out": out.detach(), "da": da, "db": db}


def randn(*shape: int, generator: torch.Generator, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype)


def wide_range(*shape: int, generator: torch.Generator) -> Tensor:
    """bf16 numbers of some thirty binades: any other order of summation shows."""
    return (randn(*shape, generator=generator) * torch.exp(4 * randn(*shape, generator=generator))).to(BF16)


def laid_out(matrix: Tensor, rows_are_contiguous: bool) -> Tensor:
    """The same values in new memory, by rows or by columns."""
    return matrix.clone(memory_format=torch.contiguous_format) if rows_are_contiguous else matrix.t().contiguous().t()


def operands(a: Tensor, b: Tensor, layout: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """a (M, K) and b (K, N) in one of LAYOUTS."""
    return laid_out(a, layout[0] == "k"), laid_out(b, layout[1] == "n")


def run(linear: Callable, case: Case, inputs: Inputs, **options) -> dict[str, Tensor]:
    """y and the gradients of all inputs that require one, without those that went to a main_grad."""
    y = linear(inputs.x, inputs.weight, inputs.bias, **case.options, **options)
    leaves = inputs.leaves
    if not leaves:
        return {"y": y}
    gradients = torch.autograd.grad(y, list(leaves.values()), inputs.dy, allow_unused=True)
    found = dict(zip(leaves, gradients, strict=True))
    return {"y": y.detach(), **{name: value for name, value in found.items() if value is not None}}


# Comparison


def bits(t: Tensor) -> Tensor:
    """The raw bits: +0 is not -0, and a NaN is equal to itself."""
    return t.contiguous().view(torch.int32 if t.element_size() == 4 else torch.int16)


def assert_same_bits(found: Tensor, wanted: Tensor, what: str = "") -> None:
    assert found.shape == wanted.shape and found.dtype is wanted.dtype, f"{what}: {found.dtype} {tuple(found.shape)}"
    different = bits(found) != bits(wanted)
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {different.sum()} of {different.numel()} elements differ, the first at {first}: "
            f"{found[first].item()!r}, not {wanted[first].item()!r}"
        )


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(bits(found), bits(wanted))


# The oracle and the bounds


@dataclass(frozen=True)
class Exact:
    """A result in fp64, the size of the terms it is the sum of, the number of k16 steps of the longest sum in it."""

    value: Tensor
    terms: Tensor
    steps: int
    margin: Tensor | float = field(default=0.0)  # what a rounded factor (z, dz) adds to the error


def steps_of(k: int) -> int:
    return -(-k // 16)


def oracle_mm(a: Tensor, b: Tensor) -> Exact:
    a, b = a.detach().double(), b.detach().double()
    return Exact(a @ b, a.abs() @ b.abs(), steps_of(a.shape[1]))


def exact_activation(z: Tensor, activation: str | None) -> Tensor:
    return {None: lambda t: t, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}[activation](z)


def oracle(case: Case, inputs: Inputs, valid: int | None = None) -> dict[str, Exact]:
    """``linear`` in fp64, the activations' derivatives by autograd; dw and db of ``valid`` tokens."""
    x, weight, dy = (t.detach().double().reshape(-1, t.shape[-1]) for t in (inputs.x, inputs.weight, inputs.dy))
    z, terms, steps = x @ weight.t(), x.abs() @ weight.abs().t(), steps_of(case.k)
    if inputs.bias is not None:
        z, terms = z + inputs.bias.detach().double(), terms + inputs.bias.detach().double().abs()
    dz, margin = dy, 0.0 * dy.abs()
    if case.activation is not None:
        leaf = z.clone().requires_grad_()
        (dz,) = torch.autograd.grad(exact_activation(leaf, case.activation), leaf, dy)
        # z is rounded where it is saved; the derivatives of silu and gelu change by no more than z does, relu's at 0
        z_error = 0.5 * torch.finfo(case.out or case.dtype).eps * z.abs() + (steps + 4) * FP32_EPS * terms
        jump = (z.abs() <= z_error).double()
        margin = dy.abs() * (jump if case.activation == "relu" else z_error + 8 * FP32_EPS)
    if case.activation is not None or inputs.dy.dtype is not case.dtype:
        for dtype in {
            case.dtype,
            inputs.dy.dtype,
        }:  # dz is rounded to y's dtype, and to x's as a factor of two products
            info = torch.finfo(dtype)
            margin = margin + 0.5 * info.eps * dz.abs().clamp_min(info.smallest_normal)
    y = exact_activation(z, case.activation)
    # The derivatives of the activations are below 1.2
    exact = {"y": Exact(y, terms if case.activation is None else 1.2 * terms, steps)}
    exact["dx"] = Exact(dz @ weight, dz.abs() @ weight.abs(), steps_of(case.n), margin @ weight.abs())
    dz, x, margin = dz[:valid], x[:valid], margin[:valid]
    exact["dw"] = Exact(dz.t() @ x, dz.abs().t() @ x.abs(), steps_of(case.m), margin.t() @ x.abs())
    exact["db"] = Exact(dz.sum(0), dz.abs().sum(0), steps_of(case.m), margin.sum(0))
    return exact


FP32_EPS = torch.finfo(FP32).eps
# Elements that are not the exact result rounded, and that are off by more than one step of their dtype. A simulation of
# truncating accumulation gives 0.24 % and 0.02 % for bf16, 2.0 % and 0.13 % for fp16 at K = 4096; as K they grow
NOT_ROUNDED = {BF16: 0.01, FP16: 0.06}
BEYOND_ONE_STEP = {BF16: 0.001, FP16: 0.005}


def check(found: dict[str, Tensor], exact: dict[str, Exact]) -> None:
    """Fails if an element is off by more than its rounding and one fp32 step a k16 step; see also ``check_gates``."""
    for name, result in found.items():
        value, terms = exact[name].value, exact[name].terms
        result = result.reshape(value.shape)
        info = torch.finfo(result.dtype)
        half_step = 0.5 * info.eps * value.abs().clamp_min(info.smallest_normal)
        bound = half_step + (exact[name].steps + 4) * FP32_EPS * terms + exact[name].margin
        ratio = ((result.double() - value).abs() / bound.clamp_min(1e-300)).nan_to_num(nan=float("inf"))
        if not ratio.numel():
            continue
        worst = ratio.argmax().item()
        assert ratio.max() <= 1.0, (
            f"{name}: element {worst} of {tuple(value.shape)} is {result.flatten()[worst]}, not "
            f"{value.flatten()[worst]}: {ratio.max():.2f} times the bound; {(ratio > 1.0).sum()} elements are beyond it"
        )


def check_gates(name: str, result: Tensor, exact: Exact) -> None:
    """For products of standard normal numbers: rms error of fp32 results, share of wrong roundings of the others."""
    value = exact.value
    result = result.reshape(value.shape)
    if result.dtype is FP32:
        error = ((result.double() - value).norm() / value.norm()).item()
        allowed = (exact.steps + 4) * FP32_EPS / 2  # a simulation: a third of that
        assert error <= allowed, f"{name}: relative rms error {error:.2e}, allowed {allowed:.2e}"
        return
    step = torch.finfo(result.dtype).eps * torch.exp2(value.abs().log2().floor())
    rounded = value.to(result.dtype).double()
    wrong = (result.double() != rounded).double().mean().item()
    far = ((result.double() - rounded).abs() > 1.01 * step).double().mean().item()
    growth = max(1.0, exact.steps / 256)
    assert wrong <= growth * NOT_ROUNDED[result.dtype], (
        f"{name}: {wrong:.2%} of the elements are not the exact result rounded"
    )
    assert far <= growth * BEYOND_ONE_STEP[result.dtype], (
        f"{name}: {far:.3%} of the elements are off by more than one step"
    )


# Calls, and the kernels that they take


class Recorder(TorchDispatchMode):
    """Calls of the registered operators, with copies of what they got."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cute_kernels":
            self.calls.append((function, tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in args)))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def only_kernel(config: GemmConfig | None, transposed: bool, num_sms: int | None = None) -> Iterator[None]:
    """Within it every product runs on this kernel; what that cannot read on the one for any stride, (None, False).

    ``num_sms``: as if the GPU had so many.
    """
    launch_of = launch.launch_of

    def launch_of_this(target, spec, shape):
        target = target if num_sms is None else target._replace(num_sms=num_sms)
        return launch_of(target, spec, shape, (config, transposed))

    launches.forget()
    try:
        with mock.patch.object(launch, "launch_of", launch_of_this):
            yield
    finally:
        launches.forget()


def kernels_of(cases: list[Case], arch: str) -> list[tuple]:
    """(builder, arguments) of all kernels that the cases' forward and backward need; nothing is computed."""

    with fake_kernels(arch, computes=False) as jobs:
        for case in cases:
            with mock.patch(f"{__name__}.randn", lambda *shape, generator, dtype=FP32: torch.zeros(shape, dtype=dtype)):
                run(linear, case, make_inputs(case, torch.Generator()))
    return jobs
