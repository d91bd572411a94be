"""The tests of the hyper-connections themselves: their data, their oracle, their bounds."""

import pytest
import torch

from cute_kernels.mhc.checks import num_coefficients
from cute_kernels.mhc.variants import Variant
from tests.mhc.cases import (
    BF16,
    STREAMS,
    Case,
    check,
    make_inputs,
    make_upstream,
    oracle,
    run_all,
)


@pytest.mark.parametrize("wrong", ["one percent", "nan", "one element", "one step", "biased"])
def test_the_check_fails_on_a_wrong_result(wrong, generator):
    case = Case(4, 64, (40,))
    inputs = make_inputs(case, generator)
    upstream = make_upstream("aggregate", case, generator)
    exact = oracle("aggregate", case, inputs, upstream)
    y = exact["layer_input"].value.to(BF16)
    check({"layer_input": y}, exact)
    if wrong == "one percent":
        y = (y.float() * 1.01).to(BF16)
    elif wrong == "nan":
        y[3, 5] = float("nan")
    elif wrong == "one element":
        y[3, 5] += 0.1
    elif wrong == "one step":
        y[3, 5] = torch.nextafter(torch.nextafter(y[3, 5], 9e9 * y[3, 5]), 9e9 * y[3, 5])
    else:  # fp32, each element within the bound, all off one way
        y = exact["layer_input"].value.float()
        check({"layer_input": y}, exact)
        noise = (exact["layer_input"].peer.double() - exact["layer_input"].value).abs().max()
        y = y + 7 * noise.float()
    with pytest.raises(AssertionError, match=r"times the bound|rms error" if wrong != "biased" else "rms error"):
        check({"layer_input": y}, exact)
    check({"layer_input": y}, exact, margins={"layer_input": 1.0}) if wrong != "nan" else None


def test_the_data_has_no_symmetry(generator):
    """Gradients of all inputs, none of them 0: a result that ignores an input cannot pass."""
    for op, _, exact in run_all(Case(norm_weight=True, bias=True), generator):
        for name, t in exact.items():
            assert t.value.norm() > 0 and t.value.isfinite().all(), (op, name)
    logits = make_inputs(Case(tokens=(100,)), generator)["logits"]
    assert 0.5 < logits.std() < 2.0


def test_gaps_hold_nan(generator):
    inputs = make_inputs(Case(4, 16, (5,), gap=3), generator)
    for name, stride in (("x", 67), ("f", 19)):
        t = inputs[name]
        assert t.stride(0) == stride and t.isfinite().all()
        memory = torch.as_strided(t.detach(), (5 * stride,), (1,), 0)
        assert memory.isnan().sum() == 15


def test_number_of_coefficients():
    assert [num_coefficients(n) for n in STREAMS] == [3, 8, 24, 80]
    assert isinstance(Case().preset, Variant)
