"""Errors for bad input, in one wording: ``op: argument must be ..., got ...``."""

from __future__ import annotations

import math
from typing import Literal, NoReturn

import torch
from torch import Tensor

Backend = Literal["reference"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HALVES = (torch.bfloat16, torch.float16)  # what tensor cores multiply
FP64 = (torch.float64,)
MAX_SIZE = 2**31 - 2**9  # of products: coordinates are 32-bit and run ahead of the last element by a tile


def fail(op: str, argument: str, expected: str, got: object, error: type = ValueError) -> NoReturn:
    """Raise ``error`` in our one wording. Checks run at every call: text is made here, after the condition."""
    raise error(f"{op}: {argument} must {expected}, got {got}")


def expect(condition: bool, op: str, argument: str, expected: str, got: object, error: type = ValueError) -> None:
    """Raise ``error`` unless ``condition`` holds."""
    if not condition:
        raise error(f"{op}: {argument} must {expected}, got {got}")


def expect_tensor(op: str, argument: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor with strides."""
    if not isinstance(value, Tensor):
        fail(op, argument, "be a torch.Tensor", type(value).__name__, TypeError)
    if value.layout is not torch.strided:
        fail(op, argument, "have layout torch.strided", value.layout, TypeError)


def expect_floats(op: str, argument: str, value: object, allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise TypeError unless ``value`` is a tensor with strides, of one of the dtypes."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        expect_tensor(op, argument, value)
    if value.dtype not in allowed:
        expect_dtype(op, argument, value.dtype, allowed)


def expect_size(op: str, argument: str, size: object) -> None:
    """Raise ValueError unless ``size`` is an integer, in a traced call maybe a symbolic one, of at least 0."""
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)) or size < 0:
        expect(False, op, argument, "be a size", repr(size))


def expect_int(op: str, argument: str, value: object) -> None:
    """Raise TypeError unless ``value`` is an int; a bool is none."""
    if type(value) is not int:  # a trace cannot write down a value that is symbolic
        expect(False, op, argument, "be an int", f"{value!r} of type {type(value).__name__}", TypeError)


def expect_float(op: str, argument: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a float, as ``as_float`` makes it of a real number."""
    if type(value) is not float:  # as in expect_int
        expect(False, op, argument, "be a float", f"{value!r} of type {type(value).__name__}", TypeError)


def expect_dtype(op: str, argument: str, dtype: object, allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise TypeError unless ``dtype`` is a torch.dtype and one of ``allowed``."""
    if not isinstance(dtype, torch.dtype):
        fail(op, argument, f"be a torch.dtype such as {allowed[0]}", repr(dtype), TypeError)
    if dtype not in allowed:
        fail(op, argument, f"have dtype {', '.join(str(d).removeprefix('torch.') for d in allowed)}", dtype, TypeError)


def expect_backend(op: str, backend: object) -> None:
    """Raise ValueError unless ``backend`` is None or "reference"."""
    if backend is not None and backend != "reference":
        fail(op, "backend", "be None or 'reference'", repr(backend))


def expect_like(op: str, argument: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` has this shape and lies on this device."""
    if tuple(tensor.shape) != tuple(shape):
        fail(op, argument, f"have shape {tuple(shape)}", tuple(tensor.shape))
    if tensor.device != device:
        fail(op, argument, f"be on {device}", tensor.device)


def expect_layer(op: str, features: str, x: Tensor, weight: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError or ValueError unless x is (..., K) and weight (N, K), where N is called ``features``."""
    expect_floats(op, "x", x, dtypes)
    expect_floats(op, "weight", weight, dtypes)
    shape, weight_shape = x.shape, weight.shape
    for size in shape:
        if size > MAX_SIZE:
            fail(op, "x", f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(shape)}")
    for size in weight_shape:
        if size > MAX_SIZE:
            fail(op, "weight", f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(weight_shape)}")
    if not shape:
        fail(op, "x", "have at least one dimension", f"shape {tuple(shape)}")
    if len(shape) > 2 and (rows := math.prod(shape[:-1])) > MAX_SIZE:  # numel() takes no symbolic sizes
        fail(op, "x", f"have at most {MAX_SIZE} rows", f"{rows} in shape {tuple(shape)}")
    if len(weight_shape) != 2:
        fail(op, "weight", f"be a matrix ({features}, K)", f"shape {tuple(weight_shape)}")
    if weight.dtype is not x.dtype:
        fail(op, "weight", f"have dtype {x.dtype}", weight.dtype, TypeError)
    if weight_shape[1] != shape[-1]:  # a message with a symbolic size in it makes that a constant of the graph
        fail(op, "weight", f"have {shape[-1]} columns, as x has", f"shape {tuple(weight_shape)}")
    if weight.device != x.device:
        fail(op, "weight", f"be on {x.device}", weight.device)
