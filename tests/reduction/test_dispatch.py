"""The kernels' path of the reductions on the CPU, plain torch in place of the kernels; the tests are the GPU's own."""

import pytest
import torch

from cute_kernels import reduction
from cute_kernels.reduction import launch
from cute_kernels.runtime import launches
from tests.fakes import fake_kernels
from tests.reduction.test_kernel import *  # noqa: F403


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def test_another_number_of_rows_compiles_nothing(jobs):
    for rows in (1, 2, 100, 5000):
        reduction.softmax(torch.randn(rows, 64))
        reduction.sum(torch.randn(rows, 64), 1)
    assert len({repr(job) for job in jobs}) == 2


def test_the_kernels_of_a_sum_do_not_follow_from_what_lies_around_it(jobs):
    x, long = torch.randn(6, 100, 65), torch.randn(3, 262147)
    cases = [(part, dim) for part in (x[..., :64], x[..., 1:], x[..., 3:43]) for dim in (1, 2)] + [(long, 1)]
    for part, dim in cases:
        found = []
        for some in (part, part.contiguous(), part[:1], part[1:2], part[2:3]):
            jobs.clear()
            launches.forget()
            reduction.sum(some, dim)
            # The width of a column's access, and of a long row's, is no part of its sum's order
            by_dtypes = part is long or dim == 1
            found.append({repr(job[1][1][:2] if by_dtypes else job) for job in jobs})
        assert all(jobs == found[0] for jobs in found), (part.stride(), dim)
    jobs.clear()
    reduction.sum(x[..., :1], 1)
    assert [job[0].build.__name__ for job in jobs] == ["column_sums"]


def test_more_sums_than_a_grid_has_ctas():
    x = torch.zeros(1, device="meta").expand(2**31, 2, 2)
    with pytest.raises(ValueError, match="sum: x must have at most .* sums of 256 rows and 32 columns"):
        launch._sum_columns(x, torch.zeros(1, device="meta").expand(2**31, 1, 2), 1.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: reduction.softmax(x.double()), TypeError, "softmax: x must have dtype bfloat16, float16, float32"),
        (lambda x: reduction.softmax(x, out_dtype=torch.int32), TypeError, "softmax: out_dtype must have dtype"),
        (lambda x: reduction.softmax(x, out_dtype=False), TypeError, "softmax: out_dtype must be a torch.dtype"),
        (lambda x: reduction.softmax(x[:0].double()), TypeError, "softmax: x must have dtype"),
        (lambda x: reduction.softmax(x[:0], out_dtype=torch.int32), TypeError, "softmax: out_dtype must have dtype"),
        (lambda x: reduction.softmax(torch.zeros(0, 262_145)), ValueError, "have at most 262144 columns, got 262145"),
        (lambda x: reduction.log_softmax(x.t()), ValueError, "log_softmax: x must have a contiguous last dimension"),
        (lambda x: reduction.softmax(x[:, ::2]), ValueError, "have a contiguous last dimension, got stride 2"),
        (lambda x: reduction.softmax(torch.zeros(2, 262_145)), ValueError, "have at most 262144 columns, got 262145"),
        (lambda x: reduction.softmax(torch.tensor(1.0)), ValueError, "have at least one dimension"),
        (lambda x: reduction.softmax(x.expand(3, 4, 6).transpose(0, 1)), ValueError, "collapse to rows of one stride"),
        (lambda x: reduction.softmax(x.to_sparse()), TypeError, "have layout torch.strided"),
        (lambda x: reduction.softmax([1.0]), TypeError, "be a torch.Tensor"),
        (lambda x: reduction.softmax(x, backend="cuda"), ValueError, "backend must be None or 'reference'"),
        (
            lambda x: reduction.softmax(x, dim=0),
            ValueError,
            "softmax: dim must be -1 or 1, the last dimension .*, got 0",
        ),
        (lambda x: reduction.log_softmax(x, -2), ValueError, "log_softmax: dim must be -1 or 1, .* got -2"),
        (lambda x: reduction.softmax(x, 2), ValueError, r"\(x.movedim\(dim, -1\) puts another one there\), got 2"),
        (lambda x: reduction.softmax(x, None), TypeError, "softmax: dim must be an int, got None of type NoneType"),
        (lambda x: reduction.softmax(x, -1.0), TypeError, "softmax: dim must be an int, got -1.0 of type float"),
        (lambda x: reduction.softmax(x, True), TypeError, "softmax: dim must be an int, got True of type bool"),
        (lambda x: reduction.softmax([1.0], 1), TypeError, "softmax: x must be a torch.Tensor, got list"),
        (lambda x: reduction.softmax(x[0, 0], 0), ValueError, "softmax: dim must be -1, got 0"),
        (lambda x: reduction.sum(x, 2), ValueError, "sum: dim must be of 2 dimensions, got 2"),
        (lambda x: reduction.sum(x, (0, -2)), ValueError, "name each dimension once"),
        (lambda x: reduction.mean(x, 1.0), TypeError, "mean: dim must be None, an int or ints"),
        (lambda x: reduction.mean(x.long()), TypeError, "mean: x must have dtype"),
        (lambda x: reduction.sum(x, 0, keepdim=1), TypeError, "sum: keepdim must be a bool"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(4, 6))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_the_last_dimension_by_either_name(op, backend):
    function, x = getattr(reduction, op), torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(function(x, dim=2, backend=backend), function(x, backend=backend))
    assert torch.equal(function(x, -1, backend=backend), function(x, backend=backend))
    torch.testing.assert_close(function(x, 2, backend=backend), getattr(torch, op)(x, 2))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_sum_over_nothing_is_a_copy(backend):
    x = torch.ones(2, 3)
    for t, dim in ((x, ()), (x[0, 0], None)):
        for function in (reduction.sum, reduction.mean):
            y = function(t, dim, backend=backend)
            assert torch.equal(y, t) and y.data_ptr() != t.data_ptr()


def test_references_are_the_kernels_specification(generator):
    x = torch.randn(5, 3, 40, generator=generator).to(torch.bfloat16)
    for op_name in ("softmax", "log_softmax"):
        expected = getattr(torch, op_name)(x.double(), -1)
        got = getattr(reduction, op_name)(x, backend="reference", out_dtype=torch.float32)
        assert torch.allclose(got.double(), expected, atol=1e-6)
    for op_name in ("sum", "mean"):
        for dim in (None, 1, (0, 2), ()):
            dims = tuple(range(3)) if dim is None else dim
            expected = x.double() if dims == () else getattr(x.double(), op_name)(dims)
            got = getattr(reduction, op_name)(x, dim, backend="reference", out_dtype=torch.float32)
            assert torch.allclose(got.double(), expected, atol=1e-5)
