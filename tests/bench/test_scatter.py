"""bench_scatter on the CPU: providers against its own truth, what is counted."""

import pytest

from bench import bench_scatter
from bench.bench_scatter import Scatter
from tests.bench.test_harness import FakeDevice


def test_cases():
    names = [case.case(d).name for case in bench_scatter.scatters() for d in case.directions]
    assert len(set(names)) == len(names) == 3 * 2 + 2
    quick = {case.case(d).name for case in bench_scatter.scatters(quick=True) for d in case.directions}
    assert quick < set(names)


def test_what_is_counted():
    assert Scatter("embedding_backward", (10, 100, 8)).case("fwd").bytes == 2 * 110 * 8 + 8 * 10
    assert Scatter("index_sum", (10, 100, 3)).case("fwd").bytes == 2 * 10 * (200 + 6) + 8 * 30


@pytest.mark.parametrize("variant", ["uniform", "zipf"])
@pytest.mark.parametrize("op", ["embedding_backward", "index_sum"])
def test_providers_are_right(op, variant):
    case, providers = Scatter(op, (300, 64, 8), variant), ["cute_kernels", "torch"]
    (found,) = bench_scatter.measure_scatter(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == set(providers)
