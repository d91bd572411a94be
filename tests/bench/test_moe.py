"""bench_moe on the CPU: providers against its own truth, what is counted."""

import pytest

from bench import bench_moe
from bench.bench_moe import DIRECTIONS, Product
from tests.bench.test_harness import FakeDevice

TINY = {"tiny": (4, 2, 16, 8)}


def test_cases():
    names = [product.case.name for product in bench_moe.products()]
    assert len(set(names)) == len(names) == 7 * 9 * 4 + 3 * 2 * 4 + 7 * 2 * 9 * 2
    quick = {product.case.name for product in bench_moe.products(quick=True)}
    assert quick < set(names)


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


def test_decode_reads_the_weights_of_experts_with_rows(monkeypatch):
    monkeypatch.setattr(bench_moe, "MODELS", TINY)
    monkeypatch.setitem(bench_moe.PROVIDERS, "torch", bench_moe.PROVIDERS["cute_kernels"])
    product = Product("tiny", "up", 1, "fwd", "decode")
    assert product.case.bytes == 2 * (2 * 16 * 16 + 2 * 32)
    (found,) = bench_moe.measure_product(
        product, None, ["cute_kernels", "torch"], FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and "read" in found.results


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
