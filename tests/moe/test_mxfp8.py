"""Experts whose weights are mxfp8, without a GPU: bad arguments, the kernels' path over fakes."""

import pytest
import torch

from cute_kernels import dequantize, moe
from cute_kernels.runtime.launches import observed
from tests.fakes import fake_kernels
from tests.moe.cases import BF16, assert_same_bits
from tests.moe.test_kernel_mxfp8 import (  # noqa: F401
    LAYERS,
    make,
    run,
    test_a_layer_has_the_bits_of_dequantized_weights,
    test_a_token_does_not_know_its_batch,
    test_compile,
)


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("layer", LAYERS)
def test_the_reference(layer, generator):
    x, routing, up, down, options = make(33, layer, generator)
    options["backend"] = "reference"
    wanted = moe.experts(x, routing, dequantize(*up), dequantize(*down), **options)
    assert_same_bits(run(x, routing, up, down, options), wanted)


def test_no_row_of_zeros_behind_an_expert_s(generator):
    """They would take tiles of their own."""
    x, routing, up, down, options = make(5, "swiglu", generator)
    with observed() as launches:
        run(x, routing, up, down, options)
    products = [(launch.kernel, shape[1]) for launch, shape, _ in launches]
    assert products == [("grouped_rows_mxfp8", 10)] * 2


INDICES, WEIGHTS = torch.zeros(6, 2, dtype=torch.int32), torch.zeros(6, 2)
ROUTING, X = moe.Routing(INDICES, WEIGHTS), torch.zeros(6, 32, dtype=BF16)
UP, DOWN = (torch.zeros(8, n, 32).to(torch.float8_e4m3fn) for n in (64, 32))
SCALES = {
    name: torch.zeros(8, n, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for name, n in (("gate_up_scale", 64), ("down_scale", 32))
}
BAD = [
    ({"down_scale": None}, ValueError, "down_scale must be given where the other weight has scales, got None"),
    ({"gate_up_scale": None}, ValueError, "gate_up_scale must be given where the other weight has scales"),
    ({"transposed": True}, ValueError, "transposed must be False with scales, got True"),
    ({"x": X.half()}, TypeError, "x must have dtype bfloat16, got torch.float16"),
    ({"gate_up": UP.to(BF16)}, TypeError, "gate_up must have dtype float8_e4m3fn, got torch.bfloat16"),
    ({"down": DOWN[:, :16]}, ValueError, r"down must have shape \(E, N, K\) of multiples of 32"),
    ({"down": DOWN.mT}, ValueError, "down must be contiguous, got strides"),
    ({"down": DOWN[:3]}, ValueError, r"down_scale must have shape \(3, 32, 1\)"),
    ({"gate_up_scale": SCALES["down_scale"]}, ValueError, r"gate_up_scale must have shape \(8, 64, 1\)"),
    ({"down_scale": SCALES["down_scale"].float()}, TypeError, "down_scale must have dtype float8_e8m0fnu"),
    ({"activation": "silu"}, ValueError, r"gate_up must have shape \(8, 32, 32\)"),
    (
        {"x": X.clone().requires_grad_()},
        ValueError,
        "gate_up_scale must be None where a gradient is wanted, got a tensor",
    ),
    (
        {"routing": moe.Routing(INDICES, WEIGHTS.clone().requires_grad_())},
        ValueError,
        "gate_up_scale must be None where a gradient is wanted",
    ),
]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_arguments(changes, error, message, backend):
    """The same of the kernels' path, after a good call, and of the reference."""
    good = {"x": X, "routing": ROUTING, "gate_up": UP, "down": DOWN, **SCALES}
    moe.experts(**good)
    with pytest.raises(error, match=f"experts: {message}"):
        moe.experts(**good | changes, backend=backend)
