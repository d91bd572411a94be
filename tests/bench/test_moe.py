"""bench_moe on the CPU: providers against its own truth, what is counted."""

import sys
from types import SimpleNamespace

import pytest

from bench import bench_moe
from bench.bench_moe import DIRECTIONS, Product
from cute_kernels.gemm.config_grouped import candidates
from cute_kernels.runtime.launches import observed
from tests.bench.test_harness import FakeDevice
from tests.fakes import fake_kernels

TINY = {"tiny": (4, 2, 16, 8)}


def test_cases():
    names = [product.case.name for product in bench_moe.products()]
    assert len(set(names)) == len(names) == 7 * (4 * 4 + 2 + 3 + 2 * 9 + 4)
    quick = {product.case.name for product in bench_moe.products(quick=True)}
    assert quick < set(names)
    with_peers = [product for product in bench_moe.products() if product.has_peers]
    assert len(with_peers) == 7 * (4 + 1)


def test_cases_of_a_matrix_share_its_weights(monkeypatch):
    monkeypatch.setattr(bench_moe, "MODELS", TINY)
    first, second = (bench_moe.make_inputs(Product("tiny", "up", t, "fwd", "decode"), "cpu") for t in (1, 2))
    assert first.weight is second.weight and len(first.x) == 2


def test_what_is_counted(monkeypatch):
    monkeypatch.setattr(bench_moe, "MODELS", TINY)
    case = Product("tiny", "up", 8, "fwd", "random").case
    assert case.flops == 2 * 16 * 16 * 16 and case.bytes == 2 * (4 * 16 * 16 + 16 * (16 + 16))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("variant", ["equal", "skew"])
def test_ours_is_right(direction, variant, monkeypatch):
    monkeypatch.setattr(bench_moe, "MODELS", TINY)
    monkeypatch.setitem(bench_moe.PROVIDERS, "torch", bench_moe.PROVIDERS["cute_kernels"])  # its own is a GPU's
    product = Product("tiny", "up", 8, direction, variant)
    monkeypatch.setattr(bench_moe, "CHECKED_EXPERTS", 4)
    (found,) = bench_moe.measure_product(
        product, None, ["cute_kernels", "torch"], FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and {"cute_kernels", "equal_bmm", "dense"} <= set(found.results)


@pytest.mark.parametrize("direction", ["fwd", "dW"])
def test_candidates(direction, monkeypatch):
    """Each launches its own kernel."""
    monkeypatch.setattr(bench_moe, "MODELS", TINY)
    product = Product("tiny", "up", 8, direction, "random")
    known = candidates("sm_90a", "sums" if direction == "dW" else "rows")[1:]
    with fake_kernels(), observed() as launches:
        calls = [make(product, bench_moe.make_inputs(product, "cpu")) for make in bench_moe.CONFIGS.values()]
        for call in calls[: len(known)]:
            call()
    assert [(launch.config, launch.transposed) for launch, *_ in launches] == list(known)
    assert calls[len(known) :] == [None] * (len(calls) - len(known))


def of_rows(rows, weight, out, layout):
    assert all(len(set(block.tolist()) - {-1}) == 1 for block in layout.split(bench_moe.PADDING))
    for e, matrix in enumerate(weight):
        out[layout == e] = rows[layout == e] @ matrix


def of_sums(a, b, d, sizes, counts, c):
    assert sizes == counts.tolist() and not any(size % bench_moe.PADDING for size in sizes)
    for e, (rows, others) in enumerate(zip(a.split(sizes), b.split(sizes), strict=True)):
        d[e] = c[e] + rows.float().t() @ others.float()


def of_masked(a, b, out, used, mean):
    assert a.shape[1] % bench_moe.PADDING == 0 and mean >= 1
    for e, rows in enumerate(used.tolist()):
        assert not a[e, rows:].any()
        out[e, :rows] = a[e, :rows] @ b[e].mT


@pytest.mark.parametrize(
    "direction, variant", [("fwd", "skew"), ("dA", "skew"), ("dW_into", "skew"), ("fwd", "decode")]
)
def test_rows_are_padded_for_deep_gemm(direction, variant, monkeypatch):
    """Its functions in plain torch: each block of rows is of one expert, zeros are behind them."""
    functions = {
        "m_grouped_bf16_gemm_nt_masked": of_masked,
        "m_grouped_bf16_gemm_nt_contiguous": lambda a, b, *rest: of_rows(a, b.mT, *rest),
        "m_grouped_bf16_gemm_nn_contiguous": of_rows,
        "k_grouped_bf16_gemm_tn_contiguous": of_sums,
    }
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**functions))
    monkeypatch.setattr(bench_moe, "MODELS", {"tiny": (4, 2, 16, 8)})
    monkeypatch.setitem(bench_moe.PROVIDERS, "torch", bench_moe.PROVIDERS["cute_kernels"])
    (found,) = bench_moe.measure_product(
        Product("tiny", "up", 200, direction, variant),
        None,
        ["cute_kernels", "torch", "deep_gemm"],
        FakeDevice(),
        repetitions=3,
        breakdown=False,
    )
    assert found.failures == {} and "deep_gemm" in found.results


def test_decode_reads_the_weights_of_experts_with_rows(monkeypatch):
    monkeypatch.setattr(bench_moe, "MODELS", TINY)
    monkeypatch.setitem(bench_moe.PROVIDERS, "torch", bench_moe.PROVIDERS["cute_kernels"])
    product = Product("tiny", "up", 1, "fwd", "decode")
    assert product.case.bytes == 2 * (2 * 16 * 16 + 2 * 32)
    (found,) = bench_moe.measure_product(
        product, None, ["cute_kernels", "torch"], FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and {"read", "equal_bmm"} <= set(found.results)


def test_mxfp8_weights_are_half_the_bytes(monkeypatch):
    """Beside our own product with the dequantized ones."""
    monkeypatch.setattr(bench_moe, "MODELS", {"tiny": (4, 2, 32, 32)})
    monkeypatch.setitem(bench_moe.PROVIDERS, "torch", bench_moe.PROVIDERS["cute_kernels"])
    product = Product("tiny", "up", 1, "fwd", "mxfp8")
    assert product.case.bytes == 2 * 64 * 33 + 2 * 2 * (32 + 64)
    (found,) = bench_moe.measure_product(
        product, None, ["cute_kernels", "torch"], FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and {"bf16", "read"} <= set(found.results)
