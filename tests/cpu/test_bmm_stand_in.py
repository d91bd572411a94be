"""The kernels' path of bmm on the CPU, ``serial_k16`` in plain torch in place of them; the tests are the GPU's."""

import contextlib
import inspect
import itertools
import math

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels import bmm
from cute_kernels.gemm import launch, op_bmm
from cute_kernels.gemm.config import candidates, choose
from cute_kernels.gemm.launch import forced, observed
from tests.gemm_cases import BF16, FP32, Batch, assert_same_bits, make_batch, stand_in
from tests.gpu.gemm.test_bmm import (  # noqa: F401
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
def path_of_the_kernels():
    with stand_in() as jobs:
        yield jobs


@pytest.fixture
def traced_bmm():
    """As it goes on for CUDA tensors: the compiler does not see that ``is_cuda`` was replaced."""
    source = inspect.getsource(bmm)
    assert source.count("not a.is_cuda") == 1
    namespace = dict(vars(op_bmm))
    exec(source.replace("not a.is_cuda", "False"), namespace)
    return namespace["bmm"]


@pytest.mark.parametrize("case", [Batch(3, 24, 40, 16), Batch(3, 24, 40, 16, expanded="a", layout=("m", "k"))], ids=str)
def test_every_kernel_may_be_forced(case, generator):
    """Transposed ones, too; an expanded operand is given as one entry to those that use TMA."""
    a, b = make_batch(case, generator)
    wanted = bmm(a, b)
    for kernel in itertools.product(candidates("sm_90a"), (False, True)):
        config, transposed = kernel
        if config is not None or not transposed:
            with forced(*kernel), observed() as launches:
                assert_same_bits(bmm(a, b), wanted)
            ((plan, _, _),) = launches
            assert (plan.config, plan.transposed) == kernel


@pytest.mark.parametrize("shape", [(20, 512, 512, 16), (300, 100, 100, 64), (3, 8, 520, 64), (2, 33, 35, 17)])
def test_as_many_ctas_as_there_are_tiles(shape):
    """Of all entries, but no more than SMs."""
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
    assert choose(arch, 100, 100, 64, 132)[0].tile[0] == 64
    assert choose(arch, 100, 100, 64, 132, entries=300)[0].tile[0] == 128
    sizes = (1, 8, 16, 33, 64, 100, 200, 257, 1024)
    for m, n, k, entries in itertools.product(sizes, sizes, (64, 4096), (1, 3, 64, 300)):
        assert choose(arch, m, n, k, 132, entries=entries)[0] in candidates(arch)


@pytest.mark.parametrize("grad", [False, True])
def test_a_known_call_looks_no_plan_up(grad, generator, monkeypatch):
    lookups = []
    plan_product = op_bmm.plan_product
    monkeypatch.setattr(op_bmm, "plan_product", lambda *arguments: (lookups.append(1), plan_product(*arguments))[1])
    a, b = (t.requires_grad_(grad) for t in make_batch(Batch(3, 6, 48, 64), generator))
    wanted = bmm(a, b)
    bmm(a, b)
    assert len(lookups) == 2
    found = bmm(a, b)
    assert len(lookups) == 2 and found.requires_grad == grad
    assert_same_bits(found.detach(), wanted.detach())
    assert_same_bits(bmm(a, b, out_dtype=FP32).detach().to(BF16), wanted.detach())
    with forced(None, False):
        bmm(a, b)
    assert len(lookups) == 4


def test_forced_kernels_end_in_any_order():
    first, second = (None, False), (None, True)
    with contextlib.ExitStack() as stack:
        one = forced(*first)
        one.__enter__()
        stack.enter_context(forced(*second))
        one.__exit__(None, None, None)
        assert launch._forced == [second]
    assert not launch._forced


def test_a_tangent_is_refused_and_not_lost():
    x = torch.zeros(2, 8, 8, dtype=BF16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="jvp"):
            bmm(dual, x)
    assert not any(launch.calls.values())


def test_a_sign_that_is_not_in_memory(generator):
    parts = torch.randn(2, 24, 40, 2, generator=generator).half().view(torch.complex32).conj()[..., 0].imag
    other = torch.randn(2, 40, 8, generator=generator).half()
    assert parts.is_neg()
    assert_same_bits(bmm(parts, other), bmm(parts.resolve_neg(), other))
