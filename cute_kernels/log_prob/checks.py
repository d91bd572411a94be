"""The argument contract of linear_log_prob, shared by the kernels and the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.runtime.checks import (
    FP64,
    HALVES,
    MAX_SIZE,
    expect_float,
    expect_floats,
    expect_int,
    expect_layer,
    expect_like,
    fail,
)
from cute_kernels.runtime.rows import contiguous_dim

INDICES = (torch.int64, torch.int32)
# Temperature, scale and softcap are factors and divisors of the logits: all is far from the ends of fp32
FACTORS = 1e-6, 1e6


def check_log_prob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    temperature: float,
    scale: float,
    softcap: float,
    keep_logits: bool,
    fp64: bool = False,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: the reference's, of fp64 operands."""
    op = "linear_log_prob"
    expect_layer(op, "V", x, weight, FP64 if fp64 else HALVES)
    if not weight.shape[0]:
        fail(op, "weight", "have at least one row", f"shape {tuple(weight.shape)}")
    expect_floats(op, "target", target, INDICES)
    for size in target.shape:
        if size > MAX_SIZE:
            fail(op, "target", f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(target.shape)}")
    expect_like(op, "target", target, tuple(x.shape[:-1]), x.device)
    expect_int(op, "ignore_index", ignore_index)
    if not -(2**63) <= ignore_index < 2**63:
        fail(op, "ignore_index", "be an int of 64 bits", ignore_index)
    low, high = FACTORS
    for name, value in (("temperature", temperature), ("scale", scale)):
        expect_float(op, name, value)
        if not low <= value <= high:
            fail(op, name, f"be between {low} and {high}", value)
    expect_float(op, "softcap", softcap)
    if softcap and not low <= softcap <= high:
        fail(op, "softcap", f"be 0 or between {low} and {high}", softcap)
    if not isinstance(keep_logits, bool):
        fail(op, "keep_logits", "be a bool", f"{keep_logits!r} of type {type(keep_logits).__name__}", TypeError)


def operands(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, str]:
    """x and weight with rows for TMA, and the dimension that the weight's neighbours lie along, "k" or "n".

    A single row has no stride to speak of, and gets one. A product over no k is one over zeros.

    Raises:
        ValueError: they have rows that TMA cannot read.
    """
    k = x.shape[1]
    if not k:
        return x.new_zeros(x.shape[0], 8), weight.new_zeros(weight.shape[0], 8), "k"
    x, weight = (
        t.as_strided(t.shape, (k + -k % 8, 1)) if t.shape[0] <= 1 and t.stride(1) == 1 else t for t in (x, weight)
    )
    x_dim, weight_dim = contiguous_dim(x, x.shape), contiguous_dim(weight, weight.shape)
    if x_dim != -1 or not weight_dim:
        name, t = ("x", x) if x_dim != -1 else ("weight", weight)
        got = f"shape {tuple(t.shape)}, strides {t.stride()}, address {t.data_ptr():#x}"
        fail("linear_log_prob", name, "have rows that start on 16 bytes", got)
    return x, weight, "k" if weight_dim == -1 else "n"
