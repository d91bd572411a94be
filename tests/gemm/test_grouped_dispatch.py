"""The kernels' path of grouped_mm on the CPU, ``serial_k16`` in plain torch in their place; the tests are the GPU's."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import grouped_mm
from cute_kernels.gemm import prewarm
from cute_kernels.gemm.config_grouped import (
    DECODE,
    MANY_ROWS,
    ONE_TILE,
    SOME,
    GroupedSpec,
    candidates,
    choose_rows,
    choose_sums,
)
from cute_kernels.runtime.launches import observed
from tests.fakes import fake_gpu, fake_kernels
from tests.gemm.cases import assert_same_bits
from tests.gemm.grouped_cases import BF16, FP32, Grouped, make_grouped, offs_of, only_grouped, run_grouped
from tests.gemm.test_kernel_grouped import (  # noqa: F401
    experts_of_torch,
    inside_of_batch_invariant,
    test_a_row_alone,
    test_calls_in_a_row_into_main_grad,
    test_columns_of_groups,
    test_compile,
    test_cuts_at_every_row,
    test_empty,
    test_ends_that_do_not_ascend_touch_no_other_memory,
    test_frozen_operand,
    test_gradient_of_a_transposed_weight_lies_as_the_weight,
    test_number_as_incoming_gradient,
    test_opcheck,
    test_product_and_gradients,
    test_provenance,
    test_rows_of_zeros,
    test_without_offs_it_is_bmm,
)


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("ragged", ["rows", "sums"])
def test_every_kernel_computes(ragged, arch, generator):
    a, b, offs = make_grouped(Grouped("few", 24, 40), generator)
    call = (lambda: grouped_mm(a, b, offs)) if ragged == "rows" else lambda: grouped_mm(a.t(), a, offs)
    wanted = call()
    for kernel in candidates(arch, ragged):
        with fake_kernels(arch), only_grouped(*kernel), observed() as launches:
            assert_same_bits(call(), wanted)
        ((launch, _, _),) = launches
        assert (launch.config, launch.transposed) == kernel


def test_who_is_chosen():
    """By the mean number of rows: a tile of tokens on N that is wider for few of them; along M for more, for many in
    pairs along N.
    """
    for rows, transposed, height, width in (
        (5, True, 64, 8),
        (20, True, 64, 8),
        (35, True, 64, 16),
        (120, True, 64, 32),
        (121, False, 64, 128),
        (180, False, 64, 128),
        (181, False, 128, 128),
        (320, False, 128, 128),
        (321, False, 128, 192),
        (5000, False, 128, 192),
    ):
        a, b = torch.zeros(rows, 64, dtype=BF16), torch.zeros(5, 64, 1536, dtype=BF16)
        with observed() as launches:
            grouped_mm(a, b, offs_of([rows, 0, 0, 0, 0], "cpu"))
        ((launch, _, _),) = launches
        assert launch.transposed == transposed and launch.config.tile[:2] == (height, width), rows
        assert launch.num_ctas <= 132 and launch.num_ctas % launch.config.cluster[1] == 0


def test_up_to_a_tile_a_group_waves_count():
    """Columns of the busiest SM of 132, as H200 had it: Mixtral's down has 88, 104, 128 pairs of tiles on 66."""
    for groups, n, width in ((8, 4096, 128), (8, 28672, 160), (64, 4096, 128), (64, 7168, 128), (128, 2048, 128)):
        for mean in (SOME + 1, ONE_TILE):
            assert choose_rows("sm_90a", mean * groups, groups, n, 132)[0].tile[:2] == (128, width), (groups, n)
    for n, width in ((5760, 160), (2880, 160), (1536, 128)):
        assert choose_rows("sm_90a", ONE_TILE * 128, 128, n, 132)[0].tile[1] == width, n
    assert choose_rows("sm_90a", ONE_TILE * 8, 8, 4096, 176)[0].tile[1] == 192  # one wave of 88


@pytest.mark.parametrize("mean", [ONE_TILE + 1, 512])
def test_of_many_rows_columns_count(mean):
    """Of the models' sizes 2880 is 18 tiles of 160; at 4096 192 and 160 have 128 and 64 columns too many."""
    widths = {192: (768, 1408, 1536, 3072, 5760, 7168, 14336, 28672), 160: (2880,), 128: (2048, 2816, 4096)}
    for width, sizes in widths.items():
        for groups, n in itertools.product((8, 128), sizes):
            config, transposed = choose_rows("sm_90a", mean * groups, groups, n, 132)
            assert config.tile[:2] == (128, width) and not transposed, n


def test_matrices_along_n_that_are_read_a_few_times_have_no_160_columns():
    for mean, width in ((ONE_TILE + 1, 192), (MANY_ROWS - 1, 192), (MANY_ROWS, 160)):
        assert choose_rows("sm_90a", mean * 8, 8, 2880, 132, "n")[0].tile[1] == width, mean


def test_who_is_chosen_to_sum():
    """Few bytes of a and b; to accumulate whole tiles where few rows are summed; of few tiles those of most rows."""
    assert choose_sums("sm_90a", 2048, 1408, 49152, 64, False)[0].tile[1] == 192
    for m, n, first in ((2048, 768, True), (1536, 2048, False), (2048, 1408, False)):
        for into in (False, True):
            assert choose_sums("sm_90a", m, n, 65536, 128, into)[0].most_rows_first == first
    assert [choose_sums("sm_90a", 1536, 2048, 65536, 128, into)[0].tile[1] for into in (False, True)] == [192, 128]
    assert choose_sums("sm_90a", 5760, 2880, 32768, 128, True)[0].tile[1] == 192
    assert [choose_sums("sm_90a", 28672, 4096, rows, 8, True)[0].tile[1] for rows in (8191, 16384)] == [128, 192]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_layer_finds_its_kernels_precompiled(arch):
    """Forward, dx and dweight, with main_grad, of any number of rows."""
    with fake_kernels(arch, computes=False) as jobs:
        for rows in (5, *(5 * most for most in (*DECODE, SOME, ONE_TILE)), 5000):
            for n in (1536, 256, 2880):
                x, weight = torch.zeros(rows, 64, dtype=BF16), torch.zeros(5, n, 64, dtype=BF16)
                offs = offs_of([rows, 0, 0, 0, 0], "cpu")
                run_grouped(x, weight.mT, offs, x.new_zeros(rows, n))
                dy = x.new_zeros(rows, n)
                grouped_mm(dy.t(), x, offs, accumulate_into=torch.zeros(5, n, 64))
    table = [job for job in prewarm.specializations(arch) if isinstance(job[1][1], GroupedSpec)]
    assert set(jobs) <= set(table)


def test_the_same_call_compiles_nothing(generator, jobs):
    a, b, offs = make_grouped(Grouped("few", 48, 64), generator)
    grouped_mm(a, b, offs)
    assert len(jobs) == 1
    grouped_mm(a, b, offs_of([1, 2, 3, 4, 5], a.device))
    assert len(jobs) == 1
    grouped_mm(a, b, offs, out_dtype=FP32)
    assert len(set(jobs)) == 2


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_inside_of_batch_invariant(arch, generator):
    with fake_gpu(arch):
        inside_of_batch_invariant(generator)


def test_experts_of_torch(generator):
    with fake_gpu():
        experts_of_torch(generator)


def test_flops(generator):
    a, b, offs = make_grouped(Grouped("few", 24, 16), generator)
    with FlopCounterMode(display=False) as counter:
        grouped_mm(a, b, offs)
        grouped_mm(a.t(), a, offs)
    assert counter.get_total_flops() == 2 * 60 * 24 * 16 + 2 * 60 * 16 * 16


@pytest.mark.parametrize("out", [BF16, FP32])
@pytest.mark.parametrize("groups", ["edges", "few", "none"])
def test_on_sm100(groups, out, generator):
    """All forms, gradients, main_grad; no warpgroup takes turns there, no copy loads many blocks."""
    a, b, offs = make_grouped(Grouped(groups, 24, 64, rest=8), generator)
    dout = a.new_ones(len(a), 24)

    def run():
        into = torch.ones(len(offs), 64, 24)
        grouped_mm(a.t(), dout, offs, accumulate_into=into)
        columns = grouped_mm(b.mT, a.t(), offs, out_dtype=out)
        return [*run_grouped(a, b, offs, dout, out_dtype=out).values(), columns, into]

    wanted = run()
    with fake_kernels("sm_100a") as jobs:
        found = run()
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)
    assert {arch for _, (arch, *_) in jobs} == {"sm_100a"}
    assert not any(config.ping_pong or multi_block for _, (*_, config, _, multi_block) in jobs)
