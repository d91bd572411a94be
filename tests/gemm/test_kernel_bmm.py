"""bmm: of each entry the bits of mm, forward and backward; by every kernel; what entries do not see of each other."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import bmm, mm, provenance
from cute_kernels.gemm.config import DECODE_16, DECODE_32, PING_PONG, PREFILL
from cute_kernels.gemm.launch import gemm
from cute_kernels.runtime.launches import observed
from jit_cache import stats
from tests.gemm.cases import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    Batch,
    Recorder,
    assert_same_bits,
    check,
    here,
    kernel_name,
    make_batch,
    only_kernel,
    oracle_mm,
    randn,
    run_batch,
    wide_range,
)
from tests.gemm.every_kernel import batches, of_any_layout, of_whole_blocks
from tests.sanitizer import assert_clean, needs_sanitizer

pytestmark = pytest.mark.usefixtures("gemms_precompiled")

# Each number of entries, M, N and K at least once with each layout; sizes around the tiles, K below a step and long
SIZES = [
    (1, 257, 264, 200),
    (1, 1, 1, 1),
    (2, 512, 200, 64),
    (2, 128, 4096, 64),
    (2, 33, 64, 4096),
    (3, 100, 200, 4096),
    (3, 64, 8, 200),
    (3, 33, 33, 17),
    (33, 128, 64, 60),
    (33, 64, 60, 64),
    (33, 257, 200, 8),
    (33, 7, 1, 200),
    (300, 16, 200, 64),
    (300, 1, 64, 200),
    (300, 7, 8, 8),
    (300, 100, 64, 60),
    (300, 33, 200, 1),
]
BY_SIZE = [Batch(*size, layout=layout) for size in SIZES for layout in LAYOUTS]
BY_MEMORY = [
    *(Batch(3, 72, 136, 60, layout=layout, gap=4) for layout in LAYOUTS),  # rows of 64 on 16 bytes
    *(Batch(3, 100, 64, 60, layout=layout, gap=3) for layout in LAYOUTS),
    *(Batch(5, 72, 136, 200, layout=layout, between=True) for layout in LAYOUTS),
    *(Batch(5, 16, 136, 200, expanded=e, layout=layout) for e in ("a", "b", "ab") for layout in LAYOUTS),
    *(Batch(33, 7, 33, 17, expanded=e) for e in ("a", "b")),
    Batch(5, 264, 136, 60, expanded="b", gap=4),
    Batch(3, 264, 136, 200, between=True, gap=8),
]
BY_DTYPE = [Batch(3, *mnk, dtype, out) for mnk in ((264, 136, 200), (7, 33, 64)) for dtype in (BF16, FP16)
            for out in (None, BF16, FP16, FP32)]  # fmt: skip


def assert_entries(found, a, b, dout, **options):
    """Against ``mm`` of each entry; of a hundred and more the first, the last and some between."""
    entries = range(len(a)) if len(a) < 100 else (0, 1, 2, len(a) // 2, len(a) - 2, len(a) - 1)
    for i in entries:
        wanted = run_batch(mm, a[i], b[i], dout[i], **options)
        for name, result in wanted.items():
            assert_same_bits(found[name][i], result, f"{name} of entry {i}")


@pytest.mark.parametrize("case", [*BY_SIZE, *BY_MEMORY, *BY_DTYPE], ids=str)
def test_each_entry_has_the_bits_of_mm(case, generator):
    a, b = make_batch(case, generator)
    dout = randn(case.entries, case.m, case.n, generator=generator).to(case.out or case.dtype)
    with observed() as launches:
        found = run_batch(bmm, a, b, dout, out_dtype=case.out)
    assert len(launches) == 3 and launches[0][1] == (case.entries, case.m, case.n, case.k)
    assert found["out"].is_contiguous() and found["out"].dtype is (case.out or case.dtype)
    assert found["da"].dtype is found["db"].dtype is case.dtype
    assert_entries(found, a, b, dout, out_dtype=case.out)


@pytest.mark.parametrize("batch_kernel", of_any_layout() + of_whole_blocks(), ids=kernel_name)
def test_every_kernel_has_the_same_bits(batch_kernel, generator):
    """Each in all that a batch can get it for against the one for any stride; with many SMs, and with four."""
    shapes = [(3, 40, 72, 576), (2, 520, 264, 1088)]
    if batch_kernel in of_any_layout():
        shapes += [(5, 72, 136, 200), (3, 304, 264, 72), (7, 8, 520, 136), (2, 520, 264, 1032)]
    for entries, m, n, k in shapes:
        a, b = make_batch(Batch(entries, m, n, k, layout=("k", "k")), generator)
        with only_kernel(None, False):
            wanted = batches(batch_kernel, a, b.mT)
        for num_sms in (132, 4):
            with only_kernel(*batch_kernel, num_sms), observed() as used:
                found = batches(batch_kernel, a, b.mT)
            assert {(launch.config, launch.transposed) for launch, _, _ in used} == {batch_kernel}
            assert all(launch.num_ctas <= num_sms for launch, _, _ in used)
            assert found.keys() == wanted.keys()
            for name, result in found.items():
                assert_same_bits(result, wanted[name], f"{name}, {entries}x{m}x{n}x{k}, {num_sms} SMs")


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
@pytest.mark.parametrize("m, n, k", [(72, 136, 200), (8, 72, 2112), (100, 64, 60), (8, 264, 72), (33, 35, 17)], ids=str)
def test_an_entry_does_not_see_its_neighbours(m, n, k, layout, generator):
    """All others NaN: a tile reads neither rows nor k of the next entry into its sums, nor writes to it."""
    entries = 3
    a, b = make_batch(Batch(entries, m, n, k, layout=layout), generator)
    dout = randn(entries, m, n, generator=generator).to(BF16)
    wanted = run_batch(bmm, a, b, dout)
    for i in range(entries):
        others = torch.arange(entries, device=a.device) != i
        for hit in itertools.product((False, True), repeat=3):
            dirty = [t.clone() for t in (a, b, dout)]
            for t, is_hit in zip(dirty, hit, strict=True):
                if is_hit:
                    t[others] = float("nan")
            found = run_batch(bmm, *dirty)
            for name, result in wanted.items():
                assert_same_bits(found[name][i], result[i], f"{name} of entry {i}, {hit} NaN elsewhere")
            assert bool(found["out"][others].isnan().any()) == (hit[0] or hit[1])


def test_a_row_does_not_know_its_batch(generator):
    """Any number of entries and rows, in any order."""
    a, b = make_batch(Batch(40, 257, 136, 200), generator)
    whole = bmm(a, b)
    for entries, m in ((1, 1), (2, 257), (7, 33), (33, 64), (40, 8)):
        entry = torch.randperm(40, generator=generator, device=a.device)[:entries]
        row = torch.randperm(257, generator=generator, device=a.device)[:m]
        assert_same_bits(bmm(a[entry][:, row], b[entry]), whole[entry][:, row], f"{entries} entries of {m} rows")


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
def test_against_fp64(layout, generator):
    for entries, m, n, k in ((5, 100, 72, 200), (3, 8, 264, 60)):
        a, b = make_batch(Batch(entries, m, n, k, layout=layout), generator)
        dout = randn(entries, m, n, generator=generator).to(BF16)
        found = run_batch(bmm, a, b, dout)
        for i in range(entries):
            exact = {
                "out": oracle_mm(a[i], b[i]),
                "da": oracle_mm(dout[i], b[i].t()),
                "db": oracle_mm(a[i].t(), dout[i]),
            }
            check({name: result[i] for name, result in found.items()}, exact)


@pytest.mark.parametrize("layout", ["transposed", "number", "entry", "gap"])
def test_layout_of_the_incoming_gradient(layout, generator):
    a, b = make_batch(Batch(3, 72, 136, 64), generator)
    dense = randn(3, 72, 136, generator=generator).to(BF16)
    dout = {
        "transposed": dense.mT.contiguous().mT,
        "number": dense[:1, :1, :1].expand_as(dense),
        "entry": dense[:1].expand_as(dense),
        "gap": torch.cat([dense, dense], 2)[..., :136],
    }[layout]
    assert not dout.is_contiguous()
    assert_entries(run_batch(bmm, a, b, dout), a, b, dout)


@pytest.mark.parametrize("wanted", ["a", "b"])
def test_frozen_operand(wanted, generator):
    a, b = make_batch(Batch(3, 72, 136, 64), generator)
    dout = randn(3, 72, 136, generator=generator).to(BF16)
    both = run_batch(bmm, a, b, dout)
    leaf = {"a": a, "b": b}[wanted].requires_grad_()
    with observed() as launches:
        (found,) = torch.autograd.grad(bmm(a, b), leaf, dout)
    assert len(launches) == 2
    assert_same_bits(found, both[f"d{wanted}"])


def test_gradients_of_what_is_expanded(generator):
    """They are those of each entry, added by torch."""
    a, b = make_batch(Batch(5, 16, 136, 64), generator)
    dout = randn(5, 16, 136, generator=generator).to(BF16)
    shared = b[0].detach().requires_grad_()
    (found,) = torch.autograd.grad(bmm(a, shared.expand(5, 64, 136)), shared, dout)
    db = run_batch(bmm, a, b[:1].expand_as(b), dout)["db"]
    assert_same_bits(found, db.sum(0))


def test_second_derivative_is_refused(generator):
    a, b = make_batch(Batch(2, 8, 8, 8), generator)
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(bmm(a.requires_grad_(), b).float().square().sum(), a, create_graph=True)


@pytest.mark.parametrize("empty", range(4))
def test_empty(empty, generator):
    sizes = [3, 65, 40, 24]
    sizes[empty] = 0
    entries, m, n, k = sizes
    a, b = make_batch(Batch(*sizes), generator)
    dout = randn(entries, m, n, generator=generator).to(BF16)
    with observed() as launches:
        found = run_batch(bmm, a, b, dout)
    assert not launches
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "out": (entries, m, n),
        "da": (entries, m, k),
        "db": (entries, k, n),
    }
    assert not any(t.any() for t in found.values())


def test_provenance(generator):
    a, b = make_batch(Batch(3, 72, 136, 64), generator)
    (entry,) = provenance(bmm, a, b)
    assert entry.shape == (3, 72, 136, 64) and entry.kernel.startswith("gemm (tile")
    (entry,) = provenance(bmm, a[..., ::2], b[:, ::2])
    assert entry.kernel == "gemm (any stride)" and entry.shape == (3, 72, 136, 32)


@pytest.mark.parametrize("case", [Batch(3, 65, 96, 64), Batch(5, 9, 33, 17, FP16, FP32)], ids=str)
def test_compile(case, generator, compile_backend):
    """One graph, forward and backward; eager mode's bits, also for other numbers of entries and rows."""
    torch._dynamo.reset()
    compiled = torch.compile(bmm, fullgraph=True, backend=compile_backend)
    for entries, m in ((case.entries, case.m), (2, 3), (7, 130)):
        a, b = make_batch(Batch(entries, m, case.n, case.k, case.dtype), generator)
        dout = randn(entries, m, case.n, generator=generator).to(case.out or case.dtype)
        wanted = run_batch(bmm, a, b, dout, out_dtype=case.out)
        before = stats().compiles
        for name, result in run_batch(compiled, a, b, dout, out_dtype=case.out).items():
            assert_same_bits(result, wanted[name], name)
        assert stats().compiles == before


def test_opcheck(generator):
    """Every call that a forward and a backward make."""
    a, b = make_batch(Batch(3, 40, 24, 16), generator)
    dout = randn(3, 40, 24, generator=generator).to(BF16)
    wanted = run_batch(bmm, a, b, dout)
    with Recorder() as recorder:
        found = run_batch(bmm, a, b, dout)
    for name, result in wanted.items():
        assert_same_bits(found[name], result, name)
    assert [function for function, _ in recorder.calls] == [gemm.registered] * 3
    for function, arguments in recorder.calls:
        torch.library.opcheck(function, arguments)


def test_fake_tensors():
    before = stats()
    with FakeTensorMode(), torch.no_grad():
        a, b = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in ((3, 5, 64), (3, 64, 96)))
        y = bmm(a, b, out_dtype=FP32)
        assert y.shape == (3, 5, 96) and y.dtype is FP32 and y.device.type == "cuda"
        with pytest.raises(ValueError, match="b must have 3 matrices"):
            bmm(a, torch.empty(2, 64, 96, dtype=BF16, device="cuda"))
    assert stats() == before


# Below: on a GPU only


def test_first_call_inside_a_graph_capture(generator):
    """A dtype that no other test has, so that the module is loaded inside; replays take what the operands then hold."""
    case = Batch(5, 72, 136, 88, FP16, BF16)
    a, b = make_batch(case, generator)
    dout = randn(5, 72, 136, generator=generator).to(BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_batch(bmm, a, b, dout, out_dtype=BF16)
    for _ in range(2):
        for t, fresh in zip((a, b), make_batch(case, generator), strict=True):
            t.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        for name, result in run_batch(bmm, a, b, dout, out_dtype=BF16).items():
            assert_same_bits(replayed[name], result, name)


def test_no_memory_but_the_output():
    """Nothing is padded, transposed, expanded or copied, in any layout."""
    a, b = (torch.zeros(8, *shape, dtype=BF16, device="cuda") for shape in ((512, 256), (256, 1024)))
    for left in (a, a.mT.contiguous().mT, a[:, :5], a[:1].expand_as(a)):
        for right in (b, b.mT.contiguous().mT, b[:1].expand_as(b)):
            bmm(left, right)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            y = bmm(left, right)
            assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == y.numel() * y.element_size()
            del y


def needs_gigabytes(number):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < number * 1e9:
        pytest.skip(f"needs {number} GB of free GPU memory")


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("m, step", [(200, 2**31 + 64), (8, 2**31 + 64), (200, 2**31 + 1)], ids=str)
def test_entries_far_apart(m, step, operand, generator):
    """Beyond 2^31 elements: read by TMA, by kernels for few rows, and element by element."""
    needs_gigabytes(12)
    n, k = 136, 64
    a, b = wide_range(2, m, k, generator=generator), wide_range(2, k, n, generator=generator)
    near = {"a": a, "b": b}[operand]
    size = near[0].numel()
    memory = torch.full((step + size,), float("nan"), dtype=BF16, device="cuda")
    far = memory.as_strided(near.shape, (step, near.shape[2], 1)).copy_(near)
    assert_same_bits(bmm(*((far, b) if operand == "a" else (a, far))), bmm(a, b))


@pytest.mark.parametrize("m, n", [(8192, 8192), (8, 2**23), (8193, 8191)], ids=str)
def test_more_than_2_31_elements(m, n, generator):
    """The result: stored by TMA, by the transposed product, and element by element."""
    needs_gigabytes(24)
    entries = 2**31 // (m * n) + 2
    a, b = (randn(entries, *shape, generator=generator, dtype=BF16) for shape in ((m, 16), (16, n)))
    y = bmm(a, b)
    assert y.numel() > 2**31
    for i in (0, 2**30 // (m * n), 2**31 // (m * n), entries - 1):
        assert_same_bits(y[i], mm(a[i], b[i]), f"entry {i}")


PROGRAM = """
import torch
from cute_kernels import bmm
from tests.gemm.cases import only_kernel
from tests.gemm.test_kernel_bmm import OF_THE_SANITIZER

for kernel in OF_THE_SANITIZER:
    for k in (72, 17):  # the latter by the kernel for any stride
        a = torch.randn(3, 136, k, device="cuda").bfloat16().requires_grad_()
        b = torch.randn(3, k, 264, device="cuda").bfloat16().requires_grad_()
        with only_kernel(*kernel, num_sms=2):  # one cluster computes all tiles
            found = [bmm(a, b), bmm(a[:1].expand(3, -1, -1), b, out_dtype=torch.float32)]
            found += torch.autograd.grad(found[0], (a, b), found[0].detach())
        torch.cuda.synchronize()
        assert all(t.isfinite().all() for t in found)
print("done")
"""
OF_THE_SANITIZER = [
    (PREFILL[0], False),
    (PREFILL[3], False),
    (DECODE_16, True),
    (DECODE_32, False),
    *[(PING_PONG[0], False)] * (here() == "sm_90a"),
]


@needs_sanitizer
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    for kernel in OF_THE_SANITIZER:  # compiled before
        with only_kernel(*kernel):
            for k in (72, 17):
                a, b = (torch.randn(3, *shape, device="cuda").bfloat16() for shape in ((136, k), (k, 264)))
                run_batch(bmm, a, b, bmm(a, b))
                bmm(a[:1].expand_as(a), b, out_dtype=FP32)
    assert_clean(tool, PROGRAM, "bmm")
