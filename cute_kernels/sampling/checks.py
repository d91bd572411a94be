"""The argument contract of sample, shared by the kernel and the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.runtime.checks import expect_dtype, expect_floats, expect_int, expect_tensor, fail
from cute_kernels.sampling.config import MAX_COLUMNS

OP = "sample"
MAX_ROWS = 2**28 - 1  # of which each has a cluster of 8


def check_sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats(OP, "logits", logits)
    if logits.dim() != 2:
        fail(OP, "logits", "be a matrix (rows, columns)", f"shape {tuple(logits.shape)}")
    rows, columns = logits.shape
    if not 0 < columns <= MAX_COLUMNS:
        fail(OP, "logits", f"have from 1 to {MAX_COLUMNS} columns", columns)
    if rows > MAX_ROWS:
        fail(OP, "logits", f"have at most {MAX_ROWS} rows", rows)
    if columns > 1 and logits.stride(1) != 1:
        fail(OP, "logits", "have a contiguous last dimension", f"stride {logits.stride(1)}")
    for name, t in (("seeds", seeds), ("positions", positions)):
        expect_tensor(OP, name, t)
        if t.dtype is not torch.int64:
            expect_dtype(OP, name, t.dtype, (torch.int64,))
        if t.dim() != 1 or t.shape[0] != rows:
            fail(OP, name, f"have shape ({rows},)", tuple(t.shape))
        if t.device != logits.device:
            fail(OP, name, f"be on {logits.device}", t.device)
    _check_number("temperature", temperature, 0.0, math.inf, "be at least 0, 0 for the largest logit, and finite")
    if temperature and not 2.0**-100 <= temperature < 2.0**100:
        fail(OP, "temperature", "be 0, or from 2^-100 to 2^100", temperature)
    if top_k is not None:
        expect_int(OP, "top_k", top_k)
        if top_k < 1:
            fail(OP, "top_k", "be None or at least 1", top_k)
    if top_p is not None:
        _check_number("top_p", top_p, 0.0, 1.0, "be None or in (0, 1]")
        if not top_p:
            fail(OP, "top_p", "be None or in (0, 1]", top_p)
    if min_p is not None:
        _check_number("min_p", min_p, 0.0, 1.0, "be None or in [0, 1]")


def _check_number(name: str, value: object, least: float, most: float, expected: str) -> None:
    if type(value) is not float:
        fail(OP, name, expected, repr(value), TypeError)
    if not least <= value <= most:
        fail(OP, name, expected, value)
