"""The hyper-connections of the systems in use: eps and where they go, Sinkhorn algorithm, orientation, layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from cute_kernels.runtime.real import as_float

RmsEpsPlacement = Literal["inside", "outside"]
SinkhornVariant = Literal["log", "softmax_eps", "exp_clamp"]
ResOrientation = Literal["io", "oi"]
Layout = Literal["streams", "channels"]
RMS_EPS_PLACEMENTS = get_args(RmsEpsPlacement)
SINKHORNS = get_args(SinkhornVariant)
RES_ORIENTATIONS = get_args(ResOrientation)
LAYOUTS = get_args(Layout)
MAX_ITERATIONS = 100
UNDERFLOW = 2.0**-150  # this, and what is less, is 0 in fp32
LEAST_NORMAL = 2.0**-126  # of fp32: what is less is 0 to the fast reciprocal of Sinkhorn's sums


class Constants(NamedTuple):
    """The part of a ``Variant`` that the coefficients' kernels depend on: neither orientation nor layout."""

    rms_eps: float
    rms_eps_placement: RmsEpsPlacement
    pre_eps: float
    post_mult: float
    sinkhorn: SinkhornVariant
    sinkhorn_eps: float
    iterations: int


@dataclass(frozen=True)
class Variant:
    """The hyper-connection of one system: its constants, its Sinkhorn algorithm, its orientation and its layout.

    ``VARIANTS`` has those of the systems in use by name: "deepseek_v4", "transformer_engine", "megatron",
    "megatron_dev", "tilekernels", "liger".

    Args:
        rms_eps: > 0, also in fp32; added to the mean square of a token ("inside": sqrt(mean_square + eps)) or to its
            root ("outside": sqrt(mean_square) + eps).
        rms_eps_placement: "inside" or "outside".
        pre_eps: >= 0; pre = sigmoid + pre_eps.
        post_mult: > 0; post = post_mult * sigmoid.
        sinkhorn: the algorithm, "log", "softmax_eps" or "exp_clamp"; see ``cute_kernels.mhc.sinkhorn``.
        sinkhorn_eps: from 2^-126 to 1; "log" has none, and may say 0.
        iterations: of the Sinkhorn algorithm, 1 to 100.
        res_orientation: how the residual matrix is applied: "io": out_o = sum_i res[i, o] x_i; "oi": res[o, i].
        layout: of the residual: "streams": (..., n, C); "channels": (..., C, n).

    Raises:
        ValueError: a bad field; the message names it, the expected value and the given one.

    Example:
        >>> from dataclasses import replace
        >>> from cute_kernels import mhc
        >>> mhc.VARIANTS["deepseek_v4"].iterations
        20
        >>> replace(mhc.VARIANTS["deepseek_v4"], iterations=10).iterations
        10
    """

    rms_eps: float
    rms_eps_placement: RmsEpsPlacement
    pre_eps: float
    post_mult: float
    sinkhorn: SinkhornVariant
    sinkhorn_eps: float
    iterations: int
    res_orientation: ResOrientation
    layout: Layout

    def __post_init__(self) -> None:
        for name in ("rms_eps", "pre_eps", "post_mult", "sinkhorn_eps"):
            object.__setattr__(self, name, as_float(getattr(self, name)))
        for name in ("rms_eps", "post_mult"):
            value = getattr(self, name)
            _expect(_is_finite(value) and value > 0.0, "Variant", name, "be a positive float", value)
        _expect(self.rms_eps > UNDERFLOW, "Variant", "rms_eps", "be positive in fp32", self.rms_eps)
        good = _is_finite(self.pre_eps) and self.pre_eps >= 0.0
        _expect(good, "Variant", "pre_eps", "be a non-negative float", self.pre_eps)
        for name, allowed in (
            ("rms_eps_placement", RMS_EPS_PLACEMENTS),
            ("sinkhorn", SINKHORNS),
            ("res_orientation", RES_ORIENTATIONS),
            ("layout", LAYOUTS),
        ):
            value = getattr(self, name)
            _expect(value in allowed, "Variant", name, f"be one of {allowed}", value)
        eps = self.sinkhorn_eps
        good = _is_finite(eps) and (0.0 < eps < 1.0 or (self.sinkhorn == "log" and eps == 0.0))
        _expect(good, "Variant", "sinkhorn_eps", "be a float between 0 and 1", eps)
        good = self.sinkhorn == "log" or eps >= LEAST_NORMAL
        _expect(good, "Variant", "sinkhorn_eps", "be a normal number in fp32", eps)
        good = type(self.iterations) is int and 1 <= self.iterations <= MAX_ITERATIONS
        _expect(good, "Variant", "iterations", f"be an int from 1 to {MAX_ITERATIONS}", self.iterations)
        # No fields. Of a learned head: every system that has one puts eps into the root
        constants = Constants(*[getattr(self, name) for name in Constants._fields])
        object.__setattr__(self, "constants", constants)
        object.__setattr__(self, "head_constants", constants._replace(rms_eps_placement="inside"))


def _expect(condition: bool, op: str, argument: str, expected: str, got: object) -> None:
    """As in ``cute_kernels.runtime.checks``, which imports torch: kernels read variants, too.

    Texts are made where they are wanted: torch.compile traces none of a number that is another at another call.
    """
    if not condition:
        raise ValueError(f"{op}: {argument} must {expected}, got {got!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and -math.inf < value < math.inf


VARIANTS: dict[str, Variant] = {
    # DeepSeek-V4's released configuration: hc_mult 4, hc_sinkhorn_iters 20, hc_eps 1e-6 for pre and Sinkhorn,
    # rms_norm_eps 1e-6. The paper's order of normalisation: over the incoming streams last
    "deepseek_v4": Variant(
        rms_eps=1e-6,
        rms_eps_placement="inside",
        pre_eps=1e-6,
        post_mult=2.0,
        sinkhorn="softmax_eps",
        sinkhorn_eps=1e-6,
        iterations=20,
        res_orientation="io",
        layout="streams",
    ),
    # TransformerEngine's mhc functions: torch.finfo(torch.float32).eps in the root, no other eps, channel-major
    # residuals, whose K order phi follows
    "transformer_engine": Variant(
        rms_eps=2.0**-23,
        rms_eps_placement="inside",
        pre_eps=0.0,
        post_mult=2.0,
        sinkhorn="log",
        sinkhorn_eps=0.0,
        iterations=20,
        res_orientation="io",
        layout="channels",
    ),
    # Megatron-LM's main branch, HyperConnectionModule and SinkhornKnopp: norm_eps and the clamp 1e-6; rows first, then
    # columns, and the matrix applied as it is. Its activation-dtype arithmetic is not imitated
    "megatron": Variant(
        rms_eps=1e-6,
        rms_eps_placement="outside",
        pre_eps=0.0,
        post_mult=2.0,
        sinkhorn="exp_clamp",
        sinkhorn_eps=1e-6,
        iterations=20,
        res_orientation="oi",
        layout="streams",
    ),
    # Megatron-LM's dev branch: compute_h_eps and sinkhorn_eps 1e-6 as DeepSeek, the transposed matrix applied, the root
    # as on main. Its rounding of the coefficients to the activations' dtype is not imitated
    "megatron_dev": Variant(
        rms_eps=1e-6,
        rms_eps_placement="outside",
        pre_eps=1e-6,
        post_mult=2.0,
        sinkhorn="softmax_eps",
        sinkhorn_eps=1e-6,
        iterations=20,
        res_orientation="io",
        layout="streams",
    ),
    # TileKernels' mhc_pre with its own defaults, post_mult_value 1.0 and sinkhorn_repeat 10; the paper has 2 and 20
    "tilekernels": Variant(
        rms_eps=1e-6,
        rms_eps_placement="inside",
        pre_eps=1e-6,
        post_mult=1.0,
        sinkhorn="softmax_eps",
        sinkhorn_eps=1e-6,
        iterations=10,
        res_orientation="io",
        layout="streams",
    ),
    # Liger-Kernel's liger_mhc_coeffs: tmax 20, rms_eps and sinkhorn_eps 1e-6, pre_eps 0. Its phi is stored as (K, N):
    # pass the transpose, contiguous
    "liger": Variant(
        rms_eps=1e-6,
        rms_eps_placement="inside",
        pre_eps=0.0,
        post_mult=2.0,
        sinkhorn="softmax_eps",
        sinkhorn_eps=1e-6,
        iterations=20,
        res_orientation="oi",
        layout="streams",
    ),
}


def variant_of(op: str, value: str | Variant) -> Variant:
    """The preset of this name; a Variant as it is.

    Raises:
        TypeError: neither a name nor a Variant.
        ValueError: an unknown name.
    """
    if isinstance(value, Variant):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{op}: variant must be a name or a Variant, got {type(value).__name__}")
    if value not in VARIANTS:
        _expect(False, op, "variant", f"be one of {tuple(VARIANTS)}", value)
    return VARIANTS[value]
