"""The argument contract of the hyper-connection operators, shared by the kernels and the references.

``compute_dtype=torch.float64``, which only the references have, lets fp64 tensors in beside the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from cute_kernels.mhc.variants import LAYOUTS, LEAST_NORMAL, MAX_ITERATIONS, RES_ORIENTATIONS, SINKHORNS
from cute_kernels.runtime.checks import FLOATS, expect, expect_dtype, expect_like, expect_tensor
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
    return (x.shape[-2], x.shape[-1]) if layout == "streams" else (x.shape[-1], x.shape[-2])


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
    expect_tensor(op, "phi", phi)
    expect_dtype(op, "phi", phi.dtype, _allowed(PARAMETERS, compute_dtype))
    rows, k = (num_coefficients(n), n), n * channels
    good = phi.dim() == 2 and (phi.shape[0] == rows[0] or phi.shape[0] == rows[1]) and phi.shape[1] == k
    if not good:  # torch.compile traces no text of sizes that are symbols
        expected = f"have shape {(rows[0], k)} or {(rows[1], k)}, as x has {n} streams of {channels} channels"
        expect(False, op, "phi", expected, tuple(phi.shape))
    expect(phi.device == x.device, op, "phi", f"be on {x.device}", phi.device)
    expect(phi.is_contiguous(), op, "phi", "be contiguous", f"strides {phi.stride()}")
    if norm_weight is not None:
        _check_parameter(op, "norm_weight", norm_weight, (k,), x.device, compute_dtype)
    expect(precision in PRECISIONS, op, "precision", f"be one of {PRECISIONS}", repr(precision))


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
    expect_tensor(op, "H", H)
    expect_dtype(op, "H", H.dtype, _allowed(COEFFICIENTS, compute_dtype))
    columns = num_coefficients(n)
    good = H.dim() >= 1 and H.shape[-1] == columns
    expect(good, op, "H", f"have shape (..., {columns})", tuple(H.shape))
    _check_rows(op, "H", H)
    expect_tensor(op, "mean_square", mean_square)
    expect_dtype(op, "mean_square", mean_square.dtype, _allowed(COEFFICIENTS, compute_dtype))
    expect_like(op, "mean_square", mean_square, H.shape[:-1], H.device)
    expect(mean_square.is_contiguous(), op, "mean_square", "be contiguous", f"strides {mean_square.stride()}")
    _check_parameter(op, "alpha", alpha, (3,), H.device, compute_dtype)
    _check_parameter(op, "beta", beta, (columns,), H.device, compute_dtype)


def check_sinkhorn(
    logits: Tensor, iterations: int, variant: str, eps: float, *, compute_dtype: torch.dtype = torch.float32
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "sinkhorn"
    expect_tensor(op, "logits", logits)
    expect_dtype(op, "logits", logits.dtype, _allowed(COEFFICIENTS, compute_dtype))
    good = logits.dim() >= 2 and logits.shape[-1] == logits.shape[-2] and logits.shape[-1] in STREAMS
    expect(good, op, "logits", f"have shape (..., n, n) with n one of {STREAMS}", tuple(logits.shape))
    _check_block(op, "logits", logits)
    good = type(iterations) is int and 1 <= iterations <= MAX_ITERATIONS
    if not good:
        expect(False, op, "iterations", f"be an int from 1 to {MAX_ITERATIONS}", repr(iterations))
    expect(variant in SINKHORNS, op, "variant", f"be one of {SINKHORNS}", repr(variant))
    good = type(eps) is float and (0.0 < eps < 1.0 or (variant == "log" and eps == 0.0))
    if not good:
        expect(False, op, "eps", "be a float between 0 and 1", repr(eps))
    if variant != "log" and eps < LEAST_NORMAL:
        expect(False, op, "eps", "be a normal number in fp32", repr(eps))


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
    name = result_of(op)
    expect_tensor(op, name, f)
    expect(f.dtype == x.dtype, op, name, f"have dtype {x.dtype}", f.dtype, TypeError)
    expect_like(op, name, f, (*x.shape[:-2], channels), x.device)
    _check_rows(op, name, f)
    _check_coefficient(op, "post", post, (*x.shape[:-2], n), x.device, compute_dtype)
    _check_rows(op, "post", post)
    _check_coefficient(op, "res", res, (*x.shape[:-2], n, n), x.device, compute_dtype)
    _check_block(op, "res", res)
    _check_combination(op, x, channels, bias, dropout_p, seed, res_orientation, compute_dtype)


def result_of(op: str) -> str:
    """What an error names f: ``hyper_connection`` has no argument of that name."""
    return "the sublayer's output" if op == "hyper_connection" else "f"


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
    expect(callable(sublayer), op, "sublayer", "be callable", type(sublayer).__name__, TypeError)
    _check_combination(op, x, sizes(x, layout)[1], bias, dropout_p, seed, res_orientation, compute_dtype)


def _check_combination(op, x, channels, bias, dropout_p, seed, res_orientation, compute_dtype) -> None:
    if bias is not None:
        _check_parameter(op, "bias", bias, (channels,), x.device, compute_dtype)
    check_dropout(op, dropout_p, seed, x.device)
    good = res_orientation in RES_ORIENTATIONS
    expect(good, op, "res_orientation", f"be one of {RES_ORIENTATIONS}", repr(res_orientation))


def check_dropout(op: str, dropout_p: float, seed: Tensor | int | None, device: torch.device) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    good = type(dropout_p) is float and 0.0 <= dropout_p < 1.0
    if not good:  # torch.compile traces no text of a number that is another at another call
        expect(False, op, "dropout_p", "be a float in [0, 1)", repr(dropout_p))
    if isinstance(seed, Tensor):
        expect_tensor(op, "seed", seed)
        expect_dtype(op, "seed", seed.dtype, (torch.int64,))
        expect(seed.numel() == 1, op, "seed", "have one element", f"shape {tuple(seed.shape)}")
        expect(seed.device == device, op, "seed", f"be on {device}", seed.device)
    elif seed is not None:
        expect(type(seed) is int, op, "seed", "be an int64 tensor or an int", type(seed).__name__, TypeError)
        expect(-(2**63) <= seed < 2**63, op, "seed", "fit in 64 bits, signed", seed)


def check_expand(h: Tensor, n: int, layout: str, *, compute_dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "expand"
    _check_layout(op, layout)
    _check_n(op, n)
    expect_tensor(op, "h", h)
    expect_dtype(op, "h", h.dtype, _allowed(FLOATS, compute_dtype))
    good = h.dim() >= 1 and h.shape[-1] >= MIN_CHANNELS
    expect(good, op, "h", f"have shape (..., C) with C >= {MIN_CHANNELS}", tuple(h.shape))
    _check_token(op, "h", n, h.shape[-1])
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
    _check_weight(op, "fn", fn, n, n, channels, x.device, compute_dtype)
    _check_parameter(op, "base", base, (n,), x.device, compute_dtype)
    _check_parameter(op, "scale", scale, (1,), x.device, compute_dtype)
    if norm_weight is not None:
        _check_parameter(op, "norm_weight", norm_weight, (n * channels,), x.device, compute_dtype)
    expect(precision in PRECISIONS, op, "precision", f"be one of {PRECISIONS}", repr(precision))


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
    columns = num_coefficients(n)
    _check_weight(op, "phi", phi, columns, n, channels, x.device, compute_dtype)
    _check_parameter(op, "alpha", alpha, (3,), x.device, compute_dtype)
    _check_parameter(op, "beta", beta, (columns,), x.device, compute_dtype)
    if norm_weight is not None:
        _check_parameter(op, "norm_weight", norm_weight, (n * channels,), x.device, compute_dtype)
    expect(precision in PRECISIONS, op, "precision", f"be one of {PRECISIONS}", repr(precision))


def _allowed(dtypes: tuple[torch.dtype, ...], compute_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (*dtypes, torch.float64) if compute_dtype is torch.float64 else dtypes


def _check_layout(op: str, layout: str) -> None:
    expect(layout in LAYOUTS, op, "layout", f"be one of {LAYOUTS}", repr(layout))


def _check_n(op: str, n: int) -> None:
    if type(n) is not int or n not in STREAMS:  # torch.compile traces no text of a symbol
        expect(False, op, "n", f"be one of {STREAMS}", repr(n))


def _check_residual(op: str, x: Tensor, layout: str, compute_dtype: torch.dtype) -> tuple[int, int]:
    """(n, C)."""
    _check_layout(op, layout)
    expect_tensor(op, "x", x)
    expect_dtype(op, "x", x.dtype, _allowed(FLOATS, compute_dtype))
    n, channels = sizes(x, layout) if x.dim() >= 2 else (0, 0)
    shape = "(..., n, C)" if layout == "streams" else "(..., C, n)"
    expected = f"have shape {shape} with n one of {STREAMS} and C >= {MIN_CHANNELS}"
    expect(n in STREAMS and channels >= MIN_CHANNELS, op, "x", expected, tuple(x.shape))
    _check_token(op, "x", n, channels)
    _check_block(op, "x", x)
    return n, channels


def _check_token(op: str, name: str, n: int, channels: int) -> None:
    """phi of so many channels, and so a token, has as many elements as 32 bits count."""
    if num_coefficients(n) * n * channels >= 2**31:
        most = (2**31 - 1) // (num_coefficients(n) * n)
        expect(False, op, name, f"have at most {most} channels with {n} streams", channels)


def _check_block(op: str, name: str, t: Tensor) -> None:
    """The last two dimensions of a token are one piece of memory."""
    rows, columns = t.shape[-2:]
    good = (columns == 1 or t.stride(-1) == 1) and (rows == 1 or t.stride(-2) == columns)
    expect(good, op, name, "have contiguous last two dimensions", f"shape {tuple(t.shape)}, strides {t.stride()}")


def _check_rows(op: str, name: str, t: Tensor) -> None:
    good = t.shape[-1] == 1 or t.stride(-1) == 1
    expect(good, op, name, "have a contiguous last dimension", f"stride {t.stride(-1)}")


def as_tokens(op: str, name: str, t: Tensor, width: int) -> Tensor:
    """``t`` as a matrix of ``width`` numbers a token, without a copy.

    Raises:
        ValueError: its tokens do not collapse to rows of one stride, or are more than 32 bits count.
    """
    try:
        matrix = t.view(-1, width)
    except RuntimeError:
        expected = "have leading dimensions that collapse to rows of one stride"
        expect(False, op, name, expected, f"shape {tuple(t.shape)}, strides {t.stride()}")
        raise
    if matrix.shape[0] > MAX_TOKENS:
        expect(False, op, name, f"have at most {MAX_TOKENS} tokens", matrix.shape[0])
    return matrix


def strict_tokens(op: str, **tensors: tuple[Tensor, int]) -> None:
    """Raise ValueError as ``as_tokens``, where the references refuse what the kernels refuse.

    ``tensors``: each with the number of dimensions that a token has.
    """
    if is_strict():
        for name, (t, dimensions) in tensors.items():
            as_tokens(op, name, t, t.shape[-dimensions:].numel())


def _check_coefficient(op, name, t, shape, device, compute_dtype) -> None:
    expect_tensor(op, name, t)
    expect_dtype(op, name, t.dtype, _allowed(COEFFICIENTS, compute_dtype))
    expect_like(op, name, t, shape, device)


def _check_weight(op, name, weight, rows, n, channels, device, compute_dtype) -> None:
    """A parameter whose shape x's decides."""
    good_dtype = isinstance(weight, Tensor) and weight.dtype in _allowed(PARAMETERS, compute_dtype)
    if good_dtype and tuple(weight.shape) != (rows, n * channels):
        expected = f"have shape {(rows, n * channels)}, as x has {n} streams of {channels} channels"
        expect(False, op, name, expected, tuple(weight.shape))
    _check_parameter(op, name, weight, (rows, n * channels), device, compute_dtype)


def _check_parameter(op, name, parameter, shape, device, compute_dtype) -> None:
    expect_tensor(op, name, parameter)
    expect_dtype(op, name, parameter.dtype, _allowed(PARAMETERS, compute_dtype))
    expect_like(op, name, parameter, shape, device)
    expect(parameter.is_contiguous(), op, name, "be contiguous", f"strides {parameter.stride()}")
