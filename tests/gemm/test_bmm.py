"""bmm without a GPU: the reference, the kernels as they compile for both architectures, the walk over a batch."""

import itertools
import re

import pytest
import torch

import cute_kernels
from cute_kernels import bmm
from cute_kernels.gemm.config import BLOCK
from tests.fakes import fake_kernels
from tests.gemm.cases import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    Batch,
    assert_same_bits,
    check,
    kernel_name,
    kernels,
    make_batch,
    only_kernel,
    oracle_mm,
    randn,
    run_batch,
)
from tests.gemm.test_compile import INSTRUCTIONS, SM100, arguments, compile_and_check, early_reads, products
from tests.marks import first_of
from tests.ptx import compile_in, kernels_in

FP64 = torch.float64


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
def test_torch_s_in_fp64(layout, generator):
    a, b = (t.double() for t in make_batch(Batch(3, 9, 5, 7, layout=layout), generator))
    dout = randn(3, 9, 5, generator=generator, dtype=FP64)
    found, wanted = run_batch(bmm, a, b, dout), run_batch(torch.bmm, a, b, dout)
    for name, result in wanted.items():
        torch.testing.assert_close(found[name], result)
    leaves = [randn(2, *shape, generator=generator, dtype=FP64).requires_grad_() for shape in ((3, 4), (4, 5))]
    assert torch.autograd.gradcheck(bmm, leaves)


@pytest.mark.parametrize("dtype, out", [(BF16, None), (BF16, FP32), (FP16, BF16), (FP16, FP16)])
def test_the_reference_against_fp64(dtype, out, generator):
    a, b = make_batch(Batch(3, 65, 40, 129, dtype), generator)
    dout = randn(3, 65, 40, generator=generator).to(out or dtype).to(dtype).to(out or dtype)
    found = run_batch(bmm, a, b, dout, out_dtype=out)
    assert found["out"].dtype is (out or dtype) and found["da"].dtype is found["db"].dtype is dtype
    for i in range(3):
        exact = {"out": oracle_mm(a[i], b[i]), "da": oracle_mm(dout[i], b[i].t()), "db": oracle_mm(a[i].t(), dout[i])}
        check({name: result[i] for name, result in found.items()}, exact)
    assert_same_bits(bmm(a, b, out_dtype=out, backend="reference"), found["out"])


def test_second_derivative_is_refused(generator):
    a, b = make_batch(Batch(2, 8, 8, 8), generator)
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(bmm(a.requires_grad_(), b).float().square().sum(), a, create_graph=True)


def test_it_is_public():
    assert cute_kernels.bmm is bmm and "bmm" in cute_kernels.__all__


# As compiled


def widest_of_each_kind(arch: str) -> list[tuple]:
    """The widest of kernels that differ in their tile's columns alone: a batch is one more coordinate in registers."""
    found = {}
    for config, transposed in sorted(kernels(arch)[1:], key=lambda kernel: kernel[0].tile[0] * kernel[0].tile[1]):
        kind = config.ping_pong, transposed, config.tile[0], config.multi_block_tma(arch, ("k", "k"), BLOCK)
        found[kind] = config, transposed
    return [(None, False), *found.values()]


@pytest.mark.parametrize(
    "arch, kernel",
    [param for arch in ("sm_90a", "sm_100a") for param in first_of([(arch, k) for k in widest_of_each_kind(arch)], 2)],
    ids=lambda value: value if isinstance(value, str) else kernel_name(value),
)
def test_kernels_compile(arch, kernel):
    """test_compile.py compiles all others without a batch."""
    compile_and_check(arch, kernel, batched=True)


@pytest.mark.parametrize("arch", ["sm_90a", SM100])
@pytest.mark.parametrize("option", first_of(["rows off 16 bytes", "b along n", "a along m", "fp32", "fp16"]))
def test_options_compile(option, arch):
    """With the widest tile, the widest of a warpgroup's own, the narrowest, and the kernel for any stride."""
    changes = {
        "b along n": {"b_major": "n"},
        "a along m": {"a_major": "m"},
        "fp32": {"out": FP32},
        "fp16": {"dtype": FP16, "out": FP16},
        "rows off 16 bytes": {"out_aligned": False},
    }[option]
    aligned = sorted(kernels(arch)[1:], key=lambda kernel: (kernel[0].tile[0] * kernel[0].tile[1], kernel[1]))
    turns = [kernel for kernel in aligned if kernel[0].ping_pong][-1:]
    for kernel in (aligned[-1], *turns, aligned[0]):
        compile_and_check(arch, kernel, batched=True, **changes)
    if "major" not in str(changes):
        compile_and_check(arch, (None, False), batched=True, **changes)


@pytest.mark.parametrize(
    "change",
    [{"bias": FP32}, {"activation": "relu"}, {"save_preact": True}, {"accumulate": True}, {"has_valid_k": True}],
)
def test_what_no_batch_has(change):
    from cute_kernels.gemm.kernel import gemm

    with pytest.raises(ValueError, match="^a batched product has no bias, activation, saved z, acc"):
        gemm.build(*arguments("sm_90a", (None, False), batched=True, **change))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_precompiled_is_what_calls_ask_for(arch):
    """Forward and backward of attention's scores."""
    a, b = (torch.zeros(64, *shape, dtype=BF16) for shape in ((1024, 128), (128, 1024)))
    dout = torch.zeros(64, 1024, 1024, dtype=BF16)
    with fake_kernels(arch, computes=False) as jobs:
        run_batch(bmm, a, b, dout)
        run_batch(bmm, a, b.mT.contiguous().mT, dout)
        with only_kernel(jobs[0][1][2], False):
            run_batch(bmm, a, b, dout)
            run_batch(bmm, a, b.mT.contiguous().mT, dout)
    table = [job for job in products(arch) if job[1][1].batched]
    assert len(table) == 3 and set(table) == set(jobs[6:]) and table[0] in jobs[:6]


@pytest.mark.parametrize("group", [1, 8])
def test_the_walk_over_a_batch(group):
    """As compiled for this processor: an entry after the other, each as a matrix."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    from cute_kernels.common.gemm_epilogue import entry_and_tile, tile_divisors, tile_of

    @cute.jit
    def walk(places: cute.Tensor, entries: cutlass.Int32, tiles_m: cutlass.Int32, tiles_n: cutlass.Int32):
        divisors = tile_divisors(tiles_m, tiles_n, group, True)
        for index in cutlass.range(entries * tiles_m * tiles_n):
            entry, tile = entry_and_tile(index, divisors)
            m, n = tile_of(tile, tiles_m, divisors, group)
            places[index, 0] = entry
            places[index, 1] = m
            places[index, 2] = n

    def tensor(places):
        return from_dlpack(places).mark_layout_dynamic()

    function = cute.compile(walk, tensor(torch.empty(4, 3, dtype=torch.int32)), *(cutlass.Int32(1) for _ in range(3)))
    for entries, tiles_m, tiles_n in itertools.product((1, 2, 37), (1, 7, 8, 9, 17), (1, 2, 37)):
        places = torch.full((entries * tiles_m * tiles_n, 3), -1, dtype=torch.int32)
        function(tensor(places), *map(cutlass.Int32, (entries, tiles_m, tiles_n)))
        groups = [range(first, min(first + group, tiles_m)) for first in range(0, tiles_m, group)]
        matrix = [(m, n) for rows in groups for n in range(tiles_n) for m in rows]
        assert places.tolist() == [[entry, m, n] for entry in range(entries) for m, n in matrix]


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", SM100])
def test_instructions(arch, tmp_path):
    """Tiles come, and go where they can, by TMA of a dimension more; nothing else differs from products of matrices."""
    program = f"""
import pathlib
from cute_kernels.gemm.kernel import gemm
from tests.gemm.test_compile import arguments
from tests.gemm.cases import kernels
everything = sorted(kernels({arch!r})[1:], key=lambda kernel: (kernel[0].tile[0] * kernel[0].tile[1], not kernel[1]))
in_turn = [kernel for kernel in everything if kernel[0].ping_pong][-1:]
for index, kernel in enumerate(((None, False), everything[0], everything[-1], *in_turn)):
    assert gemm.obtain(*arguments({arch!r}, kernel, batched=True)).origin == "compiled"
    (ptx,) = pathlib.Path.cwd().glob("*.ptx")
    ptx.rename(f"{{index}}.text")
"""
    compile_in(tmp_path, program)
    found = [kernel for path in sorted(tmp_path.glob("*.text")) for kernel in kernels_in(tmp_path, path.name)]
    assert len(found) == (4 if arch == "sm_90a" else 3)
    anything, narrow, *wide = found
    assert "mma.sync.aligned.m16n8k16" in anything and "bulk.tensor" not in anything
    for kernel in (narrow, *wide):
        assert INSTRUCTIONS[arch][0] in kernel
        # K in blocks is one more
        loads = "4d" if kernel is narrow and arch == "sm_90a" else "3d"
        assert set(re.findall(r"cp\.async\.bulk\.tensor\.(\dd)\S*shared\S*\.global", kernel)) == {loads}
    assert all("cp.async.bulk.tensor.3d.global.shared" in kernel for kernel in wide)
    for kernel in found:
        assert not early_reads(kernel) and ".local" not in kernel
        assert not re.search(r"\b(atom|red|div|rem)\.", kernel) and "cp.reduce" not in kernel
        # The entry's place in memory takes 64 bits
        assert "st.global" not in kernel or "mul.lo.s64" in kernel
