"""The kernels' path of bmm on the CPU, ``serial_k16`` in plain torch in place of them; the tests are the GPU's."""

import itertools
import math

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels import bmm
from cute_kernels.gemm.config import candidates, choose
from cute_kernels.runtime.launches import observed
from tests.fakes import fake_kernels
from tests.gemm.cases import BF16, FP32, Batch, assert_same_bits, make_batch, only_kernel
from tests.gemm.test_kernel_bmm import (  # noqa: F401
    test_a_row_does_not_know_its_batch,
    test_against_fp64,
    test_an_entry_does_not_see_its_neighbours,
    test_compile,
    test_each_entry_has_the_bits_of_mm,
    test_empty,
    test_fake_tensors,
    test_frozen_operand,
    test_gradients_of_what_is_expanded,
    test_layout_of_the_incoming_gradient,
    test_opcheck,
    test_provenance,
    test_second_derivative_is_refused,
)


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("case", [Batch(3, 24, 40, 16), Batch(3, 24, 40, 16, expanded="a", layout=("m", "k"))], ids=str)
def test_every_kernel_computes(case, generator):
    """Transposed ones, too; an expanded operand is given as one entry to those that use TMA."""
    a, b = make_batch(case, generator)
    wanted = bmm(a, b)
    for kernel in itertools.product(candidates("sm_90a"), (False, True)):
        config, transposed = kernel
        if config is not None or not transposed:
            with only_kernel(*kernel), observed() as launches:
                assert_same_bits(bmm(a, b), wanted)
            ((plan, _, _),) = launches
            assert (plan.config, plan.transposed) == kernel


@pytest.mark.parametrize("shape", [(20, 512, 512, 16), (300, 100, 100, 64), (3, 8, 520, 64), (2, 33, 35, 17)])
def test_as_many_ctas_as_there_are_tiles(shape):
    """CTAs of all entries, but no more than SMs."""
    entries, m, n, k = shape
    a, b = torch.zeros(1, m, k, dtype=BF16).expand(entries, m, k), torch.zeros(entries, k, n, dtype=BF16)
    with observed() as launches:
        bmm(a, b)
    ((plan, _, _),) = launches
    tile, cluster = (64, 64), (1, 1)
    if plan.config is not None:
        tile, cluster = plan.config.tile[:2], plan.config.cluster
    sizes = (n, m) if plan.transposed else (m, n)
    clusters = entries * math.prod(-(-size // (t * c)) for size, t, c in zip(sizes, tile, cluster, strict=True))
    assert plan.num_ctas == min(clusters, 132 // math.prod(cluster)) * math.prod(cluster)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_entries_count_as_work(arch):
    """Many small ones leave no SM idle: they get tiles that are as large as they are, not narrow ones."""
    assert choose(arch, 512, 512, 64, 132)[0].tile[1] < choose(arch, 512, 512, 64, 132, entries=64)[0].tile[1]
    assert choose(arch, 100, 100, 64, 132)[0].tile[0] <= 64
    assert choose(arch, 100, 100, 64, 132, entries=300)[0].tile[0] == 128
    sizes = (1, 8, 16, 33, 64, 100, 200, 257, 1024)
    for m, n, k, entries in itertools.product(sizes, sizes, (64, 4096), (1, 3, 64, 300)):
        assert choose(arch, m, n, k, 132, entries=entries)[0] in candidates(arch)


@pytest.mark.parametrize("grad", [False, True])
def test_the_same_call_compiles_nothing(grad, generator, jobs):
    a, b = (t.requires_grad_(grad) for t in make_batch(Batch(3, 6, 48, 64), generator))
    wanted = bmm(a, b)
    assert len(jobs) == 1
    found = bmm(a, b)
    assert len(jobs) == 1 and found.requires_grad == grad
    assert_same_bits(found.detach(), wanted.detach())
    bmm(*make_batch(Batch(4, 5, 48, 64), generator))  # other numbers of entries and rows
    assert len(set(jobs)) == 1
    assert_same_bits(bmm(a, b, out_dtype=FP32).detach().to(BF16), wanted.detach())
    assert len(set(jobs)) == 2


def test_a_tangent_is_refused_and_not_lost():
    x = torch.zeros(2, 8, 8, dtype=BF16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="jvp"):
            bmm(dual, x)


def test_a_sign_that_is_not_in_memory(generator):
    parts = torch.randn(2, 24, 40, 2, generator=generator).half().view(torch.complex32).conj()[..., 0].imag
    other = torch.randn(2, 40, 8, generator=generator).half()
    assert parts.is_neg()
    assert_same_bits(bmm(parts, other), bmm(parts.resolve_neg(), other))
