"""The argument contracts of the experts' functions, shared by the kernels and the references."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.gemm.functional import check_mxfp8_matrices
from cute_kernels.moe.config import MAX_EXPERTS, MAX_K
from cute_kernels.runtime.checks import (
    FLOATS,
    FP64,
    MAX_SIZE,
    expect_float,
    expect_floats,
    expect_int,
    expect_like,
    fail,
)
from cute_kernels.runtime.operators import differentiates

SCORES = ("softmax", "sigmoid", "softmax_of_topk")
ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu", "silu")
Activation = str | Callable[[Tensor], Tensor]
FP32 = (torch.float32,)
STEP = 16  # rows of a step of a product's sum
INTEGERS = (torch.int32, torch.int64)
Groups = tuple[int, int]


def is_fp64(t: object) -> bool:
    """Whether this is what references take for exact results."""
    return isinstance(t, Tensor) and t.dtype is torch.float64


def check_logits(op: str, logits: Tensor, fp64: bool = False) -> None:
    """Raise TypeError or ValueError unless these are logits (T, E). ``fp64``: the reference's."""
    expect_floats(op, "logits", logits, FP64 if fp64 else FP32)
    if logits.dim() != 2 or not 0 < logits.shape[1] <= MAX_EXPERTS:
        fail(op, "logits", f"have shape (T, E) with E from 1 to {MAX_EXPERTS}", tuple(logits.shape))


def check_balance(logits: Tensor, indices: Tensor, mask: Tensor | None, fp64: bool = False) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "load_balancing_loss"
    check_logits(op, logits, fp64)
    check_indices(op, indices)
    expect_like(op, "routing.indices", indices, (logits.shape[0], indices.shape[1]), logits.device)
    if mask is not None:
        expect_floats(op, "mask", mask, (torch.bool,))
        expect_like(op, "mask", mask, logits.shape[:1], logits.device)


def check_router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, fp64: bool = False) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "router_logits"
    expect_floats(op, "x", x, FP64 if fp64 else FLOATS)
    expect_floats(op, "weight", weight, (x.dtype, FP64[0] if fp64 else FP32[0]))
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        fail(op, "weight", "have shape (E, H) for x (..., H)", f"{tuple(weight.shape)} for {tuple(x.shape)}")
    if weight.device != x.device:
        fail(op, "weight", f"be on {x.device}", weight.device)
    if bias is not None:
        expect_floats(op, "bias", bias, FP64 if fp64 else FLOATS)
        expect_like(op, "bias", bias, weight.shape[:1], x.device)


def check_route(
    logits: Tensor,
    k: int,
    score: str,
    bias: Tensor | None,
    groups: Groups | None,
    eps: float,
    scale: float,
    indices: Tensor | None,
    fp64: bool = False,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: the reference's, of fp64 logits."""
    op = "route"
    check_logits(op, logits, fp64)
    tokens, experts = logits.shape
    expect_int(op, "k", k)
    if not 0 < k <= min(MAX_K, experts):
        fail(op, "k", f"be from 1 to {min(MAX_K, experts)}", k)
    if tokens * k > MAX_SIZE:
        fail(op, "logits", f"have tokens of at most {MAX_SIZE} slots", f"{tokens} tokens, k = {k}")
    if score not in SCORES:
        fail(op, "score", f"be one of {SCORES}", repr(score))
    expect_float(op, "eps", eps)
    expect_float(op, "scale", scale)
    if bias is not None:
        expect_floats(op, "bias", bias, FP64 if fp64 else FP32)
        expect_like(op, "bias", bias, (experts,), logits.device)
        if score != "sigmoid":
            fail(op, "bias", "be None but for sigmoid scores", f"a tensor with {score}")
    if groups is not None:
        _check_groups(groups, experts, k)
    if indices is not None:
        check_indices(op, indices)
        expect_like(op, "indices", indices, (tokens, k), logits.device)
        if bias is not None or groups is not None:
            fail(op, "indices", "be None where experts are selected by bias or groups", "a tensor")


def _check_groups(groups: Groups, experts: int, k: int) -> None:
    op = "route"
    if not isinstance(groups, tuple) or len(groups) != 2 or any(type(n) is not int for n in groups):
        fail(op, "groups", "be None or a pair (groups, groups that are kept)", repr(groups), TypeError)
    count, kept = groups
    if not 0 < count <= MAX_K or experts % count:
        fail(op, "groups", f"be of at most {MAX_K} groups that divide {experts} experts", groups)
    if not 0 < kept <= count or kept * (experts // count) < k:
        fail(op, "groups", f"leave at least k = {k} experts", groups)


def check_indices(op: str, indices: Tensor) -> None:
    """Raise TypeError or ValueError unless these are slots (T, k) of tokens."""
    expect_floats(op, "indices", indices, INTEGERS)
    if indices.dim() != 2 or not 0 < indices.shape[1] <= MAX_K:
        fail(op, "indices", f"have shape (T, k) with k from 1 to {MAX_K}", tuple(indices.shape))


def check_plan(indices: Tensor, num_experts: int, align: int, segments: Tensor | None = None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    check_indices("plan", indices)
    expect_int("plan", "num_experts", num_experts)
    expect_int("plan", "align", align)
    if not 0 < num_experts <= MAX_EXPERTS:
        fail("plan", "num_experts", f"be from 1 to {MAX_EXPERTS}", num_experts)
    if not 0 < align <= 1024:
        fail("plan", "align", "be from 1 to 1024", align)
    groups = num_experts
    if segments is not None:
        expect_floats("plan", "segments", segments, INTEGERS)
        if segments.dim() != 1 or not len(segments) or segments.device != indices.device:
            fail("plan", "segments", f"be a list of ends on {indices.device}", f"{segments.shape} on {segments.device}")
        if align % STEP:
            fail("plan", "align", f"be a multiple of {STEP} with segments", align)
        groups *= len(segments)
    if indices.shape[0] * indices.shape[1] + align * groups > MAX_SIZE:
        fail("plan", "indices", f"have at most {MAX_SIZE} slots", tuple(indices.shape))


def check_rows(op: str, name: str, rows: Tensor, count: int, device: torch.device, dtypes=FLOATS) -> None:
    """Raise TypeError or ValueError unless this is a matrix of so many rows."""
    expect_floats(op, name, rows, dtypes)
    if rows.dim() != 2 or rows.shape[0] != count:
        fail(op, name, f"have shape ({count}, columns)", tuple(rows.shape))
    if rows.device != device:
        fail(op, name, f"be on {device}", rows.device)


def check_weights(op: str, weights: Tensor, like: Tensor, fp64: bool = False) -> None:
    """Raise TypeError or ValueError unless these are a weight for each slot."""
    expect_floats(op, "weights", weights, FP64 if fp64 else FP32)
    expect_like(op, "weights", weights, tuple(like.shape), like.device)


def check_layout(op: str, name: str, rows: Tensor) -> None:
    """Raise ValueError unless rows are contiguous and start on 16 bytes: a lane takes as many."""
    columns, unit = rows.shape[1], 16 // rows.itemsize
    if columns % unit:
        fail(op, name, f"have columns that are a multiple of {unit}", columns)
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        fail(op, name, "have a contiguous last dimension", f"strides {rows.stride()}")
    if rows.shape[0] > 1 and rows.stride(0) % unit:
        fail(op, name, "have rows that start on 16 bytes", f"strides {rows.stride()}")
    if rows.data_ptr() % 16:
        fail(op, name, "start on 16 bytes", f"address {rows.data_ptr():#x}")


def check_swiglu(z: Tensor, limit: float | None, alpha: float | None, fp64: bool = False) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats("swiglu", "z", z, FP64 if fp64 else FLOATS)
    if z.dim() != 2 or z.shape[1] % 2:
        fail("swiglu", "z", "have shape (R, 2 I)", tuple(z.shape))
    check_gate("swiglu", limit, alpha)


def check_gate(op: str, limit: float | None, alpha: float | None) -> None:
    """Raise TypeError or ValueError unless these are numbers or None."""
    for name, value in (("limit", limit), ("alpha", alpha)):
        if value is not None:
            expect_float(op, name, value)
            if not value > 0:
                fail(op, name, "be None or positive", value)


def check_activation(activation: Activation, interleaved: bool, limit: float | None, alpha: float | None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "experts"
    if not callable(activation) and activation not in ACTIVATIONS:
        fail(op, "activation", f"be one of {ACTIVATIONS}, or a function", repr(activation))
    check_gate(op, limit, alpha)
    for name, value in (("limit", limit), ("alpha", alpha)):
        if value is not None and activation not in ("swiglu", "swiglu_oai"):
            fail(op, name, f"be None with {activation}", value)
    if interleaved and activation not in ACTIVATIONS[:-1]:
        fail(op, "interleaved", f"be False with {activation}", interleaved)


def check_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    transposed: bool,
    activation: Activation,
    align: int,
    segments: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "experts"
    quantized = any(scale is not None for scale in scales)
    expect_floats(op, "x", x, (torch.bfloat16,) if quantized else dtypes)
    if x.dim() != 2:
        fail(op, "x", "have shape (T, H)", tuple(x.shape))
    for name, weight, dims in (
        ("gate_up", gate_up, 3),
        ("down", down, 3),
        ("gate_up_bias", gate_up_bias, 2),
        ("down_bias", down_bias, 2),
    ):
        if weight is None and dims == 2 or quantized and dims == 3:
            continue
        expect_floats(op, name, weight, dtypes)
        if weight.dtype is not x.dtype:
            fail(op, name, f"have dtype {x.dtype}", weight.dtype, TypeError)
        if weight.dim() != dims:
            fail(op, name, "be a batch of matrices" if dims == 3 else "be a matrix", tuple(weight.shape))
    if quantized:
        _check_quantized(x, weights, gate_up, down, gate_up_bias, down_bias, transposed, scales)
    experts, hidden = gate_up.shape[0], x.shape[1]
    width = down.shape[1 if transposed else 2]
    columns = width if activation == "silu" else 2 * width
    if callable(activation):
        columns = gate_up.shape[2 if transposed else 1]
    wanted = (experts, hidden, columns) if transposed else (experts, columns, hidden)
    expect_like(op, "gate_up", gate_up, wanted, x.device)
    wanted = (experts, width, hidden) if transposed else (experts, hidden, width)
    expect_like(op, "down", down, wanted, x.device)
    if gate_up_bias is not None:
        expect_like(op, "gate_up_bias", gate_up_bias, (experts, columns), x.device)
    if down_bias is not None:
        expect_like(op, "down_bias", down_bias, (experts, hidden), x.device)
    check_plan(indices, experts, align, segments)
    if indices.shape[0] != x.shape[0] or indices.device != x.device:
        fail(op, "routing", f"be of {x.shape[0]} tokens on {x.device}", f"{tuple(indices.shape)} on {indices.device}")
    check_weights(op, weights, indices, x.dtype is torch.float64)


def _check_quantized(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    transposed: bool,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    op = "experts"
    for name, scale in zip(("gate_up_scale", "down_scale"), scales, strict=True):
        if scale is None:
            fail(op, name, "be given where the other weight has scales", None)
    if transposed:
        fail(op, "transposed", "be False with scales", transposed)
    for name, weight, scale in zip(("gate_up", "down"), (gate_up, down), scales, strict=True):
        check_mxfp8_matrices(op, name, weight, f"{name}_scale", scale, False)
        if scale.device != x.device:
            fail(op, f"{name}_scale", f"be on {x.device}", scale.device)
    if differentiates(x, weights, gate_up, down, gate_up_bias, down_bias):
        fail(op, "gate_up_scale", "be None where a gradient is wanted", "a tensor")
