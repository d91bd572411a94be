"""What torch's FlopCounterMode counts of this library's operators: their products, as torch counts its own."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"
Shape = Sequence[int]


def teach_counter() -> None:
    """Register the formulas with torch: now if the counter's module is there, else when it is imported.

    That module imports Triton, 0.12 s which most programs do not need. A counter copies the formulas when it is made.
    """
    if COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(COUNTER)
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register
        return spec


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.cute_kernels, name))(formula)


# The arguments are those of the operators, shapes in place of tensors; what a formula does not need is in ``_``


def _gemm(
    a: Shape,
    b: Shape,
    d: Shape,
    z=None,
    bias=None,
    valid_k=None,
    activation=None,
    accumulate=False,
    trans_a=False,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * math.prod(d) * a[-2 if trans_a else -1]


def _log_prob(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _log_prob_backward(dlog_prob, dentropy, x: Shape, weight: Shape, target, statistics, dx, dweight, *_, **__) -> int:
    """The logits are computed again, as the scores of torch's fused attention, which it counts, too."""
    return _log_prob(x, weight) * (1 + (dx is not None) + (dweight is not None))


def _projection(x: Shape, phi: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * phi[0]


def _projection_backward(
    x: Shape,
    phi: Shape,
    norm_weight,
    dH,
    dmean_square,
    dout,
    res,
    dlayer,
    pre,
    dx,
    dphi,
    dnorm_weight,
    n: int,
    *_,
    **__,
) -> int:
    """With a gradient of the residual also its product with res."""
    products = (dx is not None) + (dphi is not None or dnorm_weight is not None)
    return _projection(x, phi) * products + (0 if dout is None else 2 * math.prod(x) * n)


def _expand_combine(f, bias, post: Shape, x: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * post[-1]


def _expand_combine_backward(dout, f, bias, post: Shape, x: Shape, res, seed, dx, df, dpost, dres, *_, **__) -> int:
    return _expand_combine(f, bias, post, x) * ((dx is not None) + (dres is not None))


FORMULAS = {
    "gemm": _gemm,
    "log_prob_forward": _log_prob,
    "log_prob_backward": _log_prob_backward,
    "mhc_projection_forward": _projection,
    "mhc_projection_backward": _projection_backward,
    "mhc_pre_forward": _projection,
    "mhc_expand_combine_forward": _expand_combine,
    "mhc_expand_combine_backward": _expand_combine_backward,
}
