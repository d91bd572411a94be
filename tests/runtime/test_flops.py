"""torch's FlopCounterMode on this library: what the kernels' path counts is what plain torch counts."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import batch_invariant, bmm, linear, linear_log_prob, mhc, mm
from cute_kernels.mhc import reference
from cute_kernels.nn import HyperConnectionConfig, MHCTransformer, TransformerConfig
from cute_kernels.runtime import flops, operators
from tests.fakes import fake_kernels
from tests.mhc.cases import OPERATIONS, Case, call, make_inputs, make_upstream

BF16 = torch.bfloat16


def randn(*shape):
    return torch.randn(*shape).to(BF16).requires_grad_()


def counted(function):
    """(forward, backward) of a function of no arguments."""
    found = []
    with FlopCounterMode(display=False) as counter:
        y = function()
    found.append(counter.get_total_flops())
    outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None and t.requires_grad]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return [*found, counter.get_total_flops()]


PRODUCTS = {
    "mm": lambda: mm(randn(6, 16), randn(16, 24)),
    "mm of columns": lambda: mm(randn(6, 16), randn(24, 16).t()),
    "bmm": lambda: bmm(randn(3, 6, 16), randn(3, 16, 24)),
    "linear": lambda: linear(randn(2, 3, 16), randn(24, 16), activation="gelu"),
    "a frozen weight": lambda: linear(randn(6, 16), randn(24, 16).detach()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    wanted = counted(PRODUCTS[name])
    with fake_kernels():
        found = counted(PRODUCTS[name])
    assert found == wanted and all(found)


def test_a_bias_gradient_is_a_product():
    with fake_kernels():
        forward, backward = counted(lambda: linear(randn(6, 16), randn(24, 16), randn(24)))
    assert forward == 2 * 6 * 16 * 24 and backward == 2 * forward + 2 * 6 * 24


def test_log_probabilities():
    """The backward makes the logits again, which plain torch keeps, and ours if asked to."""

    def run(keep_logits=False):
        return linear_log_prob(randn(6, 16), randn(24, 16), torch.arange(6), keep_logits=keep_logits)

    wanted = counted(run)
    with fake_kernels():
        found, kept = counted(run), counted(lambda: run(True))
    assert found == [wanted[0], wanted[1] + wanted[0]] == [2 * 6 * 16 * 24, 3 * 2 * 6 * 16 * 24]
    assert kept == wanted


@pytest.mark.parametrize("op", OPERATIONS)
def test_hyper_connections(op):
    case = Case(4, 16, (6,), norm_weight=True, bias=True)
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(case, generator)
    upstream = make_upstream(op, case, generator)

    def run(module):
        with FlopCounterMode(display=False) as forward:
            outputs = call(module, op, case, inputs)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(
                [t for t in outputs if t is not None], [upstream[name] for name in OPERATIONS[op][1]]
            )
        return forward.get_total_flops(), backward.get_total_flops()

    wanted = run(reference)
    with fake_kernels():
        assert run(mhc) == wanted


@pytest.mark.parametrize("order", ["counter outside", "block outside"])
def test_inside_of_batch_invariant(order):
    """The count of torch without the block."""
    x, weight, bias = randn(2, 3, 16), randn(24, 16), randn(24)
    q, k = randn(3, 6, 16), randn(3, 16, 5)

    def run():
        return F.linear(x, weight, bias), q @ k, torch.addmm(bias, x[0], weight.t())

    wanted = counted(run)

    def inside(function):
        def block():
            with batch_invariant():
                return function()

        return block

    with fake_kernels():
        if order == "counter outside":
            found = counted(inside(run))
        else:
            with batch_invariant():
                found = counted(run)
    assert found == wanted and all(found)


def test_a_backward_inside_of_batch_invariant():
    x, weight = randn(6, 16), randn(24, 16)
    with fake_kernels(), FlopCounterMode(display=False) as counter, batch_invariant():
        F.linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 16 * 24


@pytest.mark.parametrize("connections", [None, HyperConnectionConfig(64)], ids=["plain", "streams"])
def test_a_model(connections):
    """Its forward: torch does not count its own attention on a CPU."""
    torch.manual_seed(0)
    model = MHCTransformer(TransformerConfig(32, 64, 1, 4, 128, 16, hyper_connections=connections)).to(BF16)
    tokens = torch.randint(32, (2, 16))

    def run():
        with FlopCounterMode(display=False) as counter:
            model(tokens)
        return counter.get_total_flops()

    wanted = run()
    attention = 2 * (2 * 2 * 4 * 16 * 16 * 16)  # scores, and the values' sums, as torch counts: of all keys
    with fake_kernels(computes=False):
        assert run() == wanted + attention


def test_every_product_has_a_formula():
    """Operators without one multiply no matrices."""
    without = {
        f"mhc_{name}"
        for name in ("aggregate_forward", "aggregate_backward", "expand_streams", "bias_gradient", "sinkhorn_forward")
    } | {f"mhc_{name}" for name in ("sinkhorn_backward", "coefficients_forward", "coefficients_backward")}
    found = {name for name in operators.OPERATORS if name.startswith("mhc_")}
    assert found == without | {name for name in flops.FORMULAS if name.startswith("mhc_")}
