"""check_invariance finds planted faults, each by the transform that is made for it, and leaves no trace."""

import functools

import pytest
import torch
from torch import nn

from cute_kernels import check_invariance
from cute_kernels.cli import check
from cute_kernels.invariance.checker import ON_CPU, ROW_TRANSFORMS
from tests.invariance.cases import (
    EVERY,
    ROWS,
    BackwardDependsOnRows,
    Faulty,
    RowSums,
    Scale,
    batch,
    failing,
    in_order,
    row_sums,
    squares,
)

# Functions that pass


@pytest.mark.parametrize("function", [squares, row_sums, lambda x: (x.relu(), {"sum": row_sums(x)})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_functions_of_single_rows_pass(function, dtype):
    report = check_invariance(function, batch().to(dtype))
    assert report and report.ok and report.first_difference is None and report.notes == (ON_CPU,), str(report)
    assert {result.transform for result in report.results} == {"B0", *ROW_TRANSFORMS}
    assert "grad of input[0]" in report.tensors
    report.raise_if_failed()


def test_every_population_that_fits():
    report = check_invariance(torch.neg, batch(), transforms=("T1",))
    sizes = (1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 100, 128)
    assert [r.case for r in report.results if r.transform == "T1"] == [f"{size} of {ROWS} rows" for size in sizes]


def test_splits_of_the_origin():
    report = check_invariance(torch.neg, batch(256), transforms=("T5",))
    assert {"100 + 156", "chunks of 100", "chunks of 7"} <= {result.case for result in report.results}


@pytest.mark.parametrize("rows", [2, 3])
def test_the_smallest_samples(rows):
    report = check_invariance(row_sums, batch(rows))
    assert report and {result.transform for result in report.results} == {"B0", *ROW_TRANSFORMS}
    assert failing(check_invariance(Faulty(), batch(rows))) >= {"T1", "T3", "T4", "T5"}


def test_token_ids_stay_ids():
    """An embedding: no made-up row may be out of range; the weight's gradient is the only one."""
    module = nn.Sequential(nn.Embedding(50, 8), RowSums())
    ids = torch.randint(40, 50, (ROWS, 1), generator=torch.Generator().manual_seed(0))
    report = check_invariance(lambda i, mask: module(i[:, 0]) * mask, (ids, ids > 44))
    assert report.ok and "input[0]" not in str(report.tensors)
    report = check_invariance(nn.Sequential(nn.Embedding(50, 8), nn.ReLU()), ids[:, 0])
    assert not failing(report) and "grad of parameter 0.weight" in report.tensors


def test_integers_alone():
    report = check_invariance(torch.neg, torch.arange(20))
    assert report and report.notes == ("no output requires a gradient: gradients are not compared", ON_CPU)


def test_other_arguments_by_partial_and_several_inputs():
    weight = torch.full((8,), 3.0)
    report = check_invariance(functools.partial(torch.addcmul, value=0.5), (batch(), batch(seed=2), weight + batch()))
    assert report and report.target == "addcmul"
    assert {f"grad of input[{i}]" for i in range(3)} <= set(report.tensors)


def test_without_gradients():
    def function(x):
        assert not torch.is_grad_enabled()
        return BackwardDependsOnRows.apply(x)

    report = check_invariance(function, batch(), gradients=False)
    assert report and report.tensors == ("output",)


def test_strided_sample():
    assert check_invariance(row_sums, batch(8, ROWS).t())


# Planted faults


def test_depends_on_the_number_of_rows():
    report = check_invariance(lambda x: x * (1 if len(x) > 4 else 1.0000001), batch())
    assert not report and "T1" in failing(report) and not failing(report) & {"B0", "T2", "T3", "T6"}
    cases = {result.case for result in report.results if result.transform == "T1" and result.status == "differs"}
    assert cases == {f"{size} of {ROWS} rows" for size in (1, 2, 3, 4)}


def test_depends_on_the_position():
    report = check_invariance(lambda x: x * torch.arange(1, len(x) + 1)[:, None], batch())
    assert {"T2", "T6"} <= failing(report) and not failing(report) & {"B0", "T1", "T3"}
    found = next(result.difference for result in report.results if result.transform == "T2" and result.difference)
    assert found.index == (129, 0) and found.position == 0  # rotated by 1


def test_depends_on_the_neighbours():
    """A term that only large neighbours make visible, and that population and position do not change."""
    report = check_invariance(lambda x: x + (x.abs().amax() > 100).float(), batch())
    assert failing(report) == {"T3"}
    assert {r.case for r in report.results if r.status != "ok"} >= {"odd rows large", "odd rows inf", "row 65 large"}


def test_depends_on_the_mean():
    assert failing(check_invariance(Faulty(), batch())) >= {"T1", "T3", "T4", "T5", "T6"}


def test_nan_contaminates():
    report = check_invariance(lambda x: x + 0 * x.sum(0), batch())
    cases = {result.case for result in report.results if result.status != "ok"}
    assert all("inf" in case or "nan" in case for case in cases) and failing(report) == {"T3", "T4"}


def test_depends_on_padding_before():
    """As if the first row were always a token: rows before it move all others."""

    def function(x):
        return x + (x[0] == 0).all().float()

    assert failing(check_invariance(function, batch())) == {"T4"}


def test_depends_on_chunks():
    report = check_invariance(lambda x: x + (len(x) == 30), batch())
    assert failing(report) == {"T5"}
    assert {r.case for r in report.results if r.status != "ok"} == {"chunks of 100", "100 + 30"}
    assert report.first_difference.index == (100, 0) and report.first_difference.position == 0


def test_depends_on_a_selection():
    """On the order of two neighbours that only a reversal or a permutation changes for all rows."""
    report = check_invariance(lambda x: x + (x[:-1, 0] > x[1:, 0]).all(), batch()[batch()[:, 0].argsort()])
    assert "T6" in failing(report) and not failing(report) & {"T2", "T3", "T4"}


def test_signed_zeros_differ():
    report = check_invariance(lambda x: x * 0 if len(x) > 4 else (x * 0).abs(), batch(), gradients=False)
    found = report.first_difference
    assert failing(report) >= {"T1"} and (found.expected_bits, found.got_bits) == ("0x80000000", "0x00000000")
    assert (found.expected, found.got) == ("-0.0", "0.0") and "0x80000000 (-0.0) became" in str(report)


def test_nans_are_equal_if_their_bits_are():
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert check_invariance(lambda x: x * 0 + nans[0], batch(), gradients=False, transforms=("T1",))
    payload = check_invariance(
        lambda x: nans[(torch.zeros(len(x)) + (len(x) < 4)).long()], batch(), gradients=False, transforms=("T1",)
    )
    assert payload.first_difference.got_bits == "0x7fc00001"


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, "0x3f80"), (torch.float64, "0x3ff0000000000000")])
def test_bits_have_the_width_of_the_dtype(dtype, bits):
    report = check_invariance(lambda x: x * 0 + len(x), torch.ones(2, 1, dtype=dtype), transforms=("T1",))
    assert report.first_difference.got_bits == bits


@pytest.mark.parametrize("dtype, bits", [(torch.float32, "0xc3010000"), (torch.float64, "0xc060200000000000")])
def test_complex_results_are_compared_by_their_parts(dtype, bits):
    sample = torch.ones(ROWS, 1, dtype=dtype)
    assert check_invariance(lambda x: torch.complex(x, x), sample)
    report = check_invariance(lambda x: torch.complex(x, x * len(x)), sample - 2, gradients=False, sizes=(129,))
    found = report.first_difference
    assert found.index == (0, 0, 1) and (found.expected, found.got) == ("-130.0", "-129.0")
    assert found.got_bits == bits


def test_the_default_device_is_the_caller_s():
    sample, module = batch(), Scale(in_order)
    wanted = check_invariance(Faulty(), sample), check_invariance(module, sample)
    with torch.device("meta"):
        assert (check_invariance(Faulty(), sample), check_invariance(module, sample)) == wanted
        assert check.Make("cpu", 4).batch(8).device.type == "cpu"


@pytest.mark.parametrize("function", [lambda x: x + torch.rand(()), nn.Dropout()], ids=["rand", "dropout"])
def test_not_deterministic(function):
    report = check_invariance(function, batch())
    assert failing(report) == {"B0"} and {result.transform for result in report.results} == {"B0"}
    assert "the function itself is not deterministic (dropout" in str(report)


def test_random_generators_are_left_alone():
    state = torch.get_rng_state()
    check_invariance(row_sums, batch())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_buffer_that_is_used_again():
    """Results of the first run are compared as they were, not as the next run left them in the same memory."""
    memory = torch.empty(1000, 8)

    def function(x):
        memory[: len(x)] = x + len(x)
        return memory[: len(x)]

    assert "T1" in failing(check_invariance(function, batch(), gradients=False))


def test_fault_in_the_backward_alone():
    report = check_invariance(BackwardDependsOnRows.apply, batch())
    assert failing(report) == {"T1", "T5"} and report.first_difference.tensor == "grad of input[0]"


def test_wrong_number_of_rows():
    """Padded to a multiple of 64 and not cut off again, but for whole batches."""

    def function(x):
        return x if len(x) > 100 else torch.cat([x, x.new_zeros(-len(x) % 64, 8)])

    report = check_invariance(function, batch(), transforms=("T1",))
    assert {result.status for result in report.results if result.case == f"3 of {ROWS} rows"} == {"error"}
    assert "output is of shape (64, 8) for 1 rows" in str(report)


@pytest.mark.parametrize(
    "function",
    [lambda x: (x, None if len(x) > 4 else x * 2), lambda x: {"y": x} if len(x) > 4 else {"y": x, "z": x * 2}],
)
def test_an_output_of_some_batches_alone(function):
    report = check_invariance(function, batch(33))
    assert not report and "is there for these 1 rows, but not for the sample" in str(report)


def test_gradients_of_some_batches_alone():
    class Second(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.rows, ctx.is_weight = len(x), len(other) != len(x)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            there = ctx.rows <= 4 or (ctx.is_weight and ctx.rows > 33)
            return dy * 2, (dy.sum(0) if ctx.is_weight else dy) if there else None

    report = check_invariance(Second.apply, (batch(33), batch(33)))
    assert failing(report) >= {"T1", "T5"} and "grad of input[1] is there for these 1 rows" in str(report)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return Second.apply(x, self.w)

    report = check_invariance(Module(), batch(33), transforms=EVERY)
    assert failing(report) == {"B1"} and "grad of parameter w: not there for all numbers of rows" in str(report)


def test_made_up_rows_are_rows_of_the_sample_in_all_its_tensors():
    low = torch.arange(33)

    def between(low, high):
        assert (low < high).all()
        return torch.stack([low, high], 1)

    assert check_invariance(between, (low, low + 5))


def test_sparse_gradients():
    ids = torch.arange(33) % 7
    assert not failing(check_invariance(nn.Embedding(50, 8, sparse=True), ids))


def test_an_output_whose_name_has_module_in_it():
    """Is held to its number of rows as any other."""
    report = check_invariance(lambda x: {"module y": x if len(x) > 4 else x[:0]}, batch(33))
    assert failing(report) >= {"T1"} and "output['module y'] is of shape (0, 8) for 1 rows" in str(report)


def test_an_exception_in_a_case():
    def function(x):
        if len(x) == 7:
            raise RuntimeError("seven [x]")
        return squares(x)

    report = check_invariance(function, batch())
    assert failing(report) == {"T1", "T5"} and "RuntimeError: seven [x]" in str(report)
    with pytest.raises(AssertionError, match=r"7 of 130 rows: RuntimeError"):
        report.raise_if_failed()


def test_needs_an_even_number_of_rows():
    report = check_invariance(lambda x: x.view(-1, 2, 8).square().view(-1, 8), batch(), transforms=("T2", "T3"))
    assert report and "fails on 129 rows" in report.notes[0]
