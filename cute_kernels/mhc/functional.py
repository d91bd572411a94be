"""A sublayer's two halves apart, and what a block of recompute makes again: what modules need beside the public ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cute_kernels.mhc import launch
from cute_kernels.mhc.checks import (
    MIN_CHANNELS,
    STREAMS,
    Precision,
    check_dropout,
    check_expand_combine,
    check_pre,
    num_coefficients,
    sizes,
)
from cute_kernels.mhc.op.common import matrix_of, rows
from cute_kernels.mhc.op.composite import Options, connect
from cute_kernels.mhc.op.expand_combine import combine
from cute_kernels.mhc.reference.dropout import draw_seed
from cute_kernels.mhc.variants import MAX_ITERATIONS, UNDERFLOW, Variant, variant_of

__all__ = [
    "MAX_ITERATIONS",
    "MIN_CHANNELS",
    "STREAMS",
    "UNDERFLOW",
    "Aggregation",
    "Combination",
    "Connected",
    "Precision",
    "after_sublayer",
    "before_sublayer",
    "check_dropout",
    "draw_seed",
    "num_coefficients",
    "pre_of",
    "variant_of",
]


class Connected(NamedTuple):
    """The results before a sublayer, for the part after it.

    ``residual``: x; where ``is_alias``, another tensor of it, by which ``after_sublayer`` leads the
    gradient of the new residual back, to be multiplied by res and added to x's gradient in one kernel.
    """

    layer_input: Tensor
    post: Tensor
    res: Tensor
    residual: Tensor
    is_alias: bool


def before_sublayer(
    op: str, x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, variant: Variant, precision: str
) -> Connected:
    """``mhc.pre`` by the kernels, before ``after_sublayer``; checks its arguments."""
    check_pre(x, phi, alpha, beta, None, variant.layout, precision, op=op)
    options = Options(op, variant.constants, variant.layout, precision, variant.res_orientation)
    return Connected(*connect(x, phi, alpha, beta, None, options))


def after_sublayer(
    op: str,
    f: Tensor,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    variant: Variant,
    passes_dout: bool,
) -> Tensor:
    """``mhc.expand_combine`` by the kernels; checks its arguments. ``passes_dout``: x is ``Connected``'s alias."""
    options = dropout_p, seed, variant.layout, variant.res_orientation
    check_expand_combine(f, post, x, res, bias, *options, op=op)
    return combine(op, f, post, x, res, bias, *options, passes_dout)


def pre_of(layer_input: Tensor) -> Tensor:
    """The weights (M, n) of the streams that made a layer input, which its backward keeps."""
    return layer_input.grad_fn.saved_tensors[-2]


class Aggregation:
    """Makes a layer input again."""

    def __init__(self, op: str, x: Tensor, pre: Tensor, layout: str) -> None:
        n, self.channels = sizes(x, layout)
        self.x = rows(op, "x", x.detach(), n * self.channels)
        self.pre, self.layout = pre, layout

    def __call__(self, out: Tensor) -> None:
        launch.aggregate_forward(self.x, self.pre, matrix_of(out, self.channels), self.layout, 1.0)


class Combination:
    """Makes the residual after a sublayer again, and in the same launch, of the residual, the next sublayer's input.

    So the residual is not read for it: in a step of 8 layers of 4096x4x4096 in the best blocks (H200) aggregate takes
    0.84 ms and this 2.31, where launches of their own would take 1.30 and 2.21.
    """

    def __init__(
        self,
        op: str,
        f: Tensor,
        post: Tensor,
        x: Tensor,
        res: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        dropout_p: float,
        layout: str,
        orientation: str,
    ) -> None:
        n, channels = sizes(x, layout)
        self.matrices = {
            "f": rows(op, "f", f.detach(), channels),
            "bias": bias,
            "post": rows(op, "post", post.detach(), n),
            "x": rows(op, "x", x.detach(), n * channels),
            "res": rows(op, "res", res.detach(), n * n),
            "seed": seed,
        }
        self.channels = channels
        self.options = dropout_p, layout, orientation
        self.pre: Tensor | None = None

    def takes(self, pre: Tensor, layout: str) -> bool:
        """Whether the next connection's weights are taken up: of one connection, and of the residual's layout."""
        if self.pre is not None or layout != self.options[1]:
            return False
        self.pre = pre
        return True

    def __call__(self, out: Tensor, layer_input: Tensor | None = None) -> None:
        pre, aggregated = None, None
        if layer_input is not None:
            pre, aggregated = self.pre, matrix_of(layer_input, self.channels)
        width = self.matrices["x"].shape[1]
        launch.expand_combine_forward(*self.matrices.values(), matrix_of(out, width), pre, aggregated, *self.options)
