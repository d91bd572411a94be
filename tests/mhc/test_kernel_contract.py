"""Only CUDA tensors show these: errors at the border of devices, no host synchronisation, no fallback, memory."""

from dataclasses import replace

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.mhc import reference
from cute_kernels.mhc.config import splits_of
from tests.mhc.cases import (
    BF16,
    OPERATIONS,
    Case,
    call,
    check,
    differentiate,
    make_inputs,
    make_upstream,
    oracle,
    product_margins,
)
from tests.norm.cases import strided

FULL = Case(4, 64, (130,), norm_weight=True, bias=True)
LARGE = Case(4, 1280, (4096,), norm_weight=True, bias=True)
MIB = 2**20


def test_operands_on_another_device(generator):
    """CPU and CUDA mixed, in each position; nothing is moved."""
    t = make_inputs(FULL, generator)
    for op, (inputs, _) in OPERATIONS.items():
        for name in inputs[1:]:
            call(mhc, op, FULL, t)
            odd = f"{inputs[0]} must be on cpu, got cuda:0" if name == "x" else f"{name} must be on cuda:0, got cpu"
            with pytest.raises(ValueError, match=f"^{op}: {odd}$"):
                call(mhc, op, FULL, t | {name: t[name].detach().cpu()})
    for name in ("phi", "bias"):
        mixed = {key: tensor.detach().cpu() for key, tensor in t.items()} | {name: t[name]}
        with pytest.raises(ValueError, match=f"^hyper_connection: {name} must be on cpu, got cuda:0$"):
            call(mhc, "hyper_connection", FULL, mixed)
    with pytest.raises(ValueError, match="^expand_combine: seed must be on cuda:0, got cpu$"):
        seed = torch.zeros(1, dtype=torch.int64)
        mhc.expand_combine(t["f"], t["post"], t["x"], t["res"], dropout_p=0.5, seed=seed)


def test_errors_come_each_time_and_spoil_nothing(generator):
    """A refused call leaves no plan behind, and a good call no licence for bad ones that look like it."""
    t, upstream = make_inputs(FULL, generator), make_upstream("pre", FULL, generator)
    exact = oracle("pre", FULL, t, upstream)
    x, phi = t["x"].detach(), t["phi"].detach()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^projection: phi must have shape \(24, 256\) or \(4, 256\), as x has "):
            mhc.projection(x, phi[:23])
        with pytest.raises(TypeError, match="^projection: x must have dtype"):
            mhc.projection(x.double(), phi)
        with pytest.raises(ValueError, match="^projection: precision must be one of"):
            mhc.projection(x, phi, precision="bf16")
        with pytest.raises(ValueError, match="^aggregate: x must have contiguous last two dimensions"):
            mhc.aggregate(x[..., ::2], t["pre"])
        with pytest.raises(ValueError, match="^aggregate: x must have leading dimensions that collapse to rows"):
            mhc.aggregate(x.view(2, 65, 4, 64).transpose(0, 1), t["pre"].detach().view(2, 65, 4).transpose(0, 1))
        with pytest.raises(ValueError, match="^aggregate: layout must be one of"):
            mhc.aggregate(x, t["pre"], layout="rows")
        with pytest.raises(TypeError, match="^expand_combine: f must have dtype torch.bfloat16"):
            mhc.expand_combine(t["f"].float(), t["post"], x, t["res"])
        with pytest.raises(ValueError, match="^expand_combine: dropout_p must be a float in"):
            mhc.expand_combine(t["f"], t["post"], x, t["res"], dropout_p=1.0)
        with pytest.raises(ValueError, match="^sinkhorn: iterations must be an int from 1 to 100, got 0$"):
            mhc.sinkhorn(t["logits"], iterations=0)
        found = differentiate(mhc, "pre", FULL, t, upstream)
        check(found, exact, margins=product_margins("pre", FULL, exact, "tf32"))


@pytest.mark.parametrize("op", OPERATIONS)
def test_reference_backend_on_cuda(op, generator):
    t = make_inputs(FULL, generator)
    for one, two in zip(call(mhc, op, FULL, t, backend="reference"), call(reference, op, FULL, t), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("case", [FULL, Case(4, 13, (130,), variant="transformer_engine")], ids=str)
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "hyper_connection"])
def test_cuda_tensors_never_take_a_fallback(op, case, generator):
    """Neither a product, a sum nor an elementwise operator of torch runs, aligned or not, forward and backward."""

    class Refuse(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.name().partition("::")[2].partition(".")[0]
            allowed = ("empty", "new_empty", "empty_like", "view", "_unsafe_view", "as_strided", "alias", "detach")
            allowed += ("fill_", "zero_", "full", "zeros", "new_zeros", "view_as", "expand")
            assert name in allowed or name.startswith("mhc_"), name
            return function(*args, **(kwargs or {}))

    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    with Refuse():
        differentiate(mhc, op, case, t, upstream)


@pytest.mark.parametrize("case", [replace(FULL, dropout_p=0.3)], ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_host_does_not_wait(op, case, generator):
    """Not for a seed on the device, either."""
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = differentiate(mhc, op, case, t, upstream)
        if op == "expand_combine":
            seed = torch.zeros(1, dtype=torch.int64, device="cuda")
            for given in (seed, None):
                mhc.expand_combine(t["f"], t["post"], t["x"], t["res"], dropout_p=0.5, seed=given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# Memory


def peak_of(function):
    """(result, most bytes that were allocated at once beside those before)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = function()
    return result, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("case", [LARGE], ids=str)
@pytest.mark.parametrize("op", ["projection", "aggregate", "expand_combine", "contract", "pre"])
@pytest.mark.parametrize("gap, offset", [(0, 0), (1, 0), (8, 0), (8, 1)])
def test_strided_inputs_are_not_copied(gap, offset, op, case, generator):
    t = {name: tensor.detach() for name, tensor in make_inputs(case, generator).items()}
    if gap or offset:
        for name in ("x", "f"):
            t[name] = strided(t[name].flatten(1), gap, offset).unflatten(1, t[name].shape[1:])
    call(mhc, op, case, t)
    outputs, peak = peak_of(lambda: call(mhc, op, case, t))
    partials = 4 * splits_of(t["phi"].shape[1]) * 25 * 4096 if gap % 8 or offset else 0  # clusters need none
    coefficients = 4 * (2 * 24 + 1) * 4096
    scratch = partials + coefficients if op in ("projection", "pre") else 0
    assert peak <= sum(output.nbytes for output in outputs) + scratch + MIB


@pytest.mark.parametrize("case", [LARGE], ids=str)
@pytest.mark.parametrize("op", ["hyper_connection"])
def test_memory_of_the_backward(op, case, generator):
    """One gradient of x; beside it the sublayer's, partial sums of phi's, coefficients: no second one, no fp32 copy."""
    t = make_inputs(case, generator)
    upstream = make_upstream(op, case, generator)["out"]
    leaves = [t[name] for name in OPERATIONS[op][0]]

    def forward():
        weights = {"norm_weight": t["norm_weight"], "bias": t["bias"]}
        return mhc.hyper_connection(t["x"], lambda h: h.view_as(h), t["phi"], t["alpha"], t["beta"], **weights)

    torch.autograd.grad(forward(), leaves, upstream)
    out = forward()
    gradients, peak = peak_of(lambda: torch.autograd.grad(out, leaves, upstream))
    x, f = t["x"], t["f"]
    assert x.dtype is BF16
    partials = 4 * -(-4096 // 512) * t["phi"].numel()  # fp32, a chunk of 512 tokens each
    coefficients = 4 * 4096 * 24 * 4
    allowed = x.nbytes + f.nbytes + partials + coefficients + sum(g.nbytes for g in gradients[1:]) + MIB
    assert peak <= allowed and allowed < 1.75 * x.nbytes
    print(f"peak of the backward: {peak / MIB:.1f} MiB; x {x.nbytes / MIB:.1f} MiB")


def test_what_is_saved(generator):
    """x itself, H, mean squares and coefficients, and the sublayer's result: no second residual."""
    t = make_inputs(LARGE, generator)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        call(mhc, "pre", LARGE, t)
    own = {tensor.data_ptr() for tensor in t.values()}
    others = [s for s in saved if s.data_ptr() not in own]
    assert sum(s.nbytes for s in others) <= 4 * 4096 * (24 + 1 + 4 + 16)
