"""embedding, embedding_backward, index_sum: the contract's bits, what a sum must not know, what torch does to calls."""

import pytest
import torch

from cute_kernels import scatter
from cute_kernels.scatter import launch
from cute_kernels.scatter.config import MAX_FEW, SEGMENT
from tests.scatter.cases import BF16, FP16, FP32, Case, contract, make_ids, make_inputs, same_bits, where_different

SMALL = [
    Case(1, 5, 8),
    Case(700, 40, 8),
    Case(700, 3, 24, "one"),
    Case(700, 40, 17, "zipf"),
    Case(3000, 20, 4, "blocks", FP32),
    Case(3000, 20, 3, "blocks"),
    Case(1025, 7, 1, "zipf"),
    Case(600, 90, 8, "zipf", FP16),
    Case(600, 90, 8, "zipf", BF16, FP32),
    Case(600, 90, 12, "zipf", FP32, BF16),
    Case(300, 9, 2056, "zipf"),
]
LARGE = [
    Case(4096, 128256, 4096),
    Case(16384, 32000, 1024, "zipf"),
    Case(65537, 128256, 512, "zipf"),
    Case(65537, 1000, 256, "zipf", FP32),
    Case(65537, 10, 2048, "one"),
    Case(40000, 50, 4104, "blocks"),
]


@pytest.fixture(params=SMALL, ids=str)
def case(request):
    return request.param


def test_the_contract(case, generator):
    check_contract(case, generator)


def check_contract(case, generator):
    dy, ids = make_inputs(case, generator)
    found = scatter.embedding_backward(dy, ids, case.rows, out_dtype=case.out)
    wanted = contract(dy, ids, case.rows).to(case.out or case.dtype)
    assert same_bits(found, wanted), where_different(found, wanted)
    found, dy = found[:, :64].double(), dy[:, :64].double()  # a large table in fp64 would take memory of others
    exact, size = (torch.zeros_like(found).index_add(0, ids, t) for t in (dy, dy.abs()))
    eps = torch.finfo(case.out or case.dtype).eps
    assert ((found - exact).abs() <= eps * exact.abs() + 2.0**-24 * 600 * size + 1e-7).all()


def test_a_row_does_not_know_other_tokens(generator):
    """Alone, in any batch, in a larger table, beside gradients that are NaN."""
    dy, ids = make_inputs(Case(2000, 30, 8, "zipf"), generator)
    whole = scatter.embedding_backward(dy, ids, 30)
    for row in (0, 1, 3, 29):
        own = ids == row
        assert same_bits(scatter.embedding_backward(dy[own], ids[own], 30)[row], whole[row])
        beside = torch.where(own[:, None], dy, torch.nan)
        assert same_bits(scatter.embedding_backward(beside, ids, 30)[row], whole[row])
        more = torch.cat([ids + 1, ids]), torch.cat([dy, dy])
        assert same_bits(scatter.embedding_backward(more[1][:2000], more[0][:2000], 500)[row + 1], whole[row])
    assert same_bits(scatter.embedding_backward(dy, ids.int(), 30), whole)
    assert same_bits(scatter.embedding_backward(dy.view(2, 1000, 8), ids.view(2, 1000), 30), whole)


def test_padding_and_ids_that_are_no_row(generator):
    dy, ids = make_inputs(Case(900, 6, 8, "zipf"), generator)
    whole = scatter.embedding_backward(dy, ids, 6)
    for row in (0, 5):
        found = scatter.embedding_backward(dy, ids, 6, padding_idx=row)
        assert (found[row] == 0).all()
        found[row] = whole[row]
        assert same_bits(found, whole)
    others = torch.cat([ids, ids.new_tensor([-1, 6, 2**30, -7, 2**32 + 1])]), torch.cat([dy, dy[:5]])
    assert same_bits(scatter.embedding_backward(others[1], others[0], 6), whole)
    x = torch.randn(6, 8, generator=generator, device=generator.device)
    assert same_bits(scatter.index_sum(x, others[0], others[1]), scatter.index_sum(x, ids, dy))


def test_nothing_to_sum(generator):
    device = generator.device
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    assert (scatter.embedding_backward(torch.zeros(0, 4, device=device), empty, 3) == 0).all()
    assert scatter.embedding_backward(torch.zeros(2, 0, device=device), empty.new_zeros(2), 3).shape == (3, 0)
    assert scatter.embedding_backward(torch.zeros(2, 4, device=device), empty.new_zeros(2), 0).shape == (0, 4)
    x = torch.randn(3, 4, generator=generator, device=device)
    assert same_bits(scatter.index_sum(x, empty, x[:0]), x)
    assert same_bits(scatter.index_sum(x, empty.view(3, 0), x[:, :0], dim=1), x)


def test_autograd_and_main_grad(generator):
    case = Case(1500, 50, 8, "zipf", FP32)
    dy, ids = make_inputs(case, generator)
    weight = torch.randn(50, 8, generator=generator, device=generator.device).requires_grad_()
    y = scatter.embedding(ids, weight, padding_idx=2)
    assert torch.equal(y, weight[ids])
    y.backward(dy)
    assert same_bits(weight.grad, scatter.embedding_backward(dy, ids, 50, padding_idx=2))
    weight.grad = None
    start = torch.randn(50, 8, generator=generator, device=generator.device)
    start[2] = torch.nan  # of no token that counts: it stays
    found = []
    for _ in range(2):
        weight.main_grad = start.clone()
        for part in (slice(0, 700), slice(700, None)):
            scatter.embedding(ids[part], weight, padding_idx=2).backward(dy[part])
        found.append(weight.main_grad)
    assert same_bits(*found) and weight.grad is None
    wanted = start
    for part in (slice(0, 700), slice(700, None)):
        touched = torch.zeros(50, 1, dtype=torch.bool, device=start.device)
        touched[ids[part]] = True
        touched[2] = False
        wanted = torch.where(touched, wanted + contract(dy[part], ids[part], 50), wanted)
    assert same_bits(found[0], wanted), where_different(found[0], wanted)


def test_layouts_of_gradients(generator):
    dy, ids = make_inputs(Case(600, 20, 16, "zipf"), generator)
    wanted = scatter.embedding_backward(dy, ids, 20)
    wide = torch.randn(600, 40, generator=generator, device=generator.device).to(BF16)
    wide[:, 3:19] = dy
    assert same_bits(scatter.embedding_backward(wide[:, 3:19], ids, 20), wanted)
    assert same_bits(scatter.embedding_backward(dy.t().contiguous().t(), ids, 20), wanted)
    one = torch.ones((), device=ids.device).expand(600, 16)
    assert same_bits(scatter.embedding_backward(one, ids, 20), scatter.embedding_backward(one.contiguous(), ids, 20))
    spread = ids.repeat_interleave(2)[::2]
    assert same_bits(scatter.embedding_backward(dy, spread, 20), wanted)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rows_onto_x(dim, dtypes, generator):
    x = torch.randn(7, 6, 5, generator=generator, device=generator.device).to(dtypes[0])
    for number, kind in ((1, "uniform"), (40, "zipf"), (1500, "zipf"), (600, "one")):
        index = make_ids(number, x.shape[dim], kind, generator)
        shape = [number if d == dim % 3 else size for d, size in enumerate(x.shape)]
        source = torch.randn(shape, generator=generator, device=x.device).to(dtypes[1])
        found = scatter.index_sum(x, index, source, dim=dim)
        as_rows = [t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (source, x)]
        wanted = contract(as_rows[0], index, x.shape[dim], as_rows[1]).to(x.dtype)
        wanted = wanted.view(x.movedim(dim, 0).shape).movedim(0, dim)
        assert found.is_contiguous() and same_bits(found, wanted), where_different(found, wanted)


@pytest.mark.parametrize("few", [1, 8, MAX_FEW, MAX_FEW + 1, 2 * SEGMENT + 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_elements_onto_x(dim, few, generator):
    """Few are compared, many sorted: the bits are those of one chain an element, however many a row has."""
    x = torch.randn(9, 9, generator=generator, device=generator.device).to(BF16)
    index = make_ids(9 * few, 9, "zipf", generator).view(9, few)
    source = torch.randn(9, few, generator=generator, device=x.device).to(BF16)
    found = scatter.index_sum(x, index if dim else index.t(), source if dim else source.t(), dim=dim)
    rows = x if dim else x.t()
    of_rows = [contract(source[i, :, None], index[i], 9, rows[i, :, None])[:, 0] for i in range(9)]
    wanted = torch.stack(of_rows).to(BF16)
    wanted = wanted if dim else wanted.t()
    assert same_bits(found, wanted), where_different(found, wanted)


def test_gradients_of_sums(generator):
    x = torch.randn(5, 6, generator=generator, device=generator.device).requires_grad_()
    for index, source in (
        (make_ids(9, 6, "zipf", generator), torch.randn(5, 9, generator=generator, device=x.device)),
        (make_ids(20, 6, "zipf", generator).view(5, 4), torch.randn(5, 4, generator=generator, device=x.device)),
    ):
        source = source.to(BF16).requires_grad_()
        y = scatter.index_sum(x, index, source, dim=1)
        dy = torch.randn(5, 6, generator=generator, device=x.device)
        dx, dsource = torch.autograd.grad(y, (x, source), dy)
        gathered = dy.gather(1, index) if index.dim() == 2 else dy[:, index]
        assert torch.equal(dx, dy) and torch.equal(dsource, gathered.to(BF16))
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(scatter.index_sum(x, index, source, dim=1).sum(), x, create_graph=True)


def test_opcheck(generator):
    dy, ids = make_inputs(Case(40, 6, 8), generator)
    out = torch.zeros(6, 8, dtype=BF16, device=ids.device)
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(launch.sum_into_rows.registered, (dy, ids, out, -1, "write"), test_utils=tests)
    index, source = ids.view(5, 8) % 4, dy[:5]
    torch.library.opcheck(
        launch.sum_into_elements.registered, (source, index, out[:5, :4].contiguous()), test_utils=tests
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_compile(generator, compile_backend, dim):
    """An embedding's gradient comes through index_sum, whose own argument is another op's result."""
    dy, ids = make_inputs(Case(300, 12, 8, "zipf"), generator)
    weight = torch.randn(12, 8, generator=generator, device=ids.device).to(BF16).requires_grad_()
    index = ids if dim == 0 else ids.view(25, 12)[:8, 0] % 8

    def step(ids, weight, index, source):
        return scatter.index_sum(scatter.embedding(ids, weight), index, source, dim=dim)

    results = []
    for function in (step, torch.compile(step, backend=compile_backend, fullgraph=True)):
        source = dy.clone().requires_grad_()
        y = function(ids, weight, index, source)
        results.append((y, *torch.autograd.grad(y, (weight, source), dy)))
    for eager, compiled in zip(*results, strict=True):
        assert same_bits(eager, compiled)
    assert results[0][1].any()
