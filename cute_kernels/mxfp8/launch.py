"""Launches of the quantizers: a Spec of the call's tensors, what launches it, the launch.

The registered operators ``cute_kernels::mxfp8_*`` return their outputs instead of mutating them: DTensor takes no
sharding rule (sharding.py) for an operator that writes into its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.mxfp8 import reference
from cute_kernels.mxfp8.checks import (
    SCALE,
    blocked_size,
    check_aligned,
    is_column_major,
    is_transposed,
    scale_kind,
)
from cute_kernels.mxfp8.config import (
    BLOCK,
    DEQUANTIZE_TILE,
    DequantizeSpec,
    DualConfig,
    QuantizeSpec,
    quantize_config,
    tiles_of,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache, bounded
from cute_kernels.runtime.operators import empty, empty_strided, functional_operator
from cute_kernels.runtime.targets import Target

Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


def _quantize(x, dtype, along_k, along_n, square, mode, scale_layout) -> tuple[Tensor, ...]:
    """(q, scale) of blocks along k, of those along n, or of both (then, of squares with plain scales, only once).

    Checks the address and the strides, which a graph does not see before it runs.
    """
    shape = x.shape
    if 0 in shape:
        return _fake_quantize(x, dtype, along_k, along_n, square, mode, scale_layout)
    transposed = False
    if x.data_ptr() & 15 or not x.is_contiguous():
        check_aligned(*_caller(x, along_k, along_n), x)
        transposed = is_transposed(x)
    spec = QuantizeSpec(x.dtype, dtype, len(shape), transposed, along_k, along_n, square, mode, scale_layout)
    function, num_ctas, outputs, has_counter = _quantizers.get(x.get_device(), spec)[shape]
    found = [empty_strided(x, *output) for output in outputs]
    if len(shape) == 3 and shape[0] == 1 and x.stride(0) * x.itemsize & 15:
        # One expert's stride means nothing, but TMA reads it
        x = x.as_strided(shape, (shape[1] * shape[2], *x.stride()[1:]))
    if not along_n:
        function(x, *found, None, None, num_ctas)
    elif not along_k:
        function(x, None, None, *found, num_ctas)
    else:
        counter = (empty(x, (1,), torch.int32),) if has_counter else ()
        squares = (found[1],) if len(found) == 3 else ()  # the scales serve both
        function(x, *found, *squares, *counter, num_ctas)
    return tuple(found)


def _caller(x: Tensor, along_k: bool, along_n: bool) -> tuple[str, str]:
    """The public function whose call this is, and its argument's name."""
    op = "dual" if along_k and along_n else "rowwise" if along_k else "colwise"
    return ("quantize_3d_" + op, "w") if x.dim() == 3 else ("quantize_" + op, "x")


def _fake_quantize(x, dtype, along_k, along_n, square, mode, scale_layout) -> tuple[Tensor, ...]:
    outputs = outputs_of(x.shape, dtype, along_k, along_n, square, scale_layout)
    return tuple(x.new_empty_strided(shape, strides, dtype=element) for shape, strides, element in outputs)


def _reference_quantize(x, dtype, along_k, along_n, square, mode, scale_layout) -> tuple[Tensor, ...]:
    found = []
    if along_k:
        found += reference.along_k(x, mode, scale_layout, dtype, square)
    if along_n:
        q, s = reference.along_n(x, mode, scale_layout, dtype, square)
        found += [q] if along_k and square and scale_layout == "plain" else [q, s]
    return tuple(found)


def _register_sharding(x: Tensor) -> None:
    """At the first DTensor. (A program that calls compiled code alone calls ``mxfp8.sharding.register`` itself.)"""
    if not is_compiling() and type(x).__module__.startswith("torch.distributed.tensor"):
        from cute_kernels.mxfp8.sharding import register

        register()


def _quantize_operator(name: str, num_outputs: int) -> Callable[..., tuple[Tensor, ...]]:
    """By the number of tensors returned: DTensor takes no rule for a list of any length.

    dtype, an integer, stands before the flags: DTensor remembers a call's sharding by its tensors and by what follows
    the first integer.
    """
    return functional_operator(
        name,
        "Tensor x, ScalarType dtype, bool along_k, bool along_n, bool square, str mode, str scale_layout",
        "(" + ", ".join(["Tensor"] * num_outputs) + ")",
        fake=_fake_quantize,
        cpu=_reference_quantize,
        before_dispatch=_register_sharding,
    )(_quantize)


quantize = _quantize_operator("mxfp8_quantize", 2)  # along k or along n
quantize_squares = _quantize_operator("mxfp8_quantize_squares", 3)  # along both, one tensor of plain scales
quantize_dual = _quantize_operator("mxfp8_quantize_dual", 4)


def _fake_dequantize(q, scale, dtype, transposed) -> Tensor:
    q = _in_order(q, transposed)
    return q.new_empty_strided(q.shape, q.stride(), dtype=dtype)


def _reference_dequantize(q, scale, dtype, transposed) -> Tensor:
    return reference.dequantize(_in_order(q, transposed), scale, dtype=dtype)


@functional_operator(
    "mxfp8_dequantize",
    "Tensor q, Tensor scale, ScalarType dtype, bool transposed",
    "Tensor",
    fake=_fake_dequantize,
    cpu=_reference_dequantize,
    before_dispatch=_register_sharding,
)
def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """The values, in q's layout, which is column-major if ``transposed``."""
    if transposed:
        q = _in_order(q, transposed)
    shape = q.shape
    y = empty_strided(q, shape, q.stride(), dtype)
    if 0 not in shape:
        if q.data_ptr() & 15:
            check_aligned("dequantize", "q", q)
        call = DequantizeCall(q.dtype, dtype, shape, scale.shape, transposed)
        function, num_ctas = _dequantizers.get(q.get_device(), call)
        function(q, scale, y, num_ctas)
    return y


def _in_order(q: Tensor, transposed: bool) -> Tensor:
    """q column-major if ``transposed``: what DTensor redistributes comes row-major, whatever it was as a whole."""
    return q.mT.contiguous().mT if transposed and not is_column_major(q.shape, q.stride()) else q


def outputs_of(
    shape: torch.Size, dtype: torch.dtype, along_k: bool, along_n: bool, square: bool, scale_layout: str
) -> tuple[Output, ...]:
    """The outputs of a quantizer for an input of this shape, in order."""
    *experts, n, k = shape
    elements = (*experts, n, k)
    gap = (n * k,) * len(experts)
    blocks_n, blocks_k = n // BLOCK, k // BLOCK
    outputs: list[Output] = []
    if along_k:
        outputs.append((elements, (*gap, k, 1), dtype))
        if scale_layout == "blocked":
            outputs.append(_scales(experts, blocked_size(n, blocks_k)))
        else:
            outputs.append(_scales(experts, blocks_n if square else n, blocks_k))
    if along_n:
        outputs.append((elements, (*gap, 1, n), dtype))
        if scale_layout == "blocked":
            outputs.append(_scales(experts, blocked_size(k, blocks_n)))
        elif not square:
            outputs.append(_scales(experts, *((blocks_n, k) if experts else (k, blocks_n))))
        elif not along_k:
            outputs.append(_scales(experts, blocks_n, blocks_k))
    return tuple(outputs)


def _scales(experts: list[int], *shape: int) -> Output:
    """Contiguous scales of this shape for each expert."""
    return (*experts, *shape), (*[math.prod(shape)] * len(experts), *shape[1:], 1), SCALE


class QuantizeLaunch(NamedTuple):
    """A kernel, how many CTAs of it to launch, what outputs to allocate.

    ``has_counter``: the kernel counts tiles, in memory that it is given.
    """

    function: Callable[..., None]
    num_ctas: int
    outputs: tuple[Output, ...]
    has_counter: bool


class QuantizeLaunches(bounded):
    """The launches of one Spec, by the shape of the input; each is made at its first call."""

    def __init__(self, target: Target, spec: QuantizeSpec) -> None:
        super().__init__()
        self._target, self._spec = target, spec

    def __missing__(self, shape: torch.Size) -> QuantizeLaunch:
        launch = self[shape] = _make_quantize(self._target, self._spec, shape)
        return launch


def _make_quantize(target: Target, spec: QuantizeSpec, shape: torch.Size) -> QuantizeLaunch:
    from cute_kernels.mxfp8 import kernel

    tiles = tiles_of(shape, spec.transposed)
    config = quantize_config(target.arch, spec.x.itemsize, *spec.pass_kinds, tiles)
    function = launches.load(kernel.mxfp8_quantize, target.arch, spec, config)
    outputs = outputs_of(shape, spec.q, spec.along_k, spec.along_n, spec.square, spec.scale_layout)
    return QuantizeLaunch(function, config.num_ctas(tiles, target.num_sms), outputs, isinstance(config, DualConfig))


class DequantizeCall(NamedTuple):
    """The Spec of dequantize and the number of CTAs follow from this."""

    q: torch.dtype
    y: torch.dtype
    shape: torch.Size
    scale_shape: torch.Size
    transposed: bool


def _make_dequantize(target: Target, call: DequantizeCall) -> tuple[Callable[..., None], int]:
    from cute_kernels.mxfp8 import kernel_dequantize

    kind = scale_kind(call.shape, call.scale_shape, call.transposed)
    spec = DequantizeSpec(call.q, call.y, len(call.shape), call.transposed, kind)
    num_ctas = math.prod(tiles_of(call.shape, call.transposed, DEQUANTIZE_TILE))
    return launches.load(kernel_dequantize.mxfp8_dequantize, target.arch, spec), num_ctas


_quantizers = LaunchCache(QuantizeLaunches)
_dequantizers = LaunchCache(_make_dequantize)
