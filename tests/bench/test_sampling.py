"""bench_sampling on the CPU: its own tokens, what is counted."""

import pytest

from bench import bench_sampling
from bench.bench_sampling import VARIANTS, Sampling
from tests.bench.test_harness import FakeDevice


def test_cases():
    names = [case.case(d).name for case in bench_sampling.samplings() for d in case.directions]
    assert len(set(names)) == len(names) == 4 * 5
    quick = {case.case(d).name for case in bench_sampling.samplings(quick=True) for d in case.directions}
    assert quick < set(names)
    assert Sampling(3, 100).case("fwd").bytes == 600


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_right(variant):
    case, providers = Sampling(20, 300, variant), ["cute_kernels", "torch"]
    (found,) = bench_sampling.measure_sampling(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == set(providers)
    assert all(error == 0 for error in found.results["cute_kernels"].error.values())
