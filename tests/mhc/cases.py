"""Shared by the tests of the hyper-connections: cases, inputs, the fp64 oracle and the bounds of a result's error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import num_coefficients
from cute_kernels.mhc.variants import VARIANTS, Variant
from tests.norm.cases import BF16, FP16, FP32, name_of, relative_rms, seeded_generator, strided

__all__ = ["BF16", "FP16", "FP32", "relative_rms", "seeded_generator"]

FP64 = torch.float64
FP32_EPS = torch.finfo(FP32).eps
STREAMS = (1, 2, 4, 8)
LAYOUTS = ("streams", "channels")
RES_ORIENTATIONS = ("io", "oi")
SINKHORNS = ("log", "softmax_eps", "exp_clamp")
PRESETS = tuple(VARIANTS)
CHANNELS = (8, 13, 5129)  # the fewest; odd; beyond a multiple of all tiles
# (tokens, channels): training shapes and decoding
SIZES = [(8192, 4096), (4096, 7168), (8192, 2560), (16384, 1280), (2048, 5120), (65536, 768)]

# op -> (inputs in the order of their gradients, outputs)
OPERATIONS = {
    "projection": (("x", "phi", "norm_weight"), ("H", "mean_square")),
    "coefficients": (("H", "mean_square", "alpha", "beta"), ("pre", "post", "logits")),
    "sinkhorn": (("logits",), ("res",)),
    "aggregate": (("x", "pre"), ("layer_input",)),
    "expand_combine": (("f", "post", "x", "res", "bias"), ("out",)),
    "expand": (("h",), ("x",)),
    "contract": (("x",), ("h",)),
    "head": (("x", "fn", "base", "scale", "norm_weight"), ("h",)),
    "pre": (("x", "phi", "alpha", "beta", "norm_weight"), ("layer_input", "post", "res")),
    "hyper_connection": (("x", "phi", "alpha", "beta", "norm_weight", "bias"), ("out",)),
}
# op -> its parameters, each of which may have a main_grad
WITH_PARAMETERS = {
    "projection": ("phi", "norm_weight"),
    "coefficients": ("alpha", "beta"),
    "expand_combine": ("bias",),
    "head": ("fn", "base", "scale", "norm_weight"),
    "pre": ("phi", "alpha", "beta", "norm_weight"),
    "hyper_connection": ("phi", "alpha", "beta", "norm_weight", "bias"),
}


# Cases and inputs


@dataclass(frozen=True)
class Case:
    """A hyper-connection: sizes, dtypes, variant, and what of the optional there is."""

    n: int = 4
    channels: int = 64
    tokens: tuple[int, ...] = (5,)
    dtype: torch.dtype = BF16
    parameters: torch.dtype = FP32
    variant: str | Variant = "deepseek_v4"
    layout: str | None = None  # the variant's if None, as res_orientation
    res_orientation: str | None = None
    norm_weight: bool = False
    bias: bool = False
    dropout_p: float = 0.0
    gap: int = 0  # elements between the tokens of x and of f, NaN

    def __str__(self) -> str:
        words = [self.variant] if isinstance(self.variant, str) else ["own"]
        words += ["x".join(str(size) for size in (*self.tokens, self.n, self.channels)), name_of(self.dtype)]
        words += [f"parameters_{name_of(self.parameters)}"] * (self.parameters is not FP32)
        words += [word for word in (self.layout, self.res_orientation) if word is not None]
        words += [word for word in ("norm_weight", "bias") if getattr(self, word)]
        words += [f"dropout_{self.dropout_p}"] * (self.dropout_p > 0.0) + [f"gap_{self.gap}"] * (self.gap > 0)
        return "-".join(words)

    @property
    def preset(self) -> Variant:
        return VARIANTS[self.variant] if isinstance(self.variant, str) else self.variant

    @property
    def axes(self) -> str:
        return self.layout or self.preset.layout

    @property
    def orientation(self) -> str:
        return self.res_orientation or self.preset.res_orientation

    @property
    def residual_shape(self) -> tuple[int, ...]:
        sizes = (self.n, self.channels) if self.axes == "streams" else (self.channels, self.n)
        return (*self.tokens, *sizes)


SEED = 0x1234_5678_9ABC_DEF0


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Every tensor that some op takes, those of later ops as the earlier ones make them; all but seed require grad.

    Streams of slightly different size, logits of order 1, random weights: no symmetry that could hide a mistake.
    """
    n, k, columns = case.n, case.n * case.channels, num_coefficients(case.n)

    def randn(*shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype = case.parameters) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=generator.device) * scale + shift).to(dtype)

    sizes = 1.0 + 0.01 * torch.arange(n, device=generator.device)
    sizes = sizes[:, None] if case.axes == "streams" else sizes
    tensors = {
        "x": (randn(*case.residual_shape, dtype=FP32) * sizes).to(case.dtype),
        "f": randn(*case.tokens, case.channels, dtype=case.dtype),
        "h": randn(*case.tokens, case.channels, dtype=case.dtype),
        "phi": randn(columns, k, scale=k**-0.5),
        "alpha": randn(3, scale=0.1, shift=1.0),
        "beta": randn(columns, scale=0.1),
        "fn": randn(n, k, scale=k**-0.5),
        "base": randn(n, scale=0.1),
        "scale": randn(1, scale=0.1, shift=1.0),
    }
    if case.norm_weight:
        tensors["norm_weight"] = randn(k, scale=0.1, shift=1.0)
    if case.bias:
        tensors["bias"] = randn(case.channels)
    for op in ("projection", "coefficients", "sinkhorn"):
        outputs = call(reference, op, case, {name: t.double() for name, t in tensors.items()}, compute_dtype=FP64)
        tensors |= {name: t.float() for name, t in zip(OPERATIONS[op][1], outputs, strict=True)}
    if case.gap:
        for name in ("x", "f"):
            shape = tensors[name].shape
            sizes = shape[: len(case.tokens)], shape[len(case.tokens) :]
            rows = strided(tensors[name].reshape(sizes[0].numel(), sizes[1].numel()), case.gap)
            tensors[name] = rows.unflatten(0, sizes[0]).unflatten(-1, sizes[1])
    for t in tensors.values():
        t.requires_grad_()
    return tensors


def make_upstream(op: str, case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Random gradients of an op's outputs: a sum's gradient, 1, would vanish in a doubly stochastic matrix."""
    n, columns = case.n, num_coefficients(case.n)
    wide = {"H": (columns,), "mean_square": (), "pre": (n,), "post": (n,), "logits": (n, n), "res": (n, n)}
    upstream = {}
    for name in OPERATIONS[op][1]:
        if name in wide:
            shape, dtype = (*case.tokens, *wide[name]), FP32
        elif name in ("x", "out"):
            shape, dtype = case.residual_shape, case.dtype
        else:
            shape, dtype = (*case.tokens, case.channels), case.dtype
        upstream[name] = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    return upstream


def saturated_logits(n: int, tokens: int, generator: torch.Generator, size: float = 50.0) -> Tensor:
    """(tokens, n, n) of +size and -size, the first token all +size, the second all -size."""
    logits = size * torch.randn(tokens, n, n, generator=generator, device=generator.device).sign()
    logits[0], logits[1] = size, -size
    return logits


def sublayer(layer_input: Tensor) -> Tensor:
    """The sublayer of the tests: not linear, different for each channel, and the same for each layout."""
    return torch.tanh(layer_input) + 0.5 * layer_input.roll(1, -1)


# Calls


def call(library: ModuleType, op: str, case: Case, tensors: Mapping[str, Tensor], **options) -> tuple[Tensor, ...]:
    """The op of ``library`` (the references, or the public functions) on those of ``tensors`` that it takes."""
    function = getattr(library, op)
    get = tensors.get
    x, layout = get("x"), case.axes
    variant = case.preset
    if op == "projection":
        found = function(x, get("phi"), norm_weight=get("norm_weight"), layout=layout, **options)
    elif op == "coefficients":
        arguments = [tensors[name] for name in OPERATIONS[op][0]]
        found = function(*arguments, case.n, variant=case.variant, **options)
    elif op == "sinkhorn":
        choice = {"variant": variant.sinkhorn, "iterations": variant.iterations}
        if variant.sinkhorn != "log":
            choice["eps"] = variant.sinkhorn_eps
        found = function(get("logits"), **choice, **options)
    elif op == "aggregate":
        found = function(x, get("pre"), layout=layout, **options)
    elif op == "expand_combine":
        choice = {"layout": layout, "res_orientation": case.orientation} | _dropout(case)
        found = function(get("f"), get("post"), x, get("res"), bias=get("bias"), **choice, **options)
    elif op == "expand":
        found = function(get("h"), case.n, layout=layout, **options)
    elif op == "contract":
        found = function(x, layout=layout, **options)
    elif op == "head":
        choice = {"norm_weight": get("norm_weight"), "variant": case.variant, "layout": case.layout}
        found = function(x, get("fn"), get("base"), get("scale"), **choice, **options)
    elif op == "pre":
        choice = {"norm_weight": get("norm_weight"), "variant": case.variant, "layout": case.layout}
        found = function(x, get("phi"), get("alpha"), get("beta"), **choice, **options)
    else:
        choice = {"norm_weight": get("norm_weight"), "variant": case.variant, "layout": case.layout}
        choice |= {"bias": get("bias"), "res_orientation": case.res_orientation} | _dropout(case)
        found = function(x, sublayer, get("phi"), get("alpha"), get("beta"), **choice, **options)
    return found if isinstance(found, tuple) else (found,)


def _dropout(case: Case) -> dict:
    return {"dropout_p": case.dropout_p, "seed": SEED} if case.dropout_p > 0.0 else {}


def differentiate(
    library: ModuleType,
    op: str,
    case: Case,
    tensors: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    **options,
) -> dict[str, Tensor]:
    """The op's outputs by name, and as "d" + name the gradients of those inputs that require one."""
    outputs = dict(zip(OPERATIONS[op][1], call(library, op, case, tensors, **options), strict=True))
    leaves = {name: tensors[name] for name in OPERATIONS[op][0] if name in tensors and tensors[name].requires_grad}
    incoming = [upstream[name].to(t.dtype) for name, t in outputs.items()]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), incoming, allow_unused=True)
    found = {f"d{name}": t for name, t in zip(leaves, gradients, strict=True) if t is not None}
    return {**{name: t.detach() for name, t in outputs.items()}, **found}


# The oracle and the bounds


@dataclass(frozen=True)
class Exact:
    """A result in fp64, and the same of plain torch in fp32: what that errs by is the measure of an error."""

    value: Tensor
    peer: Tensor


def oracle(op: str, case: Case, tensors: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> dict[str, Exact]:
    """The reference in fp64 on fp64 copies, and in fp32 on fp32 copies.

    What ``hyper_connection`` gives its sublayer is rounded to x's dtype: there the peer has the dtypes of the inputs.
    """

    def copies(dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}

    exact = differentiate(reference, op, case, copies(FP64), upstream, compute_dtype=FP64)
    peers = differentiate(reference, op, case, tensors if op == "hyper_connection" else copies(FP32), upstream)
    return {name: Exact(value, peers[name]) for name, value in exact.items()}


NOISE = 8.0  # times the largest error of torch in fp32, beside one rounding to the result's dtype


def check(
    found: Mapping[str, Tensor],
    exact: Mapping[str, Exact],
    *,
    noise: float = NOISE,
    margins: Mapping[str, Tensor | float] | None = None,
) -> None:
    """Fails if an element is off by more than its rounding and ``noise`` of the largest error of torch in fp32, or the
    root mean square of the error, of 16 elements or more, is more than twice that of torch's rounded result.

    ``margins``: what else a result may be off by, by name; for products in tf32, say.
    """
    for name, result in found.items():
        value, peer = exact[name].value, exact[name].peer
        margin = (margins or {}).get(name, 0.0)
        assert result.shape == value.shape, f"{name} has shape {tuple(result.shape)}, not {tuple(value.shape)}"
        if not value.numel():
            continue
        info = torch.finfo(result.dtype)
        half_step = 0.5 * info.eps * value.abs().clamp_min(info.smallest_normal)
        largest = (peer.double() - value).abs().max()
        bound = half_step + noise * largest + 4 * FP32_EPS * value.abs().max() + margin
        error = (result.double() - value).abs()
        ratio = (error / bound.clamp_min(1e-300)).nan_to_num(nan=float("inf"))
        worst = ratio.argmax().item()
        assert ratio.max() <= 1.0, (
            f"{name}: element {worst} of {tuple(value.shape)} is {result.flatten()[worst]}, not "
            f"{value.flatten()[worst]}: {ratio.max():.2f} times the bound; {(ratio > 1.0).sum()} elements are beyond it"
        )
        if value.numel() < 16:
            continue  # torch's few errors may all be small by chance
        theirs = (peer.to(result.dtype).double() - value).norm()
        size = torch.as_tensor(margin, dtype=FP64, device=value.device).expand(value.shape).norm()
        allowed = 2 * theirs + 4 * FP32_EPS * value.norm() + size
        assert error.norm() <= allowed, f"{name}: rms error {error.norm():.3e}, allowed {allowed:.3e}"


def in_the_other_layout(case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, dict[str, Tensor]]:
    """The same hyper-connection with channels before streams, or streams before channels."""
    swapped = "channels" if case.axes == "streams" else "streams"
    rows = (case.n, case.channels) if case.axes == "streams" else (case.channels, case.n)

    def permuted(name: str, t: Tensor) -> Tensor:
        if name == "x":
            t = t.transpose(-1, -2)
        elif name in ("phi", "fn", "norm_weight"):
            t = t.unflatten(-1, rows).transpose(-1, -2).flatten(-2)
        return t.detach().clone(memory_format=torch.contiguous_format).requires_grad_()

    return replace(case, layout=swapped), {name: permuted(name, t) for name, t in tensors.items()}


# Precision and margins of products on tensor cores, for the tests of the kernels

WITH_PRODUCTS = ("projection", "head", "pre", "hyper_connection")


def precision_of(op: str, precision: str) -> dict:
    """The keyword arguments of ``call`` that choose the precision, of an op that has one."""
    return {"precision": precision} if op in WITH_PRODUCTS else {}


def product_margins(op: str, case: Case, exact: Mapping[str, Exact], precision: str = "fp32") -> dict[str, float]:
    """Margins beside the bound of ``check``, where there is a product on tensor cores.

    These cut off what they add below 2^-24 of the sum, at every 16 elements of a part of K, for each of up to six
    products of terms; "tf32" also leaves out terms below 2^-16 of an operand. Relative to the largest of each result.
    """
    if op not in WITH_PRODUCTS:
        return {}
    relative = 6 * min(case.n * case.channels, 4096) / 16 * 2.0**-24 + (2.0**-13 if precision == "tf32" else 0.0)
    return {name: relative * e.value.abs().max().item() for name, e in exact.items() if e.value.numel()}


def randn64(*shape, generator, scale=1.0):
    return (torch.randn(*shape, generator=generator, dtype=FP64) * scale).requires_grad_()


def in_fp64(tensors):
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def run_all(case, generator, ops=tuple(OPERATIONS)):
    """(op, found, exact) of each op with one set of inputs."""
    inputs = make_inputs(case, generator)
    for op in ops:
        upstream = make_upstream(op, case, generator)
        yield op, differentiate(reference, op, case, inputs, upstream), oracle(op, case, inputs, upstream)
