"""compute-sanitizer finds no bad access and no race in small layers of experts, forward and backward."""

import pytest
import torch

from cute_kernels import moe
from tests.fakes import fake_kernels
from tests.moe.cases import BF16, make_layer, randn, run_layer
from tests.moe.test_kernel_mxfp8 import make, run
from tests.precompiled import precompile
from tests.sanitizer import assert_clean, needs_sanitizer

pytestmark = pytest.mark.sm90

# Groups whose last tiles are partly empty, experts without tokens, few rows and many
RUNS = ("layers", "other layers", "segments", "mxfp8", "routing")
PROGRAM = """
import sys
import torch
from tests.moe.test_kernel_sanitizer import results

found = results(sys.argv[1], "cuda")
torch.cuda.synchronize()
assert all(result.isfinite().all() for result in found)
print("done")
"""


def results(name: str, device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    if name == "layers":
        sizes = ((3, 24, 16, 8, 2), (150, 72, 40, 8, 2), (333, 136, 72, 3, 2), (40, 40, 24, 64, 3))
        layers = [(make_layer(*size[:4], generator), size[4]) for size in sizes]
        return [t for layer, k in layers for t in run_layer(layer, k).values()]
    if name == "other layers":
        found = []
        for activation in ("swiglu_oai", "geglu", "silu"):
            layer = make_layer(61, 72, 40, 8, generator, biased=True, gated=activation != "silu")
            found += run_layer(layer, 2, activation=activation, interleaved=activation == "swiglu_oai").values()
        return found
    if name == "segments":
        layer, ends = make_layer(61, 72, 40, 8, generator), torch.tensor([5, 5, 40, 61], device=device)
        return list(run_layer(layer, 2, segments=ends).values())
    if name == "mxfp8":  # each of its kernels, 4, 2 and 1 scales a load
        layers = [(tokens, hidden) for tokens in (5, 20, 70) for hidden in (128, 64, 96)]
        return [run(*make(tokens, "oai", generator, hidden=hidden)) for tokens, hidden in layers]
    assert name == "routing"
    found = []
    for experts, k in ((7, 2), (128, 8), (1000, 32)):
        logits = randn(37, experts, generator=generator).requires_grad_()
        weights = moe.route(logits, k, score="sigmoid").weights
        loss = weights.sum() + moe.load_balancing_loss(logits, moe.route(logits, k)) + moe.z_loss(logits)
        found += torch.autograd.grad(loss, logits)
    of_blocks = moe.plan(moe.route(randn(700, 40, generator=generator), 4).indices, 40, align=16)  # three CTAs
    found.append(of_blocks.positions.float())
    leaves = [randn(37, 24, generator=generator, dtype=BF16).requires_grad_()]
    leaves += [randn(5, 24, generator=generator).requires_grad_()]
    return found + list(torch.autograd.grad(moe.router_logits(*leaves).sum(), leaves))


@pytest.fixture(scope="module")
def compiled_for_the_sanitizer():
    with fake_kernels("sm_90a", computes=False) as jobs:
        for name in RUNS:
            results(name, "cpu")
    precompile(jobs)


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool, name, compiled_for_the_sanitizer):
    assert_clean(tool, PROGRAM, name)
