"""The types of the public functions for a checker: tests/test_typing.py runs mypy over it; nothing runs it.

Every `type: ignore` is an error that mypy must find.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import cute_kernels as ck
import jit_cache
from cute_kernels import mhc, models, nn, reduction, scatter


def norms(x: Tensor, weight: Tensor, wants_h: bool) -> None:
    assert_type(ck.rms_norm(x, weight), Tensor)
    assert_type(ck.rms_norm(x, weight, residual=x, return_residual=False), Tensor)
    assert_type(ck.rms_norm(x, weight, residual=x, return_residual=True), tuple[Tensor, Tensor])
    assert_type(ck.rms_norm(x, weight, return_residual=wants_h), Tensor | tuple[Tensor, Tensor])
    assert_type(ck.layer_norm(x, weight, weight, save="output", backend="reference"), Tensor)
    y, h = ck.layer_norm(x, weight, weight, return_residual=True)
    assert_type(h, Tensor)
    ck.rms_norm(x, weight).sum()
    ck.rms_norm(x, weight, return_residual=True).sum()  # type: ignore[attr-defined]
    ck.rms_norm(x, weight, save="outputs")  # type: ignore[call-overload]
    ck.layer_norm(x, weight, backend="torch")  # type: ignore[call-overload]
    assert_type(nn.RMSNorm(64).forward(x), Tensor)
    assert_type(nn.LayerNorm(64).forward(x, x), tuple[Tensor, Tensor])
    nn.RMSNorm(64, save="x")  # type: ignore[arg-type]


def products(a: Tensor, b: Tensor, target: Tensor) -> None:
    assert_type(ck.mm(a, b, out_dtype=torch.float32), Tensor)
    assert_type(ck.bmm(a, b), Tensor)
    assert_type(ck.linear(a, b, activation="gelu"), Tensor)
    ck.linear(a, b, activation="tanh")  # type: ignore[arg-type]
    ck.mm(a, b, out_dtype="bf16")  # type: ignore[arg-type]
    log_prob, entropy = ck.linear_log_prob(a, b, target)
    assert_type(log_prob, Tensor)
    prepared = models.prepare(nn.RMSNorm(64))
    assert_type(prepared, nn.RMSNorm)
    assert_type(models.log_prob(prepared, target, target), tuple[Tensor, Tensor])
    assert_type(models.generate(prepared, target, seeds=target).tokens, Tensor)
    models.generate(prepared, target, seeds=target, cache="x")  # type: ignore[arg-type]
    assert_type(ck.provenance(ck.mm, a, b)[0].shape, tuple[int, ...])
    assert_type(nn.Linear(8, 8, activation="silu").forward(a), Tensor)
    nn.Linear(8, 8, activation="swish")  # type: ignore[arg-type]


def reductions(x: Tensor) -> None:
    assert_type(reduction.softmax(x), Tensor)
    assert_type(reduction.sum(x, (0, 1), keepdim=True), Tensor)
    reduction.mean(x, dim="rows")  # type: ignore[arg-type]
    assert_type(scatter.index_sum(x, x.long(), x), Tensor)
    assert_type(ck.sample(x, seeds=x.long(), positions=x.long(), top_p=0.9), Tensor)


def quantizers(x: Tensor, w: Tensor) -> None:
    q, scale = ck.quantize_rowwise(x, mode="floor", scale_layout="blocked")
    assert_type(ck.quantize_colwise(x), tuple[Tensor, Tensor])
    assert_type(ck.quantize_dual(x), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(ck.quantize_3d_colwise(w, block=(32, 32)), tuple[Tensor, Tensor])
    assert_type(ck.quantize_3d_dual(w, square=True), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(ck.dequantize(q, scale), Tensor)
    assert_type(ck.from_blocked(ck.to_blocked(scale), 4, 4), Tensor)
    ck.quantize_rowwise(x, mode="round")  # type: ignore[arg-type]
    ck.quantize_dual(x, scale_layout="swizzled")  # type: ignore[arg-type]
    q, scale = ck.quantize_dual(x)  # type: ignore[misc]


def hyper_connections(x: Tensor, f: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor) -> None:
    layer_input, post, res = mhc.pre(x, phi, alpha, beta, variant="megatron", precision="fp32")
    assert_type(mhc.expand_combine(f, post, x, res, layout="channels", res_orientation="oi"), Tensor)
    assert_type(mhc.projection(x, phi), tuple[Tensor, Tensor])
    assert_type(mhc.sinkhorn(res, variant="exp_clamp"), Tensor)
    assert_type(mhc.VARIANTS["liger"], mhc.Variant)
    mhc.hyper_connection(x, torch.relu, phi, alpha, beta, variant=mhc.VARIANTS["liger"])
    mhc.aggregate(x, post, layout="rows")  # type: ignore[arg-type]
    mhc.pre(x, phi, alpha, beta, precision="bf16")  # type: ignore[arg-type]
    mhc.expand_combine(f, post, x, res, res_orientation="ii")  # type: ignore[arg-type]
    mhc.sinkhorn(res, variant="deepseek_v4")  # type: ignore[arg-type]
    config = nn.HyperConnectionConfig(64, recompute=True, recompute_layers="optimal")
    assert_type(config.layers_per_block(24), int)
    nn.HyperConnectionConfig(64, recompute=True, recompute_layers="best")  # type: ignore[arg-type]


def invariance(model: torch.nn.Module, x: Tensor) -> None:
    with ck.batch_invariant("warn") as uncovered:
        assert_type(uncovered, Counter[str])
    assert_type(ck.check_invariance(model, x).ok, bool)
    ck.batch_invariant("loose")  # type: ignore[arg-type]

    @ck.batch_invariant()
    def step(x: Tensor) -> Tensor:
        return x

    assert_type(step(x), Tensor)


@jit_cache.compiled
def scale_forward(arch: str, factor: float) -> jit_cache.Program:
    return jit_cache.Program(print, factor)


def cache() -> None:
    assert_type(scale_forward, jit_cache.Compiled)
    assert_type(jit_cache.stats().compiles, int)
    report = jit_cache.prewarm([(scale_forward, ("sm_90a", 2.0))], check=True)
    assert_type(report.ok, bool)
    with jit_cache.recording() as calls:
        assert_type(calls, list[tuple[jit_cache.Compiled, tuple[Any, ...]]])
