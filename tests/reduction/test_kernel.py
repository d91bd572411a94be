"""softmax, log_softmax, sum and mean: against fp64, bit by bit in other batches, and with what torch does to calls."""

import math

import pytest
import torch

from cute_kernels import reduction
from cute_kernels.reduction import launch
from tests.norm.cases import strided
from tests.reduction.cases import BF16, FP16, FP32, FP32_EPS, SoftmaxCase, exact_softmax, make_inputs, rounding

WIDTHS = [1, 2, 3, 8, 64, 100, 512, 769, 1024, 2235, 4096, 6000, 10007, 16384, 32000, 50257, 151643, 151936, 262144]
OPS = ("softmax", "log_softmax")
CASES = [
    *(SoftmaxCase(op, n) for op in OPS for n in WIDTHS),
    *(SoftmaxCase(op, n, dtype) for op in OPS for n in (64, 769, 4096, 151936) for dtype in (FP16, FP32)),
    *(SoftmaxCase(op, n, BF16, FP32) for op in OPS for n in (100, 4096, 32000)),
    SoftmaxCase("softmax", 4096, FP32, BF16),
]
# (shape, dimensions)
SUMS = [
    ((7, 4096), -1),
    ((300, 5), 1),
    ((5000, 64), 0),
    ((257, 1), 0),
    ((3, 1000, 24), 1),
    ((3, 1000, 24), (0, 2)),
    ((3, 1000, 24), (0, 1)),
    ((3, 1000, 24), (1, 2)),
    ((3, 10, 7, 33), (0, 2)),
    ((3, 1000, 24), None),
    ((300001,), None),
    ((2, 262145), 1),
    ((4, 600000), None),
    ((70000, 3, 2), 1),
    ((1, 769), 1),
    ((), None),
    ((3, 4), ()),
]


def call(case: SoftmaxCase, x, dy):
    y = getattr(reduction, case.op)(x, out_dtype=case.out)
    (dx,) = torch.autograd.grad(y, x, dy)
    return {"y": y.detach(), "dx": dx}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_softmax_against_fp64(case, generator):
    x, dy = make_inputs(case, max(3, min(1000, 2**20 // case.n)), generator)
    got = call(case, x, dy)
    for name, (exact, bound) in exact_softmax(case, x, dy, got["y"]).items():
        assert got[name].dtype is (case.out or case.dtype if name == "y" else case.dtype)
        excess = ((got[name].double() - exact).abs() - bound).max().item()
        assert excess <= 0, f"{name}: {excess:.3g} beyond the bound"


@pytest.mark.parametrize(
    "case", [SoftmaxCase(op, n) for op in OPS for n in (64, 769, 4096, 10007, 32000, 50257, 151936)], ids=str
)
def test_a_row_does_not_know_its_batch(case, generator):
    rows = max(40, min(3000, 2**25 // case.n))
    x, dy = make_inputs(case, rows, generator)
    whole = call(case, x, dy)
    for size in (1, 7, 33):
        for begin in (0, 1, rows // 2 + 1, rows - size):
            some = slice(begin, begin + size)
            part = call(case, x.detach()[some].clone().requires_grad_(), dy[some].clone())
            for name, value in part.items():
                assert torch.equal(value, whole[name][some]), f"{name}, {size} rows from {begin}"
    again = call(case, x, dy)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1001, 2235, 10007, 50257])
def test_an_odd_row_has_the_same_bits_wherever_it_begins(op, n, generator):
    """At each place in 16 bytes, read and written: NaN around what is read is not used, nor is what lies around y."""
    case, rows, log = SoftmaxCase(op, n), 9, op == "log_softmax"
    x, dy = make_inputs(case, rows, generator)
    whole = call(case, x, dy)
    for offset in range(8):
        memory = torch.full((rows * n + 16,), math.nan, dtype=BF16, device=x.device)
        result = memory[offset : offset + rows * n].view(rows, n)
        inputs = [strided(t.detach(), -n % 8, offset) for t in (x, whole["y"], dy)]
        launch.softmax_forward(inputs[0], result, log)
        assert torch.equal(result, whole["y"]), f"y, {offset} elements from 16 bytes"
        launch.softmax_backward(inputs[1], inputs[2], result, log)
        assert torch.equal(result, whole["dx"]), f"dx, {offset} elements from 16 bytes"
        assert memory[:offset].isnan().all() and memory[offset + rows * n :].isnan().all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [8, 769, 4096, 40000, 40001])
def test_infinities_and_nan(op, n, generator):
    """As torch has them, and in their own rows alone."""
    x = torch.randn(9, n, generator=generator, device=generator.device)
    clean = getattr(reduction, op)(x)
    x[1, n // 2] = math.inf
    x[3, 0] = math.nan
    x[4] = -math.inf
    x[5, : n - 1] = -math.inf
    x[6, 1::2] = -math.inf
    x[7] = torch.finfo(FP32).min
    got, expected = getattr(reduction, op)(x), getattr(torch, op)(x.double(), -1)
    for row in (1, 3, 4):
        assert got[row].isnan().all() and expected[row].isnan().all()
    for row in (5, 6, 7):
        assert torch.allclose(got[row].double(), expected[row], rtol=1e-5, atol=1e-6)
    for row in (0, 2, 8):
        assert torch.equal(got[row], clean[row])


@pytest.mark.parametrize("n", [5000, 50257])
def test_equal_elements_have_equal_results(n, generator):
    """Wherever they stand in the row."""
    x = torch.randn(4, n, generator=generator, device=generator.device)
    x[:, ::3] = 1.25
    for op in OPS:
        y = getattr(reduction, op)(x)
        assert torch.equal(y[:, ::3], y[:, :1].expand_as(y[:, ::3]))


def test_shapes_and_strides(generator):
    wide = torch.randn(6, 5, 200, generator=generator, device=generator.device).to(BF16)
    for x in (wide[..., :64], wide[..., 3:103], wide[0], wide[0, 0], wide[:0], wide[..., :0], wide[:, :1, :1]):
        y = reduction.softmax(x)
        assert y.shape == x.shape and y.is_contiguous()
        assert torch.allclose(y.float(), torch.softmax(x.float(), -1), atol=1e-2)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("shape", "dim"), SUMS, ids=str)
def test_sums_against_fp64(shape, dim, dtype, generator):
    x = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    dims = tuple(range(x.dim())) if dim is None else dim
    for op in ("sum", "mean"):
        for keepdim in (False, True):
            for out in (None, FP32):
                got = getattr(reduction, op)(x, dim, keepdim=keepdim, out_dtype=out)
                exact = x.double() if dims == () else getattr(x.double(), op)(dims, keepdim=keepdim)
                size = x.double().abs() if dims == () else getattr(x.double().abs(), op)(dims, keepdim=keepdim)
                assert got.shape == exact.shape and got.dtype is (out or dtype)
                bound = rounding(exact, out or dtype) * 1.01 + 200 * FP32_EPS * size
                assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("shape", "dim"), [((3000, 769), 1), ((300, 4096), 1), ((50, 700, 40), 1), ((9, 4000, 8), 1)])
def test_a_sum_does_not_know_its_batch(shape, dim, generator):
    x = torch.randn(shape, generator=generator, device=generator.device).to(BF16)
    whole = reduction.sum(x, dim, out_dtype=FP32)
    for begin, end in ((0, 1), (1, 8), (3, len(x)), (len(x) - 1, len(x))):
        assert torch.equal(reduction.sum(x[begin:end], dim, out_dtype=FP32), whole[begin:end])
        assert torch.equal(reduction.sum(x[begin:end].clone(), dim, out_dtype=FP32), whole[begin:end])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_sum_does_not_know_what_lies_around_it(dtype, generator):
    """The same bits alone, where it is contiguous, and among others, wherever its row begins."""
    x = torch.randn(6, 1000, 65, generator=generator, device=generator.device).to(dtype)
    for part in (x[..., :64], x[..., 1:], x[..., 3:43], x[..., 2:3]):
        for dim in (1, 2, (1, 2)):
            whole = reduction.sum(part, dim, out_dtype=FP32)
            assert torch.equal(reduction.sum(part.contiguous(), dim, out_dtype=FP32), whole)
            for i in (0, 5):
                assert torch.equal(reduction.sum(part[i : i + 1], dim, out_dtype=FP32), whole[i : i + 1])
        columns = reduction.sum(part, (0, 1), out_dtype=FP32)
        assert torch.equal(reduction.sum(part[..., :1], (0, 1), out_dtype=FP32), columns[:1])
    long = torch.randn(3, 262147, generator=generator, device=generator.device).to(dtype)
    whole = reduction.sum(long, 1, out_dtype=FP32)
    for i in range(3):
        assert torch.equal(reduction.sum(long[i].clone(), 0, out_dtype=FP32), whole[i])


def test_layouts_that_do_not_collapse(generator):
    x = torch.randn(6, 50, 33, generator=generator, device=generator.device)
    for view in (x.transpose(0, 1), x.permute(2, 0, 1), x[:, ::2], x[..., ::2], x[:, :1].expand(6, 9, 33)):
        for dim in (0, 1, 2, (0, 2), None):
            dims = tuple(range(3)) if dim is None else dim
            assert torch.allclose(reduction.sum(view, dim), view.sum(dims), rtol=1e-5, atol=1e-4)


def test_gradients_of_sums(generator):
    x = torch.randn(4, 30, 16, generator=generator, device=generator.device).to(BF16).requires_grad_()
    dy = torch.randn(4, 16, generator=generator, device=generator.device).to(BF16)
    for op, scale in (("sum", 1.0), ("mean", 1 / 30)):
        (dx,) = torch.autograd.grad(getattr(reduction, op)(x, 1), x, dy)
        expected = (dy.float() * scale).to(BF16)[:, None].expand_as(x)
        assert dx.dtype is BF16 and torch.equal(dx, expected)


def test_lazily_negated(generator):
    x = torch.randn(300, 1, dtype=torch.complex64, generator=generator, device=generator.device).conj().imag
    for dim in (0, 1, None):
        assert torch.allclose(reduction.sum(x, dim), x.resolve_neg().sum(() if dim is None else dim), atol=1e-4)


def test_nothing_to_sum(device):
    x = torch.empty(3, 0, 4, device=device)
    assert torch.equal(reduction.sum(x, 1), torch.zeros(3, 4, device=device))
    assert reduction.mean(x, 1).isnan().all() and reduction.sum(x, 0).shape == (0, 4)


def test_second_derivatives_are_refused(generator):
    x = torch.randn(4, 8, generator=generator, device=generator.device, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(reduction.softmax(x).square().sum(), x, create_graph=True)


def test_compile(generator, compile_backend):
    x = torch.randn(40, 512, generator=generator, device=generator.device).to(BF16)

    def function(x):
        return reduction.log_softmax(2 * x) + reduction.mean(x, -1, keepdim=True)

    compiled = torch.compile(function, fullgraph=True, backend=compile_backend)
    results = []
    for f in (function, compiled):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        y.float().square().sum().backward()
        results.append((y.detach(), leaf.grad))
    # Sums of a compiled backward stay in fp32 where eager ones are rounded, and elements that cancel show it
    for eager, graph in zip(*results, strict=True):
        assert (eager.float() - graph.float()).norm() <= 1e-2 * eager.float().norm()


@pytest.mark.gpu
def test_graph_and_stream(generator, device):
    """A first call inside a capture, then replays on new data; a side stream."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    x = torch.randn(30, 1032, generator=generator, device=device).to(BF16)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        y, total = reduction.softmax(x), reduction.sum(x, 0)
    x.copy_(torch.randn(30, 1032, generator=generator, device=device))
    graph.replay()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = reduction.softmax(x), reduction.sum(x, 0)
    stream.synchronize()
    assert torch.equal(y, expected[0]) and torch.equal(total, expected[1])


@pytest.mark.gpu
def test_far_offsets(device):
    """Rows and columns beyond 2^31 elements."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs a GPU with 30 GB")
    x = torch.zeros(2**20 + 3, 2056, device=device, dtype=BF16)
    x[-1, 5] = 3.0
    y = reduction.softmax(x)
    assert torch.equal(y[-1], reduction.softmax(x[-1:].clone())[0])
    assert reduction.sum(x, 1, out_dtype=FP32)[-1].item() == 3.0
    assert reduction.sum(x, 0, out_dtype=FP32)[5].item() == 3.0
