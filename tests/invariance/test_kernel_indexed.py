"""batch_invariant: sums by an index, and ties, in every form that torch has of them."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import batch_invariant
from tests.scatter.cases import make_ids, same_bits

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def make(generator):
    class Make:
        device = generator.device

        @staticmethod
        def normal(*shape, dtype=torch.float32):
            return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

        @staticmethod
        def ids(rows, *shape):
            return make_ids(torch.Size(shape).numel(), rows, "zipf", generator).view(shape)

    return Make


def _indices(m, name):
    """(indices, the shape of values) for x (6, 5, 4)."""
    mask = m.ids(2, 6, 5).bool()
    return {
        "rows": ((m.ids(6, 40),), (40, 5, 4)),
        "negative": ((m.ids(6, 40) - 6,), (40, 5, 4)),
        "two": ((m.ids(6, 7, 3), m.ids(5, 3)), (7, 3, 4)),
        "all": ((m.ids(6, 30), m.ids(5, 30), m.ids(4, 1)), (30,)),
        "middle": ((None, m.ids(5, 9)), (6, 9, 4)),
        "last": ((None, None, m.ids(4, 8, 2)), (6, 5, 8, 2)),
        "apart": ((m.ids(6, 8), None, m.ids(4, 8)), (8, 5)),
        "mask": ((mask,), (int(mask.sum()), 4)),
        "number": ((m.ids(6, 40),), ()),
    }[name]


INDEXED = ["rows", "negative", "two", "all", "middle", "last", "apart", "mask", "number"]


def check(function, *tensors):
    """Inside of a block, strict, in every dtype, as in fp64; twice the same bits."""
    for dtype in DTYPES:
        given = [t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]
        wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given]
        wanted = function(*(t.clone() if isinstance(t, torch.Tensor) else t for t in wide))
        with batch_invariant():
            found, again = (function(*(t.clone() if isinstance(t, torch.Tensor) else t for t in given)) for _ in "ab")
        assert found.dtype is dtype and found.shape == wanted.shape
        torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)
        assert same_bits(found, again)


@pytest.mark.parametrize("name", INDEXED)
def test_index_put(name, make):
    indices, shape = _indices(make, name)
    x, values = make.normal(6, 5, 4), make.normal(*shape)
    aten = torch.ops.aten  # in Python's form of it no index is None
    check(lambda x, v: aten.index_put(x, indices, v, True), x, values)
    check(lambda x, v: aten.index_put_(x, indices, v, True), x, values)
    check(lambda x, v: aten.index_put_(x.mT.contiguous().mT, indices, v, True), x, values)


@pytest.mark.parametrize("name", [n for n in INDEXED if n != "number"])
def test_the_backward_of_an_index(name, make):
    indices, shape = _indices(make, name)

    def backward(x, dy):
        x = x.requires_grad_()
        picked = x[tuple(slice(None) if i is None else i for i in indices)]
        return torch.autograd.grad(picked, x, dy)[0]

    check(backward, make.normal(6, 5, 4), make.normal(*shape))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rows_and_elements(dim, make):
    x, few, many = make.normal(6, 5, 4), make.ids(4, 6, 5, 4), make.ids(4, 400)
    shape = [400 if d == dim % 3 else size for d, size in enumerate(x.shape)]
    source, small = make.normal(*shape), few[:3, :2, :4]
    check(lambda x, s: x.index_add(dim, many, s), x, source)
    check(lambda x, s: x.index_add_(dim, many, s, alpha=0.5), x, source)
    check(lambda x, s: x.mT.index_add_(dim, many[:3], s), x, x.mT.narrow(dim, 0, 3))
    check(lambda x, s: x.scatter_add(dim, few, s), x, x + 1)
    check(lambda x, s: x.scatter_add_(dim, small, s), x, x + 1)
    check(lambda x, s: x.scatter(dim, few, s, reduce="add"), x, x + 1)
    for include_self in (True, False):
        check(lambda x, s, own=include_self: x.scatter_reduce(dim, few, s, "sum", include_self=own), x, x + 1)
        check(lambda x, s, own=include_self: x.scatter_reduce_(dim, few, s, "amax", include_self=own), x, x + 1)
    check(lambda x, s: torch.autograd.grad(x.requires_grad_().gather(dim, few), x, s)[0], x, x + 1)
    check(lambda x, s: torch.autograd.grad(x.requires_grad_().index_select(dim, many), x, s)[0], x, source)
    check(lambda x, s: x.put(many, s, accumulate=True), x, many.double() / 7)


def test_embedding(make):
    ids = make.ids(50, 3, 300)

    def backward(weight, dy):
        weight = weight.requires_grad_()
        return torch.autograd.grad(F.embedding(ids, weight, padding_idx=1), weight, dy)[0]

    check(backward, make.normal(50, 8), make.normal(3, 300, 8))


def test_what_does_not_accumulate_runs_as_it_is(make):
    x, index = make.normal(6, 5), torch.arange(3, device=make.device)
    with batch_invariant():
        y = x.index_put((index,), x[3:])
        assert torch.equal(y[:3], x[3:]) and torch.equal(x.clone().index_put_((index,), x[3:]), y)
        assert torch.equal(x.put(index, x[0, :3])[0, :3], x[0, :3])
        z = x.clone()
        z[index] = 1.0
        assert (z[:3] == 1).all()


def test_equal_values_come_by_their_index(make):
    x = make.ids(7, 4, 3000).to(torch.bfloat16)
    x[0, 5] = x[0, 77] = torch.nan
    order = torch.sort(x.double().cpu(), dim=-1, stable=True, descending=True)[1].to(x.device)
    rising = torch.sort(x.double().cpu(), dim=-1, stable=True)[1].to(x.device)
    with batch_invariant():
        assert torch.equal(x.sort(descending=True)[1], order) and torch.equal(x.sort()[1], rising)
        assert torch.equal(x.argsort(descending=True), order)
        for k in (1, 8, 3000):
            values, indices = x.topk(k)
            assert torch.equal(indices, order[:, :k])
            assert torch.equal(values[1:], x.gather(1, indices)[1:]) and values[0, 0].isnan()
            assert torch.equal(x.topk(k, largest=False)[1], rising[:, :k])
            assert torch.equal(x.t().topk(k, dim=0)[1], order[:, :k].t())


def test_the_largest_and_smallest_of_equals_is_the_first(make):
    """NaN before all; alone and in a batch, contiguous and not, short rows and those that several blocks share."""
    for rows, columns in ((5, 7), (4, 3000), (2, 300_000)):
        x = make.ids(3, rows, columns).to(torch.bfloat16)
        x[0, 5] = x[0, 6] = torch.nan
        places = torch.arange(columns, device=x.device)
        best = torch.stack([x.amax(1, keepdim=True), x.amin(1, keepdim=True)])
        wanted = torch.where((x == best) | (x.isnan() & best.isnan()), places, columns).amin(2)
        with batch_invariant():
            for y, dim in ((x, 1), (x.t().contiguous(), 0), (x.t().contiguous().t(), 1)):
                assert torch.equal(torch.stack([y.argmax(dim), y.argmin(dim)]), wanted)
                assert torch.equal(torch.stack([y.max(dim)[1], y.min(dim)[1]]), wanted)
            assert torch.equal(x[1:2].argmax(1), wanted[0, 1:2])
