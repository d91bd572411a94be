"""batch_invariant on the CPU, plain torch in place of the kernels; the tests are the GPU's own."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from cute_kernels import UncoveredOperatorError, batch_invariant
from cute_kernels.runtime import launches
from tests.fakes import fake_gpu
from tests.invariance.test_kernel_modes import *  # noqa: F403


@pytest.fixture(autouse=True)
def path_of_the_kernels():
    with fake_gpu() as jobs:
        yield jobs


def test_tensors_that_wrap_others():
    """The operators inside of them come by themselves."""
    a, b = torch.randn(2, 8, 8, dtype=torch.bfloat16)
    with batch_invariant() as uncovered:
        product = TwoTensor(a.clone(), a.clone()) @ TwoTensor(b.clone(), b.clone())
        assert isinstance(product, TwoTensor) and torch.equal(product.a, a @ b)
    assert not uncovered


def test_a_row_alone_has_the_kernels_of_one_among_others(path_of_the_kernels):
    """The kernel's geometry, which decides about the order of a row's sum, is the same for a row alone."""
    wide = torch.randn(5, 400).bfloat16()
    functions = {
        "softmax": lambda t: t.softmax(-1),
        "layer_norm": lambda t: torch.nn.functional.layer_norm(t, t.shape[1:]),
        "sum": lambda t: t.sum(1),
    }
    for name, function in functions.items():
        for x in (wide[:, 5:365], wide[:, 1:301], wide[:, 1:]):
            found = []
            for rows in (x, x[:1], x[3:4]):
                path_of_the_kernels.clear()
                launches.forget()
                with batch_invariant():
                    leaf = rows.detach().requires_grad_()
                    y = function(leaf)
                    y.square().backward(torch.ones_like(y))
                found.append({repr(job) for job in path_of_the_kernels})
            assert found[0] and found[0] == found[1] == found[2], name


def test_floating_point_sums_of_integers():
    """They may be rounded, as no sum of integers to an integer is."""
    x = torch.full((3,), 2**24 + 1)
    with batch_invariant("warn") as uncovered, pytest.warns(UserWarning, match="aten.mean.default is not covered"):
        x.mean(dtype=torch.float32)
    assert set(uncovered) == {"aten.mean.default"}
    with batch_invariant():
        assert x.sum() == 3 * (2**24 + 1) and x.to(torch.float32).dtype is torch.float32
        with pytest.raises(UncoveredOperatorError, match="aten.sum.dim_IntList"):
            x.sum(0, dtype=torch.float32)


def test_collectives(tmp_path):
    """Those that move data run; one that adds over ranks is refused."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x, gathered = torch.ones(4), torch.empty(4)
        with batch_invariant() as uncovered:
            dist.all_gather([gathered], x)
            for reduces in (dist.all_reduce, lambda t: dist.reduce(t, 0)):
                with pytest.raises(UncoveredOperatorError, match="reduce"):
                    reduces(x)
        assert torch.equal(gathered, x) and not uncovered
    finally:
        dist.destroy_process_group()
