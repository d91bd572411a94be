"""grouped_mm of mxfp8 matrices on a GPU: the bits of the product with the dequantized ones.

Most of these run on the CPU, too, over fake kernels: test_grouped_mxfp8.py.
"""

import contextlib
from unittest import mock

import pytest
import torch

from cute_kernels import dequantize, grouped_mm, provenance, quantize_rowwise
from cute_kernels.gemm import config_mxfp8, launch_mxfp8
from cute_kernels.gemm.config_mxfp8 import DECODE, GroupedMxfp8Spec
from cute_kernels.runtime.launches import observed
from tests.gemm.cases import Recorder, assert_same_bits, here
from tests.gemm.grouped_cases import (
    BF16,
    EDGES,
    FP16,
    FP32,
    GROUPS,
    bounds_of,
    kernel_name,
    offs_of,
    only_grouped,
    randn,
    rows_by_mm,
    wide_range,
)
from tests.mxfp8.cases import opcheck
from tests.precompiled import precompile

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(here() != "sm_90a", reason="needs a Hopper GPU")]
CONFIGS = pytest.mark.parametrize("config", DECODE.values(), ids=lambda config: kernel_name((config, True)))
OUTS = {4: BF16, 2: FP32, 1: FP16}  # by how many scales one load takes


def every_job() -> list[tuple]:
    """(builder, arguments) of what the tests of every kernel need on a GPU."""
    from cute_kernels.gemm.kernel_grouped_mxfp8 import grouped_mxfp8

    specs = [GroupedMxfp8Spec(out, vec) for vec, out in OUTS.items()]
    return [(grouped_mxfp8, ("sm_90a", spec, config)) for config in DECODE.values() for spec in specs]


@pytest.fixture(scope="session", autouse=True)
def mxfp8_precompiled():
    """One after the other the kernels take some seconds each."""
    if torch.cuda.is_available():
        precompile(every_job())


@contextlib.contextmanager
def only(config):
    """Within it every product runs on this kernel."""
    with mock.patch.object(launch_mxfp8, "choose", lambda arch, rows, groups: config):
        yield


def make(sizes, n, k, generator, rest=0):
    """a (R, K), b (E, K, N) and its scales, offs."""
    a = wide_range(sum(sizes) + rest, k, generator=generator)
    q, scale = quantize_rowwise(wide_range(len(sizes) * n, k, generator=generator))
    shape = len(sizes), n, -1
    return a, q.view(shape).mT, scale.view(shape), offs_of(sizes, a.device)


def dequantized(b, scale):
    return dequantize(b.mT, scale).mT


@CONFIGS
@pytest.mark.parametrize("k", [32, 64, 128, 1056, 2880, 2048])
def test_every_kernel_has_the_bits_of_mm(config, k, generator):
    """Tiles beyond the end of N and K, groups of all sizes, rows beyond the last group."""
    out = OUTS[config_mxfp8.scale_vec(k, 0)]
    for n in (32, 160, 448) if k < 2000 else (96,):
        for groups in ("edges", "few", "all in one", "none"):
            sizes = GROUPS[groups]
            a, b, scale, offs = make(sizes, n, k, generator, rest=5)
            wanted = rows_by_mm(a, dequantized(b, scale), sizes, out)
            with only(config), observed() as used:
                found = grouped_mm(a, b, offs, b_scale=scale, out_dtype=out)
            assert [launch.config for launch, _, _ in used] == [config]
            assert_same_bits(found, wanted, f"{groups}, {n}x{k}")


@CONFIGS
def test_all_elements_with_all_scales(config, generator):
    """Each of the 256 e4m3 numbers but NaN, times each scale: subnormal, infinite and NaN products, too.

    A row has one number that is not zero, in a product with ones.
    """
    elements = torch.tensor([value for value in range(256) if value & 127 != 127], dtype=torch.uint8)
    q = torch.zeros(256 * 256, 32, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(256).view(-1, 1)
    rows = torch.arange(256 * 256)
    q[rows, rows % 32] = elements[rows % 254]
    device = generator.device
    b = q.view(torch.float8_e4m3fn).view(1, -1, 32).to(device).mT
    scale = scale.view(torch.float8_e8m0fnu).view(1, -1, 1).to(device)
    a = torch.ones(3, 32, dtype=BF16, device=device)
    offs = offs_of((3,), device)
    with only(config):
        found = grouped_mm(a, b, offs, b_scale=scale)
    wanted = rows_by_mm(a, dequantized(b, scale), (3,))
    assert_same_bits(torch.where(found.isnan(), 7.0, found), torch.where(wanted.isnan(), 7.0, wanted))
    assert (found.isnan() == wanted.isnan()).all() and found.isinf().any() and found.isnan().any()


@CONFIGS
def test_a_group_does_not_see_its_neighbours(config, generator):
    """All other rows and matrices are NaN, elements and scales."""
    a, b, scale, offs = make(EDGES, 96, 160, generator, rest=5)
    with only(config):
        whole = grouped_mm(a, b, offs, b_scale=scale)
        for e in (1, 6, 9, 13, 14):
            start, end = bounds_of(EDGES)[e]
            dirty_a = torch.full_like(a, float("nan"))
            dirty_q = torch.full_like(b.mT.view(torch.uint8), 127)
            dirty_scale = torch.full_like(scale.view(torch.uint8), 255)
            dirty_a[start:end] = a[start:end]
            dirty_q[e], dirty_scale[e] = b[e].mT.view(torch.uint8), scale[e].view(torch.uint8)
            dirty_q, dirty_scale = dirty_q.view(b.dtype), dirty_scale.view(scale.dtype)
            found = grouped_mm(dirty_a, dirty_q.mT, offs, b_scale=dirty_scale)
            assert_same_bits(found[start:end], whole[start:end], f"group {e}")
            assert not found[sum(EDGES) :].any()


def test_a_row_alone(generator):
    """And with any number of others, by kernels or by dequantized matrices: the same bits."""
    sizes = (0, 500, 3)
    a, b, scale, offs = make(sizes, 160, 288, generator)
    whole = grouped_mm(a, b, offs, b_scale=scale)
    assert_same_bits(whole, rows_by_mm(a, dequantized(b, scale), sizes))
    for rows in (1, 2, 5, 12, 40, 130):
        found = grouped_mm(a[:rows], b, offs_of((0, rows, 0), a.device), b_scale=scale)
        assert_same_bits(found, whole[:rows], f"{rows} rows")


def test_rows_that_tma_does_not_read(generator):
    """Strided ones, and scales at an odd address."""
    sizes = (3, 0, 5)
    a, b, scale, offs = make(sizes, 64, 128, generator)
    wanted = grouped_mm(a, b, offs, b_scale=scale)
    strided = torch.empty(8, 256, dtype=BF16, device=a.device)[:, ::2].copy_(a)
    assert_same_bits(grouped_mm(strided, b, offs, b_scale=scale), wanted)
    moved = torch.empty(scale.numel() + 1, dtype=torch.uint8, device=a.device)[1:].view(scale.shape)
    moved = moved.copy_(scale.view(torch.uint8)).view(scale.dtype)
    assert_same_bits(grouped_mm(a, b, offs, b_scale=moved), wanted)


def test_empty(generator):
    for sizes, n, k in (((0, 0), 32, 32), ((2, 1), 0, 32), ((2, 1), 32, 0), ((), 32, 32)):
        device = generator.device
        a = randn(sum(sizes), k, generator=generator).to(BF16)
        b = torch.zeros(len(sizes), n, k, device=device).to(torch.float8_e4m3fn)
        scale = torch.zeros(len(sizes), n, k // 32, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
        found = grouped_mm(a, b.mT, offs_of(sizes, device), b_scale=scale)
        assert found.shape == (sum(sizes), n) and not found.any()


def test_ends_that_do_not_ascend_touch_no_other_memory(generator):
    """Each end counts as at least the one before, and at most R."""
    a, b, scale, _ = make((4, 4, 4), 64, 128, generator)
    offs = torch.tensor([5, -3, 900], dtype=torch.int32, device=a.device)
    found = grouped_mm(a, b, offs, b_scale=scale)
    assert_same_bits(found, rows_by_mm(a, dequantized(b, scale), (5, 0, 7)))


def test_provenance(generator):
    a, b, scale, offs = make((3, 0, 16), 64, 128, generator)
    (entry,) = provenance(lambda: grouped_mm(a, b, offs, b_scale=scale))
    assert entry.shape == (3, 19, 64, 128) and entry.contract == "serial_k16"
    assert entry.kernel == "grouped_rows_mxfp8 (tile (64, 16, 128), cluster (1, 1), transposed)"


def test_compile(generator, compile_backend):
    """One graph, eager mode's bits, also for another number of rows."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, b, offs, scale: grouped_mm(a, b, offs, b_scale=scale), fullgraph=True, backend=compile_backend
    )
    for sizes in ((3, 0, 16, 1, 40), (9, 9, 9, 9, 9)):
        a, b, scale, offs = make(sizes, 64, 96, generator)
        assert_same_bits(compiled(a, b, offs, scale), grouped_mm(a, b, offs, b_scale=scale))


def test_opcheck(generator):
    a, b, scale, offs = make((3, 0, 16), 64, 96, generator)
    with Recorder() as recorder:
        grouped_mm(a, b, offs, b_scale=scale)
    ((function, arguments),) = recorder.calls
    assert function._schema.name == "cute_kernels::grouped_rows_mxfp8"
    opcheck(function, arguments)


# Below: on a GPU only


def test_graph_replays_with_other_groups(generator):
    """The host reads no value of offs: a captured call takes others."""
    a, b, scale, offs = make((3, 0, 16), 160, 288, generator)
    grouped_mm(a, b, offs, b_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped_mm(a, b, offs, b_scale=scale)
    for sizes in ((3, 0, 16), (0, 19, 0), (7, 5, 2)):
        offs.copy_(offs_of(sizes, a.device))
        graph.replay()
        assert_same_bits(found, rows_by_mm(a, dequantized(b, scale), sizes))


@CONFIGS
def test_many_tiles_of_many_groups(config, generator):
    """Each CTA has many tiles, of groups with and without rows; twice the same bits."""
    sizes = [(7 * e) % 23 if e % 3 else 0 for e in range(128)]
    a, b, scale, offs = make(sizes, 1536, 512, generator)
    with only(config):
        found, again = (grouped_mm(a, b, offs, b_scale=scale) for _ in range(2))
    assert_same_bits(found, again)
    with only_grouped(None):
        assert_same_bits(found, grouped_mm(a, dequantized(b, scale), offs))
