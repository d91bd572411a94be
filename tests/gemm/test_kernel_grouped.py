"""grouped_mm on a GPU: each row has the bits of ``mm``, each group's sums those of ``mm`` of its rows.

Most of these run on the CPU, too, over fake kernels: test_grouped_dispatch.py.
"""

import itertools

import pytest
import torch

from cute_kernels import batch_invariant, bmm, grouped_mm, linear, mm, provenance
from cute_kernels.gemm.config_grouped import candidates
from cute_kernels.runtime.launches import observed
from tests.gemm.cases import Recorder, assert_same_bits, bits, here, only_kernel
from tests.gemm.grouped_cases import (
    BF16,
    EDGES,
    FP16,
    FP32,
    GROUPS,
    Grouped,
    bounds_of,
    kernel_name,
    make_grouped,
    offs_of,
    only_grouped,
    randn,
    rows_by_mm,
    run_grouped,
    sums_by_mm,
    wide_range,
)
from tests.gemm.test_grouped import LAYOUTS, OUTS, every_job
from tests.precompiled import precompile

ROWS = pytest.mark.parametrize("kernel", candidates(here(), "rows"), ids=kernel_name)
SUMS = pytest.mark.parametrize("kernel", candidates(here(), "sums"), ids=kernel_name)


@pytest.fixture(scope="session", autouse=True)
def grouped_precompiled():
    """One after the other the kernels take some seconds each."""
    if not torch.cuda.is_available():
        return
    precompile(every_job())


# Rows


@ROWS
def test_every_kernel_s_rows_have_the_bits_of_mm(kernel, generator):
    """Whatever lies where in memory, with an SM for each tile and with four."""
    for n, k in ((264, 200), (520, 64), (72, 1032)):
        for groups in ("edges", "all in one", "every start"):
            for layout, out in LAYOUTS.items():
                case = Grouped(groups, n, k, layout=layout, rest=8 + -sum(GROUPS[groups]) % 8)
                a, b, offs = make_grouped(case, generator)
                wanted = rows_by_mm(a, b, case.sizes, out)
                for num_sms in (132, 4):
                    with only_grouped(*kernel, num_sms), observed() as used:
                        found = grouped_mm(a, b, offs, out_dtype=out)
                    assert [(launch.config, launch.transposed) for launch, _, _ in used] == [kernel]
                    assert_same_bits(found, wanted, f"{case}, {num_sms} SMs")


CASES = [
    *(Grouped(groups, 136, 72, rest=rest) for groups in GROUPS for rest in (0, 3)),
    Grouped("edges", 136, 72, FP16),
    Grouped("edges", 136, 72, FP16, FP32),
    Grouped("edges", 136, 72, out=FP16),
    Grouped("edges", 35, 72),  # rows of the result off 16 bytes
    Grouped("edges", 64, 17),  # rows of a off 16 bytes
    Grouped("few", 33, 35, layout=("m", "k")),
    Grouped("edges", 136, 72, rest=7, layout=("m", "n")),  # columns of tokens that start on 16 bytes, groups do not
    Grouped("edges", 8, 8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_and_gradients(case, generator):
    a, b, offs = make_grouped(case, generator)
    dout = randn(case.rows, case.n, generator=generator).to(case.out or case.dtype)
    found = run_grouped(a, b, offs, dout, out_dtype=case.out)
    rounded = dout.to(case.dtype)
    assert found["out"].is_contiguous() and found["db"].dtype is found["da"].dtype is case.dtype
    assert_same_bits(found["out"], rows_by_mm(a, b, case.sizes, case.out), "out")
    assert_same_bits(found["da"], rows_by_mm(rounded, b.mT, case.sizes), "da")
    assert_same_bits(found["db"], sums_by_mm(a.t(), rounded, case.sizes), "db")


def test_a_row_alone(generator):
    """Each by itself in a group, with any others, in any order: the same bits."""
    a, b, offs = make_grouped(Grouped("edges", 136, 200), generator)
    whole = grouped_mm(a, b, offs)
    for e, (start, end) in enumerate(bounds_of(EDGES)):
        for row in {start, (start + end) // 2, end - 1} if end > start else ():
            alone = [int(i == e) for i in range(len(EDGES))]
            assert_same_bits(grouped_mm(a[row : row + 1], b, offs_of(alone, a.device)), whole[row : row + 1], f"{row}")
    sizes = [min(size, 20) for size in EDGES]
    picked = torch.cat([torch.arange(s, e, device=a.device).flip(0)[:20] for s, e in bounds_of(EDGES)])
    assert_same_bits(grouped_mm(a[picked], b, offs_of(sizes, a.device)), whole[picked])


@ROWS
def test_a_group_does_not_see_its_neighbours(kernel, generator):
    """All other rows and matrices are NaN or infinite, and what the result's memory held was NaN."""
    case = Grouped("edges", 136, 72, rest=5)
    a, b, offs = make_grouped(case, generator)
    with only_grouped(*kernel):
        whole = grouped_mm(a, b, offs)
        for e, other in zip((1, 6, 9, 13, 14), ("nan", "inf", "nan", "-inf", "nan"), strict=True):
            start, end = bounds_of(EDGES)[e]
            dirty_a, dirty_b = torch.full_like(a, float(other)), torch.full_like(b, float(other))
            dirty_a[start:end], dirty_b[e] = a[start:end], b[e]
            poison = torch.full_like(whole, float("nan"))
            del poison
            found = grouped_mm(dirty_a, dirty_b, offs)
            assert_same_bits(found[start:end], whole[start:end], f"group {e}")
            assert not found[sum(EDGES) :].any()


@pytest.mark.parametrize("groups", ["edges", "few"])
def test_columns_of_groups(groups, generator):
    """The third form; and its gradients."""
    case = Grouped(groups, 136, 72)
    a, b, offs = make_grouped(case, generator)
    matrices, columns = b.mT, a.t()
    dout = randn(case.n, case.rows, generator=generator).to(BF16)
    found = run_grouped(matrices, columns, offs, dout)
    assert_same_bits(found["out"], rows_by_mm(a, b, case.sizes).t(), "out")
    assert_same_bits(found["db"], rows_by_mm(dout.t(), b.mT, case.sizes).t(), "db")
    assert_same_bits(found["da"], sums_by_mm(a.t(), dout.t(), case.sizes).mT, "da")


def test_without_offs_it_is_bmm(generator):
    a, b = wide_range(3, 40, 64, generator=generator), wide_range(3, 64, 72, generator=generator)
    assert_same_bits(grouped_mm(a, b, out_dtype=FP32), bmm(a, b, out_dtype=FP32))


# Sums


@SUMS
def test_every_kernel_s_sums_have_the_bits_of_mm(kernel, generator):
    for m, n in ((264, 200), (72, 520), (392, 136)):
        for groups in ("edges", "few", "every start", "all in one", "none"):
            sizes = GROUPS[groups]
            rows = sum(sizes) + 8 + -sum(sizes) % 8  # those of columns, too, start on 16 bytes
            x, dy = wide_range(rows, n, generator=generator), wide_range(rows, m, generator=generator)
            start = wide_range(len(sizes), m, n, generator=generator).float()
            offs = offs_of(sizes, x.device)
            for num_sms in (132, 4):
                with only_grouped(*kernel, num_sms), observed() as used:
                    found = [grouped_mm(dy.t(), x, offs, out_dtype=out) for out in OUTS]
                    found.append(grouped_mm(dy.t(), x, offs, accumulate_into=start.clone()))
                assert {(launch.config, launch.transposed) for launch, _, _ in used} == {kernel}
                for one in found[:-1]:
                    wanted = sums_by_mm(dy.t(), x, sizes, one.dtype)
                    assert_same_bits(one, wanted, f"{groups} {m}x{n}, {one.dtype}, {num_sms} SMs")
                assert_same_bits(found[-1], accumulated(start, x, dy, sizes), f"{groups} {m}x{n}, accumulated")


def accumulated(start, x, dy, sizes):
    """Each group's by ``linear``'s backward into a main_grad."""
    found = start.clone()
    with only_kernel(None, False):
        for e, (first, end) in enumerate(bounds_of(sizes)):
            if end > first:
                weight = torch.zeros(found.shape[1:], dtype=x.dtype, device=x.device, requires_grad=True)
                weight.main_grad = found[e].clone()
                linear(x[first:end], weight).backward(dy[first:end])
                found[e] = weight.main_grad
    return found


@SUMS
def test_sums_do_not_see_other_groups(kernel, generator):
    """All else is NaN or infinite: before a group's first row, behind its last one, beyond the last group."""
    m, n, sizes = 136, 72, EDGES
    x, dy = wide_range(sum(sizes) + 7, n, generator=generator), wide_range(sum(sizes) + 7, m, generator=generator)
    offs = offs_of(sizes, x.device)
    with only_grouped(*kernel):
        for by_rows in (True, False):
            lay = (lambda t: t) if by_rows else (lambda t: t.t().contiguous().t())
            whole = grouped_mm(lay(dy).t(), lay(x), offs, out_dtype=OUTS[not by_rows])
            for e, other in zip((1, 3, 6, 10, 13, 14, 15), itertools.cycle(("nan", "inf", "-inf"))):
                start, end = bounds_of(sizes)[e]
                dirty = [torch.full_like(t, float(other)) for t in (x, dy)]
                for t, clean in zip(dirty, (x, dy), strict=True):
                    t[start:end] = clean[start:end]
                found = grouped_mm(lay(dirty[1]).t(), lay(dirty[0]), offs, out_dtype=OUTS[not by_rows])
                assert_same_bits(found[e], whole[e], f"group {e}")
                assert not found[0].any() and not found[-1].any()  # of no rows


def test_rows_of_zeros(generator):
    """E2: behind a group any number of them changes nothing, in front a multiple of 16."""
    x, dy = wide_range(100, 72, generator=generator), wide_range(100, 136, generator=generator)
    wanted = grouped_mm(dy.t(), x, offs_of([100], x.device), out_dtype=FP32)
    for front, behind in ((0, 1), (0, 28), (16, 0), (48, 77)):
        padded = [torch.nn.functional.pad(t, (0, 0, front + 5, behind)) for t in (x, dy)]
        offs = offs_of([5, 100 + front + behind], x.device)
        assert_same_bits(grouped_mm(padded[1].t(), padded[0], offs, out_dtype=FP32)[1:], wanted, f"{front}, {behind}")
    shifted = [torch.nn.functional.pad(t, (0, 0, 8, 0)) for t in (x, dy)]
    other = grouped_mm(shifted[1].t(), shifted[0], offs_of([108], x.device), out_dtype=FP32)
    assert (bits(other) != bits(wanted)).any()


def test_cuts_at_every_row(generator):
    """E3: two calls have the bits of one with zeros up to a multiple of 16 between them; of one without, only then."""
    x, dy = wide_range(40, 72, generator=generator), wide_range(40, 136, generator=generator)
    start = wide_range(1, 136, 72, generator=generator).float()

    def added(to, *parts):
        rows, of_dy = (torch.cat(of_one) for of_one in zip(*parts, strict=True))
        offs = offs_of([len(rows)], x.device)
        return grouped_mm(of_dy.t(), rows, offs, accumulate_into=to.clone())

    whole = added(start, (x, dy))
    for cut in range(41):
        first, second = (x[:cut], dy[:cut]), (x[cut:], dy[cut:])
        zeros = x.new_zeros(-cut % 16, 72), x.new_zeros(-cut % 16, 136)
        found = added(added(start, first), second)
        assert_same_bits(found, added(start, first, zeros, second), f"cut at {cut}")
        assert torch.equal(bits(found), bits(whole)) == (cut % 16 == 0 or cut == 40), f"cut at {cut}"


def test_calls_in_a_row_into_main_grad(generator):
    """Cut at multiples of 16 of each group's rows: the bits of one call. A group without rows keeps its own."""
    sizes, cuts = (96, 0, 40, 80), ((32, 0, 16, 80), (48, 0, 0, 0), (16, 0, 24, 0))
    x, dy = randn(216, 72, generator=generator).to(BF16), randn(216, 136, generator=generator).to(BF16)
    start = randn(4, 136, 72, generator=generator)
    start[1, 0, :4] = torch.tensor([-0.0, 0.0, float("nan"), 1.0])
    weight = randn(4, 136, 72, generator=generator).to(BF16).requires_grad_()
    b = weight.detach().clone().requires_grad_()

    def backward(x, dy, sizes):
        grouped_mm(x, b.mT, offs_of(sizes, x.device)).backward(dy)

    whole = grouped_mm(dy.t(), x, offs_of(sizes, x.device), accumulate_into=start.clone())
    parts, done = start.clone(), [first for first, _ in bounds_of(sizes)]
    for cut in cuts:
        index = torch.cat([torch.arange(d, d + c, device=x.device) for d, c in zip(done, cut, strict=True)])
        done = [d + c for d, c in zip(done, cut, strict=True)]
        grouped_mm(dy[index].t(), x[index], offs_of(cut, x.device), accumulate_into=parts)
    assert_same_bits(parts, whole)
    assert_same_bits(whole[1], start[1])
    leaf = weight.detach().mT.contiguous().requires_grad_()
    leaf.main_grad = start.mT.contiguous()
    grouped_mm(x, leaf, offs_of(sizes, x.device)).backward(dy)
    assert leaf.grad is None
    assert_same_bits(leaf.main_grad, whole.mT.contiguous(), "main_grad")


# As an operator


def test_ends_that_do_not_ascend_touch_no_other_memory(generator):
    """Below the one before, negative, beyond the rows: clamped. The reference refuses them."""
    a, b, _ = make_grouped(Grouped("few", 72, 64), generator)
    offs = torch.tensor([20, 5, -3, 2**31 - 1, 50], dtype=torch.int32, device=a.device)
    clamped = torch.tensor([20, 20, 20, 60, 60], dtype=torch.int32, device=a.device)
    assert_same_bits(grouped_mm(a, b, offs), grouped_mm(a, b, clamped))
    assert_same_bits(grouped_mm(a.t(), a, offs), grouped_mm(a.t(), a, clamped))
    with pytest.raises(ValueError, match="grouped_mm: offs must ascend from 0 to at most 60"):
        grouped_mm(a, b, offs, backend="reference")


@pytest.mark.parametrize("empty", ["rows", "groups", "n", "k"])
def test_empty(empty, generator, device):
    sizes = {"rows": 5, "groups": 3, "n": 8, "k": 16} | {empty: 0}
    a = torch.ones(sizes["rows"], sizes["k"], dtype=BF16, device=device)
    b = torch.ones(sizes["groups"], sizes["k"], sizes["n"], dtype=BF16, device=device)
    offs = torch.full((sizes["groups"],), sizes["rows"], dtype=torch.int32, device=device)
    found = run_grouped(a, b, offs, a.new_ones(sizes["rows"], sizes["n"]))
    for name, like in (("out", (sizes["rows"], sizes["n"])), ("da", a.shape), ("db", b.shape)):
        assert found[name].shape == like and not found[name].any(), name


@pytest.mark.parametrize("wanted", ["a", "b"])
def test_frozen_operand(wanted, generator):
    a, b, offs = make_grouped(Grouped("few", 72, 64), generator)
    dout = randn(len(a), 72, generator=generator).to(BF16)
    both = run_grouped(a, b, offs, dout)
    leaf = {"a": a, "b": b}[wanted].requires_grad_()
    with observed() as launches:
        (found,) = torch.autograd.grad(grouped_mm(a, b, offs), leaf, dout)
    assert len(launches) == 2
    assert_same_bits(found, both[f"d{wanted}"])


def test_gradient_of_a_transposed_weight_lies_as_the_weight(generator):
    a, b, offs = make_grouped(Grouped("few", 72, 64), generator)
    weight = b.mT.contiguous().requires_grad_()
    dout = randn(len(a), 72, generator=generator).to(BF16)
    (found,) = torch.autograd.grad(grouped_mm(a, weight.mT, offs), weight, dout)
    assert found.is_contiguous()
    assert_same_bits(found, run_grouped(a, b, offs, dout)["db"].mT)


def test_number_as_incoming_gradient(generator):
    a, b, offs = make_grouped(Grouped("few", 72, 64), generator)
    one = torch.ones((), dtype=BF16, device=a.device).expand(len(a), 72)
    for name, result in run_grouped(a, b, offs, one.contiguous()).items():
        assert_same_bits(run_grouped(a, b, offs, one)[name], result, name)


def inside_of_batch_invariant(generator):
    a, b, offs = make_grouped(Grouped("few", 72, 64), generator)
    dout = randn(len(a), 72, generator=generator).to(BF16)
    wanted = run_grouped(a, b, offs, dout)
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    with batch_invariant(), observed() as used:
        out = torch._grouped_mm(a, b, offs=offs)
        da, db = torch.autograd.grad(out, (a, b), dout)
    assert len(used) == 3 and all(launch.kernel.startswith("grouped") for launch, _, _ in used)
    for name, result in {"out": out.detach(), "da": da, "db": db}.items():
        assert_same_bits(result, wanted[name].reshape(result.shape), name)


def test_inside_of_batch_invariant(generator):
    """torch's own call, forward and backward."""
    inside_of_batch_invariant(generator)


def experts_of_torch(generator):
    """A layer of torch's three calls, as torchtitan has it: a row, and its gradient, by itself and among others."""
    x, w1, offs = make_grouped(Grouped("few", 72, 64), generator)
    w2, w3 = (randn(5, *sizes, generator=generator).to(BF16) for sizes in ((72, 64), (64, 72)))

    def run(x, offs):
        x = x.detach().requires_grad_()
        h = torch.nn.functional.silu(torch._grouped_mm(x, w1, offs=offs)) * torch._grouped_mm(x, w3, offs=offs)
        y = torch._grouped_mm(h, w2, offs=offs)
        return y.detach(), *torch.autograd.grad(y, x, torch.linspace(-1, 1, 64, device=x.device).to(BF16).expand_as(y))

    with batch_invariant("strict"):
        whole = run(x, offs)
        for row, group in ((0, 0), (18, 2), (19, 3), (40, 4)):
            alone = run(x[row : row + 1], offs_of([int(e == group) for e in range(5)], x.device))
            for found, wanted in zip(alone, whole, strict=True):
                assert_same_bits(found[0], wanted[row], f"row {row}")


def test_experts_of_torch(generator):
    experts_of_torch(generator)


def test_provenance(generator):
    a, b, offs = make_grouped(Grouped("few", 72, 64), generator)
    (entry,) = provenance(grouped_mm, a, b, offs)
    assert entry.shape == (5, 60, 72, 64) and entry.kernel.startswith("grouped_rows (tile")
    (entry,) = provenance(grouped_mm, a[:, ::2], b[:, ::2], offs)
    assert entry.kernel == "grouped_rows (any stride)"
    (entry,) = provenance(grouped_mm, a.t(), a, offs)
    assert entry.kernel.startswith("grouped_sums (tile") and entry.contract == "serial_k16"


def test_compile(generator, compile_backend):
    """One graph, forward and backward; eager mode's bits, also for another number of rows and other groups."""
    torch._dynamo.reset()
    compiled = torch.compile(grouped_mm, fullgraph=True, backend=compile_backend)
    for sizes in ((3, 0, 16, 1, 40), (9, 9, 9, 9, 9)):
        a, b = (wide_range(*shape, generator=generator) for shape in ((sum(sizes), 64), (5, 64, 72)))
        offs, dout = offs_of(sizes, a.device), randn(sum(sizes), 72, generator=generator).to(BF16)
        wanted = run_grouped(a, b, offs, dout)
        a, b = a.requires_grad_(), b.requires_grad_()
        out = compiled(a, b, offs)
        for name, result in zip(("out", "da", "db"), (out, *torch.autograd.grad(out, (a, b), dout)), strict=True):
            assert_same_bits(result.detach(), wanted[name], name)


def test_opcheck(generator):
    """Every call that a forward and a backward make."""
    a, b, offs = make_grouped(Grouped("few", 24, 16), generator)
    dout = randn(len(a), 24, generator=generator).to(BF16)
    b.main_grad = torch.zeros_like(b, dtype=FP32)
    with Recorder() as recorder:
        run_grouped(a, b.detach(), offs, dout)
        grouped_mm(a.t(), dout, offs, accumulate_into=torch.zeros(5, 16, 24, device=a.device))
    assert [function._schema.name.split("::")[1] for function, _ in recorder.calls] == [
        "grouped_rows",
        "grouped_rows",
        "grouped_sums",
        "grouped_sums_into",
    ]
    for function, arguments in recorder.calls:
        torch.library.opcheck(function, arguments)


# Below: on a GPU only


def test_torch_s_own_has_the_same_bits(generator):
    """torch 2.11 has our bits on SM90: it does not promise them, but they say what replacing its kernel changes."""
    for groups, n, k in (("edges", 264, 200), ("edges", 1536, 2048), ("few", 768, 4096)):
        a, b, offs = make_grouped(Grouped(groups, n, k), generator)
        found = torch._grouped_mm(a, b, offs=offs)
        if not torch.equal(bits(found), bits(grouped_mm(a, b, offs))):
            pytest.skip(f"torch {torch.__version__} sums in another order")
        assert_same_bits(torch._grouped_mm(a.t(), found, offs=offs), grouped_mm(a.t(), found, offs), "sums")


def test_other_groups_in_a_captured_graph(generator):
    a, b, offs = make_grouped(Grouped("edges", 136, 72), generator)
    dout = randn(len(a), 136, generator=generator).to(BF16)
    run_grouped(a, b, offs, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_grouped(a, b, offs, dout)
    for sizes in (EDGES, tuple(reversed(EDGES)), (*(0,) * 16, 300), (70,) * 17):
        offs.copy_(offs_of(sizes, a.device).clamp(max=len(a)))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        for name, result in run_grouped(a, b, offs, dout).items():
            assert_same_bits(replayed[name], result, f"{name}, {sizes}")


def test_first_call_inside_a_graph_capture(generator):
    """No other test has these dtypes, so each module is loaded inside."""
    a, b, offs = make_grouped(Grouped("few", 88, 104, FP16, BF16), generator)
    dout = randn(len(a), 88, generator=generator).to(BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_grouped(a, b, offs, dout, out_dtype=BF16)
    for _ in range(2):
        a.copy_(randn(*a.shape, generator=generator))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        for name, result in run_grouped(a, b, offs, dout, out_dtype=BF16).items():
            assert_same_bits(replayed[name], result, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device(generator):
    """Tensors of a device that is not the current one: the same bits; of two devices: an error."""
    a, b, offs = make_grouped(Grouped("edges", 136, 72), generator)
    dout = randn(len(a), 136, generator=generator).to(BF16)
    wanted = run_grouped(a, b, offs, dout)
    assert torch.cuda.current_device() == 0
    for name, result in run_grouped(*(t.to("cuda:1") for t in (a, b, offs, dout))).items():
        assert_same_bits(result.to("cuda:0"), wanted[name], name)
    with pytest.raises(ValueError, match="b must be on cuda:1, got cuda:0"):
        grouped_mm(a.to("cuda:1"), b, offs)


def test_more_than_2_31_elements(generator):
    """The result, and a, have offsets beyond 32 bits, by TMA and by threads."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 22e9:
        pytest.skip("needs 22 GB of free GPU memory")
    rows = 2**20 + 200
    a = torch.randn(rows, 64, generator=generator, device="cuda", dtype=BF16)
    b = torch.randn(3, 64, 2064, generator=generator, device="cuda", dtype=BF16)
    sizes = (77, rows - 300, 201)
    offs = offs_of(sizes, "cuda")
    found = grouped_mm(a, b, offs)
    last = slice(rows - 300 - 50, rows)
    wanted = torch.cat([mm(a[last][:127], b[1]), mm(a[last][127:328], b[2]), found.new_zeros(22, 2064)])
    assert_same_bits(found[last], wanted)
    assert_same_bits(grouped_mm(found, b.mT, offs)[last][:127], mm(found[last][:127], b[1].t()))
