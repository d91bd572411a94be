"""linear_log_prob without a GPU: the reference, bad arguments, and its kernels compiled for both architectures."""

import contextlib
import itertools
import math
import re
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import linear_log_prob
from cute_kernels.log_prob import launch, prewarm
from cute_kernels.log_prob.config import candidates, vocabulary_tile
from tests.fakes import fake_kernels
from tests.gemm.cases import BF16, FP16, check
from tests.log_prob.cases import IGNORED, Case, check_masked, make_inputs, oracle, run
from tests.marks import sample_for
from tests.norm.cases import name_of
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in

# The reference


@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"scale": 0.5, "softcap": 3.0}], ids=str)
def test_reference_against_the_oracle(options, generator):
    """The oracle has the gradients written out; torch's autograd finds the reference's."""
    case = replace(Case(40, 129, 64, temperature=0.7), **options)
    inputs = make_inputs(case, generator)
    for leaf in ("x", "weight", "g", "h"):
        setattr(inputs, leaf, getattr(inputs, leaf).detach().double())
    inputs.x.requires_grad_(), inputs.weight.requires_grad_()
    found, truth = run(linear_log_prob, case, inputs), oracle(case, inputs)
    for name, value in {**truth.values, **{n: exact.value for n, exact in truth.gradients.items()}}.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-13), name


def test_reference_against_torch(generator):
    """Negated it is torch's cross entropy, and with all its gradients."""
    case = Case(40, 129, 64)
    inputs = make_inputs(case, generator)
    x, weight = inputs.x.detach().float(), inputs.weight.detach().float()
    loss = F.cross_entropy(x @ weight.t(), inputs.target, reduction="none", ignore_index=IGNORED)
    log_prob, entropy = linear_log_prob(inputs.x, inputs.weight, inputs.target)
    assert torch.allclose(-log_prob, loss, rtol=1e-5, atol=1e-5)
    wanted = torch.distributions.Categorical(logits=x @ weight.t()).entropy()
    counts = inputs.target != IGNORED
    assert torch.allclose(entropy, wanted * counts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 7e-3, 1e-6])
def test_reference_is_as_exact_at_any_temperature(temperature, generator):
    case = Case(100, 129, 64, temperature=temperature, exact=True)
    inputs = make_inputs(case, generator)
    found, truth = run(linear_log_prob, case, inputs), oracle(case, inputs)
    for name, value in truth.values.items():
        assert ((found[name].double() - value).abs() <= truth.bounds[name]).all(), name
    check({name: found[name] for name in ("dx", "dw")}, truth.gradients)


def test_reference_gradcheck(generator):
    x = torch.randn(5, 8, generator=generator, dtype=torch.double, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator, dtype=torch.double, requires_grad=True)
    target = torch.tensor([0, 10, 3, IGNORED, 7])
    assert torch.autograd.gradcheck(lambda x, w: linear_log_prob(x, w, target, temperature=1.3), (x, weight))


def test_reference_adds_to_main_grad(generator):
    inputs = make_inputs(Case(40, 129, 64), generator)
    wanted = run(linear_log_prob, Case(40, 129, 64), inputs)["dw"]
    inputs.weight.main_grad = torch.ones(129, 64)
    assert "dw" not in run(linear_log_prob, Case(40, 129, 64), inputs)
    assert torch.allclose(inputs.weight.main_grad, 1 + wanted.float(), rtol=1e-2, atol=1e-2)


def test_what_is_ignored(generator):
    """Only that number among int32 targets; its gradient is 0 whatever its logits are."""
    x, weight = torch.randn(3, 8, generator=generator, requires_grad=True), torch.randn(5, 8, generator=generator)
    x, target = x.detach().to(BF16), torch.tensor([0, 1, 2], dtype=torch.int32)
    weight = weight.to(BF16)
    assert (linear_log_prob(x, weight, target, ignore_index=2**32)[0] < 0).all()
    x[1] = float("nan")
    x.requires_grad_()
    log_prob, _ = linear_log_prob(x, weight, target, ignore_index=1)
    (dx,) = torch.autograd.grad(log_prob.sum(), x)
    assert log_prob[1] == 0 and (dx[1] == 0).all() and dx.isfinite().all()


@pytest.mark.parametrize("low", ["finfo.min", "-inf"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-2])
def test_reference_with_a_masked_vocabulary(dtype, low, temperature, generator):
    case = Case(40, 300, 64, dtype, temperature=temperature)
    columns = torch.arange(case.v)
    masked = (columns % 3 == 1) | (columns >= 250)
    lowest = torch.finfo(dtype).min if low == "finfo.min" else -math.inf
    check_masked(linear_log_prob, case, make_inputs(case, generator), masked, lowest)


# Bad arguments


def good() -> dict:
    return {
        "x": torch.zeros(4, 64, dtype=BF16),
        "weight": torch.zeros(32, 64, dtype=BF16),
        "target": torch.zeros(4, dtype=torch.int64),
    }


BAD = {
    "x is a list": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    "fp32": ({"x": torch.zeros(4, 64)}, TypeError, "x must have dtype bfloat16, float16, got torch.float32"),
    "no dimension": (
        {"x": torch.zeros((), dtype=BF16)},
        ValueError,
        "x must have at least one dimension, got shape ()",
    ),
    "other dtypes": (
        {"weight": torch.zeros(32, 64, dtype=torch.float16)},
        TypeError,
        "weight must have dtype torch.bfloat16, got torch.float16",
    ),
    "a vector": (
        {"weight": torch.zeros(64, dtype=BF16)},
        ValueError,
        "weight must be a matrix (V, K), got shape (64,)",
    ),
    "other widths": (
        {"weight": torch.zeros(32, 72, dtype=BF16)},
        ValueError,
        "weight must have 64 columns, as x has, got shape",
    ),
    "no column": (
        {"weight": torch.zeros(0, 64, dtype=BF16)},
        ValueError,
        "weight must have at least one row, got shape",
    ),
    "another device": (
        {"weight": torch.zeros(32, 64, dtype=BF16, device="meta")},
        ValueError,
        "weight must be on cpu, got meta",
    ),
    "targets in fp32": (
        {"target": torch.zeros(4)},
        TypeError,
        "target must have dtype int64, int32, got torch.float32",
    ),
    "other tokens": (
        {"target": torch.zeros(5, dtype=torch.int64)},
        ValueError,
        "target must have shape (4,), got (5,)",
    ),
    "a bool": ({"ignore_index": True}, TypeError, "ignore_index must be an int, got True of type bool"),
    "70 bits": (
        {"ignore_index": 2**70},
        ValueError,
        "ignore_index must be an int of 64 bits, got 11805",
    ),
    "a string": ({"temperature": "1"}, TypeError, "temperature must be a float, got '1' of type str"),
    "zero": ({"temperature": 0.0}, ValueError, "temperature must be between 1e-06 and 1000000.0, got 0.0"),
    "NaN": ({"temperature": float("nan")}, ValueError, "temperature must be between 1e-06 and 1000000.0, got nan"),
    "a scale of 0": ({"scale": 0.0}, ValueError, "scale must be between 1e-06 and 1000000.0, got 0.0"),
    "a softcap below 0": ({"softcap": -1.0}, ValueError, "softcap must be 0 or between 1e-06 and 1000000.0, got -1.0"),
    "a softcap of text": ({"softcap": "1"}, TypeError, "softcap must be a float, got '1' of type str"),
    "a backend": ({"backend": "cuda"}, ValueError, "backend must be None or 'reference', got 'cuda'"),
}


@pytest.mark.parametrize("path", ["reference", "kernels"])
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name, path):
    """Cold, and after a good call."""
    changes, error, message = BAD[name]
    with contextlib.nullcontext([]) if path == "reference" else fake_kernels() as jobs:
        for _ in range(2):
            with pytest.raises(error) as caught:
                linear_log_prob(**(good() | changes))
            assert str(caught.value).startswith(f"linear_log_prob: {message}")
            count = len(jobs)
            linear_log_prob(**good())
            assert len(jobs) == (2 if path == "kernels" else 0) and count in (0, len(jobs))


def test_rows_off_16_bytes():
    """The kernels' alone: no copies, no slower path."""
    storage = torch.zeros(33, 144, dtype=BF16)
    for name, t in (
        ("x", storage[:4, 1:65]),
        ("x", storage[:4, :128:2]),
        ("x", torch.zeros(4, 60, dtype=BF16)),
        ("weight", storage[:32, 1:65]),
        ("weight", storage[:32, :128:2]),
    ):
        arguments = good() | {name: t}
        if t.shape[1] == 60:
            arguments["weight"] = torch.zeros(32, 64, dtype=BF16)[:, :60]
        with fake_kernels(), pytest.raises(ValueError) as caught:
            linear_log_prob(**arguments)
        message = f"linear_log_prob: {name} must have rows that start on 16 bytes, got shape {tuple(t.shape)}, strides"
        assert str(caught.value).startswith(message)


def test_the_statistics_of_some_tokens_at_a_time(monkeypatch, generator):
    """Those of the ones before are gone when the next ones are allocated."""
    seen, multiply, of = [], launch._multiply, launch.LogitsLaunches.of

    def spied(chosen, x, weight, major, target, statistics, *rest):
        seen.append(weakref.ref(statistics))
        multiply(chosen, x, weight, major, target, statistics, *rest)

    def before_they_are_allocated(*arguments):
        assert all(reference() is None for reference in seen)
        return of(*arguments)

    monkeypatch.setattr(launch.LogitsLaunches, "of", before_they_are_allocated)
    monkeypatch.setattr(launch, "_multiply", spied)
    monkeypatch.setattr(launch, "STATISTICS_TOKENS", 100)
    inputs = make_inputs(Case(300, 264, 64), generator)
    with fake_kernels(), torch.no_grad():
        linear_log_prob(inputs.x, inputs.weight, inputs.target)
    assert len(seen) == 3


# The kernels


def builders(arch: str) -> list[tuple]:
    """All that calls of bf16 with a row-major weight ask for."""
    with fake_kernels(arch) as jobs:
        for m in (40, 100, 300):
            for entropy, keep in itertools.product((True, False), repeat=2):
                case = Case(m, 264, 64, entropy=entropy, keep=keep)
                run(linear_log_prob, case, make_inputs(case, torch.Generator()))
    return [job for job in dict.fromkeys(jobs) if "log_prob" in job[0].__name__]


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_kernels_compile(arch):
    """No spills, no local memory; with the weight's columns, int32 targets and a softcap 24 bytes at most."""
    found = builders(arch)
    assert len(found) == 3 + 4 * len(set(candidates(arch)))
    for builder, (_, spec, *config) in sample_for(arch, found):
        check_record(builder.obtain(arch, spec, *config).record)
        other = spec._replace(target=torch.int32)
        if builder.__name__ != "log_prob":
            other = other._replace(has_softcap=True)
        if "weight_major" in spec._fields:
            other = other._replace(weight_major="n")
        record = builder.obtain(arch, other, *config).record
        if builder.__name__ == "log_prob_gradient" and arch == "sm_90a" and config[0].ping_pong:  # 168 registers
            assert all(kernel["stack_bytes"] <= 24 for kernel in record["kernels"])
            record = record | {"kernels": [kernel | {"stack_bytes": 0} for kernel in record["kernels"]]}
        check_record(record)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_precompiled_is_what_calls_ask_for(arch):
    assert set(prewarm.specializations(arch)) == set(builders(arch))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_tile_of_the_vocabulary_divides_the_tiles_of_kernels(arch):
    """All add up the same columns first."""
    assert all(config.tile[1] % vocabulary_tile(arch) == 0 for config in candidates(arch))


SPECS = {
    "statistics": 'StatisticsSpec(torch.bfloat16, torch.int64, "k")',
    "gradient": 'GradientSpec(torch.bfloat16, torch.int64, "k", True, True)',
}


@pytest.mark.exhaustive
def test_the_instructions_that_are_meant(tmp_path):
    """Tensor cores fed by TMA; of the statistics no exponential but to the base of 2, and nothing stored by TMA."""
    program = """
import torch
from cute_kernels.log_prob.config import GradientSpec, StatisticsSpec, candidates
from cute_kernels.log_prob.kernel import log_prob_gradient, log_prob_statistics

log_prob_{kernel}("{arch}", {spec}, candidates("{arch}")[-1])
"""
    for arch, product in (("sm_90a", "wgmma.mma_async"), ("sm_100a", "tcgen05.mma")):
        for kernel, spec in SPECS.items():
            folder = tmp_path / arch / kernel
            folder.mkdir(parents=True)
            compile_in(folder, program.format(arch=arch, kernel=kernel, spec=spec))
            (text,) = kernels_in(folder)
            assert product in text and "cp.async.bulk.tensor" in text and "ex2.approx" in text
            stores = "cp.async.bulk.tensor.2d.global.shared" in text
            assert stores == (kernel == "gradient") and not re.search(r"\b(red|atom)\.", text)


def test_the_schemas_name_what_is_written():
    for operator, outputs in (
        (launch.log_prob_forward.registered, {"log_prob", "entropy", "row_statistics", "logits"}),
        (launch.log_prob_backward.registered, {"logits", "dx", "dweight"}),
    ):
        arguments = operator._schema.arguments
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == outputs and not operator._schema.returns
