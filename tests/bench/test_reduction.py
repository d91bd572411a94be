"""bench_reduction on the CPU: all providers against its own truth, what is counted."""

import pytest
import torch

from bench import bench_reduction
from bench.bench_reduction import OPS, Reduction
from tests.bench.test_harness import FakeDevice


def test_cases():
    names = [case.case(d).name for case in bench_reduction.reductions() for d in case.directions]
    assert len(set(names)) == len(names) == 2 * 2 * 10 + 2 * 3 + 6 + 1 + 2 * 2 * 2 + 2 * 3 + 2 * 2 * 15 + 2 * 7
    quick = {case.case(d).name for case in bench_reduction.reductions(quick=True) for d in case.directions}
    assert quick < set(names)


def test_minimal_bytes():
    case = Reduction("softmax", 1024, 512)
    assert bench_reduction.minimal_bytes(case, "fwd") == 2 * 2 * 1024 * 512
    assert bench_reduction.minimal_bytes(case, "bwd") == 3 * 2 * 1024 * 512
    assert bench_reduction.minimal_bytes(Reduction("logsumexp", 1024, 512), "fwd") == 2 * 1024 * 512 + 4 * 1024
    for variant, results in (("rows", 1024), ("columns", 512), ("whole", 1)):
        summed = Reduction("sum", 1024, 512, variant=variant)
        assert bench_reduction.minimal_bytes(summed, "fwd") == 2 * 1024 * 512 + 4 * results


@pytest.mark.parametrize("variant", ["rows", "columns", "whole", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_providers_are_right(op, dtype, variant):
    if (op == "sum") == (variant == "plain") or variant in ("columns", "whole") and op != "sum":
        pytest.skip("sums are of rows, of columns or of all")
    case = Reduction(op, 64, 256, dtype, variant)
    providers = ["cute_kernels", "torch"]
    found = bench_reduction.measure_reduction(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert [m.case.direction for m in found] == list(case.directions)
    for m in found:
        assert m.failures == {} and set(m.results) == set(providers) and len(m.results["torch"].error) == 1
