"""install, blocks and backward passes on a GPU, whose gradients a thread of its own computes."""

import threading

import pytest
import torch

from cute_kernels import UncoveredOperatorError, batch_invariant, install, is_installed, mm, uninstall
from tests.invariance.cases import Product

BF16 = torch.bfloat16
NAMES = ("aten::mm", "aten::linear", "aten::sum.dim_IntList", "aten::cumprod")


@pytest.fixture(autouse=True)
def nothing_is_installed():
    uninstall()
    yield
    uninstall()


@pytest.fixture
def factors(generator):
    shapes = (8, 512), (512, 256)
    return [torch.randn(shape, generator=generator, device=generator.device).to(BF16) for shape in shapes]


def is_refused(device) -> bool:
    try:
        torch.ones(2, device=device).cumprod(0)
    except UncoveredOperatorError:
        return True
    return False


def elsewhere(function):
    """The result of a call in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


class Witness(torch.autograd.Function):
    """The identity, whose backward notes its thread and whether operators are refused there."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.notes.append((threading.get_ident(), is_refused(dy.device)))
        return dy, None


def test_from_install_to_uninstall(device, factors):
    """All threads have the bits of mm; then torch's own, by its own kernels, as before."""
    a, b = factors
    before = [torch._C._dispatch_dump(name) for name in NAMES]
    plain, ours = a @ b, mm(a, b)
    install()
    for call in (lambda function: function(), elsewhere):
        assert call(lambda: is_refused(device)) and torch.equal(call(lambda: a @ b), ours)
    with batch_invariant("off"):
        assert not is_refused(device) and torch.equal(a @ b, plain)
        assert elsewhere(lambda: is_refused(device)) and torch.equal(elsewhere(lambda: a @ b), ours)
    uninstall()
    assert not is_installed() and [torch._C._dispatch_dump(name) for name in NAMES] == before
    for call in (lambda function: function(), elsewhere):
        assert not call(lambda: is_refused(device)) and torch.equal(call(lambda: a @ b), plain)


def test_a_plain_thread_beside_a_block(device, factors):
    """Both run products at the same time, forward and backward, and each has its own bits."""
    a, b = factors

    def products():
        found, notes = [], []
        for _ in range(20):
            x = a.clone().requires_grad_()
            y = Witness.apply(x @ b, notes)
            y.backward(torch.ones_like(y))
            found += [y.detach(), x.grad]
        return found, {refused for _, refused in notes}

    def in_step():
        ready.wait(60)
        return products()

    def in_a_block():
        with batch_invariant():
            return in_step()

    ready = threading.Barrier(2)
    plain, _ = products()
    with batch_invariant():
        ours, _ = products()
    found = {}
    threads = [
        threading.Thread(target=lambda name=name, call=call: found.update({name: call()}))
        for name, call in (("plain", in_step), ("block", in_a_block))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, wanted, refused in (("plain", plain, False), ("block", ours, True)):
        tensors, seen = found[name]
        assert seen == {refused} and all(map(torch.equal, tensors, wanted))


def test_a_backward_is_whose_start_it_has(device):
    """Not of what held when its graph was made; with a graph that is kept, each time anew."""
    x, notes = torch.ones(3, device=device, requires_grad=True), []

    def backward(y):
        y.backward(torch.ones_like(y), retain_graph=True)
        ident, refused = notes.pop()
        assert x.device.type == "cpu" or ident != threading.get_ident()  # a GPU's gradients have a thread
        return refused

    plain = Witness.apply(x, notes)
    with batch_invariant():
        inside = Witness.apply(x, notes)
        assert backward(plain) and backward(inside)
        with batch_invariant("off"):
            assert not backward(inside)
        assert not elsewhere(lambda: backward(inside))
    assert not backward(plain) and not backward(inside)
    install()
    installed = Witness.apply(x, notes)
    assert backward(plain) and backward(inside) and elsewhere(lambda: backward(inside))
    with batch_invariant("off"):
        assert not backward(installed) and elsewhere(lambda: backward(installed))
    uninstall()
    assert not backward(installed) and not elsewhere(lambda: backward(installed))


def test_an_error_in_a_backward_leaves_nothing(device):
    """Autograd's thread goes on with the next backward as if it had not been."""
    x = torch.ones(3, device=device, requires_grad=True)
    with batch_invariant(), pytest.raises(UncoveredOperatorError, match="aten.cumprod"):
        Product.apply(x).backward(torch.ones(3, device=device))
    Product.apply(x).backward(torch.ones(3, device=device))
    assert x.grad.tolist() == [1, 1, 1] and not is_refused(device)
