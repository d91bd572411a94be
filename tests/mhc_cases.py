"""What the tests of the hyper-connections share: cases, inputs, the fp64 oracle and the bounds of a result's error."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import num_coefficients
from cute_kernels.mhc.op import common
from cute_kernels.mhc.reference.coefficients import rms
from cute_kernels.mhc.variants import VARIANTS, Variant
from tests.entry import check_entry
from tests.norm_cases import BF16, FP16, FP32, name_of, relative_rms, seeded_generator, strided

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
    """What the tests wrap: not linear, different for each channel, and the same for each layout."""
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
    root mean square of the error is more than twice that of torch's rounded result.

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


# Plain torch in place of the GPU


def _strict_allocator(like: Tensor) -> Callable[..., Tensor]:
    """That of a GPU takes tuples alone, no torch.Size."""

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert type(shape) is type(strides) is tuple, (type(shape), type(strides))
        return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)

    return allocate


@contextlib.contextmanager
def stand_in(arch: str = "sm_90a", computes: bool = True) -> Iterator[list[tuple]]:
    """Within it CPU tensors go where CUDA tensors would; what runs instead of a kernel is plain torch in fp32.

    Yields the list of builder calls, (builder, arguments): the kernels that a GPU would have needed. Without
    ``computes`` the results are left as they were allocated.
    """
    from cute_kernels.mhc.kernel import (
        aggregate,
        coefficients,
        expand_combine,
        phi_gradient,
        pre,
        projection,
        projection_backward,
        projection_backward_sm90,
        projection_sm90,
        sinkhorn,
    )

    jobs: list[tuple] = []

    def builder(real: Callable, entry: type, computation: Callable) -> Callable:
        names = [name for name in inspect.signature(entry.__call__).parameters if name not in ("self", "stream")]

        def build(*arguments):
            jobs.append((real, arguments))
            static, program = inspect.signature(real.build).bind(*arguments).arguments, real.build(*arguments)

            def function(*values):
                check_entry(program, values)
                tensors = dict(zip(names, values, strict=True))
                computation(static, **tensors) if computes else None

            return function

        return build

    kernels = (
        (aggregate, "aggregate_forward", aggregate.AggregateForward, _aggregate_forward),
        (aggregate, "aggregate_backward", aggregate.AggregateBackward, _aggregate_backward),
        (aggregate, "expand_streams", aggregate.Expand, _expand_streams),
        (expand_combine, "expand_combine_forward", expand_combine.ExpandCombineForward, _expand_combine_forward),
        (expand_combine, "expand_combine_backward", expand_combine.ExpandCombineBackward, _expand_combine_backward),
        (expand_combine, "bias_gradient", expand_combine.BiasGradient, _bias_gradient),
        (sinkhorn, "sinkhorn_forward", sinkhorn.SinkhornForward, _sinkhorn_forward),
        (sinkhorn, "sinkhorn_backward", sinkhorn.SinkhornBackward, _sinkhorn_backward),
        (coefficients, "coefficients_forward", coefficients.CoefficientsForward, _coefficients_forward),
        (coefficients, "coefficients_backward", coefficients.CoefficientsBackward, _coefficients_backward),
        (pre, "pre_forward", pre.PreForward, _pre_forward),
        (projection, "projection_forward", projection.ProjectionForward, _projection_forward),
        (
            projection_sm90,
            "projection_forward_sm90",
            projection_sm90.ProjectionForwardSm90,
            _projection_forward_sm90,
        ),
        (
            projection_backward,
            "projection_backward",
            projection_backward.ProjectionBackward,
            _projection_backward,
        ),
        (
            projection_backward_sm90,
            "projection_backward_sm90",
            projection_backward_sm90.ProjectionBackwardSm90,
            _projection_backward_sm90,
        ),
        (phi_gradient, "phi_gradient", phi_gradient.PhiGradient, _phi_gradient),
    )
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (common, "on_gpu", lambda x: True),
            (launch.plans, "arch_of", lambda index: arch),
            (launch.plans, "sm_count", lambda index: 132),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        for module, name, entry, computation in kernels:
            real = getattr(module, name)
            stack.enter_context(mock.patch.object(module, name, builder(real, entry, computation)))
        stack.enter_context(mock.patch.dict(launch._plans, clear=True))
        stack.enter_context(mock.patch.dict(launch.calls, clear=True))
        for module in ("composite", "expand_combine"):
            stack.enter_context(mock.patch(f"cute_kernels.mhc.op.{module}.allocator", _strict_allocator))
        library = stack.enter_context(torch.library._scoped_library("cute_kernels", "IMPL"))
        for name, function in launch.OPERATORS.items():
            library.impl(name, function, "CPU")
        yield jobs


def _is_dtype(wanted: type | None, *tensors: Tensor | None) -> None:
    """A kernel gets what it was built for."""
    from cute_kernels.runtime.targets import cutlass_dtype

    for t in tensors:
        assert wanted is (None if t is None else cutlass_dtype(t.dtype))


def _is_matrix(t: Tensor | None, wanted: bool, width: int, align: int, dtype: torch.dtype = FP32) -> None:
    """There if it is wanted: contiguous rows, all of which start on ``align`` elements."""
    assert (t is not None) == wanted
    if t is not None:
        assert t.dtype is dtype and t.dim() == 2 and t.shape[1] == width and t.stride(1) == 1, (t.shape, t.stride())
        assert t.stride(0) % align == 0 and t.data_ptr() % (align * t.element_size()) == 0, (t.stride(), align)


def _are_streams(static: dict, s, *, of_tokens: tuple = (), of_channels: tuple = ()) -> None:
    """Matrices (M, n C) and (M, C) in the dtype and alignment that the kernel was built for."""
    for matrices, width, align in ((of_tokens, s.n * s.channels, s.access), (of_channels, s.channels, s.vec)):
        for t in matrices:
            if t is not None:
                _is_dtype(static["dtype"], t)
                _is_matrix(t, True, width, align, t.dtype)


def _split(x: Tensor, n: int, order: str) -> Tensor:
    """Rows of tokens as (M, n, C) in fp32."""
    x = x.float()
    return x.unflatten(1, (n, -1)) if order == "streams" else x.unflatten(1, (-1, n)).mT


def _join(streams: Tensor, order: str) -> Tensor:
    return (streams if order == "streams" else streams.mT).flatten(1)


def _aggregate_forward(static, x, pre, out, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x,), of_channels=(out,))
    _is_matrix(pre, static["has_pre"], s.n, static["align"])
    weights = torch.full((1, s.n), scale) if pre is None else pre
    streams = _split(x, s.n, s.order)
    out.copy_(sum(weights[:, i : i + 1] * streams[:, i] for i in range(s.n)))


def _aggregate_backward(static, dout, x, pre, dx, dpre) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x, dx), of_channels=(dout,))
    _is_matrix(pre, static["needs_dx"], s.n, static["align"])
    _is_matrix(dpre, static["needs_dpre"], s.n, 1)
    assert (dx is not None) == static["needs_dx"]
    if dx is not None:
        dx.copy_(_join(pre[:, :, None] * dout.float()[:, None], s.order))
    if dpre is not None:
        dpre.copy_((_split(x, s.n, s.order) * dout.float()[:, None]).sum(-1))


def _expand_streams(static, h, x, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x,), of_channels=(h,))
    x.copy_(_join((scale * h.float())[:, None].expand(-1, s.n, -1), s.order))


def _kept(static: dict, seed: Tensor | None, tokens: int, threshold: int, scale: float) -> Tensor | float:
    """What dropout multiplies the streams (M, n, C) by."""
    s = static["layout"]
    assert (seed is not None) == static["dropout"]
    if seed is None:
        assert scale == 1.0 and threshold == 0
        return 1.0
    assert seed.shape == (1,) and seed.dtype is torch.int64
    mask = reference.dropout_mask(seed, tokens, s.n * s.channels, threshold / 2**32, seed.device)
    return _split(mask * torch.tensor(scale), s.n, s.order)


def _mixing(static: dict, res: Tensor) -> Tensor:
    """R (M, i, o)."""
    n = static["layout"].n
    _is_matrix(res, True, n * n, static["aligns"][1])
    matrix = res.unflatten(1, (n, n))
    return matrix if static["orientation"] == "io" else matrix.mT


def _expand_combine_forward(static, f, bias, post, x, res, seed, out, pre, layer_input, threshold, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x, out), of_channels=(f, layer_input))
    _is_matrix(pre, static["aggregates"], s.n, static["aligns"][2])
    _is_dtype(static["bias"], bias)
    _is_matrix(post, True, s.n, static["aligns"][0])
    update = f.float() if bias is None else f.float() + bias.float()
    added = post[:, :, None] * update[:, None] * _kept(static, seed, len(x), threshold, scale)
    out.copy_(_join(added + _mixing(static, res).mT @ _split(x, s.n, s.order), s.order))
    assert (layer_input is None) == (pre is None)
    if pre is not None:
        streams = _split(out, s.n, s.order)
        layer_input.copy_(sum(pre[:, i : i + 1] * streams[:, i] for i in range(s.n)))


def _expand_combine_backward(static, dout, f, bias, post, x, res, seed, dx, df, dpost, dres, threshold, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(dout, x, dx), of_channels=(f, df))
    _is_dtype(static["bias"], bias)
    _is_matrix(post, True, s.n, static["aligns"][0])
    _is_matrix(dpost, static["needs_sums"], s.n, 1)
    _is_matrix(dres, static["needs_sums"], s.n**2, 1)
    assert (dx is not None) == static["needs_dx"] and (df is not None) == static["needs_df"]
    d, mixing = _split(dout, s.n, s.order), _mixing(static, res)
    dropped = d * _kept(static, seed, len(x), threshold, scale)
    update = f.float() if bias is None else f.float() + bias.float()
    if dx is not None:
        dx.copy_(_join(mixing @ d, s.order))
    if df is not None:
        df.copy_((post[:, :, None] * dropped).sum(1))
    if dpost is not None:
        dpost.copy_((update[:, None] * dropped).sum(-1))
        sums = _split(x, s.n, s.order) @ d.mT
        dres.copy_((sums if static["orientation"] == "io" else sums.mT).flatten(1))


def _bias_gradient(static, dout, post, seed, partials, dbias, threshold, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(dout,))
    _is_dtype(static["dbias"], dbias)
    _is_matrix(post, True, s.n, static["align"])
    assert partials.shape[:2] == (1, -(-len(dout) // static["tokens"])) and partials.shape[2] >= s.channels
    dropped = _split(dout, s.n, s.order) * _kept(static, seed, len(dout), threshold, scale)
    _write(dbias, (post[:, :, None] * dropped).sum((0, 1)), static["accumulate"])


def _write(target: Tensor | None, total: Tensor, accumulate: bool) -> None:
    if target is not None:
        assert not accumulate or target.dtype is FP32
        target.copy_(total + target if accumulate else total)


def _normalised(logits: Tensor, n: int, variant: str, iterations: int, eps: float) -> Tensor:
    matrices = logits.unflatten(1, (n, n))
    return reference.sinkhorn(matrices, iterations=iterations, variant=variant, eps=eps).flatten(1)


def _sinkhorn_forward(static, logits, res) -> None:
    n = static["n"]
    _is_matrix(logits, True, n * n, static["align"])
    _is_matrix(res, True, n * n, min(4, n * n))
    res.copy_(_normalised(logits, n, static["variant"], static["iterations"], static["eps"]))


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd, also where an operator runs below it."""
    with (
        torch.enable_grad(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
    ):
        yield


def _sinkhorn_backward(static, logits, dres, dlogits) -> None:
    n = static["n"]
    _is_matrix(logits, True, n * n, static["aligns"][0])
    _is_matrix(dres, True, n * n, static["aligns"][1])
    _is_matrix(dlogits, True, n * n, min(4, n * n))
    with _recording():
        leaf = logits.detach().clone().requires_grad_()
        res = _normalised(leaf, n, static["variant"], static["iterations"], static["eps"])
    dlogits.copy_(torch.autograd.grad(res, leaf, dres)[0])


def _coefficients(static: dict, h: Tensor, mean_square: Tensor, alpha: Tensor, beta: Tensor) -> list[Tensor]:
    """pre, post and res of one kernel's variant; of a head pre alone."""
    n, variant = static["n"], static["variant"]
    widths = (n,) if static["head"] else (n, n, n * n)
    normalised = h / rms(mean_square, variant)[:, None]
    groups = zip(alpha.float(), normalised.split(widths, -1), beta.float().split(widths), strict=True)
    values = [scale * part + shift for scale, part, shift in groups]
    values[0] = torch.sigmoid(values[0]) + variant.pre_eps
    if not static["head"]:
        values[1] = variant.post_mult * torch.sigmoid(values[1])
        if static["normalises"]:
            values[2] = _normalised(values[2], n, variant.sinkhorn, variant.iterations, variant.sinkhorn_eps)
    return values


def _coefficients_forward(static, partials, h, mean_square, alpha, beta, pre, post, res, num_tokens) -> None:
    n, head, splits = static["n"], static["head"], static["splits"]
    columns = n if head else num_coefficients(n)
    assert (partials is None) == (splits == 0)
    _is_matrix(h, splits == 0 or static["keeps"], columns, 1)
    assert (mean_square is not None) == (h is not None)
    if partials is not None:
        assert partials.shape == (splits, columns + 1, num_tokens) and partials.is_contiguous()
        total = partials[0]
        for part in partials[1:]:
            total = total + part
        found_h, found_square = total[:-1].t(), total[-1] / static["k"]
        if h is not None:
            h.copy_(found_h)
            mean_square.copy_(found_square)
    else:
        found_h, found_square = h, mean_square
    computes = static["variant"] is not None
    _is_matrix(pre, computes, n, min(4, n))
    _is_matrix(post, computes and not head, n, min(4, n))
    _is_matrix(res, computes and not head, n * n, min(4, n * n))
    for wanted, t in zip(static["parameters"] or (None, None), (alpha, beta), strict=True):
        _is_dtype(wanted, t)
    if computes:
        values = _coefficients(static, found_h.contiguous(), found_square, alpha, beta)
        for target, value in zip((pre, post, res), values, strict=False):
            target.copy_(value)


def _coefficients_backward(
    static, h, mean_square, alpha, beta, dpre, dpost, dres, dh, dmean_square, partials, dbeta, dalpha
) -> None:
    n, head = static["n"], static["head"]
    columns = n if head else num_coefficients(n)
    align, *aligns = static["aligns"]
    _is_matrix(h, True, columns, align)
    _is_matrix(dh, True, columns, 4 if columns % 4 == 0 else 1)
    given = (dpre, dpost, dres)
    for t, has, width, align in zip(given, static["has"], (n, n, n * n), aligns, strict=True):
        _is_matrix(t, has, width, align)
    for kinds, pair in ((static["parameters"], (alpha, beta)), (static["gradients"], (dbeta, dalpha))):
        for wanted, t in zip(kinds, pair, strict=True):
            _is_dtype(wanted, t)
    adds_up = dbeta is not None or dalpha is not None
    assert not (static["leaves_sums"] and adds_up) and (partials is not None) == (static["leaves_sums"] or adds_up)
    if partials is not None:
        assert (
            partials.shape[:2] == (2, -(-len(h) // 32)) and partials.shape[2] % 32 == 0 <= partials.shape[2] - columns
        )
    with _recording():
        leaves = [t.detach().float().clone().requires_grad_() for t in (h, mean_square, alpha, beta)]
        values = _coefficients(static, *leaves)
        pairs = [(value, t) for value, t in zip(values, given, strict=False) if t is not None]
        total = sum((value * t).sum() for value, t in pairs) + sum(0.0 * leaf.sum() for leaf in leaves)
    found = torch.autograd.grad(total, leaves)
    for target, value in zip((dh, dmean_square), found, strict=False):
        target.copy_(value)
    _write(dbeta, found[3], static["accumulate"][0])
    _write(dalpha, found[2], static["accumulate"][1])
    if static["leaves_sums"]:
        partials.zero_()
        for part, sums in zip(partials, (found[3], found[2]), strict=True):
            part[0, : len(sums)] = sums


def _weight(phi: Tensor, norm_weight: Tensor | None) -> Tensor:
    return phi.float() if norm_weight is None else phi.float() * norm_weight.float()


def _are_projected(static: dict, align: int, k: int, x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> None:
    _is_matrix(x, True, k, align // x.element_size() or 1, x.dtype)
    for name, t in (("dtype", x), ("phi", phi), ("norm_weight", norm_weight)):
        _is_dtype(static[name], t)


def _projection_forward(static, x, phi, norm_weight, partials, num_ctas) -> None:
    config = static["config"]
    _are_projected(static, 16 * config.tma, config.k, x, phi, norm_weight)
    assert not config.tma or phi.data_ptr() % 16 == 0
    assert partials.shape == (config.splits, config.columns + 1, len(x)) and partials.is_contiguous()
    assert 1 <= num_ctas <= min(-(-len(x) // 128) * config.splits, 132 * config.ctas_per_sm)
    _add_parts(partials, x, _weight(phi, norm_weight), config.tile_k)


def _projection_forward_sm90(static, x, phi, norm_weight, partials, num_clusters) -> None:
    config = static["config"]
    _is_matrix(x, True, config.k, 8, BF16)
    for name, t in (("phi", phi), ("norm_weight", norm_weight)):
        _is_dtype(static[name], t)
    assert phi.data_ptr() % 16 == 0
    assert partials.shape == (config.splits, config.columns + 1, len(x)) and partials.is_contiguous()
    assert 1 <= num_clusters <= min(-(-len(x) // (2 * config.tokens)) * config.splits, 66)
    _add_parts(partials, x, _weight(phi, norm_weight), 64)


def _add_parts(partials: Tensor, x: Tensor, weight: Tensor, tile_k: int) -> None:
    wide, splits = x.float(), len(partials)
    part_of_column = torch.arange(x.shape[1]) // tile_k % splits
    for split, part in enumerate(partials):
        columns = part_of_column == split
        part[:-1].copy_((wide[:, columns] @ weight[:, columns].t()).t())
        part[-1].copy_(wide[:, columns].square().sum(-1))


def _pre_forward(static, x, phi, norm_weight, alpha, beta, h, mean_square, pre, layer_input, num_clusters) -> None:
    config = static["config"]
    columns, n = config.columns, config.n
    mixes, parameters = static["variant"] is not None, static["parameters"] or (None, None)
    for wanted, t in zip(
        (static["phi"], static["norm_weight"], *parameters), (phi, norm_weight, alpha, beta), strict=True
    ):
        _is_dtype(wanted, t)
    _is_matrix(x, True, config.k, 8, BF16)
    assert phi.data_ptr() % 16 == 0
    _is_matrix(h, static["keeps"], columns, 1)
    _is_matrix(pre, static["writes_pre"], n, 1)
    _is_matrix(layer_input, mixes, config.channels, 8, BF16)
    assert (mean_square is not None) == static["keeps"]
    assert 1 <= num_clusters <= min(-(-len(x) // 16), 132 // config.cluster)
    found_h, found_square = x.float() @ _weight(phi, norm_weight).t(), x.float().square().mean(-1)
    if h is not None:
        h.copy_(found_h)
        mean_square.copy_(found_square)
    if mixes:
        head = {"n": n, "variant": static["variant"], "head": True}
        beta = beta[:n]
        (gates,) = _coefficients(head, found_h[:, :n].contiguous(), found_square, alpha[:1], beta)
        if pre is not None:
            pre.copy_(gates)
        layer_input.copy_((gates[:, :, None] * _split(x, n, config.layout)).sum(1))


_rows_per_group: dict[int, int] = {}  # of the partial sums at this address


def _projection_backward(
    static, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre, dx, partials, chunks, num_ctas
) -> None:
    config = static["config"]
    assert chunks in (1, config.group)
    n, k, item = config.n, config.k, chunks * config.chunk
    align = 16 * config.tma
    _are_projected(static, align, k, x, phi, norm_weight)
    units = align // x.element_size() or 1
    mixes, gathers = static["orientation"] is not None, static["gathers"]
    _is_matrix(dout, mixes, k, units, x.dtype)
    _is_matrix(res, mixes, n * n, 1)
    _is_matrix(dlayer, gathers, config.channels, units, x.dtype)
    _is_matrix(pre, gathers, n, 1)
    _is_matrix(dx, static["needs_dx"], k, units, x.dtype)
    assert dh.is_contiguous() and dh.shape == (len(x), config.columns) and dmean_square.shape == (len(x),)
    assert (partials is not None) == static["needs_dphi"]
    assert 1 <= num_ctas <= min(-(-len(x) // item) * config.slices, 132)
    wide = x.float()
    if dx is not None:
        dx.copy_(_dx(static, n, config.layout, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre))
    if partials is not None:
        assert partials.shape == (config.partials(len(x), chunks), config.columns, k)
        _rows_per_group[partials.data_ptr()] = config.group // chunks
        partials.zero_()
        for index, first in enumerate(range(0, len(x), item)):
            tokens = slice(first, first + item)
            partials[index * config.parts].copy_(dh[tokens].t() @ wide[tokens])


def _dx(static, n, layout, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre) -> Tensor:
    total = dh @ _weight(phi, norm_weight) + (2.0 / x.shape[1]) * x.float() * dmean_square[:, None]
    if static["orientation"] is not None:
        matrix = res.unflatten(1, (n, n))
        matrix = matrix if static["orientation"] == "io" else matrix.mT
        total = total + _join(matrix @ _split(dout, n, layout), layout)
    if static["gathers"]:
        total = total + _join(pre[:, :, None] * dlayer.float()[:, None], layout)
    return total


def _projection_backward_sm90(
    static, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre, dx, partials, num_clusters
) -> None:
    config, n = static["config"], static["n"]
    layout = "streams" if config.runs > 1 else "channels"
    mixes, gathers = static["orientation"] is not None, static["gathers"]
    for name, t in (("phi", phi), ("norm_weight", norm_weight)):
        _is_dtype(static[name], t)
    _is_matrix(x, True, config.k, 8, BF16)
    _is_matrix(dout, mixes, config.k, 8, BF16)
    _is_matrix(dlayer, gathers, config.k // n, 8, BF16)
    _is_matrix(dx, static["needs_dx"], config.k, 8, BF16)
    _is_matrix(res, mixes, n * n, 4)
    _is_matrix(pre, gathers, n, 4)
    for t, shape in ((phi, (config.columns, config.k)), (dh, (len(x), config.columns))):
        assert t.is_contiguous() and t.shape == shape and t.data_ptr() % 16 == 0
    assert 1 <= num_clusters <= min(config.chunks(len(x)) * config.pairs, 66)
    wide = x.float()
    if dx is not None:
        dx.copy_(_dx(static, n, layout, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre))
    assert (partials is not None) == static["needs_dphi"]
    if partials is not None:
        assert partials.shape == (config.chunks(len(x)), config.columns, config.k)
        _rows_per_group[partials.data_ptr()] = 1
        for part, tokens in zip(partials, torch.arange(len(x)).split(config.chunk), strict=True):
            part.copy_(dh[tokens].t() @ wide[tokens])


def _phi_gradient(static, partials, phi, norm_weight, dphi, dweight, sums, dbeta, dalpha, per_group) -> None:
    assert per_group == _rows_per_group.pop(partials.data_ptr())
    for name, t in (("phi", phi), ("norm_weight", norm_weight), ("dphi", dphi), ("dweight", dweight)):
        _is_dtype(static[name], t)
    for name, t, part, accumulate in zip(
        ("dbeta", "dalpha"),
        (dbeta, dalpha),
        (None, None) if sums is None else sums,
        static["accumulate"][2:],
        strict=True,
    ):
        _is_dtype(static[name], t)
        if t is not None:
            _write(t, part.sum(0)[: len(t)], accumulate)
    total = partials.sum(0)
    _write(dphi, total if norm_weight is None else total * norm_weight.float(), static["accumulate"][0])
    _write(dweight, (total * phi.float()).sum(0), static["accumulate"][1])


# What the tests of the kernels ask of products on tensor cores

WITH_PRODUCTS = ("projection", "head", "pre", "hyper_connection")


def precision_of(op: str, precision: str) -> dict:
    """The keyword arguments of ``call`` that choose the precision, of an op that has one."""
    return {"precision": precision} if op in WITH_PRODUCTS else {}


def product_margins(op: str, case: Case, exact: Mapping[str, Exact], precision: str = "fp32") -> dict[str, float]:
    """What results may be off by beside the bound of ``check``, where there is a product on tensor cores.

    These cut off what they add below 2^-24 of the sum, at every 16 elements of a part of K, for each of up to six
    products of terms; "tf32" also leaves out terms below 2^-16 of an operand. Relative to the largest of each result.
    """
    if op not in WITH_PRODUCTS:
        return {}
    relative = 6 * min(case.n * case.channels, 4096) / 16 * 2.0**-24 + (2.0**-13 if precision == "tf32" else 0.0)
    return {name: relative * e.value.abs().max().item() for name, e in exact.items() if e.value.numel()}
