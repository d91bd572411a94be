"""Experts whose weights are mxfp8, on a GPU: the bits of the layer with the dequantized ones.

Most of these run on the CPU, too, over fake kernels: test_mxfp8.py.
"""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import dequantize, moe, quantize_rowwise
from tests.gemm.cases import here
from tests.moe.cases import BF16, assert_same_bits, randn

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(here() != "sm_90a", reason="needs a Hopper GPU")]
LAYERS = {
    "swiglu": {},
    "oai": {"activation": "swiglu_oai", "interleaved": True, "biased": True},
    "silu": {"activation": "silu", "biased": True},
    "function": {"activation": F.relu},
    "segments": {"segmented": True},
}


def quantized(experts, n, k, generator):
    """Elements (E, N, K) and scales (E, N, K / 32)."""
    found = quantize_rowwise(randn(experts * n, k, generator=generator, dtype=BF16) * k**-0.5)
    return tuple(t.view(experts, n, -1) for t in found)


def make(tokens, layer, generator, experts=6, hidden=96, width=64):
    """x, a routing, weights, scales, and the options of a layer; 2 of the experts."""
    options = dict(LAYERS[layer])
    columns = width if options.get("activation", "swiglu") != "swiglu" and layer != "oai" else 2 * width
    up, down = quantized(experts, columns, hidden, generator), quantized(experts, hidden, width, generator)
    if options.pop("biased", False):
        sizes = {"gate_up_bias": columns, "down_bias": hidden}
        options |= {name: randn(experts, n, generator=generator, dtype=BF16) for name, n in sizes.items()}
    if options.pop("segmented", False):
        options["segments"] = torch.tensor([tokens // 3, tokens], dtype=torch.int32, device=generator.device)
    x = randn(tokens, hidden, generator=generator, dtype=BF16)
    return x, moe.route(randn(tokens, experts, generator=generator), 2), up, down, options


def run(x, routing, up, down, options):
    scales = {"gate_up_scale": up[1], "down_scale": down[1]}
    return moe.experts(x, routing, up[0], down[0], **scales, **options)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", [1, 33, 500])
def test_a_layer_has_the_bits_of_dequantized_weights(tokens, layer, generator):
    """For few rows of an expert, and for so many that the weights are dequantized before."""
    x, routing, up, down, options = make(tokens, layer, generator)
    wanted = moe.experts(x, routing, dequantize(*up), dequantize(*down), **options)
    assert_same_bits(run(x, routing, up, down, options), wanted)


def test_a_token_does_not_know_its_batch(generator):
    x, routing, up, down, options = make(300, "swiglu", generator)
    whole = run(x, routing, up, down, options)
    for part in (slice(0, 1), slice(7, 40), slice(250, 300)):
        of_part = moe.Routing(*(t[part] for t in routing))
        assert_same_bits(run(x[part], of_part, up, down, options), whole[part])


def test_compile(generator, compile_backend):
    """One graph; eager mode's bits."""
    torch._dynamo.reset()
    x, routing, up, down, _ = make(33, "swiglu", generator)

    def call(x, indices, weights, up, down, up_scale, down_scale):
        return moe.experts(x, moe.Routing(indices, weights), up, down, gate_up_scale=up_scale, down_scale=down_scale)

    tensors = x, *routing, up[0], down[0], up[1], down[1]
    found = torch.compile(call, fullgraph=True, backend=compile_backend)(*tensors)
    assert_same_bits(found, call(*tensors))
