"""The argument contract of the hyper-connection operators, shared by the kernels and the references.

All of it is checked at every call, so conditions come first and texts are made for errors alone (torch.compile traces
none of sizes that are symbols). ``compute_dtype=torch.float64``, which only the references have, lets fp64 tensors in
beside the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor, strided

from cute_kernels.mhc.variants import LAYOUTS, LEAST_NORMAL, MAX_ITERATIONS, RES_ORIENTATIONS, SINKHORNS
from cute_kernels.runtime.checks import FLOATS, expect_dtype, expect_floats, expect_like, expect_tensor, fail
from cute_kernels.runtime.strict import is_strict

STREAMS = (1, 2, 4, 8)
MIN_CHANNELS = 8
Precision = Literal["tf32", "fp32"]
PRECISIONS = get_args(Precision)
PARAMETERS = (torch.float32, torch.bfloat16)
COEFFICIENTS = (torch.float32,)
MAX_TOKENS = 2**31 - 2**10  # their indices are 32-bit, and run to the end of the last CTA's tokens


def num_coefficients(n: int) -> int:
    """N: n of pre, n of post, n * n of res."""
    return n * n + 2 * n


def sizes(x: Tensor, layout: str) -> tuple[int, int]:
    """(n, C) of a residual."""
    shape = x.shape
    return (shape[-2], shape[-1]) if layout == "streams" else (shape[-1], shape[-2])


def check_projection(
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    layout: str,
    precision: str,
    *,
    op: str = "projection",
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    n, channels = _check_residual(op, x, layout, compute_dtype)
    expect_floats(op, "phi", phi, _allowed(PARAMETERS, compute_dtype))
    rows, k = (num_coefficients(n), n), n * channels
    good = phi.dim() == 2 and (phi.shape[0] == rows[0] or phi.shape[0] == rows[1]) and phi.shape[1] == k
    if not good:
        expected = f"have shape {(rows[0], k)} or {(rows[1], k)}, as x has {n} streams of {channels} channels"
        fail(op, "phi", expected, tuple(phi.shape))
    if phi.device != x.device:
        fail(op, "phi", f"be on {x.device}", phi.device)
    if not phi.is_contiguous():
        fail(op, "phi", "be contiguous", f"strides {phi.stride()}")
    if norm_weight is not None:
        _check_parameter(op, "norm_weight", norm_weight, (k,), x.device, compute_dtype)
    if precision not in PRECISIONS:
        fail(op, "precision", f"be one of {PRECISIONS}", repr(precision))


def check_coefficients(
    H: Tensor,
    mean_square: Tensor,
    alpha: Tensor,
    beta: Tensor,
    n: int,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. The variant: ``variant_of``."""
    op = "coefficients"
    _check_n(op, n)
    expect_floats(op, "H", H, _allowed(COEFFICIENTS, compute_dtype))
    columns, shape, device = num_coefficients(n), H.shape, H.device
    good = H.dim() >= 1 and shape[-1] == columns
    if not good:
        fail(op, "H", f"have shape (..., {columns})", tuple(shape))
    _check_rows(op, "H", H)
    good = (
        isinstance(mean_square, Tensor)
        and mean_square.layout is strided
        and mean_square.dtype is torch.float32
        and mean_square.shape == shape[:-1]
        and mean_square.device == device
    )
    if not good:
        expect_floats(op, "mean_square", mean_square, _allowed(COEFFICIENTS, compute_dtype))
        expect_like(op, "mean_square", mean_square, shape[:-1], device)
    if not mean_square.is_contiguous():
        fail(op, "mean_square", "be contiguous", f"strides {mean_square.stride()}")
    _check_parameter(op, "alpha", alpha, (3,), device, compute_dtype)
    _check_parameter(op, "beta", beta, (columns,), device, compute_dtype)


def check_sinkhorn(
    logits: Tensor, iterations: int, variant: str, eps: float, *, compute_dtype: torch.dtype = torch.float32
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "sinkhorn"
    expect_floats(op, "logits", logits, _allowed(COEFFICIENTS, compute_dtype))
    shape = logits.shape
    good = len(shape) >= 2 and shape[-1] == shape[-2] and shape[-1] in STREAMS
    if not good:
        fail(op, "logits", f"have shape (..., n, n) with n one of {STREAMS}", tuple(shape))
    _check_block(op, "logits", logits)
    good = type(iterations) is int and 1 <= iterations <= MAX_ITERATIONS
    if not good:
        fail(op, "iterations", f"be an int from 1 to {MAX_ITERATIONS}", repr(iterations))
    if variant not in SINKHORNS:
        fail(op, "variant", f"be one of {SINKHORNS}", repr(variant))
    good = type(eps) is float and (0.0 < eps < 1.0 or (variant == "log" and eps == 0.0))
    if not good:
        fail(op, "eps", "be a float between 0 and 1", repr(eps))
    if variant != "log" and eps < LEAST_NORMAL:
        fail(op, "eps", "be a normal number in fp32", repr(eps))


def check_aggregate(x: Tensor, pre: Tensor, layout: str, *, compute_dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "aggregate"
    n, _ = _check_residual(op, x, layout, compute_dtype)
    _check_coefficient(op, "pre", pre, (*x.shape[:-2], n), x.device, compute_dtype)
    _check_rows(op, "pre", pre)


def check_expand_combine(
    f: Tensor,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | int | None,
    layout: str,
    res_orientation: str,
    *,
    op: str = "expand_combine",
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    n, channels = _check_residual(op, x, layout, compute_dtype)
    leading, device = x.shape[:-2], x.device
    _check_result(op, f, x, (*leading, channels))
    _check_coefficient(op, "post", post, (*leading, n), device, compute_dtype)
    if not post.is_contiguous():
        _check_rows(op, "post", post)
    _check_coefficient(op, "res", res, (*leading, n, n), device, compute_dtype)
    if not res.is_contiguous():
        _check_block(op, "res", res)
    _check_combination(op, x, channels, bias, dropout_p, seed, res_orientation, compute_dtype)


def result_of(op: str) -> str:
    """The name of f in errors: ``hyper_connection`` has no argument of that name."""
    return "the sublayer's output" if op == "hyper_connection" else "f"


def check_result(op: str, f: Tensor, x: Tensor, layout: str) -> None:
    """Raise TypeError or ValueError unless f is the output of x's sublayer."""
    *leading, n, channels = x.shape
    _check_result(op, f, x, (*leading, channels if layout == "streams" else n))


def _check_result(op: str, f: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    good = (
        isinstance(f, Tensor)
        and f.layout is strided
        and f.dtype is x.dtype
        and f.shape == shape
        and f.device == x.device
        and f.stride(-1) == 1
    )
    if not good:
        name = result_of(op)
        expect_tensor(op, name, f)
        if f.dtype != x.dtype:
            fail(op, name, f"have dtype {x.dtype}", f.dtype, TypeError)
        expect_like(op, name, f, shape, x.device)
        _check_rows(op, name, f)


def check_sublayer(
    sublayer: Callable,
    x: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | int | None,
    layout: str,
    res_orientation: str,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Raise TypeError or ValueError before a sublayer is called, naming argument, expected and got."""
    op = "hyper_connection"
    if not callable(sublayer):
        fail(op, "sublayer", "be callable", type(sublayer).__name__, TypeError)
    channels = x.shape[-1 if layout == "streams" else -2]
    _check_combination(op, x, channels, bias, dropout_p, seed, res_orientation, compute_dtype)


def _check_combination(op, x, channels, bias, dropout_p, seed, res_orientation, compute_dtype) -> None:
    if bias is not None:
        _check_parameter(op, "bias", bias, (channels,), x.device, compute_dtype)
    if seed is not None or type(dropout_p) is not float or dropout_p != 0.0:
        check_dropout(op, dropout_p, seed, x.device)
    if res_orientation not in RES_ORIENTATIONS:
        fail(op, "res_orientation", f"be one of {RES_ORIENTATIONS}", repr(res_orientation))


def check_dropout(op: str, dropout_p: float, seed: Tensor | int | None, device: torch.device) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    good = type(dropout_p) is float and 0.0 <= dropout_p < 1.0
    if not good:
        fail(op, "dropout_p", "be a float in [0, 1)", repr(dropout_p))
    if isinstance(seed, Tensor):
        expect_tensor(op, "seed", seed)
        expect_dtype(op, "seed", seed.dtype, (torch.int64,))
        if seed.numel() != 1:
            fail(op, "seed", "have one element", f"shape {tuple(seed.shape)}")
        if seed.device != device:
            fail(op, "seed", f"be on {device}", seed.device)
    elif seed is not None:
        if type(seed) is not int:
            fail(op, "seed", "be an int64 tensor or an int", type(seed).__name__, TypeError)
        if not -(2**63) <= seed < 2**63:
            fail(op, "seed", "fit in 64 bits, signed", seed)


def check_expand(h: Tensor, n: int, layout: str, *, compute_dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "expand"
    _check_layout(op, layout)
    _check_n(op, n)
    expect_floats(op, "h", h, _allowed(FLOATS, compute_dtype))
    shape = h.shape
    good = len(shape) >= 1 and shape[-1] >= MIN_CHANNELS
    if not good:
        fail(op, "h", f"have shape (..., C) with C >= {MIN_CHANNELS}", tuple(shape))
    if num_coefficients(n) * n * shape[-1] >= 2**31:
        _refuse_channels(op, "h", n, shape[-1])
    _check_rows(op, "h", h)


def check_contract(x: Tensor, layout: str, *, compute_dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    _check_residual("contract", x, layout, compute_dtype)


def check_head(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor | None,
    layout: str,
    precision: str,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. The variant: ``variant_of``."""
    op = "head"
    n, channels = _check_residual(op, x, layout, compute_dtype)
    device, k = x.device, n * channels
    _check_weight(op, "fn", fn, (n, k), n, channels, device, compute_dtype)
    _check_parameter(op, "base", base, (n,), device, compute_dtype)
    _check_parameter(op, "scale", scale, (1,), device, compute_dtype)
    if norm_weight is not None:
        _check_parameter(op, "norm_weight", norm_weight, (k,), device, compute_dtype)
    if precision not in PRECISIONS:
        fail(op, "precision", f"be one of {PRECISIONS}", repr(precision))


def check_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    norm_weight: Tensor | None,
    layout: str,
    precision: str,
    *,
    op: str = "pre",
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. The variant: ``variant_of``."""
    n, channels = _check_residual(op, x, layout, compute_dtype)
    columns, device, k = n * n + 2 * n, x.device, n * channels
    _check_weight(op, "phi", phi, (columns, k), n, channels, device, compute_dtype)
    _check_parameter(op, "alpha", alpha, (3,), device, compute_dtype)
    _check_parameter(op, "beta", beta, (columns,), device, compute_dtype)
    if norm_weight is not None:
        _check_parameter(op, "norm_weight", norm_weight, (k,), device, compute_dtype)
    if precision not in PRECISIONS:
        fail(op, "precision", f"be one of {PRECISIONS}", repr(precision))


def _allowed(dtypes: tuple[torch.dtype, ...], compute_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (*dtypes, torch.float64) if compute_dtype is torch.float64 else dtypes


def _check_layout(op: str, layout: str) -> None:
    if layout not in LAYOUTS:
        fail(op, "layout", f"be one of {LAYOUTS}", repr(layout))


def _check_n(op: str, n: int) -> None:
    if type(n) is not int or n not in STREAMS:
        fail(op, "n", f"be one of {STREAMS}", repr(n))


def _check_residual(op: str, x: Tensor, layout: str, compute_dtype: torch.dtype) -> tuple[int, int]:
    """(n, C)."""
    if layout not in LAYOUTS:
        _check_layout(op, layout)
    if not isinstance(x, Tensor) or x.layout is not strided or x.dtype not in FLOATS:
        expect_floats(op, "x", x, _allowed(FLOATS, compute_dtype))
    shape = x.shape
    rows, columns = (shape[-2], shape[-1]) if len(shape) >= 2 else (0, 0)
    n, channels = (rows, columns) if layout == "streams" else (columns, rows)
    good = n in STREAMS and channels >= MIN_CHANNELS
    if not good:
        text = "(..., n, C)" if layout == "streams" else "(..., C, n)"
        fail(op, "x", f"have shape {text} with n one of {STREAMS} and C >= {MIN_CHANNELS}", tuple(shape))
    if (n * n + 2 * n) * n * channels >= 2**31:
        _refuse_channels(op, "x", n, channels)
    if not x.is_contiguous():
        _check_block(op, "x", x)
    return n, channels


def _refuse_channels(op: str, name: str, n: int, channels: int) -> NoReturn:
    """phi of so many channels, and so a token, would have more elements than 32 bits count."""
    most = (2**31 - 1) // (num_coefficients(n) * n)
    fail(op, name, f"have at most {most} channels with {n} streams", channels)


def _check_block(op: str, name: str, t: Tensor) -> None:
    """The last two dimensions of a token are one piece of memory."""
    rows, columns = t.shape[-2:]
    strides = t.stride()
    good = (columns == 1 or strides[-1] == 1) and (rows == 1 or strides[-2] == columns)
    if not good:
        fail(op, name, "have contiguous last two dimensions", f"shape {tuple(t.shape)}, strides {strides}")


def _check_rows(op: str, name: str, t: Tensor) -> None:
    good = t.stride(-1) == 1 or t.shape[-1] == 1
    if not good:
        fail(op, name, "have a contiguous last dimension", f"stride {t.stride(-1)}")


def as_tokens(op: str, name: str, t: Tensor, width: int) -> Tensor:
    """``t`` as a matrix of ``width`` numbers a token, without a copy.

    Raises:
        ValueError: its tokens do not collapse to rows of one stride, or are more than 32 bits count.
    """
    shape = t.shape
    if len(shape) == 2 and shape[1] == width:
        matrix = t
    else:
        try:
            matrix = t.view(-1, width)
        except RuntimeError:
            expected = "have leading dimensions that collapse to rows of one stride"
            fail(op, name, expected, f"shape {tuple(t.shape)}, strides {t.stride()}")
        shape = matrix.shape
    if shape[0] > MAX_TOKENS:
        fail(op, name, f"have at most {MAX_TOKENS} tokens", shape[0])
    return matrix


def strict_tokens(op: str, **tensors: tuple[Tensor, int]) -> None:
    """Raise ValueError as ``as_tokens``, where the references refuse what the kernels refuse.

    ``tensors``: each with the number of dimensions that a token has.
    """
    if is_strict():
        for name, (t, dimensions) in tensors.items():
            as_tokens(op, name, t, t.shape[-dimensions:].numel())


def _check_coefficient(op, name, t, shape, device, compute_dtype) -> None:
    good = (
        isinstance(t, Tensor)
        and t.layout is strided
        and t.dtype is torch.float32
        and t.shape == shape
        and t.device == device
    )
    if not good:
        expect_floats(op, name, t, _allowed(COEFFICIENTS, compute_dtype))
        expect_like(op, name, t, shape, device)


def _check_weight(op, name, weight, shape, n, channels, device, compute_dtype) -> None:
    """A parameter whose shape x's decides."""
    good_dtype = isinstance(weight, Tensor) and weight.dtype in _allowed(PARAMETERS, compute_dtype)
    if good_dtype and weight.shape != shape:
        expected = f"have shape {tuple(shape)}, as x has {n} streams of {channels} channels"
        fail(op, name, expected, tuple(weight.shape))
    _check_parameter(op, name, weight, shape, device, compute_dtype)


def _check_parameter(op, name, parameter, shape, device, compute_dtype) -> None:
    good = (
        isinstance(parameter, Tensor)
        and parameter.layout is strided
        and parameter.dtype in PARAMETERS
        and parameter.shape == shape
        and parameter.device == device
        and parameter.is_contiguous()
    )
    if not good:
        expect_floats(op, name, parameter, _allowed(PARAMETERS, compute_dtype))
        expect_like(op, name, parameter, shape, device)
        if not parameter.is_contiguous():
            fail(op, name, "be contiguous", f"strides {parameter.stride()}")
