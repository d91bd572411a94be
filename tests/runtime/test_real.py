"""Every argument that is a number takes every real one: ints, numpy's scalars, fractions. Keys hold floats alone."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from cute_kernels import layer_norm, linear_log_prob, mhc, rms_norm
from cute_kernels.mhc import reference as mhc_reference
from cute_kernels.nn import HyperConnection, HyperConnectionConfig, LayerNorm, RMSNorm, TransformerConfig
from cute_kernels.nn.recompute import RecomputeManager
from cute_kernels.norm import reference as norm_reference
from cute_kernels.runtime.real import as_float
from tests.fakes import fake_kernels

BF16, FP32 = torch.bfloat16, torch.float32
HALF = [np.float16(0.5), np.float32(0.5), np.float64(0.5), Fraction(1, 2)]
ONE = [1, np.int64(1), np.float32(1), np.float64(1), Fraction(1)]


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, dtype=FP32).to(dtype).requires_grad_()


def norms(eps, weight_offset):
    x, weight = randn(6, 64), randn(64)
    return [
        function(x, weight, eps=eps, weight_offset=weight_offset)
        for function in (rms_norm, layer_norm, norm_reference.rms_norm, norm_reference.layer_norm)
    ]


def modules(eps, weight_offset):
    x = randn(6, 64)
    manager = RecomputeManager()
    made = [kind(64, eps, weight_offset=weight_offset) for kind in (RMSNorm, LayerNorm)]
    changed = RMSNorm(64)
    changed.eps, changed.weight_offset = eps, weight_offset
    y = changed.recomputed(x * 1, manager)
    end = y * 1
    manager.end_block(end)
    end.float().sum().backward()
    return [*(module(x) for module in made), end, x.grad]


def log_prob(temperature, _):
    x, weight = randn(6, 64), randn(48, 64)
    return [*linear_log_prob(x, weight, torch.arange(6), temperature=temperature)]


def sinkhorn(eps, _):
    logits = randn(6, 4, 4, dtype=FP32)
    sinkhorns = (mhc.sinkhorn, mhc_reference.sinkhorn)
    return [function(logits, variant="exp_clamp", eps=eps) for function in sinkhorns]


def dropout(dropout_p, _):
    f, post, x, res = randn(6, 16), randn(6, 4, dtype=FP32), randn(6, 4, 16), randn(6, 4, 4, dtype=FP32)
    phi, alpha, beta = (randn(*shape, dtype=FP32) for shape in ((24, 64), (3,), (24,)))
    found = []
    for module in (mhc, mhc_reference):
        found.append(module.expand_combine(f, post, x, res, dropout_p=dropout_p, seed=3))
        found.append(module.hyper_connection(x, torch.tanh, phi, alpha, beta, dropout_p=dropout_p, seed=3))
    found.append(mhc_reference.dropout_mask(3, 6, 64, dropout_p, torch.device("cpu")))
    module = HyperConnection(HyperConnectionConfig(16))
    torch.manual_seed(1)
    layer_input, mix = module(x)
    found.append(module.combine(layer_input, x, mix, dropout_p=dropout_p))
    return found


ARGUMENTS = {
    "norms": (norms, ONE, 1.0),
    "norm modules": (modules, ONE, 1.0),
    "temperature": (log_prob, [2, np.float32(2), np.float64(2)], 2.0),
    "sinkhorn": (sinkhorn, HALF, 0.5),
    "dropout": (dropout, HALF, 0.5),
    "no dropout": (dropout, [0, np.float32(0)], 0.0),
}


@pytest.mark.parametrize("path", ["reference", "kernels"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_real_number_is_taken(name, path):
    """With the bits, the kernels and the keys of the float; before a float of this value was met, and after."""
    function, numbers, number = ARGUMENTS[name]
    jobs = []

    def run(number):
        torch.manual_seed(0)
        if path == "reference":
            return function(number, number)
        with fake_kernels() as found:
            results = function(number, number)
        jobs.append(found)
        return results

    before = [run(number) for number in numbers]
    wanted = run(number)
    for results in (*before, *map(run, numbers)):
        assert all(map(torch.equal, results, wanted))
    for found in jobs:
        assert found == jobs[-1]
        for argument in itertools.chain.from_iterable(arguments for _, arguments in found):
            assert not isinstance(argument, (np.generic, Fraction))


@pytest.mark.parametrize("number", HALF, ids=repr)
def test_fields_hold_floats(number):
    """Those of configs and variants, which are keys."""
    variant = dataclasses.replace(
        mhc.VARIANTS["deepseek_v4"], rms_eps=number, pre_eps=number, post_mult=number, sinkhorn_eps=number
    )
    connections = HyperConnectionConfig(64, init_gating_factor=number, eps=number, variant=variant)
    model = TransformerConfig(8, 64, 1, 4, 64, 16, rope_theta=number, norm_eps=number, dropout_p=number)
    for config, names in (
        (variant, ("rms_eps", "pre_eps", "post_mult", "sinkhorn_eps")),
        (connections, ("init_gating_factor", "eps")),
        (connections.resolved_variant(), ("rms_eps",)),
        (model, ("rope_theta", "norm_eps", "dropout_p")),
        (RMSNorm(64, number, weight_offset=number), ("eps", "weight_offset")),
    ):
        for name in names:
            assert type(getattr(config, name)) is float and getattr(config, name) == 0.5, name


def test_what_is_no_real_number():
    for value in (True, np.bool_(True), None, "1", 1j, np.complex64(1), torch.tensor(1.0), np.ones(1), 10**400):
        assert as_float(value) is value
    assert type(as_float(np.float32(1))) is type(as_float(np.int8(1))) is type(as_float(1)) is float


@pytest.mark.parametrize("number", [1, np.float32(1), np.float64(1)], ids=repr)
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_traced_module_has_them_as_constants(kind, number):
    """Dynamo makes a tensor of a numpy scalar that it meets in a trace; a module has none."""
    torch._dynamo.reset()
    x = randn(6, 64)
    with fake_kernels():
        found = torch.compile(kind(64, number), fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(found, kind(64, 1.0)(x))


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_a_traced_call_takes_an_int(function):
    torch._dynamo.reset()
    x, weight = randn(6, 64), randn(64)
    with fake_kernels():
        compiled = torch.compile(lambda x, weight, eps: function(x, weight, eps=eps), fullgraph=True, backend="eager")
        for eps in (1, 2, 3.0):
            assert torch.equal(compiled(x, weight, eps), function(x, weight, eps=float(eps)))
